"""Everstep: fault-tolerant distributed PyTorch training. Submit a run, wait for it, download its
checkpoint:

>>> from everstep import Client                                   # doctest: +SKIP
>>> run = Client().runs.create({"name": "digits", "task": ...})   # doctest: +SKIP
>>> run.wait(timeout_s=600).download_checkpoint("latest", "out/") # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

from everstep.client.client import Client
from everstep.client.drill_handle import DrillHandle
from everstep.client.follow import Patience
from everstep.client.profile_handle import ProfileHandle
from everstep.client.runs import RunHandle
from everstep.client.sweeps import SweepHandle
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
    SweepFailed,
    Unavailable,
    UsageError,
    WaitTimeout,
)
from everstep.spec.run_spec import RunSpec
from everstep.spec.sweep import SweepSpec
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
from everstep.wire.drills import Drill, DrillKind
from everstep.wire.profiles import AllReduce, Profile
from everstep.wire.sweep import Sweep, SweepRun, SweepStatus

if TYPE_CHECKING:
    from everstep.client.async_client import (
        AsyncClient,
        AsyncDrill,
        AsyncProfile,
        AsyncRun,
        AsyncSweep,
    )

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
    "AsyncSweep",
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
    "Sweep",
    "SweepFailed",
    "SweepHandle",
    "SweepRun",
    "SweepSpec",
    "SweepStatus",
    "Unavailable",
    "UsageError",
    "Verdict",
    "WaitTimeout",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import the client for asyncio when it is first used: scripts that block need no asyncio."""
    if name.startswith("Async") and name in __all__:
        from everstep.client import async_client

        return getattr(async_client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return every name, for completion."""
    return sorted({*globals(), *__all__})
