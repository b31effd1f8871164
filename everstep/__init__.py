"""Everstep: fault-tolerant distributed PyTorch training. Submit a run, wait for it, download its
checkpoint:

>>> from everstep import Client                                   # doctest: +SKIP
>>> run = Client().runs.create({"name": "digits", "task": ...})   # doctest: +SKIP
>>> run.wait(timeout_s=600).download_checkpoint("latest", "out/") # doctest: +SKIP
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.client.async_client import (
        AsyncClient,
        AsyncDrill,
        AsyncProfile,
        AsyncRun,
    )
    from everstep.client.client import Client
    from everstep.client.handles import DrillHandle, ProfileHandle
    from everstep.client.runs import RunHandle
    from everstep.client.streams import Patience
    from everstep.errors import (
        AuthError,
        Conflict,
        CorruptDownload,
        EverstepError,
        FieldError,
        InvalidSpec,
        NotFound,
        RateLimited,
        RunFailed,
        ServiceError,
        Unavailable,
        UsageError,
        WaitTimeout,
    )
    from everstep.spec.run_spec import RunSpec
    from everstep.wire import (
        Attempt,
        Checkpoint,
        ClusterInfo,
        CodeArchive,
        Event,
        Failure,
        Goodput,
        LogLine,
        Node,
        ReasonCode,
        Run,
        RunStatus,
        Samples,
        Verdict,
    )
    from everstep.wire.alerts import Alert, AlertDelivery, AlertMessage
    from everstep.wire.drills import AllReduce, Drill, DrillKind, Profile

__version__ = "0.1.0"

__all__ = [
    "Alert",
    "AlertDelivery",
    "AlertMessage",
    "AllReduce",
    "AsyncClient",
    "AsyncDrill",
    "AsyncProfile",
    "AsyncRun",
    "Attempt",
    "AuthError",
    "Checkpoint",
    "Client",
    "ClusterInfo",
    "CodeArchive",
    "Conflict",
    "CorruptDownload",
    "Drill",
    "DrillHandle",
    "DrillKind",
    "Event",
    "EverstepError",
    "Failure",
    "FieldError",
    "Goodput",
    "InvalidSpec",
    "LogLine",
    "Node",
    "NotFound",
    "Patience",
    "Profile",
    "ProfileHandle",
    "RateLimited",
    "ReasonCode",
    "Run",
    "RunFailed",
    "RunHandle",
    "RunSpec",
    "RunStatus",
    "Samples",
    "ServiceError",
    "Unavailable",
    "UsageError",
    "Verdict",
    "WaitTimeout",
    "__version__",
]


_NAMES_OF = {
    "everstep.client.async_client": "AsyncClient AsyncDrill AsyncProfile AsyncRun",
    "everstep.client.client": "Client",
    "everstep.client.handles": "DrillHandle ProfileHandle",
    "everstep.client.streams": "Patience",
    "everstep.client.runs": "RunHandle",
    "everstep.errors": (
        "AuthError Conflict CorruptDownload EverstepError FieldError InvalidSpec NotFound "
        "RateLimited RunFailed ServiceError Unavailable UsageError "
        "WaitTimeout"
    ),
    "everstep.spec.run_spec": "RunSpec",
    "everstep.wire": (
        "Attempt Checkpoint ClusterInfo CodeArchive Event Failure Goodput LogLine Node "
        "ReasonCode Run RunStatus Samples Verdict"
    ),
    "everstep.wire.alerts": "Alert AlertDelivery AlertMessage",
    "everstep.wire.drills": "AllReduce Drill DrillKind Profile",
}
"""Public names by the module that has them: each is imported when it is first used, so that
``import everstep`` costs next to nothing in scripts and in each process of a run."""
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}
_SUBMODULES = ("client", "errors", "spec", "wire")


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name in _MODULE_OF:
        found = getattr(importlib.import_module(_MODULE_OF[name]), name)
    elif name in _SUBMODULES:
        found = importlib.import_module(f"everstep.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return every name, for completion."""
    return sorted({*globals(), *__all__})
