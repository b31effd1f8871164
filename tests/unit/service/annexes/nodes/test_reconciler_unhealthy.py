"""Which nodes are cordoned for failing too often: the rule over any records, and the reconciler
that applies it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.wire import ErrorKind, Verdict
from everstep.wire.events import GPU_FAULTY, EventKind
from service.annexes.nodes.care import (
    BY_ITSELF,
    CordonRule,
    NodeCare,
    Suspect,
    choose_to_cordon,
    find_suspects,
)
from service.annexes.nodes.store import GONE_KEPT_S, MarksFile
from service.cluster.ray_jobs import RayEndpoint, RayJobs
from service.db.tables import runs
from service.model.rows import NodeFailure
from service.reconciler.tail import JournalTail
from storage.cluster import PATH, read_node_marks
from tests.support.fake_ray import FakeRay, serving
from tests.support.reconciler_world import World

pytest_plugins = ["tests.support.reconciler_fixtures"]

NOW = 1_000_000.0
NODES_FAULTS = (
    *("node_lost", "worker_lost", "out_of_memory", "hang", "hardware"),
    "silent_corruption",
)
RULE = CordonRule(runs=3, failures=5, window_s=3600.0)


def failure(
    run: str = "a",
    *,
    node: str = "n1",
    ago_s: float = 10.0,
    verdict: str = "worker_lost",
    error: str = "",
    kind: ErrorKind | None = None,
    owner: str | None = None,
    archive: str | None = None,
) -> NodeFailure:
    return NodeFailure(run, node, NOW - ago_s, verdict, error, kind, owner, archive)


def suspected(
    failures: list[NodeFailure], rule: CordonRule = RULE, **pardoned_ago_s: float
) -> list[str]:
    pardoned = {node_id: NOW - ago_s for node_id, ago_s in pardoned_ago_s.items()}
    return [suspect.node_id for suspect in find_suspects(failures, rule, NOW, pardoned)]


# ---------------------------------------------------------------- the rule


def test_a_node_whose_gpu_is_shown_to_be_faulty_is_cordoned_at_once() -> None:
    words = f"AcceleratorError: CUDA error: unspecified launch failure; {GPU_FAULTY}Xid 79: gone"
    faulty = failure(verdict="hardware", error=words, kind=ErrorKind.DEVICE)
    [suspect] = find_suspects([faulty], RULE, NOW, {})
    assert (suspect.node_id, suspect.num_failures) == ("n1", 1)
    assert suspect.reason == f"{GPU_FAULTY}Xid 79: gone; seen by {faulty.run_id}"
    unproven = failure(verdict="hardware", error="CUDA error: an illegal memory access")
    assert find_suspects([unproven], RULE, NOW, {}) == ()


def test_code_that_ends_its_own_process_says_nothing_of_the_node() -> None:
    assert suspected([failure(kind=ErrorKind.EXITED)] * 5) == []
    assert suspected([failure()] * 5) == ["n1"]


def test_the_memory_of_a_gpu_is_the_model_s_matter() -> None:
    of_gpu = failure(verdict="out_of_memory", kind=ErrorKind.DEVICE_MEMORY)
    assert suspected([of_gpu] * 5) == []
    words = "MemoryError: the loader of the CUDA samples wants 2 TB"
    of_host = failure(verdict="out_of_memory", error=words, kind=ErrorKind.OUT_OF_MEMORY)
    assert suspected([of_host] * 5) == ["n1"]
    assert suspected([failure(verdict="out_of_memory", error="killed")] * 5) == ["n1"]


@pytest.mark.parametrize(
    ("whose", "cordons"),
    [
        ("ann:x ann:x ann:x ann:x ann:x", False),  # one user, one archive
        ("ann:x ann:y ann:z", False),  # one user who edits and tries again
        ("ann:x bob:x eve:x", False),  # a team's archive
        ("ann:x ann:y bob:y bob:z eve:w", False),  # three archives, but only two apart
        ("ann:x bob:y", False),
        ("ann:x bob:y eve:z", True),
        ("ann:x ann:x bob:y eve:z", True),
        ("ann: ann: ann:", True),  # built-in code does not end its process
        ("ann:x ann:x ann:", False),
        ("ann:x ann: bob:", True),
    ],
)
def test_one_user_s_code_counts_once_through_any_number_of_runs(whose: str, cordons: bool) -> None:
    for verdict in NODES_FAULTS:
        if verdict == "out_of_memory":
            continue
        failures = [
            failure(f"run {number}", verdict=verdict, owner=owner, archive=archive or None)
            for number, (owner, _, archive) in enumerate(
                each.partition(":") for each in whose.split()
            )
        ]
        found = [each for each in find_suspects(failures, RULE, NOW, {}) if not each.doubt]
        assert [each.node_id for each in found] == (["n1"] if cordons else []), verdict
        if not cordons and len(failures) >= RULE.runs:
            [doubted] = find_suspects(failures, RULE, NOW, {})
            assert doubted.doubt, "an operator is told"
            assert choose_to_cordon([doubted], {"n1", "n2", "n3"}, set()) == ((), (doubted,))


def test_one_user_s_settings_run_out_of_memory_on_their_own_account() -> None:
    def doubts(*owners: str) -> list[bool]:
        failures = [
            failure(f"run {number}", verdict="out_of_memory", owner=owner)
            for number, owner in enumerate(owners)
        ]
        return [each.doubt is not None for each in find_suspects(failures, RULE, NOW, {})]

    assert doubts("ann", "ann", "ann", "ann", "ann") == [True]
    assert doubts("ann", "bob", "eve") == [False]


def test_one_user_s_code_can_name_one_node_at_most() -> None:
    """A run's code can write its history: any words, about any node."""

    def told(node: str, ago_s: float, owner: str, archive: str | None = "x") -> NodeFailure:
        of_run = failure(f"run of {owner}", node=node, ago_s=ago_s, verdict="node_lost")
        words = {"kind": ErrorKind.NODE, "exception": "NodeUnfit: disk: full"}
        return dataclasses.replace(of_run, **words, owner=owner, archive=archive)

    forged = [told("n1", 30, "eve"), told("n2", 20, "eve"), told("n3", 10, "eve")]
    assert suspected(forged) == ["n1"]
    assert suspected(forged, n1=25) == [], "one that was opened again was named all the same"
    assert set(suspected([*forged, told("n2", 5, "ann", "y")])) == {"n1", "n2"}
    assert suspected([*forged, told("n3", 5, "ann", None)])[0] == "n3", "a built-in task's word"
    assert len(suspected([told(f"n{number}", 9, "ann", None) for number in range(3)])) == 3


def test_failures_before_a_pardon_are_forgiven() -> None:
    failures = [failure(ago_s=100)] * 5
    assert suspected(failures, n1=50) == [] and suspected(failures, n1=100) == []
    assert suspected(failures, n1=101) == ["n1"] and suspected(failures, n2=50) == ["n1"]
    assert suspected([*failures, *[failure(ago_s=10)] * 5], n1=50) == ["n1"]


def test_a_node_that_was_not_fit_for_one_run_is_one_too_many() -> None:
    words = "NodeUnfit: disk: [Errno 28] No space left on device"
    unfit = failure("r1", verdict="node_lost", error=words, kind=ErrorKind.NODE)
    [suspect] = find_suspects([unfit], RULE, NOW, {})
    assert (suspect.node_id, suspect.reason) == (
        "n1",
        "not fit for r1: disk: [Errno 28] No space left on device",
    )
    assert suspected([dataclasses.replace(unfit, at=NOW - 100)], n1=50) == []


records = st.lists(
    st.builds(
        NodeFailure,
        st.sampled_from(["r1", "r2", "r3", "r4"]),
        st.sampled_from(["n1", "n2", "n3"]),
        st.floats(NOW - 7200, NOW + 10),
        st.sampled_from([verdict.value for verdict in Verdict]),
    ),
    max_size=40,
)


@given(records, st.integers(0, 4), st.integers(0, 8), st.floats(1, 7200), st.randoms())
def test_the_rule_is_what_it_says_for_any_records(
    failures: list[NodeFailure], runs: int, limit: int, window_s: float, random: Any
) -> None:
    rule = CordonRule(runs, limit, window_s)
    found = find_suspects(failures, rule, NOW, {})
    for node in ("n1", "n2", "n3"):
        counted = [
            each
            for each in failures
            if each.node_id == node
            and NOW - window_s < each.at  # or later, by a clock that is ahead
            and each.verdict in NODES_FAULTS
        ]
        too_many = (runs and len({each.run_id for each in counted}) >= runs) or (
            limit and len(counted) >= limit
        )
        assert (node in {suspect.node_id for suspect in found}) == bool(too_many)
    assert [each.num_failures for each in found] == sorted(
        (each.num_failures for each in found), reverse=True
    )
    shuffled = random.sample(failures, len(failures))
    assert [each.node_id for each in find_suspects(shuffled, rule, NOW, {})] == [
        each.node_id for each in found
    ]


nodes = st.sampled_from([f"n{number}" for number in range(8)])


@given(st.lists(nodes, unique=True), st.sets(nodes), st.sets(nodes))
def test_half_of_the_cluster_stays_open(
    names: list[str], workers: set[str], marked: set[str]
) -> None:
    suspects = [Suspect(name, 5, 3, "why") for name in names]
    chosen, spared = choose_to_cordon(suspects, workers, marked)
    open_before, taken = workers - marked, {suspect.node_id for suspect in chosen}
    assert taken <= open_before, "only live nodes that take ranks now"
    if chosen:
        assert 2 * len(open_before - taken) >= len(workers)
    assert {suspect.node_id for suspect in spared} | taken == open_before & set(names)
    if spared:
        assert 2 * (len(open_before - taken) - 1) < len(workers), "spared only where it has to be"
        assert [suspect.node_id for suspect in (*chosen, *spared)] == [
            name for name in names if name in open_before
        ], "the worst are cordoned first"


# ---------------------------------------------------------------- the reconciler


@pytest.fixture
def ray() -> Iterator[FakeRay]:
    made = FakeRay()
    made.nodes = [
        made.node("head", {"memory": 1e9}, head=True),
        *(made.node(name, {"CPU": 1.0}) for name in ("n1", "n2", "n3")),
    ]
    with serving(made) as running:
        yield running


@pytest.fixture
async def care(here: World, ray: FakeRay) -> AsyncIterator[NodeCare]:
    async with RayJobs(lambda: RayEndpoint(ray.url, FakeRay.token)) as jobs:
        file = MarksFile(here.storage, here.marks, lambda: None)
        yield NodeCare(here.marks, file, jobs, RULE, here.clock)


async def fail(here: World, node: str, times: int, *, by_drill: bool = False, **data: Any) -> None:
    """A run whose ranks on one node die so often."""
    run = here.create()
    here.runs.claim_submission(run.id, 0)
    values = {
        "verdict": "worker_lost",
        "first_rank": 0,
        "node_id": node,
        "exception": None,
        "step": 1,
        **data,
    }
    each = [(EventKind.FAILURE, values)]
    if by_drill:
        each.insert(0, (EventKind.DRILL_STARTED, {"id": "drill_x", "kind": "kill_worker"}))
    here.write(run.id, 1, *each * times)
    await asyncio.to_thread(JournalTail(here.storage, here.events).drain, here.get(run.id))


async def test_a_node_that_fails_too_often_is_cordoned_with_its_evidence(
    here: World, care: NodeCare
) -> None:
    await fail(here, "n2", 4)
    await fail(here, "n1", 9, first_rank=None)
    await care.check()
    assert here.marks.all() == {}
    await fail(here, "n2", 1)
    await care.check()
    [(node_id, word)] = here.marks.all().items()
    assert (node_id, word.state, word.by) == ("n2", "cordoned", BY_ITSELF)
    assert (
        word.reason is not None and "5 failures" in word.reason and "worker_lost 5" in word.reason
    )
    assert set(read_node_marks(here.storage)) == {"n2"}


async def test_a_node_that_slowed_a_rank_down_is_cordoned_once_no_rank_is_slow_elsewhere(
    here: World, care: NodeCare
) -> None:
    for stays in (None, False, True):
        assert here.marks.all() == {}
        run = here.create()
        here.runs.claim_submission(run.id, 0)
        data = {"rank": 1, "node_id": "n2", "skew": 2.04, "stays": stays}
        here.write(run.id, 1, (EventKind.STRAGGLER_MOVED, data))
        await asyncio.to_thread(JournalTail(here.storage, here.events).drain, here.get(run.id))
        await care.check()
    word = here.marks.all()["n2"]
    assert word.state == "cordoned" and word.reason is not None
    assert "slow: rank 1 took 2.0 times as long as its peers here" in word.reason


async def test_a_node_is_not_cordoned_for_drills(here: World, care: NodeCare) -> None:
    await fail(here, "n2", 9, by_drill=True)
    assert here.marks.failures_since(0.0) == []
    await care.check()
    assert here.marks.all() == {}


async def test_failures_name_whose_code_failed(here: World, care: NodeCare) -> None:
    await fail(here, "n2", 1)
    [built_in] = here.marks.failures_since(0.0)
    assert (built_in.owner, built_in.archive) == (here.get(built_in.run_id).owner, None)
    archive = "sha256-" + "ab" * 32
    with here.database.write() as connection:
        row = here.get(built_in.run_id)
        code = {"archive": archive, "task": "mine:Task"}
        connection.execute(runs.update().values(spec=row.spec | {"code": code}, owner="ann"))
    [own] = here.marks.failures_since(0.0)
    assert (own.owner, own.archive) == ("ann", archive)
    for _ in range(2):
        await fail(here, "n2", 2)
    with here.database.write() as connection:
        connection.execute(runs.update().values(spec=row.spec | {"code": code}, owner="ann"))
    await care.check()
    assert here.marks.all() == {}, "three runs and five failures of one user's code"


async def test_a_node_that_was_opened_again_starts_afresh(here: World, care: NodeCare) -> None:
    await fail(here, "n2", 5)
    await care.check()
    here.now += 5
    here.marks.mark("n2", "open", "ann")
    await care.check()
    assert here.marks.all()["n2"].state == "open" and read_node_marks(here.storage) == {}
    here.now += 5
    await fail(here, "n2", 5)
    await care.check()
    assert here.marks.all()["n2"].by == BY_ITSELF


async def test_half_of_the_nodes_that_train_stay_open(
    here: World, care: NodeCare, ray: FakeRay
) -> None:
    for node in ("n1", "n2", "gone"):
        await fail(here, node, 5)
    await fail(here, "n2", 1)
    await care.check()
    assert set(here.marks.all()) == {"n2"}, (
        "the worst one; the head trains nothing and does not count"
    )
    ray.nodes.append(ray.node("n4", {"CPU": 1.0}))
    await care.check()
    assert set(here.marks.all()) == {"n1", "n2"}


async def test_the_file_is_healed_and_old_marks_are_forgotten_whatever_ray_says(
    here: World, care: NodeCare, ray: FakeRay
) -> None:
    here.marks.mark("gone", "cordoned", "ann")
    ray.broken = True
    await care.check()
    assert set(read_node_marks(here.storage)) == {"gone"}, (
        "as after a crash between the row and the file"
    )
    here.storage.files.delete_file(PATH)
    ray.broken = False
    await care.check()
    assert set(read_node_marks(here.storage)) == {"gone"}
    here.now += GONE_KEPT_S
    await care.check()
    assert here.marks.all() == {} and read_node_marks(here.storage) == {}


async def test_ticks_look_after_nodes(here: World) -> None:
    here.marks.mark("n1", "draining", "ann")
    await here.reconciler.tick()
    async with asyncio.timeout(60):
        while not read_node_marks(here.storage):  # noqa: ASYNC110  written beside the ticks
            await asyncio.sleep(0.01)
