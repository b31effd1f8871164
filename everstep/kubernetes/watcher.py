"""The loop: compare what Kubernetes announces with the service's marks, and ask for the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Generic, Literal, TypeVar

from everstep.client.client import Client
from everstep.client.transport import Timing
from everstep.errors import (
    Conflict,
    EverstepError,
    NotFound,
    RateLimited,
    ServiceError,
    Unavailable,
)
from everstep.kubernetes.api import Gone, KubeNode, KubernetesApi, RayPod, Taint, WatchedChange
from everstep.wire import Node

# ---------------------------------------------------------------- mirror

# A copy of one collection of Kubernetes's API, kept up to date by a thread.

T = TypeVar("T")
SHORT_WATCH_S: Final = 1.0
"""A watch that ends before that, without a change, counts as a failure: no loop without a pause."""
_SHAPES: Final = (KeyError, TypeError, AttributeError, ValueError)
"""What an object of another shape than Kubernetes's raises."""
Say = Callable[[str], None]


class MarkMirror(Generic[T]):
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

    def _apply(self, change: WatchedChange) -> None:
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


# ---------------------------------------------------------------- notices

# The rules: which notice of Kubernetes cordons or drains which node of Ray. Pure.

OURS: Final = "Kubernetes: "
"""How the reason of every mark begins that these rules set. They end no other mark."""
CORDONED_BEFORE: Final = "; cordoned before: "
"""In the reason of a mark of ours that took the place of another's cordon, before that cordon's
reason. When the notice is over the node stays cordoned."""
LEAVING: Final = (
    "ToBeDeletedByClusterAutoscaler",
    "karpenter.sh/disrupted",
    "karpenter.sh/disruption",
    "aws-node-termination-handler/*",
    "cloud.google.com/impending-node-termination",
    "node.cloudprovider.kubernetes.io/shutdown",
    "node.kubernetes.io/out-of-service",
)
"""Keys of taints that say that a node is about to go, by those who set them: autoscalers, and
handlers of spot notices. ``*`` at the end names all that begin so."""
_CORDON: Final = "node.kubernetes.io/unschedulable"
_OF_HEALTH: Final = "node.kubernetes.io/"
"""Kubernetes's own taints for a node that is not ready or short of memory. It may recover, and
Everstep sees for itself which node answers; a pod that is evicted for it has a notice of its own.
"""
LONGEST_DEADLINE_S: Final = 30 * 24 * 3600.0
"""As far ahead as the service takes a deadline."""
LONGEST_REASON: Final = 1000
"""Characters of a reason that the service takes."""

Act = Literal["cordon", "drain", "uncordon"]


@dataclass(frozen=True)
class Notice:
    """What Kubernetes announces of the node that a pod is on."""

    act: Literal["cordon", "drain"]
    why: str
    goes_at: datetime | None = None


@dataclass(frozen=True)
class MarkOrder:
    """A request to the service."""

    act: Act
    node_id: str
    reason: str
    deadline_s: float | None = None
    """Seconds until a draining node goes; None if unknown."""


def is_leaving(taint: Taint, keys: Collection[str] = LEAVING) -> bool:
    """Return whether a taint says that its node is about to go."""
    return any(
        taint.key.startswith(key[:-1]) if key.endswith("*") else taint.key == key for key in keys
    )


def notice_of(pod: RayPod, node: KubeNode | None, keys: Collection[str] = LEAVING) -> Notice | None:
    """Return the most urgent notice of a pod and its node, or None.

    A pod that ends comes before a taint that ends it, and that before a cordon.
    """
    if pod.goes_at is not None or pod.disruption is not None:
        why = f"pod {pod.name} is about to end"
        why += f" ({pod.disruption})" if pod.disruption else ""
        return Notice("drain", why, pod.goes_at)
    if node is None:
        return None
    for taint in node.taints:
        if is_leaving(taint, keys) or _throws_out(taint, pod):
            return Notice("drain", f"node {node.name} has the taint {taint.key}")
    if node.unschedulable:
        return Notice("cordon", f"node {node.name} is cordoned")
    for taint in node.taints:
        if _keeps_away(taint, pod):
            return Notice("cordon", f"node {node.name} has the taint {taint.key}")
    return None


def orders(
    ray_nodes: Iterable[Node],
    pods: Iterable[RayPod],
    kube_nodes: Mapping[str, KubeNode],
    now: datetime,
    keys: Collection[str] = LEAVING,
) -> tuple[MarkOrder, ...]:
    """Return what to ask of the service, so that its marks say what Kubernetes announces.

    A pod and a node of Ray belong together if they have one address. What another has drained stays
    so; what another has cordoned may be drained, and is cordoned afterwards. A mark of ours ends
    once its pod and that pod's node are there without a notice: a pod that is gone is no sign that
    its node of Ray may take ranks again.
    """
    notices: dict[str, Notice | None] = {}
    for pod in pods:
        found = notice_of(pod, kube_nodes.get(pod.node or ""), keys)
        if found is None and pod.node not in kube_nodes:
            continue
        for ip in pod.ips:
            notices[ip] = _more_urgent(notices.get(ip), found)
    live = (node for node in ray_nodes if node.state != "DEAD" and node.ip in notices)
    found_orders = (_order(node, notices[node.ip], now) for node in live)
    return tuple(order for order in found_orders if order is not None)


def _more_urgent(one: Notice | None, other: Notice | None) -> Notice | None:
    if one is None or other is None:
        return one or other
    return other if (one.act, other.act) == ("cordon", "drain") else one


def _order(node: Node, notice: Notice | None, now: datetime) -> MarkOrder | None:
    marked = None if node.mark is None else node.mark.reason or ""
    is_ours = marked is not None and marked.startswith(OURS)
    before = _cordoned_before(node, marked)
    drains = node.state in ("DRAINING", "DRAINED")
    if notice is None:
        if not is_ours:
            return None
        reason = f"{OURS}the notice is over"
        if not before:
            return MarkOrder("uncordon", node.id, reason)
        return MarkOrder("cordon", node.id, reason + before) if drains else None
    reason = f"{OURS}{notice.why}{before}"[:LONGEST_REASON]
    if notice.act == "drain":
        return None if drains else MarkOrder("drain", node.id, reason, _deadline_s(notice, now))
    if node.state == "ALIVE" or (drains and is_ours):
        return MarkOrder("cordon", node.id, reason)
    return None


def _cordoned_before(node: Node, marked: str | None) -> str:
    """Return the part of our reason that keeps another's cordon of the node; "" if there is none.

    Args:
        marked: the reason of the node's mark; None if it has no mark.
    """
    if marked is None:
        return ""
    if marked.startswith(OURS):
        _, separator, reason = marked.partition(CORDONED_BEFORE)
        return separator + reason
    return f"{CORDONED_BEFORE}{marked or 'no reason given'}" if node.state == "CORDONED" else ""


def _deadline_s(notice: Notice, now: datetime) -> float | None:
    """Return the seconds that are left, at least one; None if unknown."""
    if notice.goes_at is None:
        return None
    return min(LONGEST_DEADLINE_S, max(1.0, (notice.goes_at - now).total_seconds()))


def _throws_out(taint: Taint, pod: RayPod) -> bool:
    """Return whether a taint will evict the pod, now or in a while."""
    if taint.effect != "NoExecute" or taint.key.startswith(_OF_HEALTH):
        return False
    return not any(each.bears(taint) and each.for_s is None for each in pod.tolerations)


def _keeps_away(taint: Taint, pod: RayPod) -> bool:
    """Return whether Kubernetes would place this pod on the node no more."""
    if taint.key == _CORDON:
        return True
    if taint.effect != "NoSchedule" or taint.key.startswith(_OF_HEALTH):
        return False
    return not any(each.bears(taint) for each in pod.tolerations)


# ---------------------------------------------------------------- watcher

PERIOD_S: Final = 10.0
"""Seconds between two looks where nothing changes: a node may join Ray after its pod was seen."""


class NodeWatcher:
    """Marks Ray's nodes as Kubernetes announces. Several at once ask for the same, which is
    harmless.

    Args:
        namespace: of the pods of the Ray cluster.
        selector: labels of those pods.
        keys: of taints that say that a node is about to go.
        say: takes a line for the log.
    """

    def __init__(
        self,
        client: Client,
        api: KubernetesApi,
        namespace: str,
        selector: str,
        *,
        keys: Collection[str] = LEAVING,
        say: Say = print,
        timing: Timing | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._client = client
        self._keys = keys
        self._say = say
        self._now = now
        self._timing = timing or Timing()
        self._changed = threading.Event()
        self._stopping = False
        self.nodes = MarkMirror(
            api, "/api/v1/nodes", KubeNode.of, self._changed, say=say, timing=self._timing
        )
        self.pods = MarkMirror(
            api,
            f"/api/v1/namespaces/{namespace}/pods",
            RayPod.of,
            self._changed,
            selector=selector,
            say=say,
            timing=self._timing,
        )

    def stop(self) -> None:
        """Let ``run`` return. A signal handler may call this."""
        self._stopping = True
        self._changed.set()

    def run(self) -> None:
        """Follow Kubernetes until ``stop`` is called.

        Keeps on while the service, Ray or Kubernetes does not respond. Raises AuthError, UsageError
        or ServiceError where waiting does not help.
        """
        self.nodes.start()
        self.pods.start()
        failures = 0
        pause_s = PERIOD_S
        while True:
            self._changed.wait(pause_s)
            if self._stopping:
                return
            self._changed.clear()
            try:
                self.tick()
                failures, pause_s = 0, PERIOD_S
            except (Unavailable, RateLimited) as exc:
                failures += 1
                pause_s = self._timing.backoff_s(failures, most_s=PERIOD_S)
                self._say(exc.message)

    def tick(self) -> tuple[MarkOrder, ...]:
        """Compare once, ask the service for what differs, and return it. Raises this package's
        errors."""
        for mirror in (self.nodes, self.pods):
            if mirror.problem is not None:
                raise mirror.problem
        nodes, pods = self.nodes.items, self.pods.items
        if nodes is None or pods is None:
            return ()
        cluster = self._client.cluster()
        if not cluster.available:
            raise Unavailable("Ray does not respond, so its nodes are unknown")
        found = orders(cluster.nodes, pods.values(), nodes, self._now(), self._keys)
        for order in found:
            self._send(order)
        return found

    def _send(self, order: MarkOrder) -> None:
        nodes = self._client.nodes
        try:
            if order.act == "drain":
                nodes.drain(order.node_id, deadline_s=order.deadline_s, reason=order.reason)
            elif order.act == "cordon":
                nodes.cordon(order.node_id, reason=order.reason)
            else:
                nodes.uncordon(order.node_id, reason=order.reason)
        except (Conflict, NotFound) as exc:  # it died meanwhile
            self._say(f"{order.act} {order.node_id}: {exc.message}")
            return
        self._say(f"{order.act} {order.node_id}: {order.reason}")
