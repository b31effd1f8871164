"""The answer of an API to a bad request, checked."""

from __future__ import annotations

import httpx

from everstep.wire import Problem


def problem(answer: httpx.Response, status: int, code: str) -> Problem:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    found = Problem.model_validate(answer.json())
    assert (found.status, found.code) == (status, code)
    assert found.detail and "Traceback" not in answer.text
    return found
