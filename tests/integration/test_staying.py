"""Survivors keep their processes: they form the next group with what they hold in memory, and no
bit of the run shows it."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from everstep.spec.code import RuntimeEnvSpec
from everstep.spec.run_spec import RunSpec
from everstep.wire import ErrorKind
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from tests.integration import moving_buffers, own_steps_task, staying_faults
from tests.integration.ranks import Job, Outcome, build_ahead_of, make_run_dir
from tests.integration.staying_faults import STEP
from tests.integration.staying_ranks import StayingRanks, staying_ranks
from tests.integration.test_exactness import assert_same, make_spec
from tests.integration.test_exactness_elastic import Bits, elastic
from tests.integration.test_exactness_precision import TRAINEES, own_task_spec
from tests.integration.test_exactness_unused import heads_spec
from tests.support.descriptors import more_than, open_descriptors
from tests.support.silent_backend import SilentOptions
from tests.support.two_groups import only_in_chaos
from train_fn.node.node_dir import shared_memory_root
from train_fn.recovery.evidence import RankError, StepFailed

MOVING = "tests.integration.elastic_setups:measured_task"
"""A task whose forward passes change, replace and create buffers, and that measures its own
metric."""


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[StayingRanks]:
    with staying_ranks(tmp_path) as found:
        yield found


def error_of(outcome: Outcome) -> RankError:
    assert isinstance(outcome.error, StepFailed), outcome
    return outcome.error.error


def stay_of(outcomes: list[Outcome]) -> list[int | None]:
    """Return at which step each rank stayed in its process; None also for a dead one."""
    return [None if each.exit_code == -9 else error_of(each).stays_at for each in outcomes]


def restored(outcome: Outcome) -> tuple[str, int]:
    [data] = outcome.of_kind(EventKind.RESTORED)
    return data["source"], data["step"]


def require_done(outcomes: list[Outcome]) -> Outcome:
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return outcomes[0]


class Run:
    """One run of ranks that stay."""

    def __init__(
        self,
        ranks: StayingRanks,
        tmp_path: Path,
        spec: RunSpec,
        setup: str | None = MOVING,
        device: str = "cpu",
    ) -> None:
        self.run_dir = make_run_dir(tmp_path, "run_staying")
        self._ranks, self._tmp_path, self._spec, self._setup = ranks, tmp_path, spec, setup
        self._device = device
        self._attempt, self.outcomes = 0, list[Outcome]()

    def attempt(
        self,
        names: str,
        faults: dict[str, Callable[[], None]] | None = None,
        **job: object,
    ) -> list[Outcome]:
        """Run the next attempt with a process for each rank, in the order of ``names``. ``faults``
        are called in their processes first."""
        self._attempt += 1
        made = self.job(len(names), **job)
        for name, fault in (faults or {}).items():
            self._ranks.call(name, fault, made)
        found = self._ranks.run(made, names)
        self.outcomes += found
        return found

    def job(self, world_size: int, **job: object) -> Job:
        return Job(
            self.run_dir,
            self._spec,
            world_size,
            self._attempt,
            setup=self._setup,
            in_process=True,
            device=self._device,
            **job,  # type: ignore[arg-type]
        )

    def require_as_undisturbed(self, world_size: int) -> None:
        """Compare everything that the run left with a run that nothing disturbed."""
        key = (self._spec.model_dump_json(), self._setup, self._device, world_size)
        if key not in UNDISTURBED:
            whole = make_run_dir(self._tmp_path, "run_whole")
            job = Job(whole, self._spec, world_size, setup=self._setup, device=self._device)
            ended = require_done(self._ranks.run(job, "XYZ"[:world_size]))
            UNDISTURBED[key] = without_names(Bits(whole, ended))
        found, reference = without_names(Bits(self.run_dir, *self.outcomes)), UNDISTURBED[key]
        assert (found.losses, found.evaluations) == (reference.losses, reference.evaluations)
        assert_same(found.files, reference.files)

    def num_snapshots(self, step: int | None = None) -> int:
        directory = shared_memory_root() / self.run_dir.run_id
        of_step = "*" if step is None else f"{step:09d}"
        return len(list(directory.glob(f"*/*-{of_step}-*.pt")))


UNDISTURBED: dict[tuple[str, str | None, str, int], Bits] = {}
"""What runs of that spec, setup, device and size leave when nothing disturbs them."""


def without_names(bits: Bits) -> Bits:
    """Drop the name of the best checkpoint, which tells the attempt that saved it."""
    best = bits.files["train_state.pt"]["best"]
    if best is not None:
        del best["checkpoint"]
    return bits


DEATHS = {
    "step": None,
    "exchange": staying_faults.die_in_the_exchange,
    "commit": staying_faults.die_in_the_commit,
    "evaluation": staying_faults.die_in_the_evaluation,
}


@pytest.mark.parametrize(
    ("killed", "place"),
    [
        (0, "step"),
        (2, "exchange"),
        (0, "commit"),
        (2, "evaluation"),
        *only_in_chaos((2, "step"), (0, "exchange"), (2, "commit"), (0, "evaluation")),
    ],
)
def test_survivors_go_on_with_one_that_joins(
    killed: int, place: str, ranks: StayingRanks, tmp_path: Path
) -> None:
    run, death = Run(ranks, tmp_path, moving_buffers.SPEC), DEATHS[place]
    faults = {} if death is None else {"ABC"[killed]: death}
    job = {"killed": (killed, STEP)} if death is None else {}
    first = run.attempt("ABC", faults, **job)
    kept = stay_of(first)
    newest = max(step for step in kept if step is not None)
    assert kept.count(None) == 1 and first[killed].exit_code == -9
    assert {error_of(each).snapshot_step for each in first if each.error} == {None}
    if place != "evaluation":  # before which one is published
        assert run.num_snapshots(newest) == 0
    second = require_done(run.attempt("ABC".replace("ABC"[killed], "D")))
    assert restored(second) == ("process", newest)
    assert place == "evaluation" or newest == STEP + (place == "commit")
    run.require_as_undisturbed(3)


def test_with_elastic_exactness_any_number_of_survivors_makes_the_same_bits(
    ranks: StayingRanks, tmp_path: Path
) -> None:
    run = Run(ranks, tmp_path, elastic(moving_buffers.SPEC))
    assert stay_of(run.attempt("ABC", killed=(1, 2))) == [2, None, 2]
    assert stay_of(run.attempt("AC", killed=(0, 3))) == [None, 3]
    third = run.attempt("CDE", killed=(0, 5))
    assert stay_of(third) == [None, 5, 5]
    last = require_done(run.attempt("FED"))
    assert restored(last) == ("process", 5)
    run.require_as_undisturbed(2)


@pytest.mark.parametrize("built_ahead", [True, *only_in_chaos(False)])
def test_ranks_hand_over_to_more_or_fewer_without_a_checkpoint(
    built_ahead: bool, ranks: StayingRanks, tmp_path: Path
) -> None:
    run = Run(ranks, tmp_path, elastic(moving_buffers.SPEC))
    for name in "ABC":  # a module that is imported later would be a change of the user's
        ranks.call(name, kept_here, run.job(2))
    if built_ahead:
        ranks.call("C", partial(build_ahead_of, run.job(1)), run.job(1))
        model = ranks.call("C", model_here, run.job(2))
        assert ranks.call("C", kept_here, run.job(2)) is None, "it has no state"
    for names, step in (("AB", 2), ("CAB", 3), ("BC", 6)):
        stopped = run.attempt(names, stopped=("pause", step - 1))
        assert [each.stop for each in stopped] == ["yielded"] * len(names)
        assert [ranks.call(name, kept_here, run.job(2)) for name in names] == [step] * len(names)
        assert restored(stopped[0])[0] == ("fresh" if step == 2 else "process")
        if built_ahead:
            assert ranks.call("C", model_here, run.job(2)) == model, "what was built is trained"
    assert saved_steps(run) == []
    assert restored(require_done(run.attempt("B"))) == ("process", 6)
    run.require_as_undisturbed(2)


def model_here() -> int:
    from train_fn.snapshots import store

    held: Any = store._stay
    return id(held.parts.state.model)


def saved_steps(run: Run) -> list[int]:
    return [manifest.step for manifest in CheckpointStore(run.run_dir).list()]


def test_a_survivor_one_step_behind_receives_the_newer_state(
    ranks: StayingRanks, tmp_path: Path
) -> None:
    run = Run(ranks, tmp_path, moving_buffers.SPEC)
    first = run.attempt("ABC", {"A": staying_faults.lose_the_result})
    assert stay_of(first) == [STEP, STEP + 1, STEP + 1]
    assert restored(require_done(run.attempt("ABC"))) == ("process", STEP + 1)
    run.require_as_undisturbed(3)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (staying_faults.lose_a_peer_in_the_commit, ErrorKind.COLLECTIVE),
        (staying_faults.fail_by_itself, ErrorKind.USER),
    ],
)
def test_a_torn_state_and_a_rank_that_failed_by_itself_do_not_stay(
    fault: Callable[[], None], kind: ErrorKind, ranks: StayingRanks, tmp_path: Path
) -> None:
    run = Run(ranks, tmp_path, moving_buffers.SPEC)
    first = run.attempt("ABC", {"B": fault})
    assert stay_of(first)[1] is None and error_of(first[1]).kind is kind
    assert None not in (stay_of(first)[0], stay_of(first)[2])
    assert ranks.call("B", kept_here, run.job(3)) is None
    source, step = restored(require_done(run.attempt("ADC")))
    assert (source, step) == ("process", STEP + 1)
    run.require_as_undisturbed(3)


def test_survivors_wait_with_one_that_joins_for_the_packages_of_the_run(
    ranks: StayingRanks, tmp_path: Path
) -> None:
    packages = RuntimeEnvSpec(pip=["numpy"])
    run = Run(ranks, tmp_path, moving_buffers.SPEC.model_copy(update={"runtime_env": packages}))
    assert stay_of(run.attempt("ABC", killed=(1, STEP))) == [STEP, None, STEP]
    assert restored(require_done(run.attempt("ADC"))) == ("process", STEP)
    run.require_as_undisturbed(3)


def kept_here() -> int | None:
    from train_fn.snapshots import store

    return store.kept_step()


def test_a_second_death_while_the_ranks_meet_costs_nothing(
    ranks: StayingRanks, tmp_path: Path
) -> None:
    run = Run(ranks, tmp_path, moving_buffers.SPEC)
    assert stay_of(run.attempt("ABC", killed=(2, STEP))) == [STEP, STEP, None]
    second = run.attempt("DAB", {"D": staying_faults.die_while_ranks_meet})
    assert stay_of(second) == [None, STEP, STEP]
    third = run.attempt("EFA", {"A": staying_faults.die_while_ranks_meet})
    assert stay_of(third) == [None, None, None], "those that joined had no state yet"
    assert restored(require_done(run.attempt("GHB"))) == ("process", STEP)
    run.require_as_undisturbed(3)


def test_a_rank_that_joins_reads_the_state_in_the_memory_of_its_holder(
    ranks: StayingRanks, tmp_path: Path
) -> None:
    run = Run(ranks, tmp_path, moving_buffers.SPEC)
    sent = staying_faults.send_no_tensor
    run.attempt("ABC", {"A": sent, "B": sent}, killed=(2, STEP))
    assert restored(require_done(run.attempt("ABD", {"D": sent}))) == ("process", STEP)
    run.require_as_undisturbed(3)


def test_a_rank_that_may_not_read_it_is_sent_the_state(ranks: StayingRanks, tmp_path: Path) -> None:
    run = Run(ranks, tmp_path, moving_buffers.SPEC)
    run.attempt("ABC", killed=(2, STEP))
    second = require_done(run.attempt("ABD", {"D": staying_faults.may_not_read}))
    assert restored(second) == ("process", STEP)
    run.require_as_undisturbed(3)


def test_a_holder_that_dies_while_it_is_read_costs_nothing(
    ranks: StayingRanks, tmp_path: Path
) -> None:
    run = Run(ranks, tmp_path, moving_buffers.SPEC)
    run.attempt("ABC", killed=(2, STEP))
    second = run.attempt("ABD", {"A": staying_faults.die_while_read})
    assert stay_of(second) == [None, STEP, None], "who joins has half of a state, and leaves none"
    assert restored(require_done(run.attempt("EBF"))) == ("process", STEP)
    run.require_as_undisturbed(3)


def test_bytes_that_were_read_otherwise_are_used_by_no_rank(
    ranks: StayingRanks, tmp_path: Path
) -> None:
    run = Run(ranks, tmp_path, moving_buffers.SPEC)
    run.attempt("ABC", killed=(2, STEP))
    second = run.attempt("ABD", {"D": staying_faults.read_another_bit})
    assert {error_of(each).type for each in second} == {"StateNotWhole"}
    assert stay_of(second)[2] is None


def test_the_next_attempt_does_not_wait_until_a_large_state_is_written(
    ranks: StayingRanks, tmp_path: Path
) -> None:
    run = Run(ranks, tmp_path, moving_buffers.SPEC)
    run.attempt("AB", {"A": staying_faults.insure_without_end}, killed=(1, STEP))
    assert restored(require_done(run.attempt("AC"))) == ("process", STEP)
    assert run.num_snapshots() == 0, "all ranks had it before it was written"
    run.require_as_undisturbed(2)


@pytest.mark.parametrize("is_written", [False, True])
def test_an_only_holder_that_dies_before_another_rank_has_its_state(
    is_written: bool, ranks: StayingRanks, tmp_path: Path
) -> None:
    run = Run(ranks, tmp_path, moving_buffers.SPEC)
    run.attempt(
        "AB", {} if is_written else {"A": staying_faults.insure_without_end}, killed=(1, STEP)
    )
    if is_written:
        assert ranks.call("A", insure_here, run.job(2)) is None
    assert stay_of(run.attempt("AC", {"A": staying_faults.die_while_ranks_meet})) == [None, None]
    source, step = restored(require_done(run.attempt("DE")))
    assert (source, step) == ("snapshot", STEP) if is_written else step < STEP
    run.require_as_undisturbed(2)


def insure_here() -> str | None:
    from train_fn.snapshots import store

    return store.insure()


def test_survivors_that_differ_are_not_trusted_and_new_processes_go_on(
    ranks: StayingRanks, tmp_path: Path
) -> None:
    run = Run(ranks, tmp_path, moving_buffers.SPEC)
    run.attempt("ABC", killed=(2, STEP))
    second = run.attempt("ABD", {"B": staying_faults.flip_a_kept_bit})
    assert {(error_of(each).type, error_of(each).kind) for each in second} == {
        ("StateNotWhole", ErrorKind.EXCHANGE)
    }
    assert stay_of(second) == [None, None, None]
    third = require_done(run.attempt("EFG"))
    assert restored(third)[0] != "process" and restored(third)[1] < STEP
    run.require_as_undisturbed(3)


def test_a_kept_state_can_be_left_for_new_processes(ranks: StayingRanks, tmp_path: Path) -> None:
    run = Run(ranks, tmp_path, moving_buffers.SPEC)
    run.attempt("ABC", killed=(2, STEP))
    for name in "AB":
        assert ranks.call(name, leave_here, run.job(3)) is None
        assert ranks.call(name, kept_here, run.job(3)) is None
    assert restored(require_done(run.attempt("DEF"))) == ("snapshot", STEP)
    run.require_as_undisturbed(3)


def leave_here() -> str | None:
    from train_fn.snapshots import store

    return store.leave_kept_state()


def fp16() -> RunSpec:
    return make_spec("batch", precision="fp16")


def streamed(num_workers: int) -> RunSpec:
    raw = own_task_spec(num_workers).model_dump(mode="json")
    return RunSpec.model_validate(
        raw | {"scaling": {"max_workers": 2}, "train": raw["train"] | {"epochs": 10}}
    )


TASKS: dict[str, tuple[RunSpec, str | None, int]] = {
    "averaged weights, dropout, batch norm": (make_spec("batch"), None, 13),
    "a scaler that skips steps": (fp16(), f"{TRAINEES}:overflowing_scaler", 12),
    "two optimizers": (own_steps_task.SPEC, "tests.integration.own_steps_task:gan", 6),
    "streams": (streamed(0), f"{TRAINEES}:streamed_regression", 25),
    "streams by loader processes": (streamed(1), f"{TRAINEES}:streamed_regression", 25),
    "a task with a state": (
        moving_buffers.SPEC,
        "tests.integration.stateful_task:annealed_task",
        6,
    ),
    "parameters that are not used": (heads_spec(unused="allow"), f"{TRAINEES}:heads_by_kind", 11),
    "loader processes": (own_task_spec(1), f"{TRAINEES}:regression", 3),
}


@pytest.mark.parametrize(
    ("task", "built_ahead"),
    [
        *((task, bool(at % 2)) for at, task in enumerate(TASKS)),
        *only_in_chaos(*((task, not at % 2) for at, task in enumerate(TASKS))),
    ],
)
def test_every_kind_of_task_stays_as_it_was(
    task: str, built_ahead: bool, ranks: StayingRanks, tmp_path: Path
) -> None:
    spec, setup, step = TASKS[task]
    run = Run(ranks, tmp_path, spec, setup)
    assert stay_of(run.attempt("AB", killed=(0, step))) == [None, step]
    if built_ahead:
        ranks.call("C", partial(build_ahead_of, run.job(1)), run.job(1))
    assert restored(require_done(run.attempt("CB"))) == ("process", step)
    run.require_as_undisturbed(2)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_it_is_the_same_on_collectives_that_fail_as_nccls_do(
    run_ahead: bool, ranks: StayingRanks, tmp_path: Path
) -> None:
    silent = SilentOptions(run_ahead=run_ahead, delay_s=0.002 * run_ahead)
    run = Run(ranks, tmp_path, moving_buffers.SPEC)
    assert stay_of(run.attempt("ABC", killed=(1, STEP), silent=silent)) == [STEP, None, STEP]
    second = require_done(run.attempt("ADC", silent=silent))
    assert restored(second) == ("process", STEP)
    run.require_as_undisturbed(3)


SETTLED = 10


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_recoveries_in_one_process_leave_nothing_behind(
    ranks: StayingRanks, tmp_path: Path
) -> None:
    recoveries = 200
    raw = own_task_spec(0).model_dump(mode="json")
    spec = RunSpec.model_validate(raw | {"train": raw["train"] | {"epochs": 2 * recoveries}})
    run = Run(ranks, tmp_path, spec, f"{TRAINEES}:regression")
    before: dict[str, Owned] = {}
    for name in "AB":  # a module that is imported later would be a change of the user's
        ranks.call(name, owned, run.job(2))
    for number in range(recoveries):
        assert stay_of(run.attempt("AB", abandon=(number % 2, number))) == [number, number]
        if number in (SETTLED, recoveries - 1):
            now = {name: ranks.call(name, owned, run.job(2)) for name in "AB"}
            before = before or now
    for name in "AB":
        grown = now[name].resident_bytes - before[name].resident_bytes
        print(f"{name}: resident memory has grown by {grown / 1e6:.1f} MB")
        assert now[name].threads == before[name].threads
        assert more_than(before[name].descriptors, now[name].descriptors) == ""
        assert now[name].num_tensors == before[name].num_tensors
        assert grown < MOST_GROWTH_BYTES
    assert run.num_snapshots() <= 2 * 2, "the two newest of each node, as insurance"
    require_done(run.attempt("AB"))
    run.require_as_undisturbed(2)


MOST_GROWTH_BYTES = 16 << 20
"""What allocators may keep. One replica too many each time would be 190 times the model and its
gradients, one process group too many 190 times its buffers."""


class Owned(NamedTuple):
    """What a process holds."""

    threads: Counter[str]
    descriptors: Counter[str]
    num_tensors: int
    resident_bytes: int


def owned() -> Owned:
    for thread in threading.enumerate():
        if thread.name == "digest-state":  # of the attempt that has just ended
            thread.join()
    gc.collect()
    process = psutil.Process()
    return Owned(
        Counter(thread.name for thread in threading.enumerate()),
        open_descriptors(process),
        sum(isinstance(each, torch.Tensor) for each in gc.get_objects()),
        process.memory_info().rss,
    )
