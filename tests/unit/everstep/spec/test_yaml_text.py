"""Fields of a spec in YAML text: found by line, set and removed with comments and layout kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import UsageError
from everstep.spec.yaml_file import parse_yaml
from everstep.spec.yaml_text import has_aliases, lines_of, to_yaml, value_at, with_value

TEXT = """\
# a digits run
name: digits # the name
task:
  name: image_classification
  model: {name: mini_resnet, args: {width: 16}}

  data: {name: digits}
  # behind data
train:
  epochs: 20
scaling:
"""
EXAMPLE = Path(__file__).parents[4] / "examples" / "digits.yaml"


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("name",), 2),
        (("task", "model", "args", "width"), 5),
        (("task", "model", "unknown"), 5),
        (("train", "epochs"), 10),
        (("train", "seed"), 9),
        ((), 1),
        (("optimizer", "lr"), 1),
    ],
)
def test_a_field_has_a_line(path: tuple[str, ...], line: int) -> None:
    assert lines_of(TEXT, [path, ()]) == [line, 1]
    assert lines_of("a: [", [path]) == [1]


@pytest.mark.parametrize(
    ("path", "value", "was", "now"),
    [
        (("name",), "a b", "name: digits #", "name: a b #"),
        (("name",), "0o17", "name: digits #", "name: '0o17' #"),
        (("task", "model", "args", "width"), 32, "width: 16", "width: 32"),
        (("task", "model", "args", "depth"), 2, "{width", "{depth: 2, width"),
        (("train", "epochs"), 5, "epochs: 20", "epochs: 5"),
        (("train", "seed"), 7, "  epochs: 20\n", "  seed: 7\n  epochs: 20\n"),
        (("train", "seed"), None, "", ""),
        (("optimizer", "lr"), 1e-5, "scaling:\n", "scaling:\noptimizer:\n  lr: 1.0e-05\n"),
    ],
)
def test_a_field_is_set_where_it_is(
    path: tuple[str, ...], value: object, was: str, now: str
) -> None:
    assert with_value(TEXT, path, value) == TEXT.replace(was, now, 1)


def test_a_field_is_removed_and_an_empty_section_filled() -> None:
    two = TEXT.replace("epochs: 20\n", "epochs: 20\n  seed: 1\n")
    assert with_value(two, ("train", "seed"), None) == TEXT
    filled = parse_yaml(with_value(TEXT, ("scaling", "max_workers"), 2), "x")
    assert filled["scaling"] == {"max_workers": 2} and filled["name"] == "digits"
    assert with_value("", ("name",), "a") == "name: a\n"
    for wrong in ("- a list", "a: [", "text"):
        with pytest.raises(UsageError):
            with_value(wrong, ("name",), "a")


def test_aliases_are_found_and_not_taken_for_text() -> None:
    assert has_aliases("a: &x [1]\nb: *x") and has_aliases("{<<: *x}")
    assert not has_aliases("a: 'x & *y'\nb: 2*3 & 4 # &x")


@pytest.mark.parametrize("deep", ["[" * 2000, "a: " + "{a: " * 70, "x: [1]\n# " + "[" * 65])
def test_brackets_deeper_than_a_spec_are_refused_before_they_are_parsed(
    deep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyYAML's time grows with the square of their number: 4 s for 2000."""
    monkeypatch.setattr("yaml.scanner.Scanner.fetch_more_tokens", lambda _: pytest.fail("parsed"))
    with pytest.raises(UsageError, match="nested too deeply: more than 64 brackets"):
        parse_yaml(deep, "the spec")
    assert not has_aliases(deep + " &x *x") and lines_of(deep, [("a",)]) == [1]


def test_as_many_brackets_as_a_spec_may_have_are_read() -> None:
    text = "[" * 64 + "]" * 64
    assert parse_yaml(f"a: {text}\nb: {text}", "x").keys() == {"a", "b"}


PATHS = [("name",), ("task", "model", "args", "width"), ("train", "seed"), ("a", "b", "c")]
VALUES = st.one_of(
    st.text(max_size=12).filter(str.isprintable),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
)


@given(st.lists(st.tuples(st.sampled_from(PATHS), VALUES | st.none()), max_size=5))
def test_whatever_is_set_is_read_back_and_nothing_else_changes(
    changes: list[tuple[tuple[str, ...], object]],
) -> None:
    text = EXAMPLE.read_text()
    for path, value in changes:
        before = parse_yaml(text, "x")
        text = with_value(text, path, value)
        after = parse_yaml(text, "x")
        assert value_at(after, path) == value and type(value_at(after, path)) is type(value)
        assert {key: each for key, each in after.items() if key != path[0]} == {
            key: each for key, each in before.items() if key != path[0]
        }


@given(
    st.recursive(
        VALUES | st.none(),
        lambda each: (
            st.lists(each)
            | st.dictionaries(st.text(min_size=1, max_size=5).filter(str.isprintable), each)
        ),
        max_leaves=8,
    )
)
def test_written_values_are_read_back(value: object) -> None:
    assert parse_yaml(to_yaml({"x": value}), "x") == {"x": value}
