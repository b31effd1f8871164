"""A state's file: every bit comes back, without a copy, and no damaged byte goes unnoticed."""

from __future__ import annotations

import fcntl
import gc
import io
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.restore_rounds import make_state
from tests.support.storage_places import quick_directory
from train_fn.errors import BadTask
from train_fn.snapshots import state_file
from train_fn.snapshots.state_file import read_state, state_digest, write_state
from train_fn.snapshots.store import Label, SnapshotStore
from train_fn.state.tensor_tree import digest, leaves, size_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of any layout, with any bytes."""
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    seed = draw(st.integers(0, 2**31))
    high = 2 if dtype is torch.bool else 256
    data = torch.randint(high, (num_bytes,), generator=torch.Generator().manual_seed(seed))
    flat = data.to(torch.uint8).view(dtype) if num_bytes else torch.empty(0, dtype=dtype)
    found = flat.view(shape)
    return found.t() if len(shape) == 2 and draw(st.booleans()) else found


PLAIN = st.one_of(st.none(), st.integers(), st.text(max_size=5), st.floats(allow_nan=False))
TREES = st.recursive(
    st.one_of(PLAIN, tensors()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


PLAIN_STATE = make_state().state_dict()


def state_of(tree: Any) -> dict[str, Any]:
    return {**PLAIN_STATE, "step": 7, "task": {"own": tree}, "unsaved": {}}


def assert_same(found: Any, expected: Any) -> None:
    pairs = list(zip(leaves(found), leaves(expected), strict=True))
    for (name, one), (other_name, other) in pairs:
        assert name == other_name
        if isinstance(other, torch.Tensor):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            flat, other_flat = (each.contiguous().reshape(-1) for each in (one, other))
            assert torch.equal(flat.view(torch.uint8), other_flat.view(torch.uint8))
        else:
            assert type(one) is type(other) and one == other


@settings(max_examples=25, deadline=None)
@given(tree=TREES, piece_bytes=st.sampled_from([64, 4 << 20]))
def test_every_bit_comes_back_and_the_digest_is_that_of_the_state(
    tree: Any, piece_bytes: int
) -> None:
    state = state_of(tree)
    with quick_directory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_file, "PIECE_BYTES", piece_bytes)
        patch.setattr(state_file, "_WORTH_A_THREAD", 50)
        path = Path(directory) / "state"
        assert write_state(path, state) == digest(state) == state_digest(state)
        found, read_digest = read_state(path)
    assert read_digest == digest(state)
    assert_same(found, state)


def test_a_sum_beyond_what_a_word_holds_wraps_as_that_of_one_piece_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of({"words": torch.full((1000,), 2**62 + 12345), "odd": torch.ones(3).bool()})
    monkeypatch.setattr(state_file, "PIECE_BYTES", 80)
    assert write_state(tmp_path / "state", state) == digest(state)


@pytest.mark.parametrize("odd_bytes", [1, 4, 7])
def test_a_tensor_that_ends_within_a_word_has_one_digest_in_any_order_of_its_pieces(
    tmp_path: Path, odd_bytes: int
) -> None:
    """The small last piece is summed at once, the large ones before it by threads, later."""
    size = state_file.PIECE_BYTES + odd_bytes
    state = state_of({"odd": torch.arange(size).to(torch.uint8) | 1})
    expected = digest(state)
    assert state_digest(state) == expected
    assert write_state(tmp_path / "state", state) == expected
    assert read_state(tmp_path / "state")[1] == expected


# ---------------------------------------------------------------- damage


def small_store(directory: Path) -> tuple[SnapshotStore, Label, Path]:
    store, state = SnapshotStore(directory, 1), state_of({"odd": torch.arange(13).to(torch.uint8)})
    store.write(Label(1, 1, 7, 0, None, None), state)
    [label] = store.labels()
    return store, label, store._state_path(label)


def test_no_damaged_byte_goes_unnoticed(tmp_path: Path) -> None:
    store, label, path = small_store(tmp_path)
    whole = path.read_bytes()
    size = len(whole)
    places = {*range(0, size, 97), *range(0, 80, 3), *range(size - 80, size)}
    for place in sorted(places):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"damaged|digest|bytes|state|size"):
            store.read(label)
    path.write_bytes(whole)
    assert store.read(label)["step"] == 7


def test_a_file_of_any_other_length_is_refused_and_kills_nobody(tmp_path: Path) -> None:
    """A mapping that is read beyond the end of its file would end the process with SIGBUS."""
    store, label, path = small_store(tmp_path)
    whole = path.read_bytes()
    for size in [*range(0, len(whole), 137), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"state|bytes"):
            store.read(label)
    path.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match="bytes"):
        store.read(label)


# ---------------------------------------------------------------- what a reader holds


def test_what_is_read_outlives_its_file_and_changes_nothing_there(tmp_path: Path) -> None:
    store, label, path = small_store(tmp_path)
    first, second = store.read(label), store.read(label)
    weight = next(iter(first["model"].values()))
    weight.add_(1)
    assert digest(second) == label.digest != digest(first)
    path.unlink()
    assert digest(second) == label.digest


def test_a_part_of_what_is_read_is_saved_without_the_rest(tmp_path: Path) -> None:
    """The last save writes weights and moments to files of their own."""
    state = {**state_of(None), "optimizer": {"large": torch.zeros(1 << 20)}}
    write_state(tmp_path / "state", state)
    found, _ = read_state(tmp_path / "state")
    torch.save(found["model"], saved := io.BytesIO())
    assert len(saved.getvalue()) < size_bytes(state["model"]) + 20_000


def test_a_value_that_could_not_be_loaded_again_is_named_before_anything_is_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(BadTask, match="task/own/history is a"):
        write_state(tmp_path / "state", state_of({"history": object()}))
    assert not (tmp_path / "state").exists()


def test_several_threads_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is done while another is in the middle: what torch may unpickle is known to both."""
    path, load = tmp_path / "state", torch.load
    write_state(path, state_of({}))

    def after_another(*args: Any, **named: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=read_state, args=(path,))
            other.start()
            other.join()
        return load(*args, **named)

    monkeypatch.setattr("torch.load", after_another)
    assert read_state(path)[0]["step"] == 7


# ---------------------------------------------------------------- files that are written over


def steps_published(store: SnapshotStore, *steps: int) -> list[int]:
    """Publish a state of each step as a publisher does, and return the inodes of the files."""
    inodes = []
    for step in steps:
        label = Label(1, 1, step, 0, None, None)
        store.make_room(label)
        store.write(label, {**state_of({"w": torch.full((1 << 18,), float(step))}), "step": step})
        inodes.append(store._state_path(label).stat().st_ino)
    return inodes


def test_a_state_is_written_over_the_file_of_one_that_nobody_reads(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 1)
    first, second = steps_published(store, 1, 2)
    assert steps_published(store, 3, 4, 5) == [first, second, first]
    assert [label.step for label in store.labels()] == [4, 5]
    for label in store.labels():
        assert (store.read(label)["task"]["own"]["w"] == label.step).all()
    assert len(list(tmp_path.glob("*.pt"))) == 2 and not list(tmp_path.glob("*.tmp"))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_file_that_somebody_reads_is_never_written_over(tmp_path: Path) -> None:
    """Neither while this process has it mapped, nor a child that was forked meanwhile."""
    store = SnapshotStore(tmp_path, 1)
    [inode] = steps_published(store, 1)
    held = store.read(store.labels()[0])["task"]["own"]["w"]
    may_end = os.pipe()
    if (child := os.fork()) == 0:
        os.read(may_end[0], 1)
        os._exit(0 if (held.numpy() == 1).all() else 1)
    steps_published(store, 2, 3, 4)
    assert (held == 1).all()
    del held
    gc.collect()
    assert inode not in steps_published(store, 5, 6), "the child still has it"
    os.write(may_end[1], b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for each in may_end:
        os.close(each)


def test_a_reader_that_comes_too_late_reads_no_other_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has opened the file when a writer takes it, and goes on in the middle or afterwards."""
    store = SnapshotStore(tmp_path, 1)
    steps_published(store, 1, 2)
    oldest = store.labels()[0]
    flock = fcntl.flock
    taken = []

    def after_a_writer(file: Any, how: int) -> None:
        if how & fcntl.LOCK_SH and not taken:
            taken.append(steps_published(store, 3))
        flock(file, how)

    monkeypatch.setattr(state_file.fcntl, "flock", after_a_writer)
    with pytest.raises(FileNotFoundError):
        store.read(oldest)
    newest = store.labels()[-1]
    with state_file.exclusively(store._state_path(newest)), pytest.raises(FileNotFoundError):
        store.read(newest)
    assert store.read(newest)["step"] == 3


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_that_is_forked_in_the_middle_of_a_write_locks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, may_end = SnapshotStore(tmp_path, 1), os.pipe()
    children: list[int] = []
    write_all = state_file.write_all

    def fork_once(file: Any, data: Any) -> None:
        if not children:
            children.append(os.fork())
            if not children[0]:
                os.read(may_end[0], 1)
                os._exit(0)
        write_all(file, data)

    monkeypatch.setattr(state_file, "write_all", fork_once)
    store.write(Label(1, 1, 7, 0, None, None), state_of({}))
    assert store.read(store.labels()[0])["step"] == 7
    os.write(may_end[1], b"x")
    os.waitpid(children[0], 0)
    for each in may_end:
        os.close(each)
