"""The errors of every call to Ray.

RayError
├── RayUnavailable   not reachable, too slow, or failed by itself; the same call may succeed later
│   └── RayRefused   the token is missing or wrong
├── JobNotFound      Ray knows no job of that id
└── JobRejected      Ray will never take this submission as it is
"""

from __future__ import annotations


class RayError(Exception):
    """Base of the errors of calls to Ray."""


class RayUnavailable(RayError):
    """Ray does not answer now."""


class RayRefused(RayUnavailable):
    """Ray refuses the token."""


class JobNotFound(RayError):
    """Ray knows no such job: it was never submitted, or the cluster has lost its state."""


class JobRejected(RayError):
    """Ray refuses a submission because of its content."""
