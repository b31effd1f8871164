"""Text that cannot be kept or sent on: refused where it is asked for, written out where it has
happened."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from everstep.spec.plain_text import (
    faults,
    is_sayable,
    json_line,
    may_need_it,
    printable,
    printable_lines,
    written_out,
)

TEXT = st.text(st.characters(codec=None) | st.sampled_from("\x00\ud800\udfff\\u"))
DOCUMENT = st.recursive(
    TEXT | st.integers() | st.none() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def texts(value: Any) -> list[str]:
    """Every text in a document, keys too."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [*value, *(text for item in value.values() for text in texts(item))]
    return [text for item in value for text in texts(item)] if isinstance(value, list) else []


@given(DOCUMENT)
def test_what_is_written_out_can_be_kept_and_sent_on(document: Any) -> None:
    found = written_out(document)
    assert all("\x00" not in text and text.encode() is not None for text in texts(found))
    assert (found == document) or not all(map(is_sayable, texts(document)))
    assert bool(faults(document)) == (not all(map(is_sayable, texts(document))))
    if not may_need_it(json.dumps(document).encode()):
        assert found == document


def test_it_reads_as_what_it_was() -> None:
    assert written_out({"a\udce9": ["b\x00c", 1, "é😀"]}) == {"a\\udce9": ["b\\x00c", 1, "é😀"]}


def test_each_fault_is_named_by_its_place() -> None:
    found = faults(
        {"env": {"A": "x\x00", "B\ud800": "y"}, "tags": ["fine", "\udce9"], "name": "fine"}
    )
    assert [fault.loc for fault in found] == [("env", "B\\ud800"), ("env", "A"), ("tags", 1)]
    assert "\\x00" in found[1].msg and all("remove it" in fault.msg for fault in found)


STEERING = [
    *map(chr, (*range(32), *range(127, 160))),
    *"\u061c\u200e\u200f\u2028\u2029\u202a\u202e\u2066\u2069\ufeff\ud800\U000e0041",
]


@given(DOCUMENT)
def test_a_line_of_json_steers_no_terminal_and_loses_nothing(document: Any) -> None:
    line = json_line(document)
    assert not set(line) & set(STEERING)
    assert json.loads(line) == json.loads(json.dumps(document))


def test_every_steering_character_is_escaped_in_json_and_replaced_in_words() -> None:
    for character in STEERING:
        assert json_line({character: character}) == json.dumps({character: character})
        assert printable(f"a{character}b") == ("a    b" if character == "\t" else "a\ufffdb")
    assert (
        json_line("é 漢 👩‍💻 שלום") == '"é 漢 👩‍💻 שלום"'
        and printable("é 漢 👩‍💻 שלום") == "é 漢 👩‍💻 שלום"
    )
    assert printable_lines("a\nb\x9b") == "a\nb\ufffd"
    assert printable("\x1b[1;31mred\x1b[0m \x1b]0;title\x07end") == "red end"
