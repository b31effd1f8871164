"""A copy of one collection of Kubernetes's API, kept up to date by a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar

from everstep.client.timing import Timing
from everstep.errors import EverstepError, ServiceError, Unavailable
from everstep.kubernetes.api import Change, Gone, KubernetesApi

T = TypeVar("T")
SHORT_WATCH_S: Final = 1.0
"""A watch that ends before that, without a change, counts as a failure: no loop without a pause."""
_SHAPES: Final = (KeyError, TypeError, AttributeError, ValueError)
"""What an object of another shape than Kubernetes's raises."""
Say = Callable[[str], None]


class Mirror(Generic[T]):
    """Lists a collection, then watches it. Lists again once the API has forgotten our version, and
    watches on from the newest version after a lost connection.

    Args:
        read: makes an object of what the API sends; None leaves it out.
        changed: set after each change, and with a problem.
        say: takes a line for the log.
    """

    def __init__(
        self,
        api: KubernetesApi,
        path: str,
        read: Callable[[Mapping[str, Any]], T | None],
        changed: threading.Event,
        *,
        selector: str = "",
        say: Say = print,
        timing: Timing | None = None,
    ) -> None:
        self.problem: EverstepError | None = None
        """What ended the thread: no pause makes it good."""
        self._api = api
        self._path = path
        self._selector = selector
        self._read = read
        self._changed = changed
        self._say = say
        self._timing = timing or Timing()
        self._items: dict[str, T] | None = None
        self._version: str | None = None
        self._failures = 0

    @property
    def items(self) -> Mapping[str, T] | None:
        """Return name -> object, as a snapshot; None before the first list."""
        return self._items

    def start(self) -> None:
        """Begin to follow the collection, until the process ends."""
        threading.Thread(target=self._follow, name=self._path, daemon=True).start()

    def _follow(self) -> None:
        while self.problem is None:
            self.turn()

    def turn(self) -> None:
        """List if need be, and watch until the watch ends. Pause after a failure."""
        began = self._timing.now()
        seen = self._version
        try:
            if self._version is None:
                self._list()
            self._watch()
        except Gone as exc:
            self._version = None
            self._fail(f"{self._path}: listing anew: {exc.message}")
        except Unavailable as exc:
            self._fail(exc.message)
        except EverstepError as exc:
            self._give_up(exc)
        except _SHAPES as exc:
            message = f"{self._path}: an answer that is none of Kubernetes's API ({exc!r})"
            self._give_up(ServiceError(message))
        else:
            if self._version == seen and self._timing.now() - began < SHORT_WATCH_S:
                self._fail(f"{self._path}: the watch ended at once")

    def _list(self) -> None:
        listed = self._api.list(self._path, self._selector)
        found = ((raw["metadata"]["name"], self._object(raw)) for raw in listed.items)
        self._items = {name: item for name, item in found if item is not None}
        self._version = listed.version
        self._changed.set()

    def _watch(self) -> None:
        assert self._version is not None
        for change in self._api.watch(self._path, self._version, self._selector):
            self._apply(change)
            self._version = change.version
            self._failures = 0

    def _apply(self, change: Change) -> None:
        """Take a change into a new copy: who reads ``items`` keeps a whole one."""
        if change.kind == "BOOKMARK":
            return
        name = change.item["metadata"]["name"]
        items = dict(self._items or {})
        items.pop(name, None)
        item = None if change.kind == "DELETED" else self._object(change.item)
        if item is not None:
            items[name] = item
        self._items = items
        self._changed.set()

    def _object(self, raw: Mapping[str, Any]) -> T | None:
        try:
            return self._read(raw)
        except _SHAPES as exc:
            self._say(f"{self._path}: an object that cannot be read ({exc!r}) is left out")
            return None

    def _give_up(self, problem: EverstepError) -> None:
        self.problem = problem
        self._changed.set()

    def _fail(self, why: str) -> None:
        self._failures += 1
        self._say(why)
        self._timing.sleep(self._timing.backoff_s(self._failures, most_s=15.0))
