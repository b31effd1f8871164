"""What an annex adds to the service.

The core serves runs: process, api, db, web, projections, reconciler, cluster, embedded. Everything
else is an annex: a folder in ``service/annexes`` with its routes, tables, rules and pages. Its
``Annex`` stands in the list of ``service/annexes/registry.py``. The core asks the annexes that it
is given, and names none; without one of them, the rest of the service works as before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from fastapi import APIRouter

    from everstep.spec.run_spec import RunSpec
    from service.db.tables import TableHooks
    from service.model.rows import Role
    from service.model.run_rows import RunRow
    from service.parts import ServiceParts

Slot = Literal[
    "log_in",
    "who",
    "run_links",
    "run_figures",
    "run_controls",
    "run_reports",
    "cluster_figures",
    "node_actions",
]
"""Places in pages of the core that annexes fill. Each names the part of a page where it stands."""


@dataclass(frozen=True)
class PageLink:
    """An entry of the navigation, which callers of at least ``role`` see."""

    href: str
    label: str
    place: int
    """Entries are shown in this order."""
    role: Role = "viewer"


class Beside(Protocol):
    """Work beside the reconciler's ticks, in the one process that leads."""

    def tick(self) -> None:
        """Start the work if it is due. Does not block."""

    async def close(self) -> None:
        """Cancel the work."""


@dataclass(frozen=True, eq=False)
class Annex:
    """One feature beside the core."""

    name: str
    """Name of its folder."""

    routers: tuple[APIRouter, ...] = ()
    """Routes of the API."""
    pages: tuple[APIRouter, ...] = ()
    """Routes of pages. They are asked before those of the core."""
    navigation: tuple[PageLink, ...] = ()
    package: str | None = None
    """Package with its folder ``templates``; None if it has none. Names of templates are unique."""
    slots: Mapping[Slot, str] = field(default_factory=dict)
    """Templates that fill places in pages of the core."""
    page_values: Callable[[ServiceParts], Mapping[str, Any]] | None = None
    """Values for its templates in slots, of every page."""
    run_values: Callable[[ServiceParts, RunRow], Awaitable[Mapping[str, Any]]] | None = None
    """Values for its templates in slots, of the page of a run."""
    relays_ray: bool = False
    """Whether ``/ray/`` passes on Ray's dashboard. Links then lead there, not to the cluster."""

    tables: TableHooks | None = None
    spec_checks: Mapping[str, Callable[[ServiceParts, RunSpec], Awaitable[None]]] = field(
        default_factory=dict
    )
    """By field of a spec that only this annex serves: raises InvalidSpec. Without the annex, a spec
    with the field is refused."""

    beside: Callable[[ServiceParts], Sequence[Beside]] | None = None
    """Makes its work beside the reconciler. The database of these parts refuses writes of a process
    that does not lead."""
    opened: Callable[[ServiceParts], AbstractAsyncContextManager[object] | None] | None = None
    """Opens what its routes need as long as the service runs, one of its parts. None where the
    settings want none."""


class Annexes(tuple[Annex, ...]):
    """The annexes of one service."""


def hooks_of(annexes: Sequence[Annex]) -> tuple[TableHooks, ...]:
    """Return what the tables of these annexes take part in."""
    return tuple(annex.tables for annex in annexes if annex.tables is not None)
