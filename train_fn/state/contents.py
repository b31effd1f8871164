"""Sketch a few samples of the data and the weights of the model, to compare ranks and attempts.

A sketch is exact for labels, tokens, text and shapes. Pixels and other large or computed numbers
are reduced to means of their parts: nodes with other CPUs or decoders differ in the last bits, and
this does not mean that the data differs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from train_fn.errors import BadTask, DataChanged, few
from train_fn.samples.loader import left_as_built
from train_fn.samples.sampler import seed_sample
from train_fn.step.fingerprints import word_sum
from train_fn.tasks.protocol import is_iterable

NUM_SAMPLES = 8
"""Number of samples that are read from each data set."""
READ_S = 2.0
"""Time limit for reading them, in seconds. The first sample of each set is always read."""

DRAW_ALIKE = (
    "draw from Python's, numpy's or torch's global generators, which Everstep seeds by "
    "train.seed, or from one with a fixed seed, "
    "and sort what a directory or a set lists"
)
"""Advice for errors where ranks or attempts build different things."""

Sketch = list[Any]
"""[digest of the exact parts, [[tolerance, scale, numbers …] …]]. These are plain values, since the
training state holds them."""

_SET_NAMES = {"train": "train", "val": "validation"}
_EXACT_DEPTH = 6
_MOST_ITEMS = 1000
_MOST_NUMBERS = 1 << 16
"""Limit on the numbers that are read from one tensor, evenly spaced over it."""
_FEW_NUMBERS = 64
"""A tensor of at most this many is compared number by number, a larger one by means of parts."""
_NUM_PARTS = 8
_PART_TOLERANCE = 2e-3
_TOLERANCES = {2: 1e-2, 4: 1e-5, 8: 1e-9}
"""Relative tolerance by the size of a number in bytes."""


class Contents:
    """Hold sketches of a few samples of a task's data sets, by name (``train sample 17``,
    ``validation sample 3``)."""

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        """Sketch the data sets. Samples of iterable sets, and of sets with a ``fetch`` method
        (Everstep's own, whose contents are known), are not read."""
        self._sources: dict[str, tuple[Any, int]] = {}
        self.sketches: dict[str, Sketch] = {}
        for key, word in _SET_NAMES.items():
            dataset = datasets.get(key)
            if dataset is None or is_iterable(dataset):
                continue
            self.sketches[f"{word} set"] = sketch([type(dataset).__qualname__, len(dataset)])
            if not hasattr(dataset, "fetch"):
                self._sources |= {
                    f"{word} sample {index}": (dataset, index) for index in spread(len(dataset))
                }
        with self._left_as_built():
            self._read()

    def differing(self, other: Mapping[str, Sketch]) -> list[str]:
        """Return the names that are in both but have different sketches."""
        return [
            name
            for name, mine in self.sketches.items()
            if name in other and not alike(mine, other[name])
        ]

    def unstable(self, names: Iterable[str]) -> list[str]:
        """Return those samples that differ when this process reads them again. They draw from
        random generators of their own."""
        with self._left_as_built():
            return [name for name in names if not self._reads_alike(name)]

    def _reads_alike(self, name: str) -> bool:
        if name not in self._sources:
            return alike(self.sketches[name], self.sketches[name])
        again = self._sketch_of(*self._sources[name])
        return again is not None and alike(again, self.sketches[name])

    def firsts(self) -> list[str]:
        """Return the name of the first sample of each data set that was read."""
        return [
            names[0]
            for word in _SET_NAMES.values()
            if (names := [name for name in self.sketches if name.startswith(f"{word} sample ")])
        ]

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self.sketches.pop(name, None)

    def dump(self) -> str:
        """Return all sketches as JSON, for the training state."""
        return json.dumps(self.sketches)

    def _left_as_built(self) -> AbstractContextManager[None]:
        return left_as_built(dataset for dataset, _ in self._sources.values())

    def _read(self) -> None:
        deadline, begun = time.monotonic() + READ_S, set[int]()
        for name, (dataset, index) in self._sources.items():
            if time.monotonic() > deadline and id(dataset) in begun:
                continue
            begun.add(id(dataset))
            found = self._sketch_of(dataset, index)
            if found is not None:
                self.sketches[name] = found

    def _sketch_of(self, dataset: Any, index: int) -> Sketch | None:
        """Return the sketch of one sample; None if it cannot be read. Training or evaluation raises
        the error when it needs the sample."""
        # A fixed seed, not the run's: a run with another seed may read the state.
        seed_sample(0, 0, index)
        try:
            return sketch(dataset[index])
        except (Exception, SystemExit):
            return None


def spread(length: int) -> list[int]:
    """Return a few indices: the first, the last, and one from each equal part between them. They
    depend only on the length."""
    if length <= NUM_SAMPLES:
        return list(range(length))
    drawn = np.random.default_rng(length)
    bounds = np.linspace(1, length - 1, NUM_SAMPLES - 1).astype(int)
    between = [int(drawn.integers(low, max(low + 1, high))) for low, high in pairwise(bounds)]
    return sorted({0, *between, length - 1})


def sketch_weights(model: nn.Module, *, all_of_it: bool) -> dict[str, Sketch]:
    """Return sketches of a model's parameters and buffers by name. Without ``all_of_it``, include
    only those that are not in its ``state_dict``."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    held = set() if all_of_it else model.state_dict().keys()
    return {name: sketch(tensor) for name, tensor in tensors.items() if name not in held}


def sketch(value: Any) -> Sketch:
    """Return a short description of the contents of ``value``."""
    exact, numbers = hashlib.sha256(), list[list[float]]()
    _walk(value, exact, numbers, 0)
    return [exact.hexdigest()[:16], numbers]


def alike(one: Sketch, other: Sketch) -> bool:
    """Return whether two sketches are equal within their tolerances."""
    if one[0] != other[0] or len(one[1]) != len(other[1]):
        return False
    return all(map(_close, one[1], other[1]))


def _close(one: list[float], other: list[float]) -> bool:
    tolerance, scale = one[0], max(one[1], other[1])
    pairs = zip(one[2:], other[2:], strict=True)
    return len(one) == len(other) and all(abs(a - b) <= tolerance * scale for a, b in pairs)


def _walk(value: Any, exact: Any, numbers: list[list[float]], depth: int) -> None:
    """Add every leaf of ``value`` to ``exact`` if it is bitwise equal on all nodes, else to
    ``numbers``."""
    exact.update(f"({type(value).__qualname__}".encode())
    if depth > _EXACT_DEPTH or value is None:
        return
    if isinstance(value, torch.Tensor):
        _enter_tensor(value, exact, numbers)
    elif isinstance(value, float | complex | np.ndarray | np.generic):
        _enter_array(np.asarray(value), exact, numbers, depth)
    elif isinstance(value, str | PurePath):
        text = str(value)  # only a file's name: its directory may differ by node
        exact.update(
            (PurePath(text).name if text.startswith("/") else text).encode(errors="surrogatepass")
        )
    elif isinstance(value, bytes | bytearray | int):
        exact.update(bytes(value) if not isinstance(value, int) else str(value).encode())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            exact.update(f"{key}=".encode(errors="surrogatepass"))
            _walk(value[key], exact, numbers, depth + 1)
    elif isinstance(value, list | tuple):
        exact.update(str(len(value)).encode())
        for item in value[:_MOST_ITEMS]:
            _walk(item, exact, numbers, depth + 1)
    elif isinstance(value, set | frozenset):
        exact.update(repr(sorted(map(str, value))).encode(errors="surrogatepass"))
    elif hasattr(value, "__array_interface__"):  # PIL's images
        _enter_array(np.asarray(value), exact, numbers, depth)
    elif dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        _walk(dict(vars(value)) if hasattr(value, "__dict__") else None, exact, numbers, depth + 1)


def _enter_tensor(tensor: torch.Tensor, exact: Any, numbers: list[list[float]]) -> None:
    if is_lazy(tensor):  # the first forward pass sets its shape
        return
    exact.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return
    flat = tensor.detach().reshape(-1)
    flat = flat[_thinned(flat.numel())] if flat.numel() > _MOST_NUMBERS else flat
    if flat.dtype.is_floating_point and flat.dtype.itemsize <= 2:  # numpy has no bfloat16
        _enter_numbers(flat.float().cpu().numpy(), 2, exact, numbers)
    else:
        _enter_flat(flat.resolve_conj().cpu().numpy(), exact, numbers)


def _enter_array(array: Any, exact: Any, numbers: list[list[float]], depth: int) -> None:
    exact.update(f"{array.dtype} {array.shape}".encode())
    if array.dtype.kind in "OV":
        for item in array.reshape(-1)[:_MOST_ITEMS].tolist():
            _walk(item, exact, numbers, depth + 1)
        return
    flat = array.reshape(-1)
    _enter_flat(flat[_thinned(flat.size)] if flat.size > _MOST_NUMBERS else flat, exact, numbers)


def _enter_flat(flat: Any, exact: Any, numbers: list[list[float]]) -> None:
    if flat.dtype.kind == "c":
        flat = np.stack([flat.real, flat.imag], axis=1).reshape(-1)
    computed = flat.dtype.kind == "f"
    # pixels, sound
    coarse = flat.dtype.kind in "iub" and flat.dtype.itemsize <= 2 and flat.size > _FEW_NUMBERS
    if computed or coarse:
        _enter_numbers(flat, flat.dtype.itemsize, exact, numbers)
    else:
        exact.update(np.ascontiguousarray(flat).tobytes())


def _enter_numbers(flat: Any, itemsize: int, exact: Any, numbers: list[list[float]]) -> None:
    values = flat.astype(np.float64)
    finite = np.isfinite(values)
    if not finite.all():
        exact.update(np.packbits(finite).tobytes())
        values = np.where(finite, values, 0.0)
    scale = float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0
    if values.size > _FEW_NUMBERS:
        means = [float(part.mean()) for part in np.array_split(values, _NUM_PARTS)]
        numbers.append([_PART_TOLERANCE, scale, *means])
    else:
        numbers.append([_TOLERANCES.get(itemsize, 1e-9), scale, *values.tolist()])


def _thinned(size: int) -> Any:
    return np.linspace(0, size - 1, _MOST_NUMBERS).astype(np.int64)


# ---------------------------------------------------------------- same data

# Refuse to resume a state on other training data than it was trained on.


def require_same_data(
    state: Mapping[str, Any],
    data_name: str,
    *,
    fingerprint: str,
    steps_per_epoch: int,
    contents: Contents | None,
) -> None:
    """Raise DataChanged if a saved state was trained on data with another fingerprint, length or
    samples.

    Args:
        state: The saved state.
        data_name: Name of the data in errors.
        fingerprint: Of the data that are there now, as their number of steps and their contents.
        contents: Sketches of a few samples; None if they are not compared.
    """
    if state["fingerprint"] != fingerprint:
        raise DataChanged(
            f"{data_name} changed since step {state['step']}: "
            f"it was {state['fingerprint']}, now it is {fingerprint}. "
            "Put the data back as it was, or start a new run"
        )
    if divmod(state["step"], steps_per_epoch) != (state["epoch"], state["k"]):
        raise DataChanged(
            f"{data_name} has another length since step {state['step']}, though it calls "
            f"itself {fingerprint} as "
            "before. Put the data back as it was, or start a new run"
        )
    if contents is not None and state.get("contents"):
        require_same_contents(state["contents"], state["step"], data_name, contents)


def require_same_contents(saved: str, step: int, data_name: str, contents: Contents) -> None:
    """Raise DataChanged if samples have changed since they were saved at this step. States of older
    versions hold no samples to compare."""
    changed = contents.differing(json.loads(saved))
    unstable = contents.unstable(changed)
    contents.forget(unstable)
    changed = [name for name in changed if name not in unstable]
    if changed:
        raise DataChanged(
            f"{data_name} changed since step {step}: not the same: "
            f"{few(changed)}. Put the data back as it was, "
            "or start a new run. If nothing was changed, each process builds other data: "
            f"{DRAW_ALIKE}"
        )


# ---------------------------------------------------------------- frozen part

# The frozen parameters of a model, which a run's states may leave out: the task builds them anew
# in every attempt.

_WAY_OUT = "Set checkpoint.parameters to all, or keep what changes in a buffer"


class FrozenPart:
    """Know the names and the contents of the parameters that are not trained, by their names in the
    model's ``state_dict``."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {
            name: value
            for name, value in model.named_parameters(remove_duplicate=False)
            if not value.requires_grad and not is_lazy(value)
        }
        trained = {
            value.untyped_storage().data_ptr()
            for value in model.parameters()
            if value.requires_grad and not is_lazy(value)
        }
        for name, value in list(self._parameters.items()):
            if value.untyped_storage().data_ptr() in trained:  # changes with them
                del self._parameters[name]
        self.sums = sums_of(self._parameters, self._parameters)
        """Sums of the words of each parameter, as the task built it."""
        self._marks = self._present_marks()

    @property
    def names(self) -> list[str]:
        return list(self._parameters)

    def without(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of ``weights`` that are not frozen."""
        return {name: value for name, value in weights.items() if name not in self._parameters}

    def require_none(self, names: Iterable[str]) -> None:
        """Raise BadTask if a forward pass changes one of these parameters."""
        if changed := [name for name in names if name in self._parameters]:
            raise BadTask(
                f"forward changes frozen parameters: {few(changed)}. With checkpoint.parameters: "
                f"trainable no checkpoint holds them. {_WAY_OUT}"
            )

    def require_unchanged(self, *, thorough: bool) -> None:
        """Raise BadTask if a frozen parameter has other contents than as it was built.

        Args:
            thorough: whether to read all of them. Else only those are read that torch knows to be
                written to.
        """
        marks = self._present_marks()
        suspects = [name for name in marks if thorough or marks[name] != self._marks[name]]
        if not suspects:
            return
        now = sums_of(self._parameters, suspects)
        if changed := [name for name in suspects if now[name] != self.sums[name]]:
            raise BadTask(
                f"frozen parameters have changed since the model was built: {few(changed)}. With "
                f"checkpoint.parameters: trainable no checkpoint holds them. {_WAY_OUT}"
            )
        self._marks = marks

    def _present_marks(self) -> dict[str, tuple[int, int]]:
        return {
            name: (value._version, value.data_ptr()) for name, value in self._parameters.items()
        }


def sums_of(weights: Mapping[str, Any], names: Iterable[str]) -> dict[str, int]:
    """Return the sums of the words of the named tensors that are among ``weights``."""
    return {
        name: word_sum(weights[name])
        for name in names
        if isinstance(weights.get(name), torch.Tensor)
    }


def other_base(saved: Mapping[str, int], own: Mapping[str, Any]) -> list[str]:
    """Return the frozen parameters that a state leaves out and that ``own``, a model's
    ``state_dict``, has not or has with other contents.

    Args:
        saved: the sums that the state holds in their place.
    """
    now = sums_of(own, saved)
    return [name for name, value in saved.items() if now.get(name) != value]
