"""The rules: which notice of Kubernetes cordons or drains which node of Ray. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from everstep.kubernetes.objects import KubeNode, RayPod, Taint
from everstep.wire import Node

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
class Order:
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
) -> tuple[Order, ...]:
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


def _order(node: Node, notice: Notice | None, now: datetime) -> Order | None:
    marked = None if node.mark is None else node.mark.reason or ""
    is_ours = marked is not None and marked.startswith(OURS)
    before = _cordoned_before(node, marked)
    drains = node.state in ("DRAINING", "DRAINED")
    if notice is None:
        if not is_ours:
            return None
        reason = f"{OURS}the notice is over"
        if not before:
            return Order("uncordon", node.id, reason)
        return Order("cordon", node.id, reason + before) if drains else None
    reason = f"{OURS}{notice.why}{before}"[:LONGEST_REASON]
    if notice.act == "drain":
        return None if drains else Order("drain", node.id, reason, _deadline_s(notice, now))
    if node.state == "ALIVE" or (drains and is_ours):
        return Order("cordon", node.id, reason)
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
