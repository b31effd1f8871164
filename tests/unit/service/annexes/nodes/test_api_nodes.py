"""Cordon, uncordon and drain over REST, SDK and command line, and what they leave for drivers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from everstep import Client, NotFound, Unavailable, UsageError
from everstep.cli.main import app
from everstep.wire import Node
from everstep.wire.events import EventKind
from service.annexes.nodes.store import MarksFile, NodeMarkStore
from service.cluster.cluster_view import HEARD_S
from storage.cluster import MarkedNode, read_node_marks
from tests.support.api_service import NOON, ApiService


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiService]:
    async with ApiService(tmp_path) as service:
        service.cluster.nodes = tuple(
            service.cluster.node(node_id) for node_id in ("node-1", "node-2", "other")
        )
        service.announce(monkeypatch)
        yield service


async def order(api: ApiService, node_id: str, word: str, body: Any = None) -> httpx.Response:
    return await api.http.post(f"/v1/cluster/nodes/{node_id}/{word}", json=body)


async def node(api: ApiService, node_id: str) -> Node:
    [found] = [each for each in (await api.get("/v1/cluster"))["nodes"] if each["id"] == node_id]
    return Node.model_validate(found)


# ---------------------------------------------------------------- REST


async def test_a_cordon_is_shown_told_to_drivers_and_taken_back(api: ApiService) -> None:
    run_id, _ = await api.running()
    answer = await order(api, "node-2", "cordon", {"reason": "bad disk"})
    assert answer.status_code == 200
    cordoned = Node.model_validate(answer.json())
    assert (cordoned.id, cordoned.state, cordoned.runs) == ("node-2", "CORDONED", (run_id,))
    assert (
        cordoned.mark is not None
        and cordoned.mark.at.timestamp() == NOON
        and cordoned.mark.deadline is None
    )
    assert (cordoned.mark.reason, cordoned.mark.by) == ("bad disk", "admin of None")
    assert await node(api, "node-2") == cordoned
    assert (await node(api, "node-1")).mark is None
    assert read_node_marks(api.storage) == {
        "node-2": MarkedNode("node-2", "cordoned", "bad disk", "admin of None", NOON)
    }
    opened = Node.model_validate((await order(api, "node-2", "uncordon")).json())
    assert (opened.state, opened.mark) == ("ALIVE", None)
    assert read_node_marks(api.storage) == {}


async def test_a_drain_is_done_once_the_ranks_of_every_run_have_left(api: ApiService) -> None:
    run_id, journal = await api.running()
    drained = Node.model_validate(
        (await order(api, "node-1", "drain", {"deadline_s": 30, "reason": "upgrade"})).json()
    )
    assert (drained.state, drained.runs) == ("DRAINING", (run_id,))
    assert drained.mark is not None and drained.mark.deadline is not None
    assert drained.mark.deadline.timestamp() == NOON + 30
    assert read_node_marks(api.storage)["node-1"].deadline == NOON + 30
    api.clock.now += 100
    assert (await node(api, "node-1")).state == "DRAINING"
    api.apply(run_id, [journal.event(EventKind.ATTEMPT_ENDED, cause="preemption", last_step=1)])
    assert (await node(api, "node-1")).state == "DRAINED"
    api.cluster.nodes = (api.cluster.node("node-1", "DEAD"),)
    assert (await node(api, "node-1")).state == "DEAD"


async def test_an_empty_node_is_drained_once_drivers_have_heard_of_it(api: ApiService) -> None:
    assert (await order(api, "other", "drain")).json()["state"] == "DRAINING"
    api.clock.now += HEARD_S
    assert (await node(api, "other")).state == "DRAINED"
    assert (await order(api, "other", "cordon")).json()["state"] == "CORDONED", (
        "the last word counts"
    )


async def test_a_run_of_another_project_keeps_a_node_draining_and_is_not_named(
    api: ApiService,
) -> None:
    await api.running(project="theirs")
    await order(api, "node-1", "drain")
    api.clock.now += 100
    viewer = await api.client(api.token("viewer", "mine"))
    shown = (await viewer.get("/v1/cluster")).json()["nodes"][0]
    assert (shown["state"], shown["runs"]) == ("DRAINING", [])
    named = (
        "3 failures within 60 min began on this node (worker_lost 3), in run_0123456789ab, "
        "run_0123456789cd and 1 more"
    )
    NodeMarkStore(api.database, api.clock).mark("node-1", "cordoned", "everstep", reason=named)
    reason = (await viewer.get("/v1/cluster")).json()["nodes"][0]["mark"]["reason"]
    assert (
        reason
        == "3 failures within 60 min began on this node (worker_lost 3), in a run, a run and 1 more"
    )
    assert (await api.get("/v1/cluster"))["nodes"][0]["mark"]["reason"] == named, (
        "an administrator sees the evidence"
    )


async def test_ray_s_own_drain_stands_above_a_cordon(api: ApiService) -> None:
    await order(api, "node-1", "cordon")
    api.cluster.nodes = (api.cluster.node("node-1", "DRAINING"),)
    shown = await node(api, "node-1")
    assert shown.state == "DRAINING" and shown.mark is not None


@pytest.mark.parametrize("word", ["cordon", "uncordon", "drain"])
async def test_unknown_nodes_and_lesser_roles_are_refused(api: ApiService, word: str) -> None:
    unknown = await order(api, "node-9", word)
    assert (unknown.status_code, unknown.json()["code"]) == (404, "not_found")
    assert "node-9" in unknown.json()["detail"]
    submitter = await api.client(api.token("submitter", "default"))
    refused = await submitter.post(f"/v1/cluster/nodes/node-1/{word}")
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    api.cluster.available = False
    away = await order(api, "node-1", word)
    assert (away.status_code, away.json()["code"], away.headers["Retry-After"]) == (
        503,
        "unavailable",
        "2",
    )
    assert api.node_marks.all() == {}


async def test_a_dead_node_takes_no_new_mark(api: ApiService) -> None:
    await order(api, "node-1", "cordon")
    api.cluster.nodes = (api.cluster.node("node-1", "DEAD"),)
    assert (await order(api, "node-1", "drain")).status_code == 409
    assert (await order(api, "node-1", "uncordon")).status_code == 200


@pytest.mark.parametrize(
    ("word", "body", "field"),
    [
        ("drain", {"deadline_s": 0}, "deadline_s"),
        ("drain", {"deadline_s": "soon"}, "deadline_s"),
        ("drain", {"deadline": 3}, "deadline"),
        ("cordon", {"deadline_s": 3}, "deadline_s"),
        ("cordon", {"reason": "x" * 1001}, "reason"),
        ("uncordon", {"reason": 3}, "reason"),
    ],
)
async def test_a_wrong_body_is_named(
    api: ApiService, word: str, body: dict[str, Any], field: str
) -> None:
    answer = await order(api, "node-1", word, body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert [error["loc"] for error in answer.json()["errors"]] == [[field]]


async def test_a_word_is_acknowledged_without_storage_and_told_later(
    api: ApiService, tmp_path: Path
) -> None:
    blocked = tmp_path / "storage"
    kept = blocked.rename(tmp_path / "kept")
    blocked.write_text("a file where a directory should be")
    assert (await order(api, "node-1", "cordon")).status_code == 200
    assert (await node(api, "node-1")).state == "CORDONED"
    blocked.unlink()
    kept.rename(blocked)
    api.storage_gate.forget()  # what it was told a moment ago
    marks = NodeMarkStore(api.database, api.clock)
    assert MarksFile(api.storage, marks, api.storage_gate.require).publish()
    assert set(read_node_marks(api.storage)) == {"node-1"}


# ---------------------------------------------------------------- SDK


async def test_a_node_is_found_by_as_much_as_is_unique(api: ApiService) -> None:
    api.cluster.nodes = (*api.cluster.nodes, api.cluster.node("node-22"))

    def story() -> None:
        with Client(api.url, api.token("viewer", "default"), max_tries=1) as client:
            assert client.nodes.find("o").id == "other"
            assert client.nodes.find("node-2").id == "node-2", (
                "a whole id is one node, though it begins another"
            )
            with pytest.raises(UsageError, match="3 nodes"):
                client.nodes.find("node")
            for unknown in ("x", ""):
                with pytest.raises(NotFound, match="node-22"):
                    client.nodes.find(unknown)
            api.cluster.available = False
            with pytest.raises(Unavailable):
                client.nodes.find("o")

    await asyncio.to_thread(story)


# ---------------------------------------------------------------- command line


async def everstep(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, list(arguments), catch_exceptions=False)


def last_line(result: Result) -> str:
    """The service logs to the same standard output here."""
    return result.stdout.splitlines()[-1]


async def test_the_command_line_cordons_and_shows_it(api: ApiService) -> None:
    result = await everstep("cordon", "ot", "--reason", "noisy \x1b[31m fan")
    assert result.exit_code == 0 and last_line(result) == "other host is CORDONED"
    shown = (await everstep("cluster")).stdout
    [line] = [line for line in shown.splitlines() if line.startswith("other")]
    assert (
        "CORDONED" in line and "by admin of None" in line and "noisy" in line and "\x1b" not in line
    )
    assert json.loads(last_line(await everstep("uncordon", "other", "--json")))["state"] == "ALIVE"


async def test_the_command_line_drains_and_waits(api: ApiService) -> None:
    run_id, journal = await api.running()
    late = await everstep("drain", "node-1", "--deadline", "0.1", "--wait")
    assert late.exit_code == 1 and run_id in late.stderr and "not drained" in late.stderr
    waiting = asyncio.create_task(everstep("drain", "node-1", "--wait", "--deadline", "20"))
    answered = 'route="/v1/cluster/nodes/{node_id}/drain",status="200"} 2.0'
    async with asyncio.timeout(60):
        while answered not in (await api.http.get("/metrics")).text:  # noqa: ASYNC110  asked for by another thread
            await asyncio.sleep(0.01)
    api.apply(run_id, [journal.event(EventKind.ATTEMPT_ENDED, cause="preemption", last_step=1)])
    api.clock.now += HEARD_S
    done = await asyncio.wait_for(waiting, 60)
    assert done.exit_code == 0 and "node-1 host is DRAINED" in done.stdout and run_id in done.stderr
