"""Code over HTTP: taken in, stored once, refused with reasons, and looked at when a run names
it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from everstep.wire import CodeArchive
from service.api import guard
from service.submission_rules.allowed import PipRule
from tests.support.api_service import ApiService
from tests.support.code_archives import TASK, tar_gz, zip_of

FILES: dict[str, str | bytes] = {"mine/__init__.py": "", "mine/task.py": TASK}


async def upload(
    api: ApiService, data: bytes, http: httpx.AsyncClient | None = None, field: str = "file"
) -> httpx.Response:
    return await (http or api.http).post("/v1/code", files={field: ("code.tar.gz", data)})


def own_spec(digest: str, task: str = "mine.task:Line", **code: Any) -> dict[str, Any]:
    return {"name": "mine", "code": {"archive": digest, "task": task, **code}}


async def test_the_same_bytes_are_stored_once(api: ApiService, tmp_path: Path) -> None:
    answers = [
        await upload(api, tar_gz(FILES)),
        await upload(api, zip_of(FILES)),
        await upload(api, zip_of(FILES)),
    ]
    assert [answer.status_code for answer in answers] == [201, 201, 201], answers[0].text
    [tar, archive, again] = [CodeArchive.model_validate(answer.json()) for answer in answers]
    assert tar.modules == archive.modules == ("mine", "mine.task")
    assert archive == again and tar.digest != archive.digest
    assert len(list((tmp_path / "storage" / "code").iterdir())) == 2


async def test_what_is_refused_says_why(api: ApiService, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(response: httpx.Response, status: int, code: str, words: str) -> None:
        body = response.json()
        assert (response.status_code, body["code"]) == (status, code), response.text
        assert words in body["detail"] and "Traceback" not in response.text

    await refused(
        await upload(api, b"nothing"), 422, "invalid_archive", "neither a zip nor a tar.gz"
    )
    await refused(
        await upload(api, tar_gz({"../a.py": ""})), 422, "invalid_archive", "use relative paths"
    )
    await refused(
        await upload(api, tar_gz({"torch.py": ""})),
        422,
        "invalid_archive",
        "'torch' is reserved for",
    )
    await refused(
        await upload(api, tar_gz(FILES), field="code"), 422, "invalid_request", "file: is required"
    )
    await refused(
        await api.http.post("/v1/code", content=tar_gz(FILES)),
        415,
        "unsupported_media_type",
        "multipart/form-data",
    )
    broken = await api.http.post(
        "/v1/code", content=b"x", headers={"content-type": "multipart/form-data; boundary=b"}
    )
    assert broken.status_code in (400, 422)
    monkeypatch.setattr(guard, "MAX_ARCHIVE_BYTES", 1000)
    monkeypatch.setattr(guard, "FORM_BYTES", 1000)
    await refused(await upload(api, bytes(100_000)), 413, "body_too_large", ".everstepignore")
    viewer = await api.client(api.token("viewer", "default"))
    await refused(await upload(api, tar_gz(FILES), viewer), 403, "forbidden", "submitter")


async def test_code_that_cannot_run_is_refused_with_the_run(api: ApiService) -> None:
    digest = (await upload(api, tar_gz(FILES))).json()["digest"]
    for spec, loc, words in (
        (own_spec("sha256:" + "0" * 64), ["code", "archive"], "upload the code first"),
        (
            own_spec(digest, "mine.task:Nothing"),
            ["code", "task"],
            "mine/task.py has no class 'Nothing'",
        ),
        (
            own_spec(digest, args={"lenght": 5}),
            ["code", "args", "lenght"],
            "did you mean 'length'?",
        ),
    ):
        answer = await api.http.post("/v1/runs", json=spec)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_spec"), answer.text
        [error] = answer.json()["errors"]
        assert error["loc"] == loc and words in error["msg"]
    assert (await api.get("/v1/runs"))["items"] == []


async def test_packages_come_with_code_where_the_operator_allows_it(api: ApiService) -> None:
    digest = (await upload(api, tar_gz(FILES))).json()["digest"]
    spec = own_spec(digest) | {"runtime_env": {"pip": ["einops>=0.8"]}}
    denied = await api.http.post("/v1/runs", json=spec)
    assert denied.status_code == 422
    [fault] = denied.json()["errors"]
    assert fault["loc"] == ["runtime_env"] and "EVERSTEP_ALLOW_PIP" in fault["msg"]
    api.set(pip_rule=PipRule.of("other:*, default:Ein_Ops"))
    refused = await api.http.post("/v1/runs", json=spec)
    assert [(fault["loc"], fault["msg"]) for fault in refused.json()["errors"]] == [
        (
            ["runtime_env", "pip", 0],
            "'einops>=0.8' is not among the packages that project 'default' may bring: ein-ops",
        )
    ]
    api.set(pip_rule=PipRule.of("default:EINOPS"))
    assert (await api.http.post("/v1/runs", json=spec)).status_code == 201


# ---------------------------------------------------------------- whose it is


async def test_an_archive_is_of_the_project_that_uploaded_it(api: ApiService) -> None:
    mine, theirs = [
        await api.client(api.token("submitter", project)) for project in ("mine", "theirs")
    ]
    digest = (await upload(api, zip_of(FILES), mine)).json()["digest"]
    absent = own_spec("sha256:" + "0" * 64)
    taken = await theirs.post("/v1/runs", json=own_spec(digest) | {"project": "theirs"})
    missing = await theirs.post("/v1/runs", json=absent | {"project": "theirs"})
    assert taken.status_code == missing.status_code == 422
    assert taken.json() == missing.json(), "whether another project has it cannot be told"
    assert taken.json()["errors"][0]["loc"] == ["code", "archive"]
    assert (
        await mine.post("/v1/runs", json=own_spec(digest) | {"project": "mine"})
    ).status_code == 201
    assert (await upload(api, zip_of(FILES), theirs)).status_code == 201
    assert (
        await theirs.post("/v1/runs", json=own_spec(digest) | {"project": "theirs"})
    ).status_code == 201


async def test_an_administrator_may_take_any_archive_and_gives_it_to_the_project(
    api: ApiService,
) -> None:
    digest = (
        await upload(api, zip_of(FILES), await api.client(api.token("submitter", "mine")))
    ).json()["digest"]
    theirs = await api.client(api.token("submitter", "theirs"))
    assert (
        await api.http.post("/v1/runs", json=own_spec(digest) | {"project": "theirs"})
    ).status_code == 201
    assert (
        await theirs.post("/v1/runs", json=own_spec(digest) | {"project": "theirs"})
    ).status_code == 201


async def test_an_upload_is_for_a_project_that_the_caller_reaches_and_that_exists(
    api: ApiService,
) -> None:
    async def status(client: httpx.AsyncClient, query: str) -> int:
        return (
            await client.post(f"/v1/code{query}", files={"file": ("code.tar.gz", zip_of(FILES))})
        ).status_code

    mine = await api.client(api.token("submitter", "mine"))
    assert await status(mine, "?project=theirs") == 403
    assert await status(api.http, "?project=typo") == 422
    assert await status(api.http, "?project=new&create_project=true") == 201
    new = await api.client(api.token("submitter", "new"))
    assert (
        await new.post(
            "/v1/runs",
            json=own_spec((await upload(api, zip_of(FILES))).json()["digest"]) | {"project": "new"},
        )
    ).is_success


async def test_a_project_has_room_for_so_much_code(api: ApiService, tmp_path: Path) -> None:
    archives = [zip_of(FILES | {"mine/note.txt": "x" * 64 + str(number)}) for number in range(3)]
    api.set(max_code_bytes=len(archives[0]) + len(archives[1]))
    mine, theirs = [
        await api.client(api.token("submitter", project)) for project in ("mine", "theirs")
    ]
    answers = [
        await upload(api, archive, mine) for archive in (*archives[:2], archives[0], archives[2])
    ]
    assert [answer.status_code for answer in answers] == [201, 201, 201, 409], (
        "the same bytes count once"
    )
    assert (
        answers[-1].json()["code"] == "quota_exceeded"
        and "EVERSTEP_MAX_CODE_BYTES" in answers[-1].json()["detail"]
    )
    assert len(list((tmp_path / "storage" / "code").iterdir())) == 2, "what is refused is not kept"
    assert (await upload(api, archives[2], theirs)).status_code == 201, "each project has its own"
