"""Files of torch with checksums of our own: the bytes that torch itself would write, in order for everybody who opens them."""

from __future__ import annotations

import io
import threading
import zipfile
from typing import Any

import pytest
import torch

from train_fn import torch_file
from train_fn.torch_file import FormFile, save, without_checksums

pytestmark = pytest.mark.own_process

SERIAL = ".data/serialization_id"
DESCRIPTOR_LIKE = torch.tensor([0x08074B50, 0, 0, 0], dtype=torch.int32)
"""Sixteen bytes that look like the descriptor of a record of no bytes."""
HEADER_LIKE = torch.tensor([*b"PK\x03\x04", *range(26)], dtype=torch.uint8)
"""Thirty bytes that look like the header of a record."""

CONTENTS = {
    "state": {"weight": torch.randn(300, 70), "moments": [torch.randn(5), torch.ones(2, 2)], "step": 7, "name": "x" * 1000},
    "sizes": {str(size): torch.ones(size, dtype=torch.uint8) for size in (0, 1, 15, 16, 17, 24, 30, 63, 64, 65)},
    "shared": (lambda base: {"first": base[:50], "second": base[50:]})(torch.arange(100)),
    "dtypes": {str(dtype): torch.ones(3, dtype=dtype) for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.int64)},
    "nothing": {},
}


def saved_by(write: Any, content: Any) -> bytes:
    file = io.BytesIO()
    write(content, file)
    return file.getvalue()


def records(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()}  # read() compares checksums


@pytest.mark.parametrize("name", CONTENTS)
def test_a_file_is_what_torch_would_have_written(name: str) -> None:
    assert torch_file._layout_is_known()
    ours, theirs = saved_by(save, CONTENTS[name]), saved_by(torch.save, CONTENTS[name])
    found, wanted = records(ours), records(theirs)
    assert len(ours) == len(theirs) and list(found) == list(wanted)
    assert {record for record in found if found[record] != wanted[record]} <= {SERIAL}
    loaded = torch.load(io.BytesIO(ours), weights_only=True)
    assert repr(loaded) == repr(CONTENTS[name])


def test_bytes_that_look_like_a_record_s_end_still_load() -> None:
    data = saved_by(save, {"a": DESCRIPTOR_LIKE, "b": HEADER_LIKE, "c": torch.ones(7)})
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert (
        torch.equal(loaded["a"], DESCRIPTOR_LIKE)
        and torch.equal(loaded["b"], HEADER_LIKE)
        and torch.equal(loaded["c"], torch.ones(7))
    )


def test_a_torch_that_writes_otherwise_takes_its_own_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_file._layout_is_known.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch_file, "_DESCRIPTOR", b"PK\x07\x09")
        data = saved_by(save, CONTENTS["state"])
    assert data == saved_by(torch.save, CONTENTS["state"])
    torch_file._layout_is_known.cache_clear()


def state_dict() -> dict[str, torch.Tensor]:
    """Of many shapes and kinds, two of them of equal values."""
    tensors = {
        f"kind.{dtype}": torch.ones(3, 2, dtype=dtype) for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.int64)
    }
    equal = {"same.first": torch.zeros(7), "same.second": torch.zeros(7)}
    return {"weight": torch.randn(300, 70), "scalar": torch.tensor(3.5), "nothing": torch.zeros(0, 4), **tensors, **equal}


def change(tensors: dict[str, torch.Tensor]) -> None:
    """Other values in the same tensors."""
    for tensor in tensors.values():
        tensor.copy_(torch.randn(tensor.shape).to(tensor.dtype) if tensor.dtype != torch.bool else torch.rand(tensor.shape) < 0.5)


def assert_as_torch_writes(data: bytes, content: Any) -> None:
    found, wanted = records(data), records(saved_by(torch.save, content))
    assert list(found) == list(wanted) and {name for name in found if found[name] != wanted[name]} <= {SERIAL}


def test_a_form_is_filled_with_what_the_tensors_hold_now(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, form = state_dict(), FormFile()
    assert_as_torch_writes(saved_by(form.save, tensors), tensors)
    by_torch: list[Any] = []
    monkeypatch.setattr(torch_file, "save", lambda *args: by_torch.append(args))
    for _ in range(3):
        change(tensors)
        assert_as_torch_writes(saved_by(form.save, dict(tensors)), tensors)
    assert not by_torch, "torch wrote the first file alone"


def with_another_name(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {("mass" if name == "weight" else name): tensor for name, tensor in tensors.items()}


def with_another_tensor(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**tensors, "weight": torch.randn(300, 70)}


def in_another_order(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(reversed(tensors.items()))


def without_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != "scalar"}


def with_a_number(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {**tensors, "scalar": 3.5}


@pytest.mark.parametrize("other", [with_another_name, with_another_tensor, in_another_order, without_one, with_a_number])
def test_a_form_is_not_used_for_anything_else(other: Any) -> None:
    tensors, form = state_dict(), FormFile()
    saved_by(form.save, tensors)
    content = other(tensors)
    for _ in range(2):
        assert_as_torch_writes(saved_by(form.save, content), content)
        change(tensors)


UNSUITED: dict[str, Any] = {
    **{name: CONTENTS[name] for name in ("state", "shared", "nothing")},
    "numbers": {1: torch.ones(3)},
    "part": {"a": torch.arange(6.0)[:3]},
    "turned": {"a": torch.randn(4, 3).t()},
    "same": (lambda tensor: {"a": tensor, "b": tensor})(torch.ones(3)),
    "wants grad": {"a": torch.ones(3, requires_grad=True)},
    "parameter": {"a": torch.nn.Parameter(torch.ones(3))},
    "list": [torch.ones(3)],
}


@pytest.mark.parametrize("name", UNSUITED)
def test_what_suits_no_form_is_written_as_ever(name: str) -> None:
    form = FormFile()
    for _ in range(2):
        assert_as_torch_writes(saved_by(form.save, UNSUITED[name]), UNSUITED[name])
        assert form._form is None


def test_no_form_is_kept_of_large_files(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = state_dict()
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    for limit, kept in ((num_bytes, True), (num_bytes - 1, False)):
        monkeypatch.setattr(torch_file, "FORM_BYTES", limit)
        form = FormFile()
        saved_by(form.save, tensors)
        assert (form._form is not None) is kept


def test_a_form_that_would_put_values_in_wrong_places_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a torch that numbers its records otherwise, or writes checksums elsewhere."""
    places = torch_file._records

    def exchanged(data: bytes) -> dict[str, tuple[int, int, int]]:
        found = places(data)
        numbers = {tensor: number for number, tensor in enumerate(state_dict())}
        first, second = f"data/{numbers['same.first']}", f"data/{numbers['same.second']}"
        return {**found, first: found[second], second: found[first]}

    def exchanged_entries(data: bytes) -> dict[str, tuple[int, int, int]]:
        found, other = places(data), exchanged(data)
        return {name: (begin, size_bytes, other[name][2]) for name, (begin, size_bytes, _) in found.items()}

    for otherwise in (exchanged, exchanged_entries):
        monkeypatch.setattr(torch_file, "_records", otherwise)
        tensors, form = state_dict(), FormFile()
        for _ in range(2):
            assert_as_torch_writes(saved_by(form.save, tensors), tensors)
            assert form._form is None
            change(tensors)


def test_making_a_form_leaves_torch_s_random_numbers_alone() -> None:
    torch.manual_seed(5)
    wanted = torch.randn(4)
    tensors = state_dict()
    torch.manual_seed(5)
    saved_by(FormFile().save, tensors)
    assert torch.equal(torch.randn(4), wanted)


def test_other_threads_keep_their_checksums() -> None:
    """A user's own torch.save beside ours is what it always was."""
    found: list[bytes] = []
    with without_checksums():
        other = threading.Thread(target=lambda: found.append(saved_by(torch.save, CONTENTS["sizes"])))
        other.start()
        other.join()
    assert found == [saved_by(torch.save, CONTENTS["sizes"])]
    assert records(found[0])
