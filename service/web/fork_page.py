"""Fork a run: submit a new run from its edited spec."""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse

from everstep.errors import FieldError, InvalidSpec
from everstep.wire.metric_names import mode_of
from service.api.context import Context
from service.api.problems import ProblemError
from service.api.spec_body import check_shape, content_sha256, validated
from service.api.submission import submitted
from service.web.rendering import PageRoute
from service.web.run_pages import run_page
from service.web.session import CheckedForm, WebCaller, WebRun

router: Final = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute, include_in_schema=False)


@router.get("/fork")
async def get_fork(
    request: Request,
    run: WebRun,
    context: Context,
    caller: WebCaller,
    step: Annotated[str, Query(pattern=r"^(latest|best|\d{1,15})?$")] = "",
) -> Response:
    """Show the spec for editing. With ``step`` the new run starts from that checkpoint."""
    caller.require("submitter")
    spec = {**run.spec, "name": _forked_name(run.name)}
    checkpoint = run.stored_spec.checkpoint
    # Leave out an inferred mode: another metric may have the other one.
    if checkpoint.best_mode == mode_of(checkpoint.best_metric):
        fields = spec.get("checkpoint", {}).items()
        spec["checkpoint"] = {name: value for name, value in fields if name != "best_mode"}
    if step:
        spec["resume_from"] = {"run_id": run.id, "step": int(step) if step.isdigit() else step}
    text = json.dumps(spec, indent=2, ensure_ascii=False)
    return await run_page(
        request,
        "fork.html",
        context,
        caller,
        run,
        text=text,
        key=secrets.token_hex(16),
        faults=[],
        step=step,
    )


@router.post("/fork")
async def post_fork(
    request: Request, run: WebRun, context: Context, caller: WebCaller, form: CheckedForm
) -> Response:
    """Submit the spec. The form has a key, so that sending it twice creates one run."""
    caller.require("submitter")
    text, key = form.get("spec", ""), form.get("key", "")
    try:
        raw = await validated(_parsed, text)
        made, _ = await submitted(context, caller, raw, f"fork-{key[:64]}-{content_sha256(raw)}")
    except InvalidSpec as exc:
        page = await run_page(
            request,
            "fork.html",
            context,
            caller,
            run,
            text=text,
            key=key,
            faults=exc.errors,
            step="",
        )
        page.status_code = 422
        return page
    return RedirectResponse(f"/runs/{made['id']}", 303)


def _parsed(text: str) -> Any:
    """Return the spec that was entered. Raises InvalidSpec unless it is JSON."""
    try:
        value = json.loads(text)
        check_shape(value)
    except (ValueError, RecursionError) as exc:
        raise InvalidSpec((FieldError(("spec",), f"is not JSON: {exc}"),)) from exc
    except ProblemError as exc:
        raise InvalidSpec((FieldError(("spec",), exc.detail),)) from exc
    return value


def _forked_name(name: str) -> str:
    return f"{name[:123]}-fork"
