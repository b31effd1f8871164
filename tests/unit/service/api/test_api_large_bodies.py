"""Bodies that are made to take long: refused at once, and never in the way of other requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from everstep.errors import InvalidSpec
from everstep.spec import parsing
from everstep.spec.parsing import parse_spec
from service.api.bodies import MAX_VALUES
from tests.support.api_service import ApiService, spec


def unknown_fields(count: int, length: int = 20) -> dict[str, Any]:
    return spec(**{f"{'x' * length}{n}": n for n in range(count)})


def test_what_is_echoed_of_a_request_is_short() -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse_spec(spec(**{"y" * 100_000: 1}, tags={"z" * 100_000: "\0"}))
    assert len(str(caught.value)) < 10_000


async def test_a_body_of_too_many_values_is_refused_before_it_is_validated(
    api: ApiService, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = await api.http.post(
        "/v1/runs", json=spec(env={f"A{n}": "1" for n in range(MAX_VALUES)})
    )
    assert answer.status_code == 413 and "more than 20000 values" in answer.json()["detail"]
    answer = await api.http.post("/v1/runs", json=unknown_fields(5_000))
    assert answer.status_code == 422 and len(answer.content) < 40_000
    assert answer.json()["errors"][-1]["loc"] == []


async def test_others_are_served_while_a_body_is_validated(
    api: ApiService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation of a body stands still here until another request was answered: in the event loop,
    that would be never."""
    answered = asyncio.Event()
    real, loop = parsing.field_errors, asyncio.get_running_loop()

    def waits(*args: Any) -> Any:
        asyncio.run_coroutine_threadsafe(answered.wait(), loop).result(30)
        return real(*args)

    monkeypatch.setattr("everstep.spec.parsing.field_errors", waits)
    slow = asyncio.create_task(api.http.post("/v1/runs", json=unknown_fields(3)))
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        assert (await api.http.get("/v1/runs")).status_code == 200
    answered.set()
    assert (await slow).status_code == 422
