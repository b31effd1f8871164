"""Ranks over NCCL: elastic exactness from three ranks to one, audits
and wrong bits on purpose, a compiled model. All ends but that of the
compiled model equal their undisturbed twins bit by bit."""

from __future__ import annotations

from dataclasses import replace
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
from tests.integration.test_exactness import assert_same, final_state, make_spec
from tests.integration.test_exactness_elastic import Bits, elastic
from tests.integration.test_exactness_failures import errors_of
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
    spec = elastic(make_spec("batch", deterministic=True))
    on: dict[str, Any] = {"device": str(device), "silent": stand_in(device)}
    run_dir, twin = make_run_dir(directory), make_run_dir(directory, "run_twin")
    first = run_ranks(Job(run_dir, spec, 3, killed=(1, 5), **on), directory)
    second = run_ranks(Job(run_dir, spec, 2, attempt=2, killed=(0, 11), **on), directory)
    last = train_to_end(Job(run_dir, spec, 1, attempt=3, **on), directory)
    assert (restored(second[1]), restored(last)) == (5, 11)
    whole = train_to_end(Job(twin, spec, 2, **on), directory)
    found, expected = Bits(run_dir, *first, *second, last), Bits(twin, whole)
    assert found.losses == expected.losses
    assert_same(final_state(run_dir), final_state(twin))
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
    """Kill a peer of a rank whose model is compiled, two times. Its bits are not promised."""
    directory.mkdir()
    spec = make_spec("batch", deterministic=True, compile=True)
    run_dir, twin = make_run_dir(directory), make_run_dir(directory, "run_twin")
    job = Job(run_dir, spec, 2, killed=(1, KILLED_AFTER), device=str(device))
    first = run_ranks(job, directory)
    second = run_ranks(replace(job, attempt=2, killed=(1, 2 * KILLED_AFTER)), directory)
    last = train_to_end(replace(job, attempt=3, killed=None), directory)
    from_steps = [restored(each) for each in (second[0], last)]
    assert from_steps == [KILLED_AFTER, 2 * KILLED_AFTER], f"went on from {from_steps}"
    train_to_end(Job(twin, spec, 2, device=str(device)), directory)
    [started] = last.of_kind(EventKind.TRAINING_STARTED)
    assert started["reproducible"] == FLOAT_TOLERANCE, started
    found, expected = (final_state(each)["model.pt"] for each in (run_dir, twin))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0.05, atol=0.02)
    is_equal = all(torch.equal(found[name], value) for name, value in expected.items())
    times = _times(first[0]) | _times(second[0]) | _times(last)
    gaps = [times[at + 1] - times[at] for at in (KILLED_AFTER, 2 * KILLED_AFTER)]
    bits = "equal bits" if is_equal else "equal within tolerance, not in every bit"
    return (
        f"a compiled model: {gaps[0]:.1f} and {gaps[1]:.1f} s "
        f"from the last step before a death to the next one, {bits}"
    )


def restored(outcome: Outcome) -> int:
    """Return the step from which a rank went on."""
    [data] = outcome.of_kind(EventKind.RESTORED)
    return int(data["step"])


def _times(outcome: Outcome) -> dict[int, float]:
    points = [point for data in outcome.of_kind(EventKind.METRICS) for point in data["points"]]
    return {point["step"]: point["at"] for point in points}


def deterministic(spec: RunSpec) -> RunSpec:
    """Return the spec with deterministic kernels on any device."""
    return spec.model_copy(update={"train": spec.train.model_copy(update={"deterministic": True})})
