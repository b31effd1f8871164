"""Additions to FastAPI's OpenAPI document: problems, the spec as a body, streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final

from fastapi import FastAPI, Query
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from everstep.spec.run_spec import RunSpec
from everstep.wire import Problem, RunChange
from service.annex import Annex, FollowUps
from service.api import problems, streams

_REF: Final = "#/components/schemas/{model}"

_MEANINGS: Final = {
    400: "The request cannot be read (`malformed_json`, `too_deep`).",
    401: "No valid token (`unauthorized`).",
    403: (
        "The token's role or project does not allow this (`forbidden`), or this service does not "
        "(`drills_disabled`)."
    ),
    404: "It does not exist, or belongs to another project (`not_found`).",
    409: "The state or a quota does not allow this (`invalid_transition`, `idempotency_conflict`, "
    "`corrupt_checkpoint`, `quota_exceeded`, `conflict`).",
    413: "The body is too large (`body_too_large`).",
    416: "The `Range` contains no byte of the content (`range_not_satisfiable`).",
    415: "The route does not accept this type of body (`unsupported_media_type`).",
    422: "A parameter, the spec or an archive is invalid; `errors` has one entry for each fault "
    "(`invalid_request`, `invalid_spec`, `invalid_archive`).",
    429: "The token exceeds its rate limit (`rate_limited`); retry after `Retry-After` seconds.",
    503: "Database or storage is unavailable; retry after `Retry-After` seconds.",
}

SPEC_BODY: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": _REF.format(model="RunSpec")},
                "example": {
                    "name": "digits-resnet",
                    "task": {
                        "name": "image_classification",
                        "model": {"name": "mini_resnet", "args": {"width": 16}},
                        "data": {"name": "digits", "args": {}},
                    },
                    "train": {"epochs": 5},
                    "scaling": {"min_workers": 1, "max_workers": 2},
                },
            }
        },
    }
}


def json_body(model: str, example: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
    """Return the documentation of a body that a route parses itself."""
    schema: dict[str, Any] = {"$ref": _REF.format(model=model)}
    if not required:
        schema = {"anyOf": [schema, {"type": "null"}]}
    content = {"application/json": {"schema": schema, "example": example}}
    return {"requestBody": {"required": required, "content": content}}


CHANGE_BODY: Final = json_body("RunChange", {"notes": "diverges with warmup below 100"})


CreateProject = Annotated[
    bool,
    Query(description="Create the project if it does not exist; otherwise that is an error."),
]

STREAM: Final[dict[str, Any]] = {"content": {streams.MEDIA_TYPE: {"schema": {"type": "string"}}}}
"""Second media type of a 200 response that may be a stream."""


def operation_id(route: APIRoute) -> str:
    """Return the id of a route: the name of its function, which generated clients call alike."""
    return route.name


Responses = dict[int | str, dict[str, Any]]


def problem_answers(*statuses: int) -> Responses:
    """Return the documented problems of a route; every route has 401, 429 and 503."""
    schema = {"schema": {"$ref": _REF.format(model="Problem")}}
    return {
        status: {"description": _MEANINGS[status], "content": {problems.MEDIA_TYPE: schema}}
        for status in sorted({401, 429, 503, *statuses})
    }


def _drop_default_validation_errors(schema: dict[str, Any]) -> None:
    """Remove FastAPI's default 422, which it adds to routes that declare none; this service never
    sends it."""
    for methods in schema["paths"].values():
        for operation in methods.values():
            content = operation["responses"].get("422", {}).get("content", {})
            if "HTTPValidationError" in str(content.get("application/json", "")):
                del operation["responses"]["422"]
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)


def _suit_generators(node: Any) -> None:
    """Write down in another way what generators of clients trip over. The meaning stays.

    A default that is an object, beside a reference or a union, goes: the service fills it in. A
    constant in a union becomes an enumeration of one.
    """
    if isinstance(node, dict):
        if isinstance(node.get("default"), dict) and node.keys() & {"$ref", "oneOf", "anyOf"}:
            del node["default"]
        for each in node.get("anyOf", ()):
            if isinstance(each, dict) and "const" in each:
                each["enum"] = [each.pop("const")]
        for each in node.values():
            _suit_generators(each)
    elif isinstance(node, list):
        for each in node:
            _suit_generators(each)


_RUN: Final = {"run_id": "$response.body#/id"}
_FOLLOW_UPS: Final = (
    FollowUps(
        "/v1/runs",
        "201",
        _RUN,
        (
            ("get", "/v1/runs/{run_id}"),
            ("get", "/v1/runs/{run_id}/spec"),
            ("get", "/v1/runs/{run_id}/events"),
            ("get", "/v1/runs/{run_id}/goodput"),
            ("post", "/v1/runs/{run_id}/cancel"),
            ("post", "/v1/runs/{run_id}/pause"),
            ("delete", "/v1/runs/{run_id}"),
        ),
    ),
    FollowUps(
        "/v1/runs/{run_id}/pause",
        "202",
        _RUN,
        (("post", "/v1/runs/{run_id}/resume"), ("post", "/v1/runs/{run_id}/cancel")),
    ),
    FollowUps(
        "/v1/runs/{run_id}/cancel",
        "202",
        _RUN,
        (("delete", "/v1/runs/{run_id}"), ("post", "/v1/runs/{run_id}/resume")),
    ),
)


def _add_parameter_problems(schema: dict[str, Any]) -> None:
    """Add 422 to every route, all of which refuse unknown query parameters, and 400 and 413 to
    every route with a body."""
    for methods in schema["paths"].values():
        for operation in methods.values():
            wrong = [422] + [400, 413] * bool(operation.get("requestBody"))
            for status in wrong:
                operation["responses"].setdefault(str(status), problem_answers(status)[status])


def _add_links(schema: dict[str, Any], follow_ups: Iterable[FollowUps]) -> None:
    paths = schema["paths"]
    for each in follow_ups:
        links = paths[each.path]["post"]["responses"][each.status].setdefault("links", {})
        for method, target in each.targets:
            operation = paths[target][method]
            links[operation["summary"]] = {
                "operationId": operation["operationId"],
                "parameters": dict(each.parameters),
            }


def install(app: FastAPI, annexes: Sequence[Annex]) -> None:
    """Complete ``app.openapi``."""
    models: list[type[BaseModel]] = [
        RunSpec,
        RunChange,
        *(model for annex in annexes for model in annex.bodies),
    ]
    follow_ups = [*_FOLLOW_UPS, *(each for annex in annexes for each in annex.follow_ups)]

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            _, definitions = models_json_schema(
                [
                    *((model, "validation") for model in models),
                    (Problem, "serialization"),
                ],
                ref_template=_REF,
            )
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(definitions["$defs"])
            _drop_default_validation_errors(schema)
            _suit_generators(schemas)
            _add_parameter_problems(schema)
            _add_links(schema, follow_ups)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
