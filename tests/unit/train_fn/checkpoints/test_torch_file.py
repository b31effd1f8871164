"""Files of torch with checksums of our own: the bytes that torch itself would write, in order for
everybody who opens them."""

from __future__ import annotations

import io
import threading
import zipfile
from typing import Any

import pytest
import torch

from train_fn.checkpoints import torch_file
from train_fn.checkpoints.torch_file import save, without_checksums

pytestmark = pytest.mark.own_process

SERIAL = ".data/serialization_id"
DESCRIPTOR_LIKE = torch.tensor([0x08074B50, 0, 0, 0], dtype=torch.int32)
"""Sixteen bytes that look like the descriptor of a record of no bytes."""
HEADER_LIKE = torch.tensor([*b"PK\x03\x04", *range(26)], dtype=torch.uint8)
"""Thirty bytes that look like the header of a record."""

CONTENTS = {
    "state": {
        "weight": torch.randn(300, 70),
        "moments": [torch.randn(5), torch.ones(2, 2)],
        "step": 7,
        "name": "x" * 1000,
    },
    "sizes": {
        str(size): torch.ones(size, dtype=torch.uint8)
        for size in (0, 1, 15, 16, 17, 24, 30, 63, 64, 65)
    },
    "shared": (lambda base: {"first": base[:50], "second": base[50:]})(torch.arange(100)),
    "dtypes": {
        str(dtype): torch.ones(3, dtype=dtype)
        for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.int64)
    },
    "nothing": {},
}


def saved_by(write: Any, content: Any) -> bytes:
    file = io.BytesIO()
    write(content, file)
    return file.getvalue()


def records(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        # read() compares checksums
        return {info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()}


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


def test_a_torch_that_writes_otherwise_takes_its_own_checksums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch_file._layout_is_known.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch_file, "_DESCRIPTOR", b"PK\x07\x09")
        data = saved_by(save, CONTENTS["state"])
    assert data == saved_by(torch.save, CONTENTS["state"])
    torch_file._layout_is_known.cache_clear()


def test_other_threads_keep_their_checksums() -> None:
    """A user's own torch.save beside ours is what it always was."""
    found: list[bytes] = []
    with without_checksums():
        other = threading.Thread(
            target=lambda: found.append(saved_by(torch.save, CONTENTS["sizes"]))
        )
        other.start()
        other.join()
    assert found == [saved_by(torch.save, CONTENTS["sizes"])]
    assert records(found[0])
