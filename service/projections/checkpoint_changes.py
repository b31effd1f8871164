"""What restores and events about checkpoints change in a run's row."""

from __future__ import annotations

from typing import Any, Final

from everstep.wire import ReasonCode, RunStatus
from everstep.wire.events import BEGINNINGS, OWN_FILES
from service.model.rows import EventRow
from service.model.run_rows import RunRow
from service.projections.changes import Changes
from service.projections.checkpoints import stands, submission_of

_RECENT_CHECKPOINTS: Final = 64


def restored(run: RunRow, event: EventRow) -> Changes:
    step = int(event.data["step"])
    lost = max(0, run.step - step)
    columns: dict[str, Any] = {
        "step": step,
        "epoch": int(event.data["epoch"]),
        "steps_lost": run.steps_lost + lost,
        "steps_lost_at_restore": lost,
    }
    if event.data.get("source") != OWN_FILES:
        redone_s = (run.redone_s or 0.0) if event.data.get("unit") else None
        columns |= {} if redone_s == run.redone_s else {"redone_s": redone_s}
    if (best := _best_after(run, event)) != run.best:
        columns["best"] = best
    return Changes(columns | _checkpoints(_standing(run.recent_checkpoints, event)))


def _best_after(run: RunRow, restored: EventRow) -> dict[str, Any] | None:
    """Return the best evaluation that still counts after a restore: that of the restored state.

    Older versions do not report it. For them an evaluation after the restored step is dropped, and
    the best one before it is unknown.
    """
    data = restored.data
    if data.get("source") in BEGINNINGS:
        return None
    found = data.get("best")
    if found is not None and found["value"] is not None:
        metric = run.spec["checkpoint"]["best_metric"]
        return {"metric": metric, "value": float(found["value"]), "step": int(found["step"])}
    return run.best if run.best and run.best["step"] <= int(data["step"]) else None


def _standing(found: list[dict[str, Any]], restored: EventRow) -> list[dict[str, Any]]:
    """Return the checkpoints that are still valid after a restore: neither rejected nor, for older
    attempts, beyond the restored step."""
    rejected = {item["name"] for item in restored.data.get("rejected") or ()}
    return [item for item in found if item["name"] not in rejected and stands(item, restored)]


def _order(item: dict[str, Any]) -> tuple[int, int, int, str]:
    """Return a sort key: step, submission, attempt. A longer name has a larger attempt number."""
    return item["step"], item["submission"], len(item["name"]), item["name"]


def _checkpoints(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the columns about checkpoints."""
    latest = max(found, key=_order, default=None)
    return {"recent_checkpoints": found[-_RECENT_CHECKPOINTS:], "latest_checkpoint": latest}


def checkpoint_committed(run: RunRow, event: EventRow) -> Changes:
    data = event.data
    committed = {
        "step": int(data["step"]),
        "submission": submission_of(event),
        "name": data["name"],
        "committed_at": event.at,
        "size_bytes": int(data["size_bytes"]),
    }
    columns = _checkpoints([*_without(run, data["name"]), committed])
    if run.reason_code == ReasonCode.STORAGE_UNAVAILABLE and run.status is RunStatus.RUNNING:
        columns |= {"reason_code": None, "reason_message": None}
    return Changes(columns)


def checkpoint_failed(run: RunRow, event: EventRow) -> Changes:
    """Show that saves fail, until one succeeds."""
    data = event.data
    failed, limit = data.get("failed_in_a_row"), data.get("max_failed_saves")
    if run.status is not RunStatus.RUNNING or failed is None or limit is None or failed < limit:
        return Changes()
    newest = (
        f"the newest checkpoint is of step {run.latest_checkpoint['step']}"
        if run.latest_checkpoint
        else "there is none yet"
    )
    message = (
        f"{failed} saves in a row failed, {newest}, and training continues; the last error: "
        f"{data['error']}"
    )
    return Changes({"reason_code": ReasonCode.STORAGE_UNAVAILABLE.value, "reason_message": message})


def checkpoint_gone(run: RunRow, event: EventRow) -> Changes:
    """Remove a checkpoint that was deleted or is corrupt."""
    return Changes(_checkpoints(_without(run, event.data["name"])))


def _without(run: RunRow, name: str) -> list[dict[str, Any]]:
    return [item for item in run.recent_checkpoints if item["name"] != name]
