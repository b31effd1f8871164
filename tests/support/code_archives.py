"""Archives of code for tests, good and bad."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile

TASK = """
import torch
from torch import nn
from torch.nn import functional as F


class Points(torch.utils.data.Dataset):
    def __init__(self, length=40):
        self.x = torch.linspace(-1, 1, length)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index : index + 1], self.x[index : index + 1] * 2


class Line:
    def __init__(self, length=40):
        self.length = length

    def build_model(self):
        return nn.Linear(1, 1)

    def build_datasets(self):
        return {"train": Points(self.length), "val": Points(8)}

    def loss(self, model, batch):
        x, y = batch
        return F.mse_loss(model(x), y, reduction="sum"), len(x)
"""
"""A task as a user writes it."""


def tar_gz(files: dict[str, str | bytes], *extra: tarfile.TarInfo) -> bytes:
    """Return an archive of these files; the same bytes at any time."""
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w") as tar,
    ):
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for info in extra:
            tar.addfile(info)
    return buffer.getvalue()


def zip_of(files: dict[str, str | bytes]) -> bytes:
    """Return an archive of these files; the same bytes at any time."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)  # of 1980; a name alone would get the present time
            info.external_attr = 0o600 << 16
            archive.writestr(info, content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def tar_entry(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info
