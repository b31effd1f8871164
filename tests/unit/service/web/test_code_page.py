"""The page of a run's code, read and compared with another run's."""

from __future__ import annotations

import tracemalloc

from service.web import code_page
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
    browser = await Browser.logged_in(api, api.token("submitter"))
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


async def test_what_differs_is_never_called_equal(api: ApiService) -> None:
    here = {"ends.py": "a\r\nb\n", "latin.py": b"\xe9\n", "last.py": "a"}
    there = {"ends.py": "a\nb\n", "latin.py": b"\xe8\n", "last.py": "a\n"}
    one, two = await submitted(api, **there), await submitted(api, **here)
    browser = await Browser.logged_in(api, api.token("submitter"))
    for name in here:
        html = await browser.page(f"/runs/{two}/code?file={name}&against={one}")
        shown = html.partition('<pre class="spec"')[2].partition("</pre>")[0]
        assert "--- there" in shown and "equal" not in shown, name


async def test_a_viewer_sees_which_files_there_are_and_nobody_sees_secrets(api: ApiService) -> None:
    secrets = {".env.local": "KEY=s3cret", "keys/.ssh/config": "s3cret", "a/tls.KEY": "s3cret"}
    one = await submitted(api, **secrets)
    viewer = await Browser.logged_in(api, api.token("viewer"))
    html = await viewer.page(f"/runs/{one}/code")
    assert "mine/task.py" in html and "?file=mine" not in html
    await viewer.page(f"/runs/{one}/code?file=mine/task.py", 403)
    browser = await Browser.logged_in(api, api.token("submitter"))
    for name in secrets:
        html = await browser.page(f"/runs/{one}/code?file={name}")
        assert "not shown" in html and "s3cret" not in html, name


async def test_files_are_compared_up_to_so_many_lines(api: ApiService) -> None:
    """Python compares files of 8,000 lines, of which each is there a hundred times, for 10 s."""
    lines = [f"{number % 110}\n" for number in range(2500)]
    texts = ["".join(lines), "".join(reversed(lines))]
    one, two = [await submitted(api, **{"t.py": text}) for text in texts]
    browser = await Browser.logged_in(api, api.token("submitter"))
    html = await browser.page(f"/runs/{two}/code?file=t.py&against={one}")
    assert "too long to be compared here" in html
    assert "equal" in await browser.page(f"/runs/{two}/code?file=t.py&against={two}")


async def test_of_an_archive_the_chosen_file_alone_is_kept(api: ApiService) -> None:
    """The contents of two archives of 256 MiB were in memory until the page was sent."""
    one = await submitted(api, **{f"{number}.bin": bytes(4 << 20) for number in range(8)})
    row = api.runs.get(one)
    assert row is not None
    tracemalloc.start()
    kept = code_page._Code.of(api.storage, row, "3.bin")
    size_bytes, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept.files) == 10 and size_bytes < 1 << 20 and peak_bytes < 16 << 20
