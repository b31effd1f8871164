"""Which rank did not enter the collective in which the others wait: rules over made-up counts, and
what torch really recorded on ranks over gloo."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from train_fn.recovery.hang import CollectiveCounts, find_late, read_counts
from train_fn.step.nccl import collective_counts
from train_fn.step.peers import end_process_group

NUMBERS = st.integers(0, 3)


def counts(*enqueued: int | None) -> dict[int, CollectiveCounts | None]:
    return {rank: None if n is None else CollectiveCounts(n) for rank, n in enumerate(enqueued)}


@pytest.mark.parametrize(
    ("enqueued", "late"),
    [
        ((7, 7, 6), [2]),
        ((6, 7, 7), [0]),
        ((7, 7, 7), []),
        ((7, 5, 5), [1, 2]),
        ((7, 5, 6), [1]),
        ((7, None, 6), []),
        ((7,), []),
    ],
)
def test_who_called_fewer_collectives_is_late(
    enqueued: tuple[int | None, ...], late: list[int]
) -> None:
    assert find_late(counts(*enqueued)) == late


@pytest.mark.parametrize(
    ("started", "late"), [((5, 6, 6), [0]), ((6, 6, 6), []), ((-1, 6, 6), []), ((-1, -1, -1), [])]
)
def test_where_hosts_are_equally_far_the_devices_tell(
    started: tuple[int, ...], late: list[int]
) -> None:
    found = {rank: CollectiveCounts(9, number) for rank, number in enumerate(started)}
    assert find_late(found) == late


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=6))
def test_a_rank_that_is_as_far_as_any_is_never_late(numbers: list[tuple[int, int]]) -> None:
    found = {rank: CollectiveCounts(*each) for rank, each in enumerate(numbers)}
    late = find_late(found)
    assert max(numbers) not in [numbers[rank] for rank in late]
    assert len({numbers[rank][0] for rank in late}) <= 1
    assert bool(late) == (len(set(numbers)) > 1 and len(numbers) > 1)
    assert len(late) < len(numbers)


def dump_of(*numbers: int, group: int = 0, kind: str = "gloo:all_reduce", **status: str) -> bytes:
    """Return a dump of a group of all ranks with collectives of these numbers."""
    entries = [
        {
            "pg_id": group,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": number,
            "profiling_name": kind,
        }
        for number in numbers
    ]
    shown = {"last_started_collective": "-1", **status}
    return json.dumps({"entries": entries, "pg_status": {str(group): shown}}).encode()


@pytest.mark.parametrize(
    "dump",
    [
        b"",
        b"[]",
        b"{}",
        b'{"entries":[]}',
        b'{"entries":[{}]}',
        dump_of(1, 2, group=4).replace(b'"4"', b'"0"'),
        dump_of(1, 2, 3),
        dump_of(1),
    ],
)
def test_a_dump_that_does_not_show_the_group_s_last_collective_says_nothing(dump: bytes) -> None:
    assert read_counts(2 if b"3" not in dump else 4, dump) is None


def test_a_group_that_only_sends_is_not_taken_for_one_that_ended_in_the_process() -> None:
    """Both have a second operation."""
    assert read_counts(2, dump_of(1, 2, 3, 4, 5)) is None


def test_a_dump_of_a_gpu_is_read_by_its_documented_form() -> None:
    dump = dump_of(11, 11, 12, kind="nccl:all_reduce", last_started_collective="11")
    assert read_counts(12, dump) == CollectiveCounts(12, 11)


def test_sends_and_receives_of_a_gpu_are_numbered_apart() -> None:
    assert read_counts(7, dump_of(3, 7, kind="nccl:all_reduce")) == CollectiveCounts(7)
    assert read_counts(7, dump_of(3, 7)) is None


def test_a_group_without_collectives_is_behind_one_that_has_some() -> None:
    assert read_counts(0, b"") == CollectiveCounts(0)


def test_a_process_without_a_group_has_no_counts() -> None:
    assert collective_counts() is None


def hang_before_the_third(
    rank: int, directory: str, pipe: Any, *, ended_groups: int = 0, sends: bool = False
) -> None:
    """Rank 1 does something else while the other two wait for it."""
    numbers = torch.ones(4)
    for _ in range(ended_groups):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for _ in range(5):
            dist.all_reduce(numbers)
        end_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=3
    )
    dist.all_reduce(numbers)
    if sends and rank != 2:
        dist.send(numbers, 1) if rank == 0 else dist.recv(numbers, 0)
    dist.broadcast(numbers, 0)
    if rank != 1:
        dist.all_reduce(numbers, async_op=True)
    time.sleep(0.5)
    pipe.send(collective_counts())
    pipe.recv()


def counts_of_ranks(directory: Path, **options: Any) -> dict[int, CollectiveCounts | None]:
    """Return what three real ranks record of a collective that rank 1 does not enter."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(3)]
    ranks = [
        context.Process(
            target=hang_before_the_third,
            args=(rank, str(directory), theirs),
            kwargs={**options, "ended_groups": options.get("ended_groups", 0) if rank == 0 else 0},
        )
        for rank, (_, theirs) in enumerate(pipes)
    ]
    try:
        for each in ranks:
            each.start()
        return {rank: ours.recv() for rank, (ours, _) in enumerate(pipes)}
    finally:
        for each in ranks:
            each.kill()
            each.join()


@pytest.mark.slow
@pytest.mark.parametrize("ended_groups", [0, 2], ids=["new", "a-survivor-among-them"])
def test_real_ranks_over_gloo_record_who_did_not_come(tmp_path: Path, ended_groups: int) -> None:
    """A rank that outlived earlier groups has their counts too."""
    found = counts_of_ranks(tmp_path, ended_groups=ended_groups)
    assert found == counts(3, 2, 3)
    assert find_late(found) == [1]


@pytest.mark.slow
def test_ranks_that_send_to_each_other_blame_nobody(tmp_path: Path) -> None:
    found = counts_of_ranks(tmp_path, sends=True)
    assert found == counts(None, None, 3)
    assert find_late(found) == []


@pytest.mark.own_process
def test_the_wrapper_for_debugging_hides_no_counts() -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    assert collective_counts() == CollectiveCounts(1)
    end_process_group()
