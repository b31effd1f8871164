"""What a rank prints: bounded, never twice, and no burden to the step that prints it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from everstep.spec.run_spec import RunSpec
from storage.errors import StorageUnavailable
from storage.filesystem import open_storage
from storage.logs import rank_logs
from storage.logs.rank_logs import LogRecord, RankLogWriter, last_rank_lines, read_rank_logs
from storage.run_dir import RunDir
from tests.support.storage_places import memory_run_dir
from train_fn.journal import rank_log
from train_fn.journal.rank_log import RankLog, listen, put_tees
from train_fn.samples.loader import loader_options


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(open_storage(str(tmp_path)), "run_l")


def read(run_dir: RunDir) -> list[str]:
    return [line.message for line in read_rank_logs(run_dir, limit=100_000)[0]]


def test_prints_logging_and_progress_bars_become_lines(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RankLog(run_dir, 1, 1, 0)
    log.start()
    try:
        print("printed")
        print("1 %\r2 %\r3 %")
        print("on ", end="")
        print("stderr", file=sys.stderr)
        logging.getLogger("user").info("two\nlines")
        sys.stdout.write("no end")
    finally:
        log.close()
    assert read(run_dir) == ["printed", "3 %", "stderr", "two", "lines", "on no end"]
    assert capsys.readouterr().out == "printed\n1 %\r2 %\r3 %\non no end", (
        "it still goes where it went"
    )


def test_what_a_process_printed_before_it_had_a_rank_comes_first_in_that_rank_s_log(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    listen(lambda line: line.replace("secret", "…"))
    print("built with secret")
    assert read(run_dir) == []
    for rank in (2, 0):
        log = RankLog(run_dir, 1, 2, rank)
        log.start()
        print("trains")
        log.close()
    found = read_rank_logs(run_dir, limit=100)[0]
    assert sorted((line.rank, line.message) for line in found if line.rank is not None) == [
        (0, "trains"),
        (2, "built with …"),
        (2, "trains"),
    ]
    assert "secret" not in capsys.readouterr().out


def test_a_logger_s_handler_that_was_made_before_the_fork_prints_into_the_log_without_secrets(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    put_tees()
    library = logging.getLogger("library")
    library.propagate = False
    library.addHandler(logging.StreamHandler(sys.stderr))
    library.warning("before")
    log = RankLog(run_dir, 1, 1, 0)
    log.redact = lambda line: line.replace("secret", "…")
    log.start()
    try:
        library.warning("the secret")
    finally:
        log.close()
    assert read(run_dir) == ["the …"]
    assert capsys.readouterr().err == "before\nthe …\n"


def test_a_process_that_ends_its_log_gets_its_streams_back(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (sys.stdout, sys.stderr, list(logging.getLogger().handlers))
    level = logging.getLogger().level
    log = RankLog(run_dir, 1, 1, 0)
    log.start()
    assert sys.stdout is not before[0]
    log.close()
    log.close()
    assert (sys.stdout, sys.stderr, logging.getLogger().handlers) == before
    assert logging.getLogger().level == level


def test_a_rank_that_prints_without_measure_is_throttled_with_a_notice(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_log, "BURST_CHARS", 10_000)
    monkeypatch.setattr(rank_log, "RATE_CHARS_PER_S", 1)
    log = RankLog(run_dir, 1, 1, 0)
    log.start()
    try:
        for number in range(1000):
            print(f"{number:03d}" + "x" * 96)
        logging.getLogger("user").warning("x" * 500)
    finally:
        log.close()
    *lines, notice = read(run_dir)
    assert [int(line[:3]) for line in lines] == list(range(100))
    assert notice.startswith("901 lines (0.1 MB) are left out here")
    assert len(capsys.readouterr().out) == 10_000, "what is left out is not passed on either"


def test_a_line_without_end_does_not_grow(run_dir: RunDir) -> None:
    log = RankLog(run_dir, 1, 1, 0)
    log.start()
    try:
        for _ in range(100):
            sys.stdout.write("x" * 1000)
        print()
        for number in range(5000):
            sys.stdout.write(f"\rstep {number}")
        print()
    finally:
        log.close()
    long, bar = read(run_dir)
    assert len(long) < 2 * rank_log.MAX_LINE_CHARS and "left out" in long
    assert bar == "step 4999"


@pytest.mark.parametrize("failure", ["before", "after"])
def test_a_batch_that_is_written_again_repeats_nothing(failure: str) -> None:
    run_dir, files = memory_run_dir()
    with RankLogWriter(run_dir, 1, 1, 0) as writer:
        batch = [LogRecord(float(number), "INFO", str(number)) for number in range(3)]
        files.fail_next_write = failure
        with pytest.raises(StorageUnavailable):
            writer.write(batch)
        writer.write([*batch, LogRecord(3.0, "INFO", "3")])
        writer.write([LogRecord(4.0, "INFO", "4")])
    assert read(run_dir) == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("where", ["local", "objects"])
def test_a_long_log_goes_on_in_parts_and_loses_the_oldest(
    where: str, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_logs, "PART_BYTES", 1000)
    run_dir = run_dir if where == "local" else memory_run_dir()[0]
    cursor: dict[str, str] = {}
    followed: list[str] = []
    for begin in range(0, 200, 25):  # the writer is opened again and again, as after errors
        with RankLogWriter(run_dir, 1, 1, 0) as writer:
            for number in range(begin, begin + 25):
                writer.write([LogRecord(float(number), "INFO", f"{number:03d} {'x' * 50}")])
                lines, cursor = read_rank_logs(run_dir, cursor)
                followed += [line.message[:3] for line in lines if line.level == "INFO"]
    assert followed == [f"{number:03d}" for number in range(200)], "who keeps up misses nothing"
    kept = read(run_dir)
    assert kept[-1].startswith("199") and 30 < len(kept) < 120
    assert any("older lines of this log were deleted" in line for line in kept)
    last = [
        line.message[:3] for line in last_rank_lines(run_dir, 1, 1, 0, 30) if line.level == "INFO"
    ]
    assert last[-20:] == [f"{number:03d}" for number in range(180, 200)]
    assert last_rank_lines(run_dir, 1, 1, 3, 30) == [] == last_rank_lines(run_dir, 2, 1, 0, 30)
    assert [line.message[:3] for line in last_rank_lines(run_dir, 1, 1, 0, 2, before=190.0)] == [
        "188",
        "189",
    ]


class Talking:
    """Data that prints, logs and warns for each sample, and may end its process."""

    def __init__(self, killed_at: int = -1) -> None:
        self.killed_at = killed_at

    def __getitem__(self, index: int) -> int:
        print(f"read {index}")
        print("secret", file=sys.stderr)
        logging.getLogger("user").info("logged %d", index)
        with warnings.catch_warnings():  # as outside of pytest, which would record it
            warnings.simplefilter("always")
            warnings.showwarning = lambda *warning, **_: sys.stderr.write(
                warnings.formatwarning(*warning[:4])
            )
            warnings.warn(f"odd {index}", UserWarning, stacklevel=1)
        if index == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        sys.stdout.write(f"no end {index}, ")
        return index


def loader(data: Any, indices: list[int]) -> DataLoader[int]:
    spec = RunSpec.model_validate(
        {"name": "a", "code": {"archive": f"sha256:{'0' * 64}", "task": "a:B"}}
    )
    return DataLoader(
        data, sampler=indices, batch_size=1, **loader_options(spec, 2, torch.device("cpu"))
    )


def test_what_loader_processes_print_is_kept_and_marked_by_their_number(
    run_dir: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    log = RankLog(run_dir, 1, 1, 0)
    log.redact = lambda text: text.replace("secret", "***")
    log.start()
    try:
        sys.stdout.write("the rank's own ")
        assert [int(found[0]) for found in loader(Talking(), [4, 5, 6, 7])] == [4, 5, 6, 7]
        print("line")
    finally:
        log.close()
    lines = list(read_rank_logs(run_dir, limit=1000)[0])
    for number, mine in ((0, (4, 6)), (1, (5, 7))):
        own = [
            (line.level, line.message)
            for line in lines
            if line.message.startswith(f"[loader {number}] ")
        ]
        first, second = mine
        texts = [text.removeprefix(f"[loader {number}] ") for _, text in own]
        assert [text for text in texts if "odd" not in text and "warnings.warn" not in text] == [
            *(
                f"read {first}",
                "***",
                f"logged {first}",
                f"no end {first}, read {second}",
                "***",
                f"logged {second}",
            ),
            f"no end {second}, ",
        ]
        assert {level for level, text in own if "***" in text} == {"WARNING"}
        assert sum(f"UserWarning: odd {first}" in text for text in texts) == 1
    assert [line.message for line in lines if not line.message.startswith("[loader")] == [
        "the rank's own line"
    ]


def test_what_a_loader_process_printed_before_it_was_killed_is_kept(run_dir: RunDir) -> None:
    log = RankLog(run_dir, 1, 1, 0)
    log.start()
    try:
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            list(loader(Talking(killed_at=1), [0, 1, 2, 3]))
    finally:
        log.close()
    assert {"[loader 1] read 1", "[loader 1] logged 1"} <= set(read(run_dir))


def test_a_process_that_user_code_forks_is_marked_by_its_pid(run_dir: RunDir) -> None:
    log = RankLog(run_dir, 1, 1, 0)
    log.start()
    try:
        process = multiprocessing.get_context("fork").Process(target=print, args=("from a pool",))
        process.start()
        process.join(20)
    finally:
        log.close()
    assert read(run_dir) == [f"[process {process.pid}] from a pool"]


def test_a_process_that_outlives_the_log_goes_on(run_dir: RunDir) -> None:
    """Also where nobody reads what it prints any more."""
    log = RankLog(run_dir, 1, 1, 0)
    log.start()
    fork = multiprocessing.get_context("fork")
    closed = fork.Event()
    process = fork.Process(
        target=lambda: (closed.wait(20), [print("x" * 5000) for _ in range(500)])
    )
    process.start()
    log.close()
    closed.set()
    process.join(20)
    assert process.exitcode == 0
