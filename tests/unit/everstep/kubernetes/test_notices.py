"""Which notice of Kubernetes cordons or drains which node of Ray."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.kubernetes.api import KubeNode, RayPod, Taint, Toleration
from everstep.kubernetes.watcher import (
    CORDONED_BEFORE,
    LEAVING,
    LONGEST_REASON,
    OURS,
    MarkOrder,
    is_leaving,
    notice_of,
    orders,
)
from everstep.wire import Node, NodeMark

NOW = datetime(2026, 1, 2, tzinfo=UTC)
SPOT = Taint("everstep.dev/spot", "NoSchedule")
KEYS = (
    "node.kubernetes.io/unschedulable",
    "node.kubernetes.io/memory-pressure",
    "ToBeDeletedByClusterAutoscaler",
    "aws-node-termination-handler/spot-itn",
    SPOT.key,
    "maintenance",
)
taints = st.builds(
    Taint, st.sampled_from(KEYS), st.sampled_from(("NoSchedule", "NoExecute", "PreferNoSchedule"))
)
tolerations = st.builds(
    Toleration,
    st.sampled_from(("", *KEYS)),
    st.sampled_from(("Equal", "Exists")),
    st.just(""),
    st.sampled_from(("", "NoSchedule", "NoExecute")),
    st.sampled_from((None, 0.0, 300.0)),
)
IPS = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
NAMES = ("a", "b")
kube_nodes = st.dictionaries(
    st.sampled_from(NAMES),
    st.builds(KubeNode, st.just("x"), st.booleans(), st.lists(taints, max_size=2).map(tuple)),
)
pods = st.lists(
    st.builds(
        RayPod,
        st.sampled_from(("p", "q")),
        st.sampled_from((*NAMES, None)),
        st.sets(st.sampled_from(IPS), min_size=1).map(frozenset),
        st.lists(tolerations, max_size=2).map(tuple),
        st.none() | st.integers(-99, 9_999_999).map(lambda s: NOW + timedelta(seconds=s)),
        st.none() | st.just("EvictionByEvictionAPI"),
    ),
    max_size=3,
)


def mark(reason: str | None) -> NodeMark:
    return NodeMark(reason=reason, by="a token", at=NOW, deadline=None)


def node(id_: str = "n", ip: str = IPS[0], state: str = "ALIVE", reason: str | None = None) -> Node:
    marked = state in ("CORDONED", "DRAINING", "DRAINED") and reason != ""
    return Node.model_validate(
        {
            "id": id_,
            "hostname": "h",
            "ip": ip,
            "state": state,
            "is_head": False,
            "mark": mark(reason) if marked else None,
            "resources_total": {},
            "runs": (),
        }
    )


ray_nodes = st.lists(
    st.builds(
        node,
        st.uuids().map(str),
        st.sampled_from(IPS),
        st.sampled_from(("ALIVE", "CORDONED", "DRAINING", "DRAINED", "DEAD")),
        st.sampled_from(
            (f"{OURS}x", f"{OURS}x{CORDONED_BEFORE}a disk fails", "a disk fails", None, "")
        ),
    ),
    max_size=3,
)


def carried_out(nodes: list[Node], found: tuple[MarkOrder, ...]) -> list[Node]:
    """As the service has its nodes after these requests."""
    states = {"drain": "DRAINING", "cordon": "CORDONED", "uncordon": "ALIVE"}
    by_id = {order.node_id: order for order in found}
    return [
        node(each.id, each.ip, states[by_id[each.id].act], by_id[each.id].reason)
        if each.id in by_id
        else each
        for each in nodes
    ]


@given(ray_nodes, pods, kube_nodes)
def test_orders_come_to_rest_and_respect_the_marks_of_others(
    nodes: list[Node], pods: list[RayPod], kube: dict[str, KubeNode]
) -> None:
    found = orders(nodes, pods, kube, NOW)
    assert orders(carried_out(nodes, found), pods, kube, NOW) == ()
    by_id = {each.id: each for each in nodes}
    for order in found:
        marked = by_id[order.node_id]
        of_others = marked.mark is not None and not (marked.mark.reason or "").startswith(OURS)
        assert marked.state != "DEAD" and order.reason.startswith(OURS)
        assert not (of_others and order.act == "uncordon")
        assert not (of_others and order.act == "cordon")
        assert order.act != "drain" or marked.state in ("ALIVE", "CORDONED")
        assert order.deadline_s is None or 1 <= order.deadline_s <= 30 * 24 * 3600


@given(ray_nodes, pods, kube_nodes)
def test_a_pod_that_ends_drains_its_node_and_one_that_is_gone_opens_none(
    nodes: list[Node], pods: list[RayPod], kube: dict[str, KubeNode]
) -> None:
    acts = {order.node_id: order.act for order in orders(nodes, pods, kube, NOW)}
    ending = {ip for pod in pods if pod.goes_at or pod.disruption for ip in pod.ips}
    known = {ip for pod in pods if pod.node in kube for ip in pod.ips}
    for each in nodes:
        if each.ip in ending and each.state in ("ALIVE", "CORDONED"):
            assert acts[each.id] == "drain"
        if acts.get(each.id) == "uncordon":
            assert each.ip in known and each.ip not in ending


def only(
    *, pod: RayPod | None = None, kube: KubeNode | None = None, ray: Node | None = None
) -> list[MarkOrder]:
    pod = pod or RayPod("p", "a", frozenset({IPS[0]}))
    return [*orders([ray or node()], [pod], {"a": kube or KubeNode("a")}, NOW)]


@pytest.mark.parametrize(
    ("taint", "act"),
    [
        (Taint("ToBeDeletedByClusterAutoscaler", "NoSchedule", "1700000000"), "drain"),
        (Taint("karpenter.sh/disrupted", "NoSchedule"), "drain"),
        (Taint("aws-node-termination-handler/spot-itn", "NoSchedule", "i-1"), "drain"),
        (Taint("cloud.google.com/impending-node-termination", "NoSchedule"), "drain"),
        (Taint("maintenance", "NoExecute"), "drain"),
        (Taint("maintenance", "NoSchedule"), "cordon"),
        (Taint("node.kubernetes.io/unschedulable", "NoSchedule"), "cordon"),
        (Taint("maintenance", "PreferNoSchedule"), None),
        (Taint("node.kubernetes.io/not-ready", "NoExecute"), None),
        (Taint("node.kubernetes.io/disk-pressure", "NoSchedule"), None),
        (SPOT, None),
    ],
)
def test_a_taint_drains_cordons_or_says_nothing(taint: Taint, act: str | None) -> None:
    pod = RayPod("p", "a", frozenset({IPS[0]}), (Toleration(SPOT.key, "Exists"),))
    found = only(pod=pod, kube=KubeNode("a", taints=(taint,)))
    assert [order.act for order in found] == ([act] if act else [])
    assert all(taint.key in order.reason for order in found)


def test_a_cordon_of_kubernetes_comes_and_goes_and_an_eviction_names_its_deadline() -> None:
    [order] = only(kube=KubeNode("a", unschedulable=True))
    assert order == MarkOrder("cordon", "n", "Kubernetes: node a is cordoned")
    cordoned = node(state="CORDONED", reason=order.reason)
    [opened] = only(ray=cordoned)
    assert (opened.act, opened.node_id) == ("uncordon", "n")
    ending = RayPod(
        "p", "a", frozenset({IPS[0]}), (), NOW + timedelta(seconds=60), "EvictionByEvictionAPI"
    )
    [drain] = only(ray=cordoned, pod=ending, kube=KubeNode("a", unschedulable=True))
    assert (drain.act, drain.deadline_s) == ("drain", 60.0)
    assert "EvictionByEvictionAPI" in drain.reason


LEAVES = KubeNode("a", taints=(Taint("ToBeDeletedByClusterAutoscaler", "NoSchedule"),))


def marked(order: MarkOrder) -> Node:
    return carried_out([node()], (order,))[0]


@pytest.mark.parametrize("reason", ["a disk fails", None])
def test_a_cordon_of_another_is_there_again_after_a_drain(reason: str | None) -> None:
    [drain] = only(ray=node(state="CORDONED", reason=reason), kube=LEAVES)
    assert drain.act == "drain"
    cordoned = KubeNode("a", unschedulable=True)
    for then in (KubeNode("a"), cordoned):  # the autoscaler lets the node stay
        [cordon] = only(ray=marked(drain), kube=then)
        assert cordon.act == "cordon" and (reason or "no reason given") in cordon.reason
        assert only(ray=marked(cordon)) == only(ray=marked(cordon), kube=cordoned) == []
        [again] = only(ray=marked(cordon), kube=LEAVES)
        assert again.reason == drain.reason


def test_a_long_reason_of_another_does_not_keep_a_node_from_its_drain() -> None:
    cordoned = node(state="CORDONED", reason="a disk fails " * 77)
    [drain] = only(ray=cordoned, kube=LEAVES)
    assert len(drain.reason) == LONGEST_REASON and CORDONED_BEFORE in drain.reason
    [cordon] = only(ray=marked(drain))
    assert len(cordon.reason) <= LONGEST_REASON


def test_a_toleration_for_a_while_is_none_for_good() -> None:
    taint = Taint("maintenance", "NoExecute")
    for seconds, act in ((None, None), (300.0, "drain")):
        pod = RayPod(
            "p", "a", frozenset({IPS[0]}), (Toleration("maintenance", "Exists", for_s=seconds),)
        )
        notice = notice_of(pod, KubeNode("a", taints=(taint,)))
        assert (notice and notice.act) == act


def test_an_operator_s_own_taint_can_be_one_of_a_node_that_leaves() -> None:
    taint = Taint("example.org/reclaim-soon", "NoSchedule")
    assert not is_leaving(taint)
    assert is_leaving(taint, (*LEAVING, "example.org/*"))
    assert is_leaving(taint, ("example.org/reclaim-soon",))


POD = {
    "metadata": {"name": "everstep-steady-1", "deletionTimestamp": "2026-01-02T00:01:00Z"},
    "spec": {
        "nodeName": "a",
        "tolerations": [
            {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "tolerationSeconds": 300}
        ],
    },
    "status": {
        "phase": "Running",
        "podIP": IPS[0],
        "podIPs": [{"ip": IPS[0]}, {"ip": "fd00::1"}],
        "conditions": [
            {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
        ],
    },
}


def test_objects_of_the_api_are_read() -> None:
    pod = RayPod.of(POD)
    assert pod == RayPod(
        "everstep-steady-1",
        "a",
        frozenset({IPS[0], "fd00::1"}),
        (Toleration("node.kubernetes.io/not-ready", "Exists", for_s=300.0),),
        NOW + timedelta(seconds=60),
        "TerminationByKubelet",
    )
    assert RayPod.of({**POD, "status": {"phase": "Failed", "podIP": IPS[0]}}) is None
    assert RayPod.of({**POD, "status": {"phase": "Pending"}}) is None
    raw = {
        "metadata": {"name": "a"},
        "spec": {"unschedulable": True, "taints": [{"key": "k", "effect": "NoExecute"}]},
    }
    assert KubeNode.of(raw) == KubeNode("a", True, (Taint("k", "NoExecute"),))
    assert KubeNode.of({"metadata": {"name": "a"}, "spec": {}}) == KubeNode("a")
