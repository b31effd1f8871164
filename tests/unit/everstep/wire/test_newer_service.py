"""An older client reads the answers of a newer service."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import ValidationError

import everstep.wire
from everstep.wire import Reason, RunStatus
from everstep.wire.base import Answer, ReadsNewer
from everstep.wire.drills import DrillRequest

STRICT = {
    "everstep.wire.sweep": "sweeps end with the service's own",
    "verdict": "Verdict reads what it does not know as unknown",
    "RunRehearsal": "is read from a run's journal, which anybody may write",
    "Liveness": "has one value",
    "Rehearsal": "is read from a run's journal, which anybody may write",
    "RehearsalRow": "is read from a run's journal, which anybody may write",
}


def test_what_only_a_newer_service_knows_is_read_as_it_is() -> None:
    text = '{"code":"a_new_code","message":"why"}'
    reason = Reason.model_validate_json(text)
    assert isinstance(reason.code, str) and reason.code == reason.code.value == "a_new_code"
    assert reason.model_dump_json() == text
    with pytest.raises(ValidationError):
        DrillRequest.model_validate({"kind": "a_new_kind", "rank": 0})
    with pytest.raises(ValueError, match="NEW"):
        RunStatus("NEW")


def answers(kind: type[Answer] = Answer) -> Iterator[type[Answer]]:
    for each in kind.__subclasses__():
        yield each
        yield from answers(each)


def closed(kind: Any) -> bool:
    """Whether an annotation holds an enumeration that is not open."""
    if any(isinstance(each, ReadsNewer) for each in getattr(kind, "__metadata__", ())):
        return False
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return True
    return get_origin(kind) is Literal or any(map(closed, get_args(kind)))


def test_every_enumeration_of_an_answer_is_open() -> None:
    for module in pkgutil.iter_modules(everstep.wire.__path__):
        importlib.import_module(f"everstep.wire.{module.name}")
    found = {
        f"{each.__name__}.{name}"
        for each in answers()
        for name, field in each.model_fields.items()
        if not any(isinstance(mark, ReadsNewer) for mark in field.metadata)
        and closed(field.annotation)
        and not {each.__module__, each.__name__, name} & STRICT.keys()
    }
    assert found == set()
