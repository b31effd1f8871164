"""Write weights as a safetensors file, tensor by tensor, without joining all of it in memory.

Format: https://huggingface.co/docs/safetensors, "Format". The file has eight bytes with the length
of the header, the header as JSON, and the bytes of the tensors in sequence, all little-endian.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any

import torch

from train_fn.errors import BadTask

_DTYPES = {
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def require_safetensors(state: Mapping[str, Any]) -> None:
    """Raise BadTask for values that the format cannot hold, and name them. Otherwise the first save
    would fail."""
    odd = [
        name
        for name, value in state.items()
        if not isinstance(value, torch.Tensor) or value.dtype not in _DTYPES
    ]
    if odd:
        raise BadTask(
            f"checkpoint.safetensors is set, but the format does not hold {', '.join(odd[:5])} of "
            "the model; set it to false"
        )
    assert sys.byteorder == "little"


def write_safetensors(
    state: Mapping[str, torch.Tensor],
    file: IO[bytes],
    value_of: Callable[[str], torch.Tensor] | None = None,
) -> None:
    """Write a ``state_dict`` with tensors on the CPU. Tensors with the widest elements come first,
    so that all are aligned.

    Args:
        value_of: gives a tensor when it is to be written; ``state`` then says shapes and dtypes
            alone.
    """
    ordered = sorted(state.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"safetensors cannot hold {name}, which is {tensor.dtype}; read the .pt files with "
                "torch.load"
            )
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name, tensor in ordered:
        tensor = tensor if value_of is None else value_of(name)
        flat = tensor.detach().contiguous().reshape(-1)
        if flat.numel():
            file.write(flat.view(torch.uint8).numpy().data)
