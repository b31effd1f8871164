"""Bodies of a request for a run: every fault is told, and none becomes a run."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.support.api_service import ApiService, spec
from tests.support.problems import problem


async def post_raw(
    api: ApiService, body: bytes, content_type: str | None = "application/json"
) -> httpx.Response:
    headers = {"content-type": content_type} if content_type else {}
    return await api.http.post("/v1/runs", content=body, headers=headers)


async def test_every_fault_is_told_at_once(api: ApiService) -> None:
    wrong = spec(
        colour="red",
        train={"global_batch_size": 8, "micro_batch_size": 16, "grad_clip_norm": float("inf")},
        scaling={"min_workers": 3, "max_workers": 2},
        optimizer={"name": "adamw", "lr": float("nan")},
        env={"RAY_ADDRESS": "x"},
    )
    wrong["task"]["model"] = {"name": "mini_resnet", "args": {"widht": 3}}
    found = problem(await post_raw(api, json.dumps(wrong).encode()), 422, "invalid_spec")
    assert {".".join(map(str, error.loc)) for error in found.errors} == {
        "colour",
        "train.micro_batch_size",
        "train.grad_clip_norm",
        "scaling.max_workers",
        "optimizer.lr",
        "env.RAY_ADDRESS",
        "task.model.args.widht",
    }
    assert (await api.get("/v1/runs"))["items"] == []


@pytest.mark.parametrize("body", [b"[]", b"null", b"3", b'"spec"', b"{}"])
async def test_json_that_is_no_spec(api: ApiService, body: bytes) -> None:
    assert problem(await post_raw(api, body), 422, "invalid_spec").errors


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"name": }',
        b'{"name": "a"} x',
        b"\xff\xfe{}",
        b'{"a": 1' + b"0" * 5000 + b"}",
        b"name: yaml",
        b"\x00",
    ],
)
async def test_a_body_that_is_no_json(api: ApiService, body: bytes) -> None:
    problem(await post_raw(api, body), 400, "malformed_json")


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 500 + b"]" * 500, b'{"a":' * 70 + b"1" + b"}" * 70],
)
async def test_a_body_that_is_nested_too_deeply(api: ApiService, body: bytes) -> None:
    problem(await post_raw(api, body), 400, "too_deep")


async def test_a_body_that_is_too_large(api: ApiService) -> None:
    problem(await post_raw(api, b" " * (1 << 20) + b"{}"), 413, "body_too_large")

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b" " * 65536

    answer = await api.http.post(
        "/v1/runs", content=chunks(), headers={"content-type": "application/json"}
    )
    problem(answer, 413, "body_too_large")


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "json"],
)
async def test_a_body_of_another_type(api: ApiService, content_type: str) -> None:
    problem(
        await post_raw(api, json.dumps(spec()).encode(), content_type),
        415,
        "unsupported_media_type",
    )


@pytest.mark.parametrize(
    "content_type",
    [None, "application/json; charset=utf-8", "application/vnd.everstep+json", "Application/JSON"],
)
async def test_kinds_of_json(api: ApiService, content_type: str | None) -> None:
    assert (await post_raw(api, json.dumps(spec()).encode(), content_type)).status_code == 201


@pytest.mark.parametrize(
    "fields",
    [
        {"\ud800": 1},
        {"tags": {"a": "\ud800"}},
        {"priority": 10**30},
    ],
)
async def test_odd_fields_are_faults_of_the_request(
    api: ApiService, fields: dict[str, Any]
) -> None:
    problem(await post_raw(api, json.dumps(spec(**fields)).encode()), 422, "invalid_spec")
