"""A spec's file: YAML as people write it, and every fault with its line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from everstep import UsageError
from everstep.code import with_code
from everstep.spec.overrides import apply_overrides
from everstep.spec.parsing import parse_spec
from everstep.spec.yaml_file import parse_yaml, read_spec
from tests.support.raw_specs import faults, spec

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name
)
def test_every_example_is_a_spec(path: Path) -> None:
    assert parse_spec(read_spec(str(path))).name


def test_yaml_says_numbers_as_people_write_them() -> None:
    assert parse_yaml("[1e-3, 1E5, -2e+3, 1.5, .5, 7, 1.e2, 1e]", "x") == [
        0.001,
        100000.0,
        -2000.0,
        1.5,
        0.5,
        7,
        100.0,
        "1e",
    ]


def test_yaml_says_words_and_dates_as_json_would() -> None:
    """What YAML 1.1 takes for booleans, octal numbers, minutes and dates is text, or the number
    that it looks like."""
    read = parse_yaml(
        "on: [FAILED]\nyes: [no, off, y, n, Yes, ON]\nt: [true, True, FALSE, null, ~, ]\n", "x"
    )
    assert read == {
        "on": ["FAILED"],
        "yes": ["no", "off", "y", "n", "Yes", "ON"],
        "t": [True, True, False, None, None],
    }
    numbers = parse_yaml("[010, 0x1f, 0o17, 1_000, 12:30, 2024-01-01, +3, -4, .inf, 1_0.5]", "x")
    assert numbers == [10, 31, 15, 1000, "12:30", "2024-01-01", 3, -4, math.inf, 10.5]
    assert parse_yaml("a: &a {b: 1}\nc: {<<: *a, d: 2}", "x") == {
        "a": {"b": 1},
        "c": {"b": 1, "d": 2},
    }


def test_a_webhook_s_statuses_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(
        json.dumps(spec())[:-1] + ", notify: {url: 'https://example.org', on: [FAILED]}}"
    )
    assert parse_spec(read_spec(str(path))).notify.on == ["FAILED"]  # type: ignore[union-attr]


def test_what_is_to_be_quoted_is_said_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(
        "name: 2024\ntags: {v: 1.10, w: 0x1f, 7: a, on: yes, none: }\nenv: {DEBUG: 1, TRACE: "
        "True}\n"
    )
    found = faults(
        apply_overrides(with_code(read_spec(str(path)), None, None, None)[0], ["train.epochs=2"])
    )
    assert found["tags.v"] == 'must be text, but the value 1.10 is a number; quote it: "1.10"'
    assert found["tags.w"].endswith('quote it: "0x1f"')
    assert found["tags.7"] == 'must be text, but the key 7 is a number; quote it: "7"'
    assert found["tags.none"] == 'must be text, but is empty; write "" for empty text, or remove it'
    assert found["env.DEBUG"].endswith('the value 1 is a number; quote it: "1"')
    assert found["env.TRACE"].endswith('the value True is a boolean; quote it: "True"')
    assert found["name"].endswith('quote it: "2024"') and "tags.on" not in found
    as_json = faults({"name": "a", "tags": {"v": 1.1, "w": True}})
    assert as_json["tags.v"].endswith('quote it: "1.1"') and as_json["tags.w"].endswith(
        'quote it: "true"'
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: a\ntrain: {epochs: 3\noptimizer: x\n", "line 3"),
        ("name: a\n\tname: b\n", "line 2, column 1.*spaces, not tabs"),
        ("train:\n  epochs: 1\n  epochs: 2\n", "line 3, column 3: the key 'epochs' occurs twice"),
        ("name: 'open\n", "line 2"),
        ("a: !!python/object/apply:os.system [ls]\n", "line 1.*python/object"),
        ("a: \0\n", "line 1"),
        ("", "is empty"),
        ("- name: a\n", "contains a list"),
        ("just words\n", "contains a str"),
    ],
)
def test_a_file_that_is_no_spec_is_told_with_its_line(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=rf"(?s)spec\.yaml.*{words}"):
        read_spec(str(path))


def test_a_missing_file_is_told_with_what_was_meant(tmp_path: Path) -> None:
    (tmp_path / "digits.yaml").write_text("name: a")
    with pytest.raises(
        UsageError, match=r"digit\.yaml does not exist; did you mean .*digits\.yaml\?"
    ):
        read_spec(str(tmp_path / "digit.yaml"))


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"x" * (5 << 20)], ids=["not text", "huge"])
def test_what_is_no_text_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "spec.yaml").write_bytes(data)
    with pytest.raises(UsageError):
        read_spec(str(tmp_path / "spec.yaml"))
    with pytest.raises(UsageError, match="directory"):
        read_spec(str(tmp_path))


def test_aliases_cannot_blow_up_a_spec(tmp_path: Path) -> None:
    """Nine lines that mean a thousand million items: shared, not copied, and then refused as a
    field."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    path = tmp_path / "spec.yaml"
    path.write_text("\n".join(lines))
    assert "a8" in faults(read_spec(str(path)))


def test_a_merged_block_is_overridden_by_what_stands_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(
        "tags: &base {a: one, b: one}\n"
        "env: &more\n  <<: *base\n  b: two\n"
        "train:\n  <<: [*more, *base]\n  a: three\n"
    )
    assert read_spec(str(path)) == {
        "tags": {"a": "one", "b": "one"},
        "env": {"a": "one", "b": "two"},
        "train": {"a": "three", "b": "two"},
    }
    path.write_text("tags: &base {a: one}\nenv:\n  <<: *base\n  b: two\n  b: three\n")
    with pytest.raises(UsageError, match="line 5, column 3: the key 'b' occurs twice"):
        read_spec(str(path))
