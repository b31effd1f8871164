"""The event stream format, however its bytes are cut."""

from __future__ import annotations

import itertools
import time

from hypothesis import given
from hypothesis import strategies as st

from everstep.client.streams import Message, parse_sse


def parsed(*chunks: bytes) -> list[tuple[str | None, str, str]]:
    return [(message.id, message.event, message.data) for message in parse_sse(chunks)]


def test_fields_comments_and_blank_lines() -> None:
    stream = (
        b": hello\nid: 7\nevent: status\ndata: one\ndata:two\ndata\n\n\n\ndata: x\nretry: "
        b"5\nunknown: y\n\nid: 8\n\ndata: last"
    )
    assert parsed(stream) == [("7", "status", "one\ntwo\n"), ("7", "message", "x")]


def test_only_one_leading_space_is_dropped_and_colons_stay() -> None:
    assert parsed(b"data:  a: b\n\n") == [(None, "message", " a: b")]


def test_an_event_without_its_blank_line_is_dropped() -> None:
    assert parsed(b"data: a\n\ndata: b\n") == [(None, "message", "a")]


def test_a_byte_order_mark_and_an_id_with_nul_are_ignored() -> None:
    assert parsed("\ufeffid: a\0b\ndata: x\n\n".encode()) == [(None, "message", "x")]


lines = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)


@given(
    messages=st.lists(st.lists(lines, min_size=1, max_size=3), max_size=6),
    ending=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_cuts_change_nothing(messages: list[list[str]], ending: bytes, cuts: list[int]) -> None:
    whole = b"".join(
        b"id: %d" % number
        + ending
        + b"".join(b"data: " + line.encode() + ending for line in data)
        + ending
        for number, data in enumerate(messages)
    )
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    chunks = [whole[start:end] for start, end in itertools.pairwise(places)]
    expected = [
        Message(str(number), "message", "\n".join(data)) for number, data in enumerate(messages)
    ]
    assert list(parse_sse(chunks)) == expected


def test_a_huge_message_in_small_chunks_costs_its_size_once() -> None:
    def seconds(num_chunks: int) -> float:
        chunks = [b"data: ", *[b"x" * 1000] * num_chunks, b"\n\n"]
        started = time.process_time()
        [message] = parse_sse(chunks)
        assert len(message.data) == 1000 * num_chunks
        return time.process_time() - started

    seconds(100)
    assert seconds(20_000) < 1.0
