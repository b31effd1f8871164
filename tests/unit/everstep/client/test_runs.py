"""The client and the service's real API together: a run's whole life as a user of the SDK sees
it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep import (
    AuthError,
    Client,
    Conflict,
    NotFound,
    RunFailed,
    RunHandle,
    RunSpec,
    RunStatus,
    Unavailable,
    WaitTimeout,
)
from everstep.client import transport
from everstep.client.download import ArchiveStream
from everstep.wire.events import EventKind
from service.api.auth import ensure_local_token
from storage.checkpoints.manifest import Manifest
from storage.checkpoints.store import CheckpointStore
from storage.run_dir import RunDir
from tests.support.api_service import ApiService, Journal, spec
from tests.support.page_text import fail
from tests.unit.service.api.test_api_checkpoints import save


@pytest.fixture
def client(api: ApiService) -> Client:
    return Client(api.url, api.token("admin"))


async def running(api: ApiService, client: Client, **fields: object) -> tuple[RunHandle, Journal]:
    run_id, journal = await api.running(**fields)
    return await asyncio.to_thread(client.runs.get, run_id), journal


async def test_a_run_is_made_found_and_listed(client: Client) -> None:
    def story() -> None:
        first = client.runs.create(spec(name="one", tags={"team": "vision"}))
        second = client.runs.create(RunSpec.model_validate(spec(name="two", train={"epochs": 3})))
        assert first.status is RunStatus.QUEUED and first.id != second.id
        assert second.spec().train.epochs == 3
        assert client.runs.get(first.id).name == "one" == first.refresh().name
        assert {run.name for run in client.runs.list()} == {"one", "two"}
        assert [
            run.id for run in client.runs.list(tag={"team": "vision"}, status=["QUEUED", "RUNNING"])
        ] == [first.id]
        assert list(client.runs.list(name="three")) == []
        assert client.runs.create(spec(), "key").id == client.runs.create(spec(), "key").id
        with pytest.raises(Conflict) as caught:
            client.runs.create(spec(name="other"), "key")
        assert caught.value.code == "idempotency_conflict"

    await asyncio.to_thread(story)


async def test_waiting_ends_with_the_run(api: ApiService, client: Client) -> None:
    run, journal = await running(api, client)
    waiting = asyncio.create_task(asyncio.to_thread(run.wait, 20))
    api.apply(
        run.id,
        [
            journal.steps(2, loss=0.25),
            journal.event(EventKind.FINISHED, outcome="succeeded", reason=None, step=2),
        ],
    )
    assert await waiting is run
    assert run.status is RunStatus.SUCCEEDED and run.step == 2 and run.run.metrics == {"loss": 0.25}


async def test_waiting_for_a_run_that_fails_raises_why(api: ApiService, client: Client) -> None:
    run, journal = await running(api, client)
    reason = {"code": "user_error", "message": "it raised twice"}
    api.apply(
        run.id,
        [
            fail(journal, verdict="user_error", exception="ValueError: no", action="stopped"),
            journal.event(EventKind.FINISHED, outcome="failed", reason=reason, step=1),
        ],
    )
    with pytest.raises(RunFailed, match="FAILED: user_error: it raised twice") as caught:
        await asyncio.to_thread(run.wait, 20)
    assert caught.value.run.status == "FAILED"
    assert (
        caught.value.failure is not None
        and caught.value.failure.verdict == "user_error"
        and caught.value.failure.first_rank == 1
    )


async def test_waiting_has_an_end(api: ApiService, client: Client) -> None:
    run, _ = await running(api, client)
    with pytest.raises(WaitTimeout, match=r"still RUNNING at step 1 after 0\.3 s"):
        await asyncio.to_thread(run.wait, 0.3)


async def test_actions_and_what_is_illegal_now(api: ApiService, client: Client) -> None:
    run, journal = await running(api, client)

    def stop() -> None:
        with pytest.raises(Conflict) as caught:
            run.resume()
        assert caught.value.code == "invalid_transition"
        with pytest.raises(Conflict):
            run.delete()
        assert run.cancel().status is RunStatus.STOPPING

    await asyncio.to_thread(stop)
    api.apply(run.id, [journal.event(EventKind.FINISHED, outcome="stopped", reason=None, step=1)])

    def remove() -> None:
        assert run.refresh().status is RunStatus.CANCELLED
        run.delete()
        with pytest.raises(NotFound, match=run.id):
            run.refresh()

    await asyncio.to_thread(remove)


async def checkpointed(api: ApiService, client: Client) -> tuple[RunHandle, list[Manifest]]:
    run, journal = await running(api, client, checkpoint={"best_metric": "accuracy"})
    return run, [
        save(api, run.id, journal, step, accuracy=accuracy)
        for step, accuracy in ((10, 0.9), (20, 0.8))
    ]


async def test_checkpoints_are_fetched_by_step_latest_and_best(
    api: ApiService, client: Client, tmp_path: Path
) -> None:
    run, manifests = await checkpointed(api, client)
    sizes: list[int] = []

    def story() -> None:
        assert [(each.step, each.digest) for each in run.checkpoints()] == [
            (each.step, each.digest) for each in manifests
        ]
        for which, manifest in (
            ("best", manifests[0]),
            ("latest", manifests[1]),
            (10, manifests[0]),
        ):
            out = run.download_checkpoint(
                which, str(tmp_path / "out" / str(which)), on_bytes=sizes.append
            )  # type: ignore[arg-type]
            assert (out / "model.pt").read_bytes() == b"weights" * 100_000
            assert (out / "manifest.json").read_bytes() == manifest.to_bytes()
            assert {path.name for path in out.iterdir()} == {
                "model.pt",
                "train_state.pt",
                "manifest.json",
            }
        assert run.verify_checkpoint("best").verified_at is not None
        with pytest.raises(NotFound, match="11"):
            run.download_checkpoint(11, tmp_path / "none")
        with pytest.raises(ValueError, match="newest"):
            run.checkpoint("newest")  # type: ignore[arg-type]
        assert not (tmp_path / "none").exists()

    await asyncio.to_thread(story)
    assert sum(sizes) > 3 * 700_000


async def test_a_download_goes_on_where_its_connection_broke(
    api: ApiService, client: Client, tmp_path: Path
) -> None:
    """Every connection to the archive brings 200,000 bytes and breaks."""
    run, manifests = await checkpointed(api, client)
    asked: list[str | None] = []
    stream = transport.Transport.stream

    @contextlib.contextmanager
    def broken(self: transport.Transport, path: str, **options: Any) -> Iterator[Any]:
        with stream(self, path, **options) as response:
            asked.append(options["headers"].get("Range"))
            iter_raw, left = response.iter_raw, 200_000

            def breaking() -> Iterator[bytes]:
                nonlocal left
                for chunk in iter_raw(50_000):
                    if not left:
                        raise Unavailable("the connection broke")
                    yield chunk[:left]
                    left -= len(chunk[:left])

            response.iter_raw = breaking  # type: ignore[assignment]
            yield response

    sizes: list[int] = []

    def story() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transport.Transport, "stream", broken)
            out = run.download_checkpoint("latest", tmp_path / "out", on_bytes=sizes.append)
        assert (out / "model.pt").read_bytes() == b"weights" * 100_000
        assert (out / "manifest.json").read_bytes() == manifests[1].to_bytes()

    client._transport.timing = dataclasses.replace(
        client._transport.timing, sleep=lambda seconds: None
    )
    await asyncio.to_thread(story)
    assert asked == [None, "bytes=200000-", "bytes=400000-", "bytes=600000-"]
    store = CheckpointStore(RunDir(api.storage, run.id))
    assert sum(sizes) == store.archive(manifests[1].name).size_bytes


async def test_a_checkpoint_of_the_same_step_that_took_another_s_place_is_fetched_anew(
    api: ApiService, client: Client, tmp_path: Path
) -> None:
    run, manifests = await checkpointed(api, client)
    connections = ArchiveStream._connection
    broken: list[int] = []

    def replaced_meanwhile(self: ArchiveStream) -> Iterator[bytes]:
        if broken:
            yield from connections(self)
            return
        yield next(connections(self))
        broken.append(self.num_bytes)
        self._etag = '"of the one before"'
        raise Unavailable("the connection broke")

    def story() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ArchiveStream, "_connection", replaced_meanwhile)
            out = run.download_checkpoint("latest", tmp_path / "out")
        assert (out / "manifest.json").read_bytes() == manifests[1].to_bytes()

    client._transport.timing = dataclasses.replace(
        client._transport.timing, sleep=lambda seconds: None
    )
    await asyncio.to_thread(story)
    assert broken


async def test_the_local_token_is_found_and_a_wrong_one_refused(
    api: ApiService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("EVERSTEP_HOME", str(home))
    monkeypatch.delenv("EVERSTEP_TOKEN", raising=False)
    ensure_local_token(api.tokens, home / "token")
    (home / "url").write_text(api.url)

    def story() -> None:
        assert list(Client().runs.list()) == []
        with pytest.raises(AuthError, match="EVERSTEP_TOKEN"):
            monkeypatch.setenv("EVERSTEP_TOKEN", "wrong")
            list(Client().runs.list())
        monkeypatch.delenv("EVERSTEP_TOKEN")
        (home / "token").unlink()
        with pytest.raises(AuthError, match="no token"):
            list(Client().runs.list())
        assert Client().health()

    await asyncio.to_thread(story)
