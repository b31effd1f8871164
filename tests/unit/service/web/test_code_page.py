"""The page of a run's code, read and compared with another run's."""

from __future__ import annotations

from tests.support.api_service import ApiService
from tests.support.code_archives import TASK, tar_gz
from tests.support.page_text import HOSTILE, text_of
from tests.support.web_browser import Browser
from tests.unit.service.api.test_api_code import own_spec, upload


async def submitted(api: ApiService, **more: str | bytes) -> str:
    archive = tar_gz({"mine/__init__.py": "", "mine/task.py": TASK, **more})
    digest = (await upload(api, archive)).json()["digest"]
    answer = await api.http.post("/v1/runs", json=own_spec(digest))
    assert answer.status_code == 201, answer.text
    run_id: str = answer.json()["id"]
    return run_id


async def test_code_is_read_and_compared_file_by_file(api: ApiService) -> None:
    one = await submitted(api, **{"lr.py": "LR = 1\n", "old.py": HOSTILE, "weights.bin": b"\0"})
    two = await submitted(api, **{"lr.py": "LR = 2\n", "weights.bin": b"\0"})
    browser = await Browser.logged_in(api, api.token("viewer"))
    path = f"/runs/{two}/code"
    assert f'href="{path}"' in await browser.page(f"/runs/{two}")
    assert text_of(await browser.page(f"{path}?file=lr.py")).count("LR = 2") == 1
    text = text_of(await browser.page(f"{path}?file=lr.py&against={one}"))
    assert "lr.py 7 B differs" in text and "-LR = 1 +LR = 2" in text
    assert "old.py 0 B only there" in text and "mine/task.py" in text and "B equal" in text
    assert HOSTILE not in await browser.page(f"/runs/{one}/code?file=old.py")
    assert "binary" in await browser.page(f"{path}?file=weights.bin")
    await browser.page(f"{path}?file=../secret", 404)
    assert "no code to show" in await browser.page(f"/runs/{await api.create()}/code", 404)
