"""The page *new run*: a form and a YAML editor of one spec, checked as it is typed; and the
API's reference.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from everstep.errors import FieldError, InvalidSpec, UsageError
from everstep.spec.run_spec import RunSpec
from everstep.spec.tasks import CatalogEntry, catalog
from everstep.spec.yaml_file import parse_yaml
from everstep.spec.yaml_text import has_aliases, lines_of, to_yaml, value_at, with_value
from everstep.wire.events import mode_of
from service.api.auth import visible_run
from service.api.bodies import check_shape, content_sha256, validated
from service.api.callers import Principal
from service.api.problems import ApiProblem, invalid_request
from service.model.run_rows import RunRow
from service.runs.submission import Submissions, TheSubmissions
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
    submissions: TheSubmissions,
    caller: WebCaller,
    template: Annotated[str, Query(max_length=64)] = "",
    run: Annotated[str, Query(alias="from", max_length=64)] = "",
    step: Annotated[str, Query(pattern=r"^(latest|best|\d{1,15})?$")] = "",
) -> Response:
    """Show a template, or with ``from`` the spec of a run; with ``step`` the new run starts from
    that checkpoint."""
    caller.require("submitter")
    if run:
        row = await visible_run(run, submissions.views.runs, caller)
        text = from_checkpoint(row, step) if step else again(row)
    else:
        found = template_text(template or DEFAULT_TEMPLATE)
        if found is None:
            names = ", ".join(templates())
            raise invalid_request("template", msg=f"does not exist; the templates are {names}")
        text = found
        if caller.project is not None:
            text = with_value(text, ("project",), caller.project)
    return await _editor(
        request, submissions, caller, text, template=template, origin=run, step=step
    )


@router.post("/new")
async def post_new_run(
    request: Request, submissions: TheSubmissions, caller: WebCaller, form: CheckedForm
) -> Response:
    """Submit the spec. The form has a key, so that sending it twice creates one run."""
    caller.require("submitter")
    text, key = form.get("spec", ""), form.get("key", "")
    try:
        raw = await validated(_parsed, text)
        made, _ = await submissions.submit(caller, raw, f"new-{key[:64]}-{content_sha256(raw)}")
    except InvalidSpec as exc:
        response = await _editor(request, submissions, caller, text, key=key, faults=exc.errors)
        response.status_code = 422
        return response
    return RedirectResponse(f"/runs/{made['id']}", 303)


@router.post("/new/check")
async def post_check(submissions: TheSubmissions, caller: WebCaller, form: CheckedForm) -> Response:
    """Return every fault of a spec with its line, and what the fields of the form have in it."""
    caller.require("submitter")
    text = form.get("spec", "")
    return JSONResponse(
        {
            "faults": await _faults(submissions, caller, text),
            "fields": await validated(_values, text),
        }
    )


@router.post("/new/field")
async def post_field(caller: WebCaller, form: CheckedForm) -> Response:
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
    submissions: Submissions,
    caller: Principal,
    text: str,
    *,
    key: str | None = None,
    faults: tuple[FieldError, ...] | None = None,
    **values: Any,
) -> Response:
    known = catalog()
    found = _faults(submissions, caller, text) if faults is None else _placed(text, faults)
    return page(
        request,
        "new.html",
        caller,
        text=text,
        key=key or secrets.token_hex(16),
        faults=await found,
        was_sent=faults is not None,
        fields=FIELDS,
        values=await validated(_values, text),
        choices={
            kind: [entry.name for entry in getattr(known, kind)]
            for kind in ("models", "data", "optimizers")
        },
        templates=templates(),
        **{"template": "", "origin": "", "step": ""} | values,
    )


async def _faults(submissions: Submissions, caller: Principal, text: str) -> list[dict[str, Any]]:
    """Return the faults that a submission would name, with their lines."""
    try:
        await submissions.validated(caller, await validated(_parsed, text))
    except InvalidSpec as exc:
        return await _placed(text, exc.errors)
    except ApiProblem as exc:
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
    except ApiProblem as exc:
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


# ---------------------------------------------------------------- starting specs

# Specs that a new run begins with: a template of the catalog, or another run's spec.

DEFAULT_TEMPLATE: Final = "digits"
_NAME_CHARS: Final = 123


def templates() -> dict[str, str]:
    """Return the title of each template by its name, which is that of a data set."""
    return {entry.name: f"{entry.name} ({entry.task})" for entry in catalog().data}


def template_text(name: str) -> str | None:
    """Return a template as YAML; None for an unknown name. An argument that has to be filled in is
    null, which is a fault until then."""
    known = catalog()
    data = next((entry for entry in known.data if entry.name == name), None)
    if data is None:
        return None
    model = next(entry for entry in known.models if entry.task == data.task)
    task = {"name": data.task, "model": _named(model), "data": _named(data)}
    return to_yaml(
        {
            "name": f"{name.replace('_', '-')}-run",
            "task": task,
            "optimizer": {"name": "adamw", "lr": 0.003},
            "train": {"epochs": 10, "global_batch_size": 128},
            "scaling": {"min_workers": 1, "max_workers": 2},
            "checkpoint": {"every_steps": 50},
        }
    )


def _named(entry: CatalogEntry) -> dict[str, Any]:
    required = entry.args_schema.get("required", ())
    return {"name": entry.name} | ({"args": dict.fromkeys(required)} if required else {})


def again(run: RunRow) -> str:
    """Return the spec of a run as YAML, to run it once more."""
    return to_yaml(_short(dict(run.spec)))


def from_checkpoint(run: RunRow, step: str) -> str:
    """Return the spec of a run that starts from a checkpoint of this one."""
    origin = {"run_id": run.id, "step": int(step) if step.isdigit() else step}
    spec = _short({**run.spec, "name": f"{run.name[:_NAME_CHARS]}-fork"})
    return to_yaml(spec | {"resume_from": origin})


def _short(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a resolved spec without what is the default, or follows from another field."""
    checkpoint = spec.get("checkpoint") or {}
    # Leave out an inferred mode: another metric may have the other one.
    if checkpoint.get("best_mode") == mode_of(checkpoint.get("best_metric")):
        checkpoint = {name: value for name, value in checkpoint.items() if name != "best_mode"}
        spec = spec | {"checkpoint": checkpoint}
    try:
        whole = RunSpec.model_validate(spec)
        short: dict[str, Any] = whole.model_dump(mode="json", exclude_defaults=True)
        short = _without(short, spec)
        is_same = RunSpec.model_validate(short) == whole
    except ValueError:  # of another version, which says other faults when it is submitted
        return spec
    return short if is_same else spec


def _without(short: Mapping[str, Any], spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``short`` in the order of ``spec``, without what ``spec`` lacks."""
    return {
        name: _without(short[name], spec[name])
        if isinstance(short[name], dict) and isinstance(spec[name], dict)
        else short[name]
        for name in spec
        if name in short
    }


# ---------------------------------------------------------------- reference

# The API reference: Swagger UI from local files, so that it works without internet access and
# under our content policy.


@router.get("/docs")
async def get_reference(request: Request) -> Response:
    return page(request, "reference.html", None)
