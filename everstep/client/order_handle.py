"""Base class of drill and profile handles: refresh and wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar
from urllib.parse import quote

from everstep.client.follow import Patience, wait_until
from everstep.client.transport import Transport
from everstep.wire.drills import Drill
from everstep.wire.profiles import Profile

Order = TypeVar("Order", Drill, Profile)


class OrderHandle(Generic[Order]):
    """One request to a run's ranks. The fields of the last response are its attributes."""

    _noun: ClassVar[str]
    _fields: ClassVar[frozenset[str]]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in self._fields:
                return getattr(self._order, name)
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __init__(self, transport: Transport, run_id: str, order: Order, patience: Patience) -> None:
        self.run_id = run_id
        self._order: Order = order
        self._transport = transport
        self._patience = patience
        self._path = f"/v1/runs/{quote(run_id, safe='')}/{self._noun}s/{quote(order.id, safe='')}"

    @property
    def id(self) -> str:
        return self._order.id

    def refresh(self) -> Self:
        """Fetch the current state; return self."""
        self._order = self._transport.get(self._path, type(self._order))
        return self

    def wait(self, timeout_s: float = 600.0) -> Self:
        """Wait until the request is complete. Return self, whatever the outcome; see ``state``.

        Keep waiting while the service is unreachable for a while. Raises WaitTimeout after
        ``timeout_s`` seconds; Unavailable if the service stays unreachable.
        """
        wait_until(
            lambda: self._order.complete,
            self.refresh,
            lambda: (
                f"{self._noun} {self.id} of run {self.run_id} is still {self._order.state} after "
                f"{timeout_s:g} s"
            ),
            self._transport.timing,
            self._patience,
            timeout_s=timeout_s,
        )
        return self
