"""Read secrets: files that the operator put on the nodes. Their values are sent nowhere."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
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


class Redactor:
    """Remove the values of secrets from texts before anybody can read them."""

    def __init__(self) -> None:
        self._values: tuple[str, ...] = ()

    def learn(self, values: Iterable[str]) -> None:
        """Add values to remove from now on. Of a value with several lines every line counts: logs
        are kept by lines."""
        parts = {
            part
            for value in values
            for part in (value, *value.splitlines())
            if len(part.strip()) >= SHORTEST_REDACTED
        }
        # The longest first: one value may hold another.
        self._values = tuple(sorted(parts, key=len, reverse=True))

    def __call__(self, text: str) -> str:
        for value in self._values:
            if value in text:
                text = text.replace(value, MASK)
        return text

    def error(self, error: RankError) -> RankError:
        """Return the same error without values in its texts."""
        return dataclasses.replace(
            error, message=self(error.message), traceback=self(error.traceback)
        )


@cache
def process_redactor() -> Redactor:
    """Return the redactor of this process. It knows the secrets of earlier attempts, too: threads
    of the user's code print before the next one has read them."""
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
