"""Read secrets: files that the operator put on the nodes. Their values are sent nowhere."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from html.entities import name2codepoint
from pathlib import Path
from typing import Final

from everstep.spec.run_spec import RunSpec
from train_fn.errors import SecretMissing
from train_fn.recovery.evidence import RankError

DIRECTORY_VARIABLE: Final = "EVERSTEP_SECRETS_DIR"
DEFAULT_DIRECTORY: Final = "/etc/everstep/secrets"
MAX_BYTES: Final = 64 * 1024
SHORTEST_REDACTED: Final = 6
"""Shorter values are left in texts: taking every ``42`` out of a log would hide more than it
protects."""
MASK: Final = "[secret]"
_LETTERS: Final = {"\n": "n", "\r": "r", "\t": "t", "\f": "f", "\b": "b", "\v": "v", "\a": "a"}
"""Control characters -> the letter behind the backslash with which they are written."""


def read_secrets(spec: RunSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables with the values of the spec's secrets, from this node's files.

    A project's own file, ``DIRECTORY/PROJECT/NAME``, comes before one for everybody,
    ``DIRECTORY/NAME``. A line break at the end is no part of the value.

    Args:
        spec: Names which secrets it needs.
        environ: The process's environment; ``EVERSTEP_SECRETS_DIR`` in it is the node's, and names
            the directory.

    Raises SecretMissing, which names the secret and where it was looked for, never a value.
    """
    directory = Path(environ.get(DIRECTORY_VARIABLE) or DEFAULT_DIRECTORY)
    return {
        variable: _read(directory, spec.project, name) for variable, name in spec.secrets.items()
    }


def _read(directory: Path, project: str, name: str) -> str:
    places = (directory / project / name, directory / name)
    for path in places:
        try:
            with path.open("rb") as stream:
                data = stream.read(MAX_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as exc:
            raise SecretMissing(name, f"{path} cannot be read: {exc.strerror}") from None
        if len(data) > MAX_BYTES:
            raise SecretMissing(name, f"{path} is larger than {MAX_BYTES} bytes")
        try:
            value = data.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError:
            raise SecretMissing(name, f"{path} is not text in UTF-8") from None
        if not value or "\0" in value:
            raise SecretMissing(name, f"{path} is empty, or holds what no variable can")
        return value
    raise SecretMissing(name, f"there is neither {places[0]} nor {places[1]}")


_BACKSLASH: Final = r"(?:\\|%(?:25)*5c)"
"""As it is, or in a URL. Three programs, one after the other, write eight for one."""
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
"""What a terminal is sent to change its colour, which may stand inside a value."""


def written_forms(value: str) -> str:
    """Return a pattern of a secret as programs write it: as it is, or through repr, JSON, a URL, a
    shell's quoting, HTML or base64, also several of them one after the other.

    Letters and digits are the same in all of these. Any other character may stand behind
    backslashes, or as its code.
    """
    runs = re.findall(r"\\+|[^\\]", value)
    raw = value.encode()
    encoded = {
        # without the last characters, which depend on what follows
        code(prefix + raw)[skip:].rstrip(b"=")[:-1].decode()
        for code in (base64.b64encode, base64.urlsafe_b64encode)
        for prefix, skip in ((b"", 0), (b"\0", 2), (b"\0\0", 3))
    }
    return "|".join(["".join(map(_forms_of_run, runs)), *map(re.escape, sorted(encoded))])


def _forms_of_run(run: str) -> str:
    """Return a pattern of one character, or of several backslashes one after the other."""
    char, count, number = run[0], len(run), ord(run[0])
    if char.isascii() and char.isalnum():
        return char
    octets = char.encode()
    utf_16 = char.encode("utf-16-be").hex()
    codes = [
        "".join(f"%(?:25)*{octet:02x}" for octet in octets),
        rf"{_BACKSLASH}{{1,8}}".join(f"x{octet:02x}" for octet in octets),
        rf"{_BACKSLASH}{{1,8}}".join(f"u{utf_16[at : at + 4]}" for at in range(0, len(utf_16), 4)),
        f"x{number:02x}|u{number:04x}|U{number:08x}",
        rf"&\#(?:{number}|x{number:x});",
        *(f"&{name};" for name, code in name2codepoint.items() if code == number),
    ]
    if char == "\\":
        written = rf"(?:{_BACKSLASH}{{0,8}}(?:{'|'.join(codes[1:])})){{{count}}}"
        return rf"(?i:{_BACKSLASH}{{{count},{8 * count}}}|{written})"
    if char == "'":  # a shell ends its quotes, writes one, and begins quotes again
        codes.append(rf"""'(?:{_BACKSLASH}{{0,8}}"'{_BACKSLASH}{{0,8}}"|{_BACKSLASH}{{1,8}}')'""")
    if char == " ":
        codes.append(r"\+")
    if char in _LETTERS:
        codes.append(_LETTERS[char])
    return rf"(?i:{_BACKSLASH}{{0,8}}(?:{'|'.join(codes)}|{re.escape(char)}))"


class Redactor:
    """Remove the values of secrets from texts before anybody can read them."""

    def __init__(self) -> None:
        self._values: tuple[str, ...] = ()
        self._pattern = re.compile(r"(?!)")

    def learn(self, values: Iterable[str]) -> None:
        """Add values to remove from now on. Of a value with several lines every line counts: logs
        are kept by lines."""
        parts: set[str] = set()
        for value in values:
            lines = [line for line in value.splitlines() if len(line.strip()) >= SHORTEST_REDACTED]
            parts.update(lines or ([value] if len(value.strip()) >= SHORTEST_REDACTED else []))
        if parts <= set(self._values):
            return
        # The longest first: one value may hold another.
        self._values = tuple(sorted(parts.union(self._values), key=len, reverse=True))
        self._pattern = re.compile("|".join(map(written_forms, self._values)))

    def __call__(self, text: str) -> str:
        if "\x1b" in text and self._pattern.search(plain := _COLOUR.sub("", text)):
            text = plain
        return self._pattern.sub(MASK, text)

    def error(self, error: RankError) -> RankError:
        """Return the same error without values in its texts."""
        return dataclasses.replace(
            error, message=self(error.message), traceback=self(error.traceback)
        )


@cache
def process_redactor() -> Redactor:
    """Return the redactor of this process."""
    return Redactor()


@contextlib.contextmanager
def secrets_set(spec: RunSpec, redactor: Redactor) -> Iterator[None]:
    """Set the variables of the spec's secrets in this process for as long as the context lasts, and
    let ``redactor`` know their values. Raises SecretMissing."""
    try:
        secrets = read_secrets(spec, os.environ)
        redactor.learn(secrets.values())
        os.environ.update(secrets)
        yield
    finally:
        for variable in spec.secrets:
            os.environ.pop(variable, None)
