"""Sizing, the TCP probe, the settings and the seam to Ray, each apart from a cluster."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train_fn.node.network import accepts_connection
from train_fn.recovery.settings import RecoverySettings
from train_fn.recovery.sizing import NodeView, choose_nodes, fit_workers


def node(name: str, total: float = 1.0, free: float | None = None, **facts: bool) -> NodeView:
    available = {"CPU": total if free is None else free}
    return NodeView(name, "127.0.0.1", 1, {"CPU": total}, available, **facts)


def count(nodes: list[NodeView], held: dict[str, int] | None = None, **changes: object) -> int:
    options = {"min_workers": 1, "max_workers": 8, "strategy": "SPREAD", **changes}
    return fit_workers(nodes, held or {}, {"CPU": 1.0}, **options).num_workers  # type: ignore[arg-type]


def test_dead_draining_and_cordoned_nodes_do_not_count() -> None:
    nodes = [
        node("a"),
        node("b", reachable=False),
        node("c", draining=True),
        node("d", cordoned=True),
    ]
    assert count(nodes) == 1
    assert choose_nodes(nodes, {}, {"CPU": 1.0}, num_workers=1, strategy="PACK") == {"a": 1}
    assert choose_nodes(nodes, {}, {"CPU": 1.0}, num_workers=2, strategy="PACK") is None


def test_what_the_run_holds_counts_as_free_and_what_others_hold_does_not() -> None:
    assert count([node("a", 1.0, 0.0), node("b", 1.0, 0.0)], {"a": 1}) == 1
    assert count([node("a", 4.0, 1.0)], {"a": 2}) == 3
    assert count([node("a", 1.0, 1.0)], {"a": 1}) == 1, (
        "a released bundle that the cluster shows as free is not counted twice"
    )


def test_strict_strategies() -> None:
    nodes = [node("a", 4.0), node("b", 2.0)]
    assert count(nodes, strategy="STRICT_PACK") == 4
    assert count(nodes, strategy="STRICT_SPREAD") == 2
    assert count(nodes, max_workers=3) == 3


def test_what_is_missing_for_the_smallest_group_is_named() -> None:
    fit = fit_workers(
        [node("a")], {}, {"CPU": 1.0, "GPU": 0.0}, min_workers=3, max_workers=4, strategy="PACK"
    )
    assert (fit.num_workers, fit.missing) == (1, {"CPU": 2.0})
    assert (
        fit_workers([], {}, {"CPU": 1.0}, min_workers=1, max_workers=4, strategy="PACK").num_workers
        == 0
    )


def test_fractions_add_up() -> None:
    view = NodeView("a", "127.0.0.1", 1, {"CPU": 1.0}, {"CPU": 1.0})
    assert (
        fit_workers(
            [view], {}, {"CPU": 0.1}, min_workers=1, max_workers=99, strategy="PACK"
        ).num_workers
        == 10
    )


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans(), st.booleans()), max_size=8
    ),
    st.integers(1, 3),
    st.integers(1, 10),
)
def test_never_more_than_live_nodes_hold(
    raw: list[tuple[int, int, bool, bool]], min_workers: int, max_workers: int
) -> None:
    nodes = [
        node(str(i), float(total), float(min(total, free)), reachable=up, draining=drain)
        for i, (total, free, up, drain) in enumerate(raw)
    ]
    fit = fit_workers(
        nodes, {}, {"CPU": 1.0}, min_workers=min_workers, max_workers=max_workers, strategy="SPREAD"
    )
    room = sum(int(view.available["CPU"]) for view in nodes if view.usable)
    assert fit.num_workers == min(room, max_workers)
    assert bool(fit.missing) == (fit.num_workers < min_workers)


def test_ranks_are_placed_by_strategy_and_what_is_held_is_used_first() -> None:
    nodes = [node("a", 2.0), node("b", 3.0), node("c", 1.0)]

    def choose(num_workers: int, strategy: str, **held: int) -> dict[str, int] | None:
        return choose_nodes(nodes, held, {"CPU": 1.0}, num_workers=num_workers, strategy=strategy)

    assert choose(3, "SPREAD") == {"a": 1, "b": 1, "c": 1}
    assert choose(3, "PACK") == {"b": 3}
    assert choose(3, "STRICT_PACK") == {"b": 3}
    assert choose(4, "STRICT_PACK") is None
    assert choose(3, "STRICT_SPREAD") == {"a": 1, "b": 1, "c": 1}
    assert choose(4, "STRICT_SPREAD") is None
    assert choose(2, "SPREAD", a=2) == {"a": 2}, "bundles that are held are there at once"
    assert choose(3, "PACK", a=1, c=1) == {"a": 2, "c": 1}
    assert choose(2, "STRICT_PACK", a=2) == {"a": 2}


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 2), st.booleans()),
        max_size=6,
    ),
    st.integers(1, 8),
    st.sampled_from(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]),
)
def test_what_fits_can_be_placed(
    raw: list[tuple[int, int, int, bool]], most: int, strategy: str
) -> None:
    nodes = [
        node(str(i), float(total), float(min(total, free)), reachable=up)
        for i, (total, free, _, up) in enumerate(raw)
    ]
    held = {str(i): own for i, (_, _, own, _) in enumerate(raw)}
    fit = fit_workers(nodes, held, {"CPU": 1.0}, min_workers=1, max_workers=most, strategy=strategy)
    chosen = choose_nodes(nodes, held, {"CPU": 1.0}, num_workers=fit.num_workers, strategy=strategy)
    assert chosen is not None
    assert chosen.total() == fit.num_workers
    usable = {view.node_id: view for view in nodes if view.usable}
    assert all(
        number <= min(usable[name].total["CPU"], usable[name].available["CPU"] + held[name])
        for name, number in chosen.items()
    )
    assert (
        choose_nodes(nodes, held, {"CPU": 1.0}, num_workers=fit.num_workers + 1, strategy=strategy)
        is None
        or fit.num_workers == most
    )


def test_the_probe_tells_listening_from_refusing_and_from_silent() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket() as unused,
        silent_host() as silent,
    ):
        unused.bind(("127.0.0.1", 0))
        began = time.monotonic()
        found = accepts_connection([server.getsockname(), unused.getsockname(), silent], 0.3)
        assert time.monotonic() - began < 20, (
            "the silent host is given up, not the kernel's two minutes later"
        )
    assert found == [True, False, False]


@contextmanager
def silent_host() -> Iterator[tuple[str, int]]:
    """An address where connecting hangs, as with a host that is cut off: a listener whose queue is
    full."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield server.getsockname()


def test_settings_come_from_the_environment() -> None:
    settings = RecoverySettings.from_env(
        {"EVERSTEP_RECOVERY_POLL_S": "0.5", "EVERSTEP_RECOVERY_PREFLIGHT": "0", "PATH": "/bin"}
    )
    assert (settings.poll_s, settings.preflight) == (0.5, False)
    assert settings.hold_s == RecoverySettings().hold_s


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("POLL", "1", "not a recovery setting"),
        ("POLL_S", "fast", "set it to a number"),
        ("PREFLIGHT", "maybe", "set it to 0 or 1"),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        RecoverySettings.from_env({f"EVERSTEP_RECOVERY_{name}": value})
    assert f"EVERSTEP_RECOVERY_{name}" in str(raised.value)
