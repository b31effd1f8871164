"""Additions to FastAPI's OpenAPI document: problems, links, streams."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import FastAPI, Query
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from everstep.wire import Problem, ProblemError
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


def followed_by(parameter: str, value: str, *operations: str) -> dict[str, Any]:
    """Return OpenAPI's links from an answer: requests that may follow, by the names of their
    routes, and where the answer has the value of their ``parameter``."""
    given = {parameter: f"$response.body#/{value}"}
    return {"links": {name: {"operationId": name, "parameters": given} for name in operations}}


def problem_answers(*statuses: int) -> Responses:
    """Return the documented problems of a route; every route has 401, 422, 429 and 503."""
    schema = {"schema": {"$ref": _REF.format(model="Problem")}}
    return {
        status: {"description": _MEANINGS[status], "content": {problems.MEDIA_TYPE: schema}}
        for status in sorted({401, 422, 429, 503, *statuses})
    }


UNFIT_QUERY: Final[Responses] = {422: problem_answers()[422]}
"""The only problem of routes that need no token."""


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


def install(app: FastAPI) -> None:
    """Complete ``app.openapi``."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            schemas = schema["components"]["schemas"]
            schemas |= {
                each.__name__: each.model_json_schema(mode="serialization", ref_template=_REF)
                for each in (ProblemError, Problem)
            }
            schemas["Problem"].pop("$defs", None)
            _suit_generators(schemas)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
