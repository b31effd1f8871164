"""Environment variables that a spec may not set, in ``env`` or ``secrets``, and what to do
instead."""

from __future__ import annotations

from typing import NamedTuple


class Reserved(NamedTuple):
    """Variable names with one reason, in capitals; a trailing ``*`` matches any suffix."""

    names: tuple[str, ...]
    reason: str
    """Message for the user, with the fix."""


RESERVED = (
    Reserved(
        (
            "RAY_*",
            "EVERSTEP_*",
            "LD_*",
            "DYLD_*",
            "PYTHON*",
            "PIP_*",
            "GLIBC_*",
            "TORCHELASTIC_*",
            "GCONV_PATH",
            "BASH_ENV",
        ),
        "is reserved: Ray, Everstep, the dynamic loader, Python or pip reads it before your code "
        "runs. Remove it; if ranks need it, ask the operator to set it on the nodes",
    ),
    Reserved(
        (
            "MASTER_ADDR",
            "MASTER_PORT",
            "RANK",
            "LOCAL_RANK",
            "GROUP_RANK",
            "NODE_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
        ),
        "is reserved: Everstep sets it for each rank. Remove it",
    ),
    Reserved(
        ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        "is reserved: Ray assigns the devices. Remove it, and set the resources of a rank in "
        "scaling",
    ),
    Reserved(
        (
            *(
                "AWS_*",
                "BOTO_CONFIG",
                "GOOGLE_APPLICATION_CREDENTIALS",
                "GOOGLE_CLOUD_*",
                "GCE_METADATA_*",
                "CLOUDSDK_*",
            ),
            *("CLOUD_STORAGE_*", "STORAGE_EMULATOR_HOST"),
        ),
        "is reserved: it selects the credentials and endpoint with which ranks write checkpoints, "
        "and others can read the spec. The operator sets it on the nodes. Remove it, and pass "
        "settings of your own code under other names",
    ),
    Reserved(
        ("HOME", "XDG_CONFIG_HOME"),
        "is reserved: the storage's credentials are searched below it. Remove it; for caches set "
        "XDG_CACHE_HOME, TORCH_HOME or HF_HOME",
    ),
)


def reserved_reason(name: str) -> str | None:
    """Return why a spec may not set this variable; None where it may.

    >>> reserved_reason("AWS_ENDPOINT_URL") is None, reserved_reason("NCCL_DEBUG") is None
    (False, True)
    """
    upper = name.upper()
    for names, reason in RESERVED:
        if any(
            upper.startswith(each[:-1]) if each.endswith("*") else upper == each for each in names
        ):
            return reason
    return None
