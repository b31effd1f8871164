"""Frozen parameters take over a restored state's memory where nothing can tell, and only there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from train_fn.session.session import may_stay
from train_fn.snapshots.state_file import read_state, write_state
from train_fn.snapshots.store import SnapshotStore
from train_fn.state import tensor_tree
from train_fn.state.tensor_tree import adopt, copy_to_cpu, owned
from train_fn.state.train_state import TrainState

LARGE = 1 << 19
"""Elements of a parameter that is worth it."""


def frozen(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape), requires_grad=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = frozen(2, LARGE)
        self.small = frozen(3)
        self.head = nn.Linear(1, LARGE)


def state_of(model: nn.Module) -> TrainState:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return TrainState(
        model,
        torch.optim.AdamW(trained),
        torch.amp.GradScaler("cpu"),
        None,
        steps_per_epoch=4,
        fingerprint="data",
    )


def anonymous_kib(path: Path) -> int:
    """What this process has copied of the pages of a mapped file."""
    found, in_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            in_file = str(path) in line
        elif in_file and line.startswith("Anonymous:"):
            found += int(line.split()[1])
    return found


def test_a_mapped_state_is_loaded_without_a_copy_of_what_is_frozen(tmp_path: Path) -> None:
    left = state_of(Model())
    with torch.no_grad():
        for parameter in left.model.parameters():
            parameter.normal_()
    write_state(path := tmp_path / "state", left.state_dict())
    found, _ = read_state(path)

    model = Model()
    body, head = model.body, model.head.weight
    state_of(model).load_state_dict(found, gives_memory=True)
    assert model.body is body and model.head.weight is head
    assert body.data_ptr() == found["model"]["body"].data_ptr()
    assert head.data_ptr() != found["model"]["head.weight"].data_ptr()
    assert anonymous_kib(path) == 0, "to load it wrote nothing into it"
    del found
    for name, value in left.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name

    before = path.read_bytes()
    with torch.no_grad():
        body.add_(1)
    assert path.read_bytes() == before, "other ranks have mapped it"
    assert anonymous_kib(path) > 0


def test_a_state_that_does_not_give_its_memory_is_copied() -> None:
    model, other = Model(), state_of(Model()).state_dict()
    state_of(model).load_state_dict(other)
    assert model.body.data_ptr() != other["model"]["body"].data_ptr()
    with torch.no_grad():
        model.body.add_(1)
    assert not other["model"]["body"].any()


def test_an_optimizer_takes_moments_over_that_have_memory_of_their_own(tmp_path: Path) -> None:
    """Not those of a mapped file, whose pages each step would copy, nor parts of larger memory."""
    large, part = torch.ones(LARGE), torch.ones(2, 3)
    state = {**state_of(Model()).state_dict(), "task": [large.clone()]}
    write_state(path := tmp_path / "state", state)
    mapped = read_state(path)[0]["task"][0]
    taken = owned({"own": large, "part": part[0], "mapped": mapped, "step": 3})
    assert taken["own"] is large and taken["step"] == 3
    assert torch.equal(taken["part"], part[0]) and torch.equal(taken["mapped"], mapped)
    memory = {part.data_ptr(), mapped.data_ptr()}
    assert not memory & {taken["part"].data_ptr(), taken["mapped"].data_ptr()}

    left = state_of(Model())
    left.model.head(torch.ones(1, left.model.head.in_features)).sum().backward()
    left.optimizer.step()
    found = copy_to_cpu(left.state_dict(packed=False))
    moments = {each.data_ptr() for each in found["optimizer"]["state"][0].values()}
    for gives_memory in (False, True):
        other = state_of(Model())
        other.load_state_dict(found, gives_memory=gives_memory)
        [own] = [other.optimizer.state[each] for each in other.model.head.parameters()][:1]
        assert bool({each.data_ptr() for each in own.values()} & moments) == gives_memory


class Holder(nn.Module):
    """A module with one frozen parameter, and whatever else refers to its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = frozen(LARGE)
        self.other: Any = None


def tie(holder: Holder) -> None:
    holder.twin = holder.weight


def tie_memory(holder: Holder) -> None:
    holder.twin = nn.Parameter(holder.weight.data, requires_grad=False)


def be_part_of_a_flat_buffer(holder: Holder) -> None:
    holder.other = torch.zeros(2 * LARGE)
    holder.weight = nn.Parameter(holder.other[:LARGE], requires_grad=False)


SHARING: list[Callable[[Holder], None]] = [
    tie,
    tie_memory,
    be_part_of_a_flat_buffer,
    lambda holder: setattr(holder, "other", holder.weight.data.view(2, -1)),
    lambda holder: setattr(holder, "other", holder.weight.detach().numpy()),
    lambda holder: setattr(holder, "other", holder.weight.untyped_storage()),
]


@pytest.mark.parametrize("share", SHARING, ids=range(len(SHARING)))
def test_what_shares_its_memory_goes_on_to_see_the_parameter(
    share: Callable[[Holder], None],
) -> None:
    holder = Holder()
    share(holder)
    value = torch.rand(LARGE)
    saved = dict.fromkeys(holder.state_dict(), value)
    adopt(holder, saved)
    holder.load_state_dict(saved)
    assert torch.equal(holder.weight, value)
    if isinstance(holder.other, torch.UntypedStorage):
        seen = torch.tensor([], dtype=torch.float32).set_(holder.other)  # type: ignore[call-overload]
    else:
        seen = torch.as_tensor(holder.other if holder.other is not None else holder.twin)
    assert torch.equal(seen.reshape(-1)[:LARGE], value)
    with torch.no_grad():
        holder.weight.fill_(7)
    assert (seen.reshape(-1)[:LARGE] == 7).all()


@st.composite
def parameters(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """The memory of a parameter, a value for it, and whether it is trained."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    own = torch.zeros(draw(st.sampled_from([(4, 6), (6, 4), (24,)])), dtype=dtype)
    kept = torch.rand(own.shape).to(draw(st.sampled_from([dtype, torch.float32])))
    if draw(st.booleans()):
        kept = torch.cat([kept.reshape(-1), kept.reshape(-1)])[: kept.numel()].view(kept.shape)
    if own.ndim == 2 and draw(st.booleans()):
        own = own.t().contiguous().t()
    return own, kept, draw(st.booleans())


@given(st.lists(parameters(), min_size=1, max_size=4))
def test_values_are_those_of_a_copy(found: list[tuple[torch.Tensor, torch.Tensor, bool]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_tree, "_WORTH_IT", 0)
        taking, copying = nn.Module(), nn.Module()
        for number, (own, _, trained) in enumerate(found):
            taking.register_parameter(f"w{number}", nn.Parameter(own.clone(), trained))
            copying.register_parameter(f"w{number}", nn.Parameter(own.clone(), trained))
        saved = {f"w{number}": kept for number, (_, kept, _) in enumerate(found)}
        copying.load_state_dict(saved)
        adopt(taking, saved)
        taking.load_state_dict(saved)
    for name, one in taking.named_parameters():
        other = copying.get_parameter(name)
        assert torch.equal(one, other)
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())


def test_a_file_may_only_stay_where_two_newer_states_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"model": {"weight": torch.zeros(LARGE)}}
    store = SnapshotStore(tmp_path, 1)
    monkeypatch.setattr("train_fn.session.session.snapshot_store", lambda ctx: store)
    free = 2 * 4 * LARGE + (4 << 20)
    monkeypatch.setattr(SnapshotStore, "free_bytes", lambda self: free)
    assert may_stay(None, state)  # type: ignore[arg-type]
    monkeypatch.setattr(SnapshotStore, "free_bytes", lambda self: free - 1)
    assert not may_stay(None, state)  # type: ignore[arg-type]
