"""Nodes and pods of Kubernetes, with the few fields that say that one is about to go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from pydantic import AwareDatetime, TypeAdapter, ValidationError

_TIME: Final[TypeAdapter[datetime]] = TypeAdapter(AwareDatetime)


@dataclass(frozen=True)
class Taint:
    """A mark on a node that keeps pods away, or throws them out."""

    key: str
    effect: str
    """``NoSchedule``, ``PreferNoSchedule`` or ``NoExecute``."""
    value: str = ""


@dataclass(frozen=True)
class Toleration:
    """A taint that a pod bears."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""
    for_s: float | None = None
    """How long it bears a taint that throws pods out; None is for good."""

    def bears(self, taint: Taint) -> bool:
        """Return whether this is a toleration of the taint, for whatever time."""
        if self.effect and self.effect != taint.effect:
            return False
        if not self.key:
            return self.operator == "Exists"
        same = self.operator == "Exists" or self.value == taint.value
        return self.key == taint.key and same


@dataclass(frozen=True)
class KubeNode:
    """A node of Kubernetes."""

    name: str
    unschedulable: bool = False
    """Whether it is cordoned (``kubectl cordon``)."""
    taints: tuple[Taint, ...] = ()

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> KubeNode:
        """Return the node in an object of the API. Raises KeyError, TypeError."""
        spec = raw.get("spec") or {}
        return cls(
            raw["metadata"]["name"],
            bool(spec.get("unschedulable")),
            tuple(
                Taint(taint["key"], taint["effect"], taint.get("value") or "")
                for taint in spec.get("taints") or ()
            ),
        )


@dataclass(frozen=True)
class RayPod:
    """A pod in which a node of Ray runs."""

    name: str
    node: str | None
    """Name of the node of Kubernetes that it is on."""
    ips: frozenset[str]
    tolerations: tuple[Toleration, ...] = ()
    goes_at: datetime | None = None
    """When its time to end is over; None if it was not told to end."""
    disruption: str | None = None
    """Why Kubernetes is about to end it, such as ``PreemptionByScheduler``."""

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> RayPod | None:
        """Return the pod in an object of the API; None if it has no address, or has ended and left
        its address to others. Raises KeyError, TypeError."""
        metadata, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
        listed = [entry["ip"] for entry in status.get("podIPs") or () if entry.get("ip")]
        ips = frozenset(listed + ([status["podIP"]] if status.get("podIP") else []))
        if not ips or status.get("phase") in ("Succeeded", "Failed"):
            return None
        return cls(
            metadata["name"],
            spec.get("nodeName"),
            ips,
            tuple(map(_toleration, spec.get("tolerations") or ())),
            _time_of(metadata.get("deletionTimestamp")),
            next(
                (
                    condition.get("reason") or "DisruptionTarget"
                    for condition in status.get("conditions") or ()
                    if condition.get("type") == "DisruptionTarget"
                    and condition.get("status") == "True"
                ),
                None,
            ),
        )


def _toleration(raw: Mapping[str, Any]) -> Toleration:
    seconds = raw.get("tolerationSeconds")
    return Toleration(
        raw.get("key") or "",
        raw.get("operator") or "Equal",
        raw.get("value") or "",
        raw.get("effect") or "",
        None if seconds is None else max(0.0, float(seconds)),
    )


def _time_of(raw: str | None) -> datetime | None:
    if raw is None:
        return None
    try:
        return _TIME.validate_python(raw)
    except ValidationError as exc:
        raise TypeError(f"{raw!r} is not a time") from exc
