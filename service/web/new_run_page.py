"""The page *new run*: a form and a YAML editor of one spec, checked as it is typed."""

from __future__ import annotations

import re
import secrets
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from everstep.errors import FieldError, InvalidSpec, UsageError
from everstep.spec.catalog import catalog
from everstep.spec.yaml_file import parse_yaml
from everstep.spec.yaml_text import has_aliases, lines_of, value_at, with_value
from service.api.auth import Principal, visible_run
from service.api.context import ApiContext, Context
from service.api.problems import ProblemError, invalid_request
from service.api.spec_body import check_shape, content_sha256, validated
from service.api.submission import submitted, validated_spec
from service.web import starting_specs
from service.web.rendering import PageRoute, page
from service.web.session import CheckedForm, WebCaller

router: Final = APIRouter(route_class=PageRoute, include_in_schema=False)

FIELDS: Final = (
    ("name", "Name", "text"),
    ("project", "Project", "text"),
    ("task.model.name", "Model", "models"),
    ("task.data.name", "Data", "data"),
    ("optimizer.name", "Optimizer", "optimizers"),
    ("optimizer.lr", "Learning rate", "number"),
    ("train.epochs", "Epochs", "number"),
    ("train.global_batch_size", "Global batch size", "number"),
    ("scaling.min_workers", "Least ranks", "number"),
    ("scaling.max_workers", "Most ranks", "number"),
    ("checkpoint.best_metric", "Best by metric", "text"),
    ("priority", "Priority", "number"),
)
"""Fields of the form: path in the spec, title, and a number, a text or a list of the catalog."""
MOST_CHARS: Final = 50_000
_KINDS: Final = {path: kind for path, _, kind in FIELDS}
_WHERE: Final = re.compile(r"^the spec, line (\d+)(?:, column \d+)?: ")


@router.get("/new")
async def get_new_run(
    request: Request,
    context: Context,
    caller: WebCaller,
    template: Annotated[str, Query(max_length=64)] = "",
    run: Annotated[str, Query(alias="from", max_length=64)] = "",
    step: Annotated[str, Query(pattern=r"^(latest|best|\d{1,15})?$")] = "",
) -> Response:
    """Show a template, or with ``from`` the spec of a run; with ``step`` the new run starts from
    that checkpoint."""
    caller.require("submitter")
    if run:
        row = await visible_run(run, context, caller)
        text = starting_specs.from_checkpoint(row, step) if step else starting_specs.again(row)
    else:
        found = starting_specs.template(template or starting_specs.DEFAULT_TEMPLATE)
        if found is None:
            names = ", ".join(starting_specs.templates())
            raise invalid_request("template", msg=f"does not exist; the templates are {names}")
        text = found
        if caller.project is not None:
            text = with_value(text, ("project",), caller.project)
    return await _editor(request, context, caller, text, template=template, origin=run, step=step)


@router.post("/new")
async def post_new_run(
    request: Request, context: Context, caller: WebCaller, form: CheckedForm
) -> Response:
    """Submit the spec. The form has a key, so that sending it twice creates one run."""
    caller.require("submitter")
    text, key = form.get("spec", ""), form.get("key", "")
    try:
        raw = await validated(_parsed, text)
        made, _ = await submitted(context, caller, raw, f"new-{key[:64]}-{content_sha256(raw)}")
    except InvalidSpec as exc:
        response = await _editor(request, context, caller, text, key=key, faults=exc.errors)
        response.status_code = 422
        return response
    return RedirectResponse(f"/runs/{made['id']}", 303)


@router.post("/new/check")
async def post_check(context: Context, caller: WebCaller, form: CheckedForm) -> Response:
    """Return every fault of a spec with its line, and what the fields of the form have in it."""
    caller.require("submitter")
    text = form.get("spec", "")
    return JSONResponse(
        {"faults": await _faults(context, caller, text), "fields": await validated(_values, text)}
    )


@router.post("/new/field")
async def post_field(context: Context, caller: WebCaller, form: CheckedForm) -> Response:
    """Return the text of a spec with another value in a field of the form."""
    caller.require("submitter")
    path, given = form.get("path", ""), form.get("value", "").strip()
    if path not in _KINDS:
        raise invalid_request("path", msg="is not a field of the form")
    try:
        text = await validated(lambda spec: _with_field(spec, path, given), form.get("spec", ""))
    except UsageError as exc:
        raise invalid_request("spec", msg=str(exc)) from exc
    return JSONResponse({"spec": text})


async def _editor(
    request: Request,
    context: ApiContext,
    caller: Principal,
    text: str,
    *,
    key: str | None = None,
    faults: tuple[FieldError, ...] | None = None,
    **values: Any,
) -> Response:
    known = catalog()
    shown = await _faults(context, caller, text) if faults is None else await _placed(text, faults)
    return page(
        request,
        "new.html",
        caller,
        text=text,
        key=key or secrets.token_hex(16),
        faults=shown,
        was_sent=faults is not None,
        fields=FIELDS,
        values=await validated(_values, text),
        choices={
            kind: [entry.name for entry in getattr(known, kind)]
            for kind in ("models", "data", "optimizers")
        },
        templates=starting_specs.templates(),
        **{"template": "", "origin": "", "step": ""} | values,
    )


async def _faults(context: ApiContext, caller: Principal, text: str) -> list[dict[str, Any]]:
    """Return the faults that a submission would name, with their lines."""
    try:
        await validated_spec(context, caller, await validated(_parsed, text))
    except InvalidSpec as exc:
        return await _placed(text, exc.errors)
    except ProblemError as exc:
        if exc.status not in (403, 409, 422):
            raise
        return await _placed(text, tuple(exc.errors) or (FieldError((), exc.detail),))
    return []


async def _placed(text: str, faults: tuple[FieldError, ...]) -> list[dict[str, Any]]:
    """Return faults by line. A fault of the YAML itself names its line in its message."""
    lines = await validated(lambda _: _lines(text, faults), text)
    return sorted(
        (
            {
                "line": line,
                "field": ".".join(map(str, fault.loc)),
                "msg": _WHERE.sub("", fault.msg),
            }
            for line, fault in zip(lines, faults, strict=True)
        ),
        key=lambda fault: fault["line"],
    )


def _lines(text: str, faults: tuple[FieldError, ...]) -> list[int]:
    found = [_WHERE.match(fault.msg) for fault in faults]
    if len(text) > MOST_CHARS or any(found):
        return [int(each[1]) if each else 1 for each in found]
    return lines_of(text, [fault.loc for fault in faults])


def _parsed(text: str) -> Any:
    """Return the spec that was entered, in YAML or JSON. Raises InvalidSpec if it is neither."""
    try:
        value = _value(text)
        check_shape(value)
    except UsageError as exc:
        raise InvalidSpec((FieldError((), str(exc)),)) from exc
    except ProblemError as exc:
        raise InvalidSpec((FieldError((), exc.detail),)) from exc
    return value


def _value(text: str) -> Any:
    """Return the value in a text. Raises UsageError also for one that takes long to read."""
    if len(text) > MOST_CHARS:
        raise UsageError(f"the spec is longer than {MOST_CHARS} characters; use the command line")
    if has_aliases(text):
        raise UsageError("the spec has anchors or aliases (& and *); write their values out")
    return parse_yaml(text, "the spec")


def _values(text: str) -> dict[str, str]:
    """Return what each field of the form has in a text; empty where it has none."""
    try:
        spec = _value(text)
    except UsageError:
        return {}
    found = {path: value_at(spec, path.split(".")) for path, _, _ in FIELDS}
    return {
        path: "" if value is None or isinstance(value, dict | list) else str(value)
        for path, value in found.items()
    }


def _with_field(text: str, path: str, given: str) -> str:
    """Return the text with what was entered in a field of the form. Raises UsageError."""
    _value(text)
    return with_value(text, path.split("."), _typed(given, _KINDS[path]))


def _typed(given: str, kind: str) -> Any:
    """Return a field's value: a number where one is meant and entered, else the text."""
    if not given:
        return None
    if kind == "number":
        number = parse_yaml(given, "the value")
        if isinstance(number, int | float) and not isinstance(number, bool):
            return number
    return given
