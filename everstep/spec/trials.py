"""The runs of a sweep: the values that each one sets, and its spec."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.errors import FieldError, InvalidSpec
from everstep.spec.overrides import set_fields
from everstep.spec.parsing import few, parse_spec
from everstep.spec.run_spec import RunSpec
from everstep.spec.sweep import ChoiceSpec, Distribution, IntSpec, LogSpec, SweepSpec

_DIGITS = 6
"""Significant digits of a drawn number: those that a person can copy."""


@dataclass(frozen=True)
class SweepTrial:
    """One run of a sweep, before it is submitted."""

    params: Mapping[str, Any]
    """Field of the spec -> value."""
    spec: RunSpec


def params_of(sweep: SweepSpec) -> list[dict[str, Any]]:
    """Return the values of each run, in order. The same seed gives the same values.

    Without ``random``, every point of the grid is a run. With it, there are ``max_runs`` runs: they
    take the points in turn, and each draws its own values. What a run draws for a field depends on
    the seed, its number and the field only.

    >>> params_of(SweepSpec(spec={}, metric="loss", grid={"optimizer.lr": [0.1, 0.2]}))
    [{'optimizer.lr': 0.1}, {'optimizer.lr': 0.2}]
    """
    points = [
        dict(zip(sweep.grid, values, strict=True))
        for values in itertools.product(*sweep.grid.values())
    ]
    if not sweep.random:
        return points
    return [
        points[number % len(points)]
        | {
            path: _drawn(distribution, f"{sweep.seed}:{number}:{path}")
            for path, distribution in sweep.random.items()
        }
        for number in range(sweep.num_runs)
    ]


def _drawn(distribution: Distribution, seed: str) -> Any:
    share = random.Random(seed).random()
    if isinstance(distribution, ChoiceSpec):
        return distribution.values[math.floor(share * len(distribution.values))]
    low, high = distribution.low, distribution.high
    if isinstance(distribution, IntSpec):
        return min(int(high), int(low) + math.floor(share * (int(high) - int(low) + 1)))
    if isinstance(distribution, LogSpec):
        value = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    else:
        value = low + share * (high - low)
    return min(high, max(low, float(f"{value:.{_DIGITS}g}")))


def trials_of(sweep: SweepSpec) -> list[SweepTrial]:
    """Return every run with its spec. Raise InvalidSpec with the faults of all of them, each with
    the value of the sweep that it comes from."""
    name = sweep.name or sweep.spec.get("name")
    found, faults = [], _Faults(sweep)
    for number, params in enumerate(params_of(sweep)):
        raw: dict[str, Any] = dict(sweep.spec)
        if isinstance(name, str):
            raw["name"] = f"{name}-{number:03d}"
        try:
            found.append(SweepTrial(params, parse_spec(set_fields(raw, params))))
        except InvalidSpec as exc:
            faults.add(number, params, exc.errors)
    faults.check()
    return found


class _Faults:
    """Faults of several runs. One that all runs share is reported once."""

    def __init__(self, sweep: SweepSpec) -> None:
        self._sweep = sweep
        self._runs: dict[FieldError, list[int]] = {}
        self._params: dict[int, Mapping[str, Any]] = {}

    def add(self, number: int, params: Mapping[str, Any], errors: Sequence[FieldError]) -> None:
        """Add the faults of a run."""
        self._params[number] = params
        for error in errors:
            self._runs.setdefault(error, []).append(number)

    def check(self) -> None:
        """Raise InvalidSpec if there is any fault."""
        found = list(dict.fromkeys(self._located()))
        if found:
            raise InvalidSpec(few(found))

    def _located(self) -> Iterator[FieldError]:
        for error, numbers in self._runs.items():
            path = ".".join(map(str, error.loc))
            swept = [
                each
                for each in self._params[numbers[0]]
                if f"{path}.".startswith(f"{each}.") or f"{each}.".startswith(f"{path}.")
            ]
            if swept:
                for number in numbers:
                    yield self._of_value(swept[0], self._params[number][swept[0]], error)
            elif len(numbers) == self._sweep.num_runs:
                yield FieldError(("spec", *error.loc), error.msg)
            else:
                where = words_of(self._params[numbers[0]])
                more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
                message = f"{error.msg} (run {numbers[0]}{more}: {where})"
                yield FieldError(("spec", *error.loc), message)

    def _of_value(self, path: str, value: Any, error: FieldError) -> FieldError:
        place: tuple[str | int, ...] = ("random", path)
        if path in self._sweep.grid:
            values = self._sweep.grid[path]
            place = ("grid", path, next(n for n, each in enumerate(values) if each is value))
        return FieldError(place, f"{json.dumps(value)}: {error.msg}")


def words_of(params: Mapping[str, Any]) -> str:
    """Return the values of a run for people: ``optimizer.lr=0.01, train.seed=3``."""
    return ", ".join(f"{path}={param_word(value)}" for path, value in params.items())


def param_word(value: Any) -> str:
    """Return a value of a run for people."""
    return value if isinstance(value, str) else json.dumps(value)
