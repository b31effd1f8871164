"""The parts of one service, by their type: stores, storage, settings, and what annexes open.

A route depends on those that it uses (``service/api/dependencies.py``).
"""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import Depends, Request

T = TypeVar("T")


class ServiceParts:
    """One part of each type."""

    def __init__(self) -> None:
        self._parts: dict[type[Any], Any] = {}

    def add(self, part: T, kind: type[T] | None = None) -> T:
        """Add a part, in place of an earlier one; return it. ``kind`` names a base of its type."""
        self._parts[kind or type(part)] = part
        return part

    def but(self, part: T, kind: type[T]) -> ServiceParts:
        """Return the same parts with another one of this type."""
        other = ServiceParts()
        other._parts = self._parts | {kind: part}
        return other

    def find(self, kind: type[T]) -> T | None:
        """Return the part of this type; None if there is none."""
        return self._parts.get(kind)

    def __getitem__(self, kind: type[T]) -> T:
        """Return the part of this type, which every service has."""
        found: T = self._parts[kind]
        return found


def parts_of(connection: Request) -> ServiceParts:
    """Return the parts of the service that serves a request."""
    parts: ServiceParts = connection.app.state.parts
    return parts


def part(kind: type[Any]) -> Any:
    """Return FastAPI's dependency on the part of this type."""

    async def find(connection: Request) -> Any:
        # FastAPI would call a dependency that is not async in a thread, for each request.
        return parts_of(connection)[kind]

    return Depends(find)
