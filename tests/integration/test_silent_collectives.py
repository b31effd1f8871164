"""What a run does on collectives that fail as NCCL's do: a peer that dies leaves the others
hanging, and who is let go finds garbage where a result should be.

The ranks take the path that they take over NCCL. Nothing of it is switched on for the tests.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from everstep.wire.events import EventKind
from tests.integration.ranks import Job, make_run_dir, run_ranks, train_to_end
from tests.integration.test_exactness import assert_same, final_state, make_spec
from tests.support.gallery import REPOSITORY, Killed, run_with_twin
from tests.support.service_process import wait_for
from tests.support.silent_backend import SilentOptions, autoload
from tests.support.two_groups import only_in_chaos
from train_fn.recovery.evidence import StepFailed
from train_fn.snapshots import whole as broadcast
from train_fn.snapshots.store import node_snapshots
from train_fn.state.tensor_tree import TensorShape
from train_fn.step.peers import Peers

BLOCKING, AHEAD = SilentOptions(), SilentOptions(run_ahead=True, delay_s=0.002)


@pytest.mark.parametrize("silent", [BLOCKING, AHEAD], ids=["blocking", "ahead"])
def test_a_death_in_the_middle_of_a_step_costs_nothing_and_changes_nothing(
    tmp_path: Path, silent: SilentOptions
) -> None:
    """The host of a GPU runs ahead of its collectives; whoever believes in one too early trains on
    other numbers than gloo's ranks do."""
    spec = make_spec()
    peace, broken = make_run_dir(tmp_path, "peace"), make_run_dir(tmp_path, "broken")
    train_to_end(Job(peace, spec, 2), tmp_path)
    survivor, killed = run_ranks(Job(broken, spec, 2, killed=(1, 13), silent=silent), tmp_path)
    assert killed.exit_code == -9
    assert isinstance(survivor.error, StepFailed)
    assert (survivor.error.error.type, survivor.error.error.snapshot_step) == ("PeersGone", 13)
    resumed = train_to_end(Job(broken, spec, 2, attempt=2, silent=silent), tmp_path)
    [restored] = resumed.of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["step"], restored["rejected"]) == ("snapshot", 13, [])
    [started] = resumed.of_kind(EventKind.TRAINING_STARTED)
    assert (started["backend"], started["reproducible"]) == ("silent", "bitwise where kernels are")
    assert_same(final_state(peace), final_state(broken))


@pytest.mark.parametrize("abort_s", [3600.0, *only_in_chaos(6.0)])
def test_the_state_is_kept_before_an_abort_that_takes_long(tmp_path: Path, abort_s: float) -> None:
    """It is copied while its rank still waits: weights, moments and running statistics are those of
    the last step, whatever the passes of the broken one have changed."""
    seen = tmp_path / "seen"
    spec, silent = make_spec("batch"), SilentOptions(abort_s=abort_s, abort_until=str(seen))
    peace, broken = make_run_dir(tmp_path, "peace"), make_run_dir(tmp_path, "broken")
    train_to_end(Job(peace, spec, 2), tmp_path)

    def kill_once_kept(ranks: list[Any]) -> None:
        wait_for(lambda: ranks[1].exitcode is not None, 60, "the death of rank 1")
        store = node_snapshots(broken, "node0", 1)
        wait_for(lambda: [label.step for label in store.labels()] == [13], 30, "the state of it")
        seen.touch()  # no abort has ended before this
        if abort_s > 60:
            ranks[0].kill()  # as the controller does once a state is kept and its rank is not freed

    survivor, _ = run_ranks(
        Job(broken, spec, 2, killed=(1, 13), silent=silent), tmp_path, kill_once_kept
    )
    if abort_s < 60:
        assert isinstance(survivor.error, StepFailed)
        assert survivor.error.error.snapshot_step == 13
    resumed = train_to_end(Job(broken, spec, 2, attempt=2, silent=BLOCKING), tmp_path)
    [restored] = resumed.of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["step"], restored["rejected"]) == ("snapshot", 13, [])
    assert_same(final_state(peace), final_state(broken))


def test_a_state_that_arrived_in_part_is_not_left_for_the_next_attempt(tmp_path: Path) -> None:
    """The holder dies while it sends its state. What the other rank has by then looks sound, and a
    snapshot of it would be newer than the holder's own."""
    spec = make_spec()
    peace, broken = make_run_dir(tmp_path, "peace"), make_run_dir(tmp_path, "broken")
    train_to_end(Job(peace, spec, 2), tmp_path)
    run_ranks(Job(broken, spec, 2, killed=(1, 13), silent=BLOCKING), tmp_path)
    setup = f"{__name__}:die_while_sending"
    again = Job(broken, spec, 2, attempt=2, silent=BLOCKING, setup=setup)
    holder, receiver = run_ranks(again, tmp_path)
    assert holder.exit_code == -9
    assert isinstance(receiver.error, StepFailed)
    assert (receiver.error.error.step, receiver.error.error.snapshot_step) == (None, None)
    assert (receiver.error.error.type, receiver.error.error.phase) == ("PeersGone", "restore")
    resumed = train_to_end(Job(broken, spec, 2, attempt=3, silent=BLOCKING), tmp_path)
    [restored] = resumed.of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["step"]) == ("snapshot", 13)
    assert_same(final_state(peace), final_state(broken))


def test_other_bytes_than_the_holder_sent_are_refused_by_every_rank(tmp_path: Path) -> None:
    setup = f"{__name__}:receive_one_other_bit"
    outcomes = run_ranks(Job(make_run_dir(tmp_path), make_spec(), 3, setup=setup), tmp_path)
    for outcome in outcomes:
        assert isinstance(outcome.error, StepFailed)
        assert outcome.error.error.type == "StateNotWhole"
        assert "rank 2 received other bytes than rank 0 sent" in outcome.error.error.message
        assert outcome.error.error.snapshot_step is None


def send_states() -> None:
    """Let no rank read the memory of another one."""
    broadcast.machine = lambda: str(os.getpid())


def die_while_sending() -> None:
    """Rank 0 ends itself before the last piece of a state; no other collective would follow it but
    those that training begins with."""
    send_states()
    chunks, flat_of, num_left = broadcast._chunks, broadcast._flat, [0]
    start_broadcast = Peers.start_broadcast

    def cut(tensors: list[TensorShape]) -> list[list[TensorShape]]:
        pieces = chunks(tensors)
        num_left[0] = len(pieces)
        return pieces

    def zeros(peers: Peers, part: list[TensorShape], own: list[torch.Tensor] | None) -> Any:
        flat = flat_of(peers, part, own)
        if own is None:
            flat.zero_()  # as fresh memory often is: no NaN gives the garbage away
        return flat

    def send(peers: Peers, tensor: torch.Tensor, source: int) -> dist.Work | None:
        num_left[0] -= 1
        if peers.rank == 0 and num_left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return start_broadcast(peers, tensor, source)

    broadcast._chunks = cut
    broadcast._flat = zeros
    Peers.start_broadcast = send  # type: ignore[method-assign]


def receive_one_other_bit() -> None:
    send_states()
    """As a network that damages data, on its way to rank 2."""
    start_broadcast = Peers.start_broadcast

    def send(peers: Peers, tensor: torch.Tensor, source: int) -> dist.Work | None:
        work = start_broadcast(peers, tensor, source)
        if peers.rank == 2 and work is not None:
            work.wait()
            tensor.view(torch.uint8)[1] ^= 1
        return work

    Peers.start_broadcast = send  # type: ignore[method-assign]


def test_a_script_without_a_service_is_freed_of_a_dead_peer(tmp_path: Path) -> None:
    """Nobody but the ranks of the host can notice the death. Ranks that end one after the other
    free nobody."""
    source = (REPOSITORY / "examples" / "gallery" / "torchrun_script.py").read_text()
    assert 'init_process_group("gloo")' in source
    script = tmp_path / "script.py"
    script.write_text(source.replace('init_process_group("gloo")', "init_process_group()"))
    env = autoload(tmp_path / "plugin", BLOCKING)
    for place in ("before", "after"):
        (directory := tmp_path / place).mkdir()
        whole, [broken] = run_with_twin(script, directory, [Killed(1, 14, place)], env)
        assert [each["source"] for each in broken.restored] == ["fresh", "snapshot"]
        assert broken.restored[-1]["step"] in (13, 14)
        assert broken.losses == whole.losses
        assert_same(broken.weights, whole.weights)
