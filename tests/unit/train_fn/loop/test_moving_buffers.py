"""What a rank's replica makes of tensors that move late, unnoticed, in evaluations, or into another
shape."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from train_fn.errors import BadTask
from train_fn.step.buffers import MovingBuffers
from train_fn.step.peers import Peers
from train_fn.step.untrained import (
    TensorPlace,
    WarmUp,
    keep,
    rules_of,
    untrained_places,
    with_their_like,
)

ALONE = Peers(0, 1, torch.device("cpu"))


class Bag(nn.Module):
    """Two buffers, a frozen parameter, a trained one, and a buffer that is a view of that."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.arange(4.0))
        self.register_buffer("two", torch.ones(3))
        self.register_buffer("loose", torch.ones(2), persistent=False)
        self.frozen = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)
        self.trained = nn.Parameter(torch.ones(5))
        self.register_buffer("tied", self.trained.data)


def buffers_of(model: Bag, *names: str) -> tuple[MovingBuffers, list[TensorPlace]]:
    places = untrained_places(model, [model.trained])
    moving = [number for number, place in enumerate(places) if place.name in names]
    return MovingBuffers(places, moving, (), ALONE, lambda moving: None), places


def test_untrained_tensors_are_visited_once_and_none_that_shares_memory_with_trained_ones() -> None:
    model = Bag()
    model.other = nn.Module()
    model.other.register_buffer("one", model.one)
    assert [place.name for place in untrained_places(model, [model.trained])] == [
        "one",
        "two",
        "loose",
        "frozen",
    ]


@pytest.mark.parametrize("how", ["in place", "another tensor", "data"])
def test_what_moves_late_is_refused_and_put_back_by_whichever_way_it_moved(how: str) -> None:
    model = Bag()
    buffers, _ = buffers_of(model, "two")
    buffers.begin(10, 2)
    buffers.passed(5)
    buffers.rewind()
    match how:
        case "in place":
            model.one.add_(1)
        case "another tensor":
            model.one = model.one + 1
        case "data":
            model.one.data = model.one + 1
    model.two += 7
    places = "build_model.*every forward pass.*after_step or on_epoch_end"
    with pytest.raises(BadTask, match=f"changed one, which the first batch.*{places}"):
        buffers.passed(5)
    assert buffers.put_back() == []
    assert (model.one.tolist(), model.two.tolist()) == ([0.0, 1.0, 2.0, 3.0], [1.0] * 3)


def test_a_write_that_changes_nothing_is_no_change() -> None:
    model = Bag()
    buffers, _ = buffers_of(model, "two")
    buffers.begin(5, 1)
    for _ in range(2):
        model.one.copy_(torch.arange(4.0))
        model.frozen.data = model.frozen.data.clone()
        buffers.passed(5)
    assert buffers.put_back() == []


def test_a_large_one_that_the_first_pass_only_wrote_is_followed() -> None:
    model = Bag()
    places = untrained_places(model, [model.trained])
    warm_up = WarmUp(model, places, is_fresh=True)
    model.one.copy_(torch.arange(4.0))
    assert [places[number].name for number in warm_up.look()[0]] == ["one"]


def test_blocks_that_the_first_batch_leaves_out_and_frozen_statistics_are_followed() -> None:
    model = nn.ModuleList([Bag(), Bag(), nn.BatchNorm1d(2).eval(), nn.BatchNorm1d(2).double()])
    trained = [each for each in model.parameters() if each.requires_grad]
    places = untrained_places(model, trained)
    moving = {at for at, place in enumerate(places) if place.name in ("0.one", "0.frozen")}
    followed = sorted(places[number].name for number in with_their_like(places, moving))
    statistics = ("num_batches_tracked", "running_mean", "running_var")
    assert followed == ["0.frozen", "0.one", "1.one", *(f"2.{each}" for each in statistics)]


def test_a_write_in_place_through_data_that_nobody_noticed_makes_the_state_torn() -> None:
    model = Bag()
    buffers, _ = buffers_of(model, "two")
    buffers.begin(5, 1)
    model.frozen.data.mul_(0.5)
    buffers.passed(5)
    assert buffers.put_back() == ["frozen"]


def test_a_write_that_nobody_noticed_is_refused_before_an_evaluation() -> None:
    model = Bag()
    buffers, _ = buffers_of(model, "two")
    buffers.require_unchanged()
    model.frozen.data.mul_(0.5)
    with pytest.raises(BadTask, match=r"frozen changed through \.data.*after_step or on_epoch_end"):
        buffers.require_unchanged()


def test_an_evaluation_leaves_no_trace() -> None:
    model = Bag()
    buffers, _ = buffers_of(model, "two")
    with buffers.kept():
        for _ in range(2):
            buffers.rewind()
            assert model.two.tolist() == [1.0] * 3
            model.two += 1
    model.one.add_(1)  # what was not known to move
    model.frozen.data.mul_(0.5)
    buffers.undo_evaluation()
    assert (model.one.tolist(), model.two.tolist()) == ([0.0, 1.0, 2.0, 3.0], [1.0] * 3)
    assert model.frozen.tolist() == [2.0] * 4


def test_what_the_optimizers_hooks_move_between_two_steps_is_no_change_of_the_next_one() -> None:
    model = Bag()
    buffers, _ = buffers_of(model, "two")
    buffers.begin(5, 1)
    buffers.passed(5)
    buffers.adopt()
    model.one.add_(1)
    buffers.begin(5, 1)
    buffers.passed(5)
    model.one.add_(1)
    assert buffers.put_back() == []
    assert model.one.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_buffer_of_the_state_that_takes_another_shape_is_refused_by_name_and_put_back() -> None:
    model = Bag()
    buffers, _ = buffers_of(model, "two")
    for name in ("one", "two"):
        buffers.begin(5, 1)
        setattr(model, name, torch.ones(9))
        with pytest.raises(
            BadTask,
            match=(
                rf"{name}, a torch.float32 of shape \({3 if name == 'two' else 4},\), by "
                r".*\(9,\)"
            ),
        ):
            buffers.passed(5)
            buffers.adopt()
        assert buffers.put_back() == []
        assert len(getattr(model, name)) != 9
    buffers.begin(5, 1)
    model.loose = torch.ones(9)  # follows from the batch
    buffers.passed(5)
    buffers.adopt()


def test_a_first_pass_that_gives_a_buffer_its_shape_is_refused_by_name() -> None:
    model = Bag()
    model.register_buffer("cache", None)
    warm_up = WarmUp(model, untrained_places(model, [model.trained]), is_fresh=True)
    model.cache = torch.ones(2)
    with pytest.raises(BadTask, match=r"replaced cache, None, by a torch\.float32"):
        warm_up.look()


@pytest.mark.parametrize("is_fresh", [True, False])
def test_a_first_pass_is_found_out_and_undone_whatever_it_wrote(is_fresh: bool) -> None:
    model = Bag()
    places = untrained_places(model, [model.trained])
    before = [place.tensor.clone() for place in places]  # type: ignore[union-attr]
    warm_up = WarmUp(model, places, is_fresh=is_fresh)
    model.frozen.data.mul_(0.5)
    model.one = model.one.clone()
    model.loose = torch.ones(9)
    moving, ignored = warm_up.look()
    assert (
        [places[number].name for number in moving],
        [places[number].name for number in ignored],
    ) == (
        ["one", "frozen"],
        ["loose"],
    )
    warm_up.put_back()
    assert [place.tensor.tolist() for place in places] == [tensor.tolist() for tensor in before]  # type: ignore[union-attr]


def test_an_unsaved_buffer_that_is_made_anew_with_the_same_contents_is_left_alone() -> None:
    model = Bag()
    places = untrained_places(model, [model.trained])
    warm_up = WarmUp(model, places, is_fresh=True)
    model.loose, model.one = model.loose.clone(), model.one.clone()
    moving, ignored = warm_up.look()
    assert (
        [places[number].name for number in moving],
        [places[number].name for number in ignored],
    ) == (["one"], ["loose"])
    buffers = MovingBuffers(places, moving, ignored, ALONE, lambda moving: None)
    buffers.begin(5, 1)
    model.loose = model.loose.clone()
    buffers.passed(5)


def test_of_what_is_large_a_sample_is_kept() -> None:
    large = torch.zeros(1000)
    small, sampled = keep([torch.zeros(4), large], limit_bytes=4000)
    assert (small.copy is None, sampled.copy is None) == (False, True)
    assert not sampled.differs(large)
    large += 1
    assert sampled.differs(large)


def test_what_a_step_commits_by_kind_and_by_what_else_the_module_moves() -> None:
    model = nn.ModuleDict(
        {"norm": nn.BatchNorm1d(2), "bag": Bag(), "queue": nn.Module(), "own": nn.Module()}
    )
    model["queue"].register_buffer("rows", torch.zeros(3))
    model["queue"].register_buffer("pointer", torch.zeros((), dtype=torch.long))
    model["own"].register_buffer("rows", torch.zeros(3))
    model["own"].register_buffer("count", torch.zeros((), dtype=torch.long))
    model["own"].buffers_take = "mean"
    places = [
        place
        for place in untrained_places(model, [model["bag"].trained])
        if place.key not in ("weight", "bias")
    ]
    assert dict(zip([place.name for place in places], rules_of(places), strict=True)) == {
        **dict.fromkeys(
            ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"), "mean"
        ),
        **dict.fromkeys(("bag.one", "bag.two", "bag.loose"), "mean"),
        "bag.frozen": "first",
        **dict.fromkeys(("queue.rows", "queue.pointer"), "first"),
        **{"own.rows": "mean", "own.count": "first"},
    }
    model["own"].buffers_take = "sum"
    with pytest.raises(BadTask, match="buffers_take of Module is 'sum'"):
        rules_of(places)
