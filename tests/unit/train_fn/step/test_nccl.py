"""What keeps a rank alive whose peers are gone: for gloo nothing, for NCCL torch's own settings,
which a spec may change."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from everstep.spec.run_spec import RunSpec
from tests.support.raw_specs import TASK
from tests.support.service_process import wait_for
from tests.support.silent_backend import claim_cpu
from train_fn.errors import PeersGone
from train_fn.protect.training import warn_of_lost_state
from train_fn.recovery.settings import (
    COMMUNICATOR_S,
    NCCL_ENV,
    RecoverySettings,
    rank_env,
    take_environment,
)
from train_fn.step import nccl
from train_fn.step.nccl import ARRIVED
from train_fn.step.peers import Peers, end_process_group
from train_fn.step.precision import reproducibility, set_determinism


def spec_of(**fields: Any) -> RunSpec:
    return RunSpec.model_validate({"name": "a", "task": TASK, **fields})


@pytest.mark.own_process
def test_the_backend_is_found_inside_of_torchs_debugging_wrapper() -> None:
    """The wrapper can neither abort nor tell of errors."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    outer = dist.group.WORLD._get_backend(torch.device("cpu"))
    inner = nccl.unwrapped(outer)
    assert isinstance(inner, dist.ProcessGroupGloo) and inner is not outer
    assert nccl.unwrapped(inner) is inner
    end_process_group()


CALLS: dict[str, Callable[[Peers], Any]] = {
    "gather": lambda peers: peers.gather(1),
    "share": lambda peers: peers.share(1, 0),
    "sum": lambda peers: peers.start_sum(torch.ones(1)),
    "broadcast": lambda peers: peers.start_broadcast(torch.ones(1), 0),
    "all_gather": lambda peers: peers.start_all_gather(torch.ones(2), torch.ones(1)),
    "all_to_all": lambda peers: peers.start_all_to_all(
        torch.ones(2), torch.ones(2), [1, 1], [1, 1]
    ),
}


@pytest.mark.own_process
def test_no_collective_begins_once_the_group_was_aborted() -> None:
    """NCCL would make a communicator for it, and wait for the peer that never comes."""
    claim_cpu()
    nccl.begin_attempt()
    dist.init_process_group("silent", store=dist.HashStore(), rank=0, world_size=2)
    nccl.abort_collectives()
    for name, call in CALLS.items():  # also of a group whose ranks have met
        with pytest.raises(PeersGone, match="before this collective"):
            call(Peers(0, 2, torch.device("cpu")))
            pytest.fail(f"{name} began")
    nccl.begin_attempt()
    end_process_group()


@pytest.mark.own_process
def test_no_communicator_is_made_before_all_ranks_are_there() -> None:
    """No abort ends NCCL's creation of one while a peer is missing."""
    claim_cpu()
    nccl.begin_attempt()
    store = dist.HashStore()
    dist.init_process_group("silent", store=store, rank=0, world_size=2)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(Peers(0, 2, torch.device("cpu")).gather, 1)
        wait_for(lambda: dist.distributed_c10d._get_default_store().check([ARRIVED]), 10, "rank 0")
        assert not waiting.done()
        nccl.abort_collectives()
        with pytest.raises(PeersGone, match="before this collective"):
            waiting.result(10)
    nccl.begin_attempt()
    end_process_group()


@pytest.mark.parametrize(
    ("env", "expected"), [({}, "2"), ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, "3")]
)
def test_torch_leaves_the_process_alive_unless_the_spec_says_otherwise(
    env: dict[str, str], expected: str
) -> None:
    assert (
        rank_env(spec_of(env=env), RecoverySettings())["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
        == expected
    )


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "a broken device would end the process"),
        ("TORCH_NCCL_ENABLE_MONITORING", "a watchdog that hangs would end the process"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "a dump would delay the abort"),
        ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "the watchdog would sleep for a minute"),
    ],
)
def test_nothing_of_torchs_ends_or_delays_the_process_that_holds_the_state(
    name: str, why: str
) -> None:
    assert rank_env(spec_of(), RecoverySettings())[name] == "0", why


def test_a_communicator_is_created_within_a_limit() -> None:
    env = rank_env(spec_of(), RecoverySettings())
    assert env["TORCH_NCCL_USE_COMM_NONBLOCKING"] == "1"
    assert float(env["TORCH_NCCL_NONBLOCKING_TIMEOUT"]) == COMMUNICATOR_S


@pytest.mark.parametrize(
    ("on_the_node", "of_the_spec", "expected"),
    [(None, None, "19"), ("22", None, "22"), ("22", "18", "18"), (None, "18", "18")],
)
def test_infiniband_gives_a_silent_host_up_as_soon_as_tcp_does_unless_somebody_knows_better(
    on_the_node: str | None,
    of_the_spec: str | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ = {} if on_the_node is None else {"NCCL_IB_TIMEOUT": on_the_node}
    monkeypatch.setattr(os, "environ", environ)
    take_environment({} if of_the_spec is None else {"NCCL_IB_TIMEOUT": of_the_spec})
    assert environ["NCCL_IB_TIMEOUT"] == expected
    seconds = 4.096e-6 * 2**19 * int(environ["NCCL_IB_RETRY_CNT"])
    assert seconds == pytest.approx(RecoverySettings().silent_peer_s, rel=0.01)


@pytest.mark.parametrize(("wanted", "is_set"), [(True, True), ("auto", False), (False, False)])
def test_one_order_of_summation_is_set_where_the_spec_asks_for_it(
    wanted: bool | str, is_set: bool
) -> None:
    env = rank_env(spec_of(train={"deterministic": wanted}), RecoverySettings())
    names = {"CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO"}
    assert names & env.keys() == (names if is_set else set())
    own = spec_of(train={"deterministic": wanted}, env={"NCCL_ALGO": "Tree"})
    assert rank_env(own, RecoverySettings())["NCCL_ALGO"] == "Tree"


@pytest.mark.own_process
@pytest.mark.parametrize(
    ("wanted", "device", "expected", "benchmark"),
    [
        (True, "cuda", "bitwise", False),
        ("auto", "cuda", "float tolerance", True),
        (False, "cuda", "float tolerance", True),
        (True, "cpu", "bitwise", None),
        ("auto", "cpu", "bitwise where kernels are", None),
        (False, "cpu", "float tolerance", None),
    ],
)
def test_what_holds_follows_from_the_device(
    wanted: Any, device: str, expected: str, benchmark: bool | None
) -> None:
    before = torch.backends.cudnn.benchmark
    set_determinism(wanted, torch.device(device))
    assert reproducibility() == expected
    assert reproducibility(compiled=True) == "float tolerance"
    assert torch.backends.cudnn.benchmark is (before if benchmark is None else benchmark)


OWN_SCRIPT = """
import os, sys
{group}
import everstep.train
assert {has_torch} == ("torch" in sys.modules)
from train_fn.recovery.settings import NCCL_ENV, why_torch_ends_it
assert os.environ.keys() >= NCCL_ENV.keys()
assert os.environ["TORCH_NCCL_ENABLE_TIMING"] == "0", "the user's own"
print(why_torch_ends_it(os.environ))
"""
GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""


@pytest.mark.parametrize(
    ("group", "env", "said"),
    [
        ("", {}, ["None"]),
        (GROUP, {}, ["import everstep.train before", "ASYNC_ERROR_HANDLING", "MONITORING"]),
        (
            "",
            {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"},
            ["leave TORCH_NCCL_ASYNC_ERROR_HANDLING unset, or set it to 2"],
        ),
        (GROUP, NCCL_ENV, ["None"]),
    ],
)
def test_a_script_that_imports_everstep_keeps_its_process(
    group: str, env: dict[str, str], said: list[str]
) -> None:
    source = OWN_SCRIPT.format(group=group, has_torch=bool(group))
    plain = {name: value for name, value in os.environ.items() if name not in NCCL_ENV}
    done = subprocess.run(
        [sys.executable, "-c", source],
        env=plain | env | {"TORCH_NCCL_ENABLE_TIMING": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert all(part in done.stdout for part in said), done.stdout


def test_a_protected_loop_warns_of_what_loses_its_state(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in NCCL_ENV.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        warn_of_lost_state(2)
        assert caplog.text == ""
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
        warn_of_lost_state(1)
        assert caplog.text == "", "it has no peers"
        warn_of_lost_state(2)
        assert "set it to 2" in caplog.text
    finally:
        dist.destroy_process_group()
