"""Following events and logs over connections that break in every way: nothing lost, nothing twice,
and an end."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from everstep import AuthError, Patience, ServiceError, Unavailable
from everstep.client.runs import RunHandle
from tests.support.scripted_http import (
    RUN_ID,
    FakeTime,
    Handler,
    ScriptedServer,
    client_of,
    ended,
    event,
    frame,
    problem,
    reply,
    run_answer,
    scripted,
    silent_after,
    streamed,
)

RUN = f"/v1/runs/{RUN_ID}"
EVENTS = f"{RUN}/events"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted() as running:
        running.script[RUN] = [reply(run_answer())]
        yield running


def run_of(server: ScriptedServer, clock: FakeTime | None = None, **options: object) -> RunHandle:
    return client_of(server, clock, **options).runs.get(RUN_ID)


def seqs(run: RunHandle, after: int = 0) -> list[int]:
    return [item.seq for item in run.events(after, follow=True)]


def test_it_ends_behind_the_event_that_ends_the_run(server: ScriptedServer) -> None:
    server.script[EVENTS] = [streamed(frame(event(1)), frame(ended(2)), b": and never more\n\n")]
    assert seqs(run_of(server)) == [1, 2]
    assert len(server.to(EVENTS)) == 1


def test_a_connection_that_breaks_inside_an_event_is_taken_up_behind_the_last_whole_one(
    server: ScriptedServer,
) -> None:
    torn = frame(event(3))
    server.script[EVENTS] = [
        streamed(frame(event(1)), frame(event(2)), torn[: len(torn) // 2], complete=False),
        streamed(frame(event(3)), frame(ended(4))),
    ]
    assert seqs(run_of(server)) == [1, 2, 3, 4]
    first, second = server.to(EVENTS)
    assert "Last-Event-ID" not in first.headers and "after=0" in first.path
    assert second.headers["Last-Event-ID"] == "2" and "after=2" in second.path


def test_an_event_that_a_clean_end_cuts_off_is_asked_for_again(server: ScriptedServer) -> None:
    server.script[EVENTS] = [
        streamed(frame(event(1)), frame(event(2))[:-1]),
        streamed(frame(event(2)), frame(ended(3))),
    ]
    assert seqs(run_of(server)) == [1, 2, 3]


def test_what_comes_twice_is_given_once(server: ScriptedServer) -> None:
    server.script[EVENTS] = [
        streamed(frame(event(1)), frame(event(2)), complete=False),
        streamed(frame(event(1)), frame(event(2)), frame(event(2)), frame(ended(3))),
    ]
    assert seqs(run_of(server)) == [1, 2, 3]


def test_a_hole_is_asked_for_again_and_never_passed_over(server: ScriptedServer) -> None:
    server.script[EVENTS] = [
        streamed(frame(event(1)), frame(event(3))),
        streamed(frame(event(2)), frame(ended(3))),
    ]
    assert seqs(run_of(server)) == [1, 2, 3]


def test_a_hole_that_stays_is_an_error(server: ScriptedServer) -> None:
    server.script[EVENTS] = [streamed(frame(event(1)), frame(event(3)))]
    with pytest.raises(ServiceError, match="item 2 is missing before item 3"):
        seqs(run_of(server))


def test_refused_and_busy_services_are_waited_for_with_growing_pauses(
    server: ScriptedServer,
) -> None:
    server.script[EVENTS] = [
        problem(503, "database_unavailable", "away"),
        problem(429, "rate_limited", "busy"),
        problem(502, "bad_gateway", "restarting"),
        streamed(frame(ended(1))),
    ]
    clock = FakeTime()
    assert seqs(run_of(server, clock)) == [1]
    assert clock.slept == [0.2, 0.4, 0.8]


def test_progress_makes_pauses_short_again(server: ScriptedServer) -> None:
    away = problem(503, "unavailable", "away")
    server.script[EVENTS] = [
        away,
        away,
        streamed(frame(event(1)), complete=False),
        streamed(frame(ended(2))),
    ]
    clock = FakeTime()
    assert seqs(run_of(server, clock)) == [1, 2]
    assert clock.slept == [0.2, 0.4, 0.2]


def test_a_service_that_stays_away_is_given_up(server: ScriptedServer) -> None:
    server.script[EVENTS] = [problem(503, "database_unavailable", "the database is away")]
    clock = FakeTime()
    with pytest.raises(Unavailable, match="the database is away"):
        seqs(run_of(server, clock, patience=Patience(away_s=30)))
    assert 30 < clock.now_s < 40


def test_what_waiting_cannot_cure_is_raised_at_once(server: ScriptedServer) -> None:
    server.script[EVENTS] = [problem(401, "unauthorized", "no valid token")]
    with pytest.raises(AuthError, match="no valid token"):
        seqs(run_of(server))
    assert len(server.to(EVENTS)) == 1


def test_a_silent_connection_is_left_for_a_new_one(server: ScriptedServer) -> None:
    server.script[EVENTS] = [silent_after(), streamed(frame(ended(1)))]
    started = time.monotonic()
    assert seqs(run_of(server, patience=Patience(silence_s=0.2))) == [1]
    # the server would be silent for 30 s
    assert len(server.to(EVENTS)) == 2 and time.monotonic() - started < 20


def test_heartbeats_keep_a_connection(server: ScriptedServer) -> None:
    def slow(handler: Handler) -> None:
        handler.begin_stream()
        for _ in range(8):
            handler.chunk(b": heartbeat\n\n")
            handler.server.released.wait(0.25)
        handler.chunk(frame(ended(1)))
        handler.end()

    server.script[EVENTS] = [slow]
    assert seqs(run_of(server, patience=Patience(silence_s=1.5))) == [1]
    assert len(server.to(EVENTS)) == 1


def test_following_a_run_that_ended_before_gives_the_rest_and_ends(server: ScriptedServer) -> None:
    server.script[RUN] = [reply(run_answer("CANCELLED"))]
    server.script[EVENTS] = [streamed(), reply({"items": [], "next_cursor": None})]
    assert seqs(run_of(server), after=7) == []
    server.script[EVENTS] = [streamed(), reply({"items": [ended(8)], "next_cursor": None})]
    assert seqs(run_of(server), after=7) == [8]


def test_an_event_of_many_megabytes_and_every_separator_passes(server: ScriptedServer) -> None:
    text = "x" * 9_000_000 + "\u2028\u2029\x85 ü \N{GRINNING FACE} \\n"
    whole = frame(event(1, "failure", exception=text))
    parts = [whole[start : start + 65_537] for start in range(0, len(whole), 65_537)]
    server.script[EVENTS] = [streamed(*parts, frame(ended(2)))]
    first, _ = run_of(server).events(follow=True)
    assert first.data["exception"] == text


def test_an_answer_that_is_no_stream_is_named(server: ScriptedServer) -> None:
    server.script[EVENTS] = [reply({"items": [], "next_cursor": None})]
    with pytest.raises(ServiceError, match="not an event stream"):
        seqs(run_of(server))


def test_a_reader_that_stops_early_closes_the_connection(server: ScriptedServer) -> None:
    server.script[EVENTS] = [
        streamed(*[frame(event(seq)) for seq in range(1, 500)], complete=False)
    ]
    events = run_of(server).events(follow=True)
    assert next(events).seq == 1
    events.close()  # type: ignore[attr-defined]
    with pytest.raises(StopIteration):
        next(events)


def test_pages_of_events_are_all_read(server: ScriptedServer) -> None:
    server.script[EVENTS] = [
        reply({"items": [event(1), event(2)], "next_cursor": "2"}),
        reply({"items": [event(3)], "next_cursor": None}),
    ]
    assert [item.seq for item in run_of(server).events()] == [1, 2, 3]
    assert "cursor=2" in server.to(EVENTS)[1].path


def line(seq: int) -> dict[str, object]:
    at = "2026-01-02T03:04:05Z"
    return {
        "seq": seq,
        "at": at,
        "submission": 1,
        "attempt": 1,
        "rank": 0,
        "level": "INFO",
        "message": f"line {seq}",
    }


def test_logs_are_followed_over_a_break_until_the_run_has_ended(server: ScriptedServer) -> None:
    path = f"{RUN}/logs"
    server.script[path] = [
        # seqs of a filtered log have holes
        streamed(frame(line(1)), frame(line(4)), complete=False),
        streamed(frame(line(6))),
        reply({"items": [line(9)], "next_cursor": None}),
    ]
    server.script[RUN] = [reply(run_answer()), reply(run_answer("SUCCEEDED"))]
    assert [found.seq for found in run_of(server).logs(follow=True, rank=0)] == [1, 4, 6, 9]
    first, second, rest = server.to(path)
    assert "follow=true" in first.path and "rank=0" in first.path
    assert second.headers["Last-Event-ID"] == "4"
    assert "follow" not in rest.path and "after=6" in rest.path
