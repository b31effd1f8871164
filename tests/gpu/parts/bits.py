"""Ranks over NCCL that stay in their processes: elastic exactness from three ranks to one, audits
and wrong bits on purpose, a compiled model. All ends but that of the
compiled model equal their undisturbed twins bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from everstep.spec.run_spec import RunSpec
from everstep.wire import ErrorKind
from everstep.wire.drills import DrillKind
from everstep.wire.events import EventKind
from tests.gpu.parts.two_ranks import stand_in
from tests.gpu.verdict import Shown
from tests.integration import test_audits, test_ranks_apart
from tests.integration.ranks import Job, Outcome, make_run_dir, run_ranks, train_to_end
from tests.integration.staying_ranks import staying_ranks
from tests.integration.test_exactness import final_state, make_spec
from tests.integration.test_exactness_elastic import elastic
from tests.integration.test_exactness_failures import errors_of
from tests.integration.test_staying import Run, require_done, restored, stay_of
from train_fn.step.precision import FLOAT_TOLERANCE

KILLED_AFTER = 7


def run(device: torch.device, directory: Path) -> Shown:
    on_gpu = device.type == "cuda"
    checks = [_elastic, _audited, _apart, *([_compiled] if on_gpu else [])]
    facts = [check(device, directory / check.__name__) for check in checks]
    return Shown("; ".join(facts), "" if on_gpu else "NCCL, torch.compile")


def _elastic(device: torch.device, directory: Path) -> str:
    """Kill one of three ranks, then one of two."""
    directory.mkdir()
    spec, silent = elastic(make_spec("batch", deterministic=True)), stand_in(device)
    with staying_ranks(directory) as ranks:
        run = Run(ranks, directory, spec, None, str(device))
        assert stay_of(run.attempt("ABC", killed=(1, 5), silent=silent)) == [5, None, 5]
        assert stay_of(run.attempt("AC", killed=(0, 11), silent=silent)) == [None, 11]
        assert restored(require_done(run.attempt("C", silent=silent))) == ("process", 11)
        run.require_as_undisturbed(2)
    return "three ranks, two, one with elastic exactness: the bits of two undisturbed ranks"


def _audited(device: torch.device, directory: Path) -> str:
    """Flip a bit of one rank's own gradient while all are audited."""
    directory.mkdir()
    spec, flipped_at = deterministic(test_audits.spec()), test_audits.FLIPPED_AT
    on: dict[str, Any] = {
        "setup": test_audits.MOVING,
        "device": str(device),
        "silent": stand_in(device),
    }
    run_dir, twin = make_run_dir(directory), make_run_dir(directory, "run_twin")
    flipped = (DrillKind.CORRUPT_GRADIENT, 1, flipped_at)
    found = errors_of(run_ranks(Job(run_dir, spec, 3, flipped=flipped, **on), directory))
    kinds = [error.kind for error in found]
    assert kinds == [ErrorKind.COLLECTIVE, ErrorKind.CORRUPTION, ErrorKind.COLLECTIVE], kinds
    assert [error.snapshot_step for error in found] == [flipped_at, None, flipped_at]
    train_to_end(Job(run_dir, spec, 3, attempt=2, **on), directory)
    train_to_end(Job(twin, deterministic(test_audits.spec(0.0)), 3, **on), directory)
    assert test_audits.end_of(run_dir) == test_audits.end_of(twin), "audits leave no trace"
    return "corrupt_gradient found before the step by an audit, which leaves no trace"


def _apart(device: torch.device, directory: Path) -> str:
    """Flip a bit of one rank's sum."""
    directory.mkdir()
    spec, flipped_at = deterministic(test_ranks_apart.spec()), test_ranks_apart.FLIPPED_AT
    on: dict[str, Any] = {
        "setup": test_ranks_apart.SETUP,
        "device": str(device),
        "silent": stand_in(device),
    }
    run_dir = make_run_dir(directory)
    train_to_end(Job(run_dir, spec, 3, stopped=("pause", 4), **on), directory)
    flipped = (DrillKind.CORRUPT_GRADIENT, 1, flipped_at)
    failed = errors_of(
        run_ranks(Job(run_dir, spec, 3, attempt=2, flipped=flipped, **on), directory)
    )
    assert failed[1].kind is ErrorKind.CORRUPTION, [error.kind for error in failed]
    assert "rank 1 differs from the others" in failed[1].message, failed[1].message
    assert all(error.snapshot_step is None for error in failed), "no state of that step is kept"
    return "without audits, the rank that differs is named at the next step"


def _compiled(device: torch.device, directory: Path) -> str:
    """Kill a peer of a rank whose model is compiled, two times. Its bits are not promised, nor that
    it keeps its process: torch's compiler may have changed that since the first pass."""
    directory.mkdir()
    spec = make_spec("batch", deterministic=True, compile=True)
    with staying_ranks(directory) as ranks:
        run = Run(ranks, directory, spec, None, str(device))
        first = run.attempt("AB", killed=(1, KILLED_AFTER))
        second = run.attempt("AC", killed=(1, 2 * KILLED_AFTER))
        last = require_done(run.attempt("AD"))
        from_steps = [restored(each)[1] for each in (second[0], last)]
        assert from_steps == [KILLED_AFTER, 2 * KILLED_AFTER], f"went on from {from_steps}"
        twin = make_run_dir(directory, "run_twin")
        require_done(ranks.run(Job(twin, spec, 2, device=str(device)), "XY"))
    [started] = last.of_kind(EventKind.TRAINING_STARTED)
    assert started["reproducible"] == FLOAT_TOLERANCE, started
    found, expected = (final_state(each)["model.pt"] for each in (run.run_dir, twin))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0.05, atol=0.02)
    is_equal = all(torch.equal(found[name], value) for name, value in expected.items())
    times = _times(first[0]) | _times(second[0]) | _times(last)
    gaps = [times[at + 1] - times[at] for at in (KILLED_AFTER, 2 * KILLED_AFTER)]
    kept = sum(stay_of(each)[0] is not None for each in (first, second))
    bits = "equal bits" if is_equal else "equal within tolerance, not in every bit"
    return (
        f"a compiled model, its process kept {kept} of 2 times: {gaps[0]:.1f} and {gaps[1]:.1f} s "
        f"from the last step before a death to the next one, {bits}"
    )


def _times(outcome: Outcome) -> dict[int, float]:
    points = [point for data in outcome.of_kind(EventKind.METRICS) for point in data["points"]]
    return {point["step"]: point["at"] for point in points}


def deterministic(spec: RunSpec) -> RunSpec:
    """Return the spec with deterministic kernels on any device."""
    return spec.model_copy(update={"train": spec.train.model_copy(update={"deterministic": True})})
