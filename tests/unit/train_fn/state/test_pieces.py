"""The rules of sharded states: any group gets its rows from the pieces of any other, every copy is
on another node, and whatever node dies at whatever moment, no reported step is lost."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from train_fn.snapshots.election import Candidate, elect
from train_fn.snapshots.store import Label
from train_fn.state.pieces import (
    Move,
    Piece,
    cut_anew,
    group_size,
    heirs,
    in_one_piece,
    joined,
    moves,
    needed,
    rows_of,
    whole_shapes,
)
from train_fn.state.tensor_tree import tree_digest

SIZES = st.integers(1, 7)
ROWS = st.lists(st.integers(0, 20), min_size=1, max_size=4)


@given(ROWS, SIZES)
def test_pieces_cut_as_torch_does(rows: list[int], of: int) -> None:
    for count in rows:
        chunks = torch.chunk(torch.arange(count), of)
        for number in range(of):
            start, stop = rows_of(count, Piece(number, of))
            expected = chunks[number] if number < len(chunks) else torch.arange(0)
            assert torch.arange(count)[start:stop].equal(expected)


@given(ROWS, SIZES, SIZES)
def test_another_group_gets_the_same_rows(counts: list[int], of: int, size: int) -> None:
    whole = {f"t{at}": torch.randn(count, 2) for at, count in enumerate(counts)}
    rows = {name: len(value) for name, value in whole.items()}

    def piece_of(piece: Piece) -> dict[str, torch.Tensor]:
        return {name: value[slice(*rows_of(len(value), piece))] for name, value in whole.items()}

    for number in range(size):
        piece = Piece(number, size)
        pieces = {each: piece_of(Piece(each, of)) for each in needed(rows.values(), of, piece)}
        assert of != size or set(pieces) <= {number}
        found, expected = cut_anew(rows, pieces, of, piece), piece_of(piece)
        assert found.keys() == expected.keys()
        assert all(found[name].equal(expected[name]) for name in rows)


def test_rows_that_are_missing_or_of_another_size_are_refused() -> None:
    first, second = torch.zeros(2, 1), torch.zeros(2, 1)
    with pytest.raises(ValueError, match=r"rows 2 to 4 of w are in none of pieces \[0\]"):
        cut_anew({"w": 4}, {0: {"w": first}}, 2, Piece())
    with pytest.raises(ValueError, match="w has 3 rows in piece 1 of 2 instead of 2"):
        cut_anew({"w": 4}, {0: {"w": first}, 1: {"w": torch.zeros(3, 1)}}, 2, Piece())
    assert len(cut_anew({"w": 4}, {0: {"w": first}, 1: {"w": second}}, 2, Piece())["w"]) == 4


@pytest.mark.parametrize("of", [1, 2, 3])
def test_a_whole_state_is_cut_into_pieces_and_joined_again(of: int) -> None:
    def moments(*shape: int) -> dict[str, torch.Tensor]:
        return {"step": torch.tensor(3.0), "exp_avg": torch.randn(*shape)}

    state = {
        "step": 3,
        "model": {"w": torch.randn(4, 2), "b": torch.randn(1), "mean": torch.randn(2)},
        "optimizer": {"state": {0: moments(4, 2), 1: moments(1)}, "param_groups": [{"lr": 0.1}]},
        "ema": None,
        "unsaved": {"seen": torch.randn(2)},
    }
    before = tree_digest(state)
    common, piece = in_one_piece(state, ["model/w", "model/b", "model/of_another_model"])
    assert [*common["model"]] == ["mean"] and [*common["optimizer"]["state"][0]] == ["step"]
    shapes = {name: tuple(value.shape) for name, value in whole_shapes(piece).items()}
    assert shapes == {"w": (4, 2), "b": (1,)}
    pieces = {
        at: {
            **piece,
            "shards": cut_anew(piece["rows"], {0: piece["shards"]}, 1, Piece(at, of)),
        }
        for at in range(of)
    }
    again = joined(common, pieces, of)
    order = {name: again["model"][name] for name in state["model"]}  # type: ignore[attr-defined]
    assert tree_digest({name: {**again, "model": order}[name] for name in state}) == before
    assert tree_digest(state) == before


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("aabb", 2),
        ("aaabbbccc", 3),
        ("aaaa", 4),
        ("a", 1),
        ("ab", 2),  # a node with one rank has nothing to cut
        ("aab", 3),
        ("abb", 3),
        ("aabbbb", 6),
        ("abab", 4),
        ("aabbaa", 6),
    ],
)
def test_each_node_has_all_of_a_model_if_all_have_equally_many_ranks(
    nodes: str, expected: int
) -> None:
    assert group_size([*nodes]) == expected


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=9))
def test_an_heir_is_on_another_node(nodes: list[str]) -> None:
    found = heirs(nodes)
    if len(set(nodes)) == 1:
        assert found == [None] * len(nodes)
        return
    assert all(heir is not None and nodes[heir] != nodes[at] for at, heir in enumerate(found))
    if 2 * max(map(nodes.count, nodes)) <= len(nodes):
        assert len(set(found)) == len(nodes), "each rank is the heir of one"


def test_a_rank_needs_no_heir_if_its_piece_is_on_another_node() -> None:
    assert heirs(["a", "a", "b", "b"], 2) == [None] * 4
    assert heirs(["a", "b", "a", "b"], 2) == [1, 0, 3, 2]
    assert heirs(["a", "b", "a", "c"], 2) == [1, None, 3, None]


@given(st.data())
def test_moves_bring_to_each_node_what_its_ranks_need_once(data: st.DataObject) -> None:
    nodes = data.draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=6))
    on_node = {node: data.draw(st.sets(st.integers(0, 3))) for node in set(nodes)}
    on_node[nodes[0]] |= set(range(4)) - set().union(*on_node.values())
    held = [on_node[node] for node in nodes]
    needs = [data.draw(st.sets(st.integers(0, 3))) for _ in nodes]
    there = {node: set(numbers) for node, numbers in on_node.items()}
    for move in moves(held, needs, nodes):
        assert move.number in on_node[nodes[move.source]]
        assert move.number not in there[nodes[move.target]]
        there[nodes[move.target]].add(move.number)
    assert all(needs[at] <= there[node] for at, node in enumerate(nodes))


def test_a_rank_takes_what_its_node_has_and_holders_send_by_turns() -> None:
    held = [{0, 1}, {0, 1}, set(), set(), {2}]
    assert list(moves(held, [{0}, {1}, {0}, {1}, {2}], ["a", "a", "b", "c", "d"])) == [
        Move(0, 2, 0),
        Move(1, 3, 1),
    ]


# ---------------------------------------------------------------- histories


class Lost(Exception):
    pass


@dataclass
class Attempt:
    """A group of ranks that train. One rank, or one copy, moves at a time."""

    rng: random.Random
    nodes: list[str]
    number: int
    first: int
    mutation: str
    pieces: dict[str, set[Label]]
    """By node."""
    copied: set[tuple[int, int]] = field(default_factory=set)
    """Rank and step of what its heir's node has."""
    at_gate: dict[int, set[int]] = field(default_factory=dict)
    reported: int = -1

    def __post_init__(self) -> None:
        self.heirs = heirs(self.nodes)
        if self.mutation == "an heir on the same node":
            self.heirs = list(range(len(self.nodes)))
        self.steps = [self.first] * len(self.nodes)
        self.phases = ["publish"] * len(self.nodes)

    def label(self, rank: int, step: int) -> Label:
        return Label(1, self.number, step, rank, f"{step}", None, pieces=len(self.nodes))

    def turn(self) -> None:
        rank = self.rng.randrange(len(self.nodes))
        step, phase, heir = self.steps[rank], self.phases[rank], self.heirs[rank]
        own = self.label(rank, step)
        is_written = own in self.pieces[self.nodes[rank]]
        if self.rng.random() < 0.4 and is_written and heir is not None:
            self.copied.add((rank, step))
            self.pieces[self.nodes[heir]].add(own)
        elif phase == "publish":
            self.pieces[self.nodes[rank]].add(own)
            self.phases[rank] = "backward"
        elif phase == "backward":
            ready = [
                at > step or (at == step and self.phases[other] != "publish")
                for other, at in enumerate(self.steps)
            ]
            self.phases[rank] = "before the gate" if all(ready) else phase
        elif phase == "before the gate":
            wards = [at for at, heir in enumerate(self.heirs) if heir == rank]
            if self.mutation == "no wait" or all((at, step) in self.copied for at in wards):
                self.at_gate.setdefault(step, set()).add(rank)
                self.phases[rank] = "in the gate"
        elif len(self.at_gate[step]) == len(self.nodes):
            self.commit(rank, step)
            self.steps[rank], self.phases[rank] = step + 1, "publish"

    def commit(self, rank: int, step: int) -> None:
        newest = ((1, self.number), step + (self.mutation == "remove too early"))
        kept = self.pieces[self.nodes[rank]]
        kept -= {each for each in kept if (each.origin, each.step) < newest}
        self.reported = max(self.reported, step)


def history(seed: int, mutation: str = "") -> int:
    """Return how many steps were made again. Raises Lost if a reported step was lost, or more than
    one made again after a death."""
    rng = random.Random(seed)
    nodes = [name for name in "abcd"[: rng.randint(2, 4)] for _ in range(rng.randint(1, 3))]
    pieces: dict[str, set[Label]] = {node: set() for node in nodes}
    step, reported, again = 0, -1, 0
    for number in range(1, 5):
        attempt = Attempt(rng, nodes, number, step, mutation, pieces)
        for _ in range(rng.randint(0, 60 * len(nodes))):
            attempt.turn()
        done, reported = max(attempt.steps), max(reported, attempt.reported)
        # The pieces of a node that died before have new heirs once a rank has passed a gate.
        if number == 1 or attempt.reported >= 0:
            pieces.pop(victim := rng.choice(nodes))
            nodes = [node for node in nodes if node != victim]
        nodes = nodes + [f"n{number}"] * rng.randint(0 if len(set(nodes)) > 1 else 1, 2)
        pieces.setdefault(f"n{number}", set())
        labels = [(at, each) for at, node in enumerate(nodes) for each in pieces[node]]
        elected = elect([Candidate(at, each) for at, each in labels], 1)
        found = elected.candidate.label.step if elected.candidate is not None else 0
        if found < reported or done - found > 1:
            raise Lost(f"{seed}: {found} of {done} steps, {reported} reported")
        again, step = again + done - found, found
        for node in pieces:  # as an attempt does once it has restored
            pieces[node] = {each for each in pieces[node] if each.step <= step}
    return again


def test_no_reported_step_is_lost_in_any_history() -> None:
    assert sum(history(seed) for seed in range(500)) > 0


@pytest.mark.parametrize("mutation", ["remove too early", "no wait", "an heir on the same node"])
def test_histories_find_wrong_rules(mutation: str) -> None:
    num_found = 0
    for seed in range(300):
        try:
            history(seed, mutation)
        except Lost:
            num_found += 1
    assert num_found > 10
