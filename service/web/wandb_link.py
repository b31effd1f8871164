"""Where a run is recorded at Weights & Biases, for its page."""

from __future__ import annotations

import json
from typing import Any

from service.api.context import ApiContext
from service.model.run_rows import RunRow
from storage.errors import StorageError
from storage.run_dir import RunDir


async def wandb_place(context: ApiContext, run: RunRow) -> dict[str, Any] | None:
    """Return what the run's driver has noted: ``url``, ``files`` and ``problem``; None if the run
    is not recorded there, or nothing is noted yet."""
    if run.stored_spec.wandb is None:
        return None
    run_dir = RunDir(context.storage, run.id)
    try:
        data = await context.storage_call(run_dir.files.read, run_dir.wandb_path("run.json"))
        noted = json.loads(data)
    except (StorageError, ValueError):
        return None
    if not isinstance(noted, dict):
        return None
    url = str(noted.get("url") or "")
    # User code can write the file: nothing but an address of the web becomes a link.
    shown = url if url.startswith(("https://", "http://")) else None
    return {"url": shown, "files": noted.get("files"), "problem": noted.get("problem")}
