"""Parallel coordinates: which axes there are, and where the values of the runs lie on them."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.wire import Run
from service.web.compare import _measured, picture
from tests.support.api_service import ApiService, Journal
from tests.support.page_text import HOSTILE
from tests.support.web_browser import Browser


async def runs_of(api: ApiService, *metrics: dict[str, float]) -> list[Run]:
    found = []
    for number, values in enumerate(metrics):
        run_id, journal = await api.running(name=f"run {number}")
        if values:
            api.apply(run_id, [journal.steps(2, **values)])
        found.append(Run.model_validate(await api.get(f"/v1/runs/{run_id}")))
    return found


async def test_axes_are_what_differs_and_what_was_measured(api: ApiService) -> None:
    runs = await runs_of(api, {"loss": 0.5}, {"loss": 1.0, "val_loss": 2.0}, {"loss": 0.75})
    specs: list[dict[str, Any]] = [
        {
            "name": f"run {number}",
            "tags": {"n": str(number)},
            "code": {"archive": f"sha256:{number}{'a' * 63}"},
            "lr": lr,
            "model": model,
            "same": 1,
        }
        for number, (lr, model) in enumerate([(1e-5, "small"), (1e-3, "large"), (1e-1, None)])
    ]
    drawn = picture(runs, specs)
    assert drawn is not None
    assert [axis.title for axis in drawn.axes] == ["lr", "model", "loss", "val_loss"]
    rate, model, loss, val_loss = drawn.axes
    middle = (drawn.top + drawn.bottom) / 2
    assert rate.places == pytest.approx((drawn.bottom, middle, drawn.top)), "logarithmic"
    assert loss.places == pytest.approx((drawn.bottom, drawn.top, middle)), "linear"
    assert model.texts == ("small", "large", None)
    assert val_loss.places == (None, pytest.approx(middle), None)
    assert [len(line.points) for line in drawn.lines] == [1, 1, 0]
    assert [len(line.dots) for line in drawn.lines] == [3, 4, 2]
    assert drawn.lines[2].words == "lr 0.1, loss 0.75"


async def test_compared_runs_have_a_picture_and_differences(api: ApiService) -> None:
    browser = await Browser.logged_in(api, api.token("viewer"))
    (one, two), queued = await runs_of(api, {"loss": 0.5}, {"loss": 1.0}), await api.create()
    html = await browser.page(f"/compare?run={one.id}&run={two.id}")
    assert "Their specs are equal" in html and "Parallel coordinates" not in html
    other = await api.create(train={"seed": 5})
    api.runs.claim_submission(other, 0)
    api.apply(other, [*(journal := Journal()).start(), journal.steps(1, **{HOSTILE: 2.0})])
    html = await browser.page(f"/compare?run={one.id}&run={other}")
    assert "Parallel coordinates" in html and ">train.seed<" in html and HOSTILE not in html
    api.apply(other, [journal.steps(2, loss=0.25)])
    html = await browser.page(f"/compare?run={one.id}&run={other}")
    assert html.index("Differences of the specs") < html.index("Side by side")
    assert html.count('tag best">best') == 1 and ">0.25 <span" in html
    assert "Side by side" in await browser.page(f"/compare?run={queued}")


async def test_the_best_is_marked_where_better_is_known(api: ApiService) -> None:
    rows = [
        {"interval_s": 3.0, "val_latency_ms": 10.0, "val_accuracy": 0.5, "loss": 1.0, "score": 1.0},
        {"interval_s": 9.0, "val_latency_ms": 90.0, "val_accuracy": 0.7, "loss": 0.5, "score": 2.0},
    ]
    runs = await runs_of(api, *rows)

    def marked(*modes: str | None) -> dict[str, list[int]]:
        judged = [{"best_metric": mode and "val_score", "best_mode": mode} for mode in modes]
        found = _measured(runs, [{"checkpoint": each} for each in judged])
        return {
            name: best
            for name, cells in found
            if (best := [place for place, cell in enumerate(cells) if cell and cell[1]])
        }

    by_name = {"val_accuracy": [1], "loss": [1]}
    assert marked(None, None) == by_name == marked("min", "max"), "the specs contradict each other"
    assert marked("min", "min") == by_name | {"score": [0]}


async def test_runs_of_a_study_are_compared_by_their_tag(api: ApiService) -> None:
    browser = await Browser.logged_in(api, api.token("viewer"))
    for number in range(10):
        seed, tags = {"seed": number}, {"study": "lr", "trial": str(number)}
        run_id, journal = await api.running(name=f"lr-{number}", tags=tags, train=seed)
        api.apply(run_id, [journal.steps(2, loss=float(number))])
    other = await api.create(tags={"study": "other"})
    runs = await browser.page("/runs?tag=study%3Dlr&sort=metrics.loss")
    link = "/compare?tag=study%3Dlr&amp;sort=metrics.loss"
    assert link in runs
    html = await browser.page(link.replace("&amp;", "&"))
    drawn = html.partition("Parallel coordinates")[2].partition("</section>")[0]
    assert all(f"lr-{number}" in drawn for number in range(10)) and other not in html
    chips = html.partition('class="filters"')[2].partition("</form>")[0]
    assert [f"> lr-{number} <" in chips for number in (0, 7, 8)] == [True, True, False]
