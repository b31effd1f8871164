"""Where this machine's Chromium is."""

from __future__ import annotations

import os
import shutil


def chromium_path() -> str | None:
    """``EVERSTEP_CHROMIUM``, else a browser of the usual names on the path; None without one."""
    names = (os.environ.get("EVERSTEP_CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if name and (found := shutil.which(name))), None)
