"""The directory that a service on this machine keeps its files in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

DEFAULT_HOME = "~/.everstep"


def home_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return ``EVERSTEP_HOME``, or ``~/.everstep``, as an absolute path."""
    named = environ.get("EVERSTEP_HOME", "").strip()
    return Path(named or DEFAULT_HOME).expanduser().absolute()
