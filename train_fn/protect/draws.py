"""Random generators that samplers own: their states when an epoch begins are part of the place in
the data."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch


def own_generators(parts: Iterable[Any]) -> dict[str, Any]:
    """Return the generators in the attributes of these objects, by a name. Those that torch calls
    ``generator`` are seeded anew for each epoch, and left out."""
    return {
        f"{number}.{name}": value
        for number, part in enumerate(parts)
        for name, value in sorted(getattr(part, "__dict__", {}).items())
        if isinstance(value, np.random.Generator | np.random.RandomState | random.Random)
        or (isinstance(value, torch.Generator) and name != "generator")
    }


def states_of(generators: dict[str, Any]) -> str:
    """Return the states as text. It holds whole numbers of any size."""
    return json.dumps({name: _state(each) for name, each in generators.items()})


def put_back(generators: dict[str, Any], states: str) -> None:
    """Give the generators their states. Those that did not exist are left as they are."""
    for name, state in json.loads(states).items():
        if name in generators:
            _set(generators[name], state)


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, np.random.RandomState):
        kind, keys, position, has_gauss, cached = generator.get_state(legacy=True)
        return [kind, np.asarray(keys).tolist(), position, has_gauss, cached]
    return _plain(generator.bit_generator.state)


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        version, numbers, following = state
        generator.setstate((version, tuple(numbers), following))
    elif isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(state, dtype=torch.uint8))
    elif isinstance(generator, np.random.RandomState):
        kind, keys, *rest = state
        generator.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    else:
        generator.bit_generator.state = _arrays(state)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": str(value.dtype)}
    return value.item() if isinstance(value, np.generic) else value


def _arrays(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.keys() == {"array", "dtype"}:
        return np.array(value["array"], dtype=value["dtype"])
    return {name: _arrays(each) for name, each in value.items()}
