"""Variables that a spec may not set for its ranks, neither by ``env`` nor by ``secrets``, and what
to do in place of it."""

from __future__ import annotations

from typing import NamedTuple


class Reserved(NamedTuple):
    """Names that one reason covers, in capitals; ``*`` stands for any end of a name."""

    names: tuple[str, ...]
    reason: str
    """In words, with the way out."""


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
        "may not be set: Ray, Everstep, the loader, Python and pip read it before your code runs. "
        "Leave it out; where ranks need "
        "it, the operator sets it on the nodes",
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
        "may not be set: Everstep tells each rank its place. Leave it out",
    ),
    Reserved(
        ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        (
            "may not be set: Ray deals out the devices. Leave it out, and say in scaling what a "
            "rank "
            "needs"
        ),
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
        "may not be set: a spec is shown to others, and ranks write checkpoints with it: to "
        "another place, or as somebody else. "
        "The operator sets the storage's credentials and endpoint on the nodes; give your own "
        "code its settings under other names",
    ),
    Reserved(
        ("HOME", "XDG_CONFIG_HOME"),
        "may not be set: credentials of the storage are looked for below it. Leave it out; for "
        "caches set XDG_CACHE_HOME, "
        "TORCH_HOME or HF_HOME",
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
