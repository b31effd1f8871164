"""What benchmarks make of what they recorded: which steps count, what a ratio is of, and which
samples the weights used; and what never began is no figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recovery
from benchmarks.by_turns import BLOCK, SETTLING, Kind, Turn
from benchmarks.recovery import counted
from benchmarks.steady import quiet_steps, settled_steps


def make_turn(kind: Kind, step_s: float, slow: dict[int, set[int]] | None = None) -> Turn:
    """``slow``: before which steps which rank's work takes twice as long; steps beside that take
    twice as long, too."""
    works_s = [
        [0.002 if at in (slow or {}).get(rank, ()) else 0.001 for at in range(BLOCK + 1)]
        for rank in range(2)
    ]
    steps_s = [
        step_s * max(works[at] + works[at + 1] for works in works_s) / 0.002 for at in range(BLOCK)
    ]
    return Turn(kind, steps_s, works_s)


def test_steps_beside_slow_work_of_any_rank_are_not_quiet() -> None:
    turns = [make_turn("protected", 1.0, {0: {30}, 1: {50, 51, BLOCK}}), make_turn("plain", 1.0)]
    of = quiet_steps(turns)
    lost = {29, 30, 49, 50, 51, BLOCK - 1}
    assert len(of(turns[0])) == BLOCK - SETTLING - len(lost) and set(of(turns[0])) == {1.0}
    assert len(of(turns[1])) == len(settled_steps(turns[1])) == BLOCK - SETTLING


def test_a_side_that_does_not_start_has_no_time_of_recovery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "GIVE_UP_S", 0.0)
    with pytest.raises(TimeoutError, match="the rendezvous"):
        recovery.measure("torchrun", "digits", "node", cold=False)


def write_steps(directory: Path, *ranks: list[tuple[int, int, int, int]]) -> None:
    """Write the lines of ranks: (world, step, epoch, batch) in the order of their time, which is
    the same for all."""
    (directory / "steps").mkdir()
    for rank, steps in enumerate(ranks):
        keys = ("world", "step", "epoch", "batch")
        lines: list[dict[str, Any]] = [
            {"rank": rank, "parts": step[0], "at": at, **dict(zip(keys, step, strict=True))}
            for at, step in enumerate(steps)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (directory / "steps" / f"{rank}.jsonl").write_text(text)


def not_once(directory: Path, through_step: int) -> int:
    """Count the samples of digits, 1,437, that the first epoch did not use once."""
    counts = counted(directory, through_step, "digits")
    assert {epoch for epoch, _ in counts} == {0}
    return sum(counts[0, sample] != 1 for sample in range(1437))


EPOCH = [(2, 1 + batch, 0, batch) for batch in range(12)]
"""Steps of two ranks on 1,437 digits, 64 a rank."""


def test_an_epoch_uses_each_sample_once(tmp_path: Path) -> None:
    write_steps(tmp_path, EPOCH, EPOCH)
    assert not_once(tmp_path, 12) == 1, (
        "torch's sampler repeats one, so that two ranks have as many"
    )
    assert not_once(tmp_path, 11) == 1437 - 11 * 128, "those of the step that follows"


def test_steps_that_are_done_again_count_once(tmp_path: Path) -> None:
    write_steps(tmp_path, EPOCH[:5] + EPOCH[3:], EPOCH[:5] + EPOCH[3:])
    assert not_once(tmp_path, 12) == 1


def test_an_epoch_that_begins_again_uses_its_samples_twice(tmp_path: Path) -> None:
    """A checkpoint of step 3, and the epoch from its begin: as the loop of a tutorial does."""
    again = [(2, 4 + batch, 0, batch) for batch in range(12)]
    write_steps(tmp_path, EPOCH[:5] + again, EPOCH[:5] + again)
    assert not_once(tmp_path, 15) == 3 * 128


def test_the_batch_of_a_rank_that_died_before_its_line_is_counted(tmp_path: Path) -> None:
    write_steps(tmp_path, EPOCH, EPOCH[:11])
    assert not_once(tmp_path, 12) == 1


def test_a_part_that_nobody_has_is_missing(tmp_path: Path) -> None:
    """The other replica group is dead: ``parts`` of two, a ``world`` of one."""
    write_steps(tmp_path, [*EPOCH[:4], *((1, *step[1:]) for step in EPOCH[4:])], EPOCH[:4])
    path = tmp_path / "steps" / "0.jsonl"
    path.write_text(path.read_text().replace('"parts": 1', '"parts": 2'))
    assert not_once(tmp_path, 12) == 719 - 4 * 64 - 1, "the repeated one is used by the other part"
