"""What watching a run costs and how quickly it shows: from a worker to a follower, the price in
throughput, a million points.

    python -m benchmarks observe --repeats 5

*lag*: a service with a cluster of two nodes, digits; every step's metrics carry the rank's clock,
and a follower on this machine notes when the event stream, and the run page in Chromium, have it.
*throughput*: the training loop on two processes, once with all that observes it (journal, logs,
step clocks, straggler watch, TensorBoard files), once with none of it, in turn. *page*: a run with
1,000,000 metric points, until Chromium has drawn its first curve.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from playwright.async_api import Page, async_playwright
from sqlalchemy import insert

from benchmarks.observe_ranks import steps_per_s
from benchmarks.report import summary, write
from benchmarks.workloads import WORKLOADS
from everstep.client.runs import RunHandle
from service.db.tables import metrics
from service.web.session import COOKIE
from tests.browser.chromium import chromium_path
from tests.browser.log_in import session_cookie, session_of
from tests.browser.story import story_token, tell
from tests.support.api_service import ApiService
from tests.support.service_process import ServiceProcess, wait_for
from train_fn.step.timing import StepClock, StragglerWatch

PARTS = ("lag", "throughput", "page")
WATCH_S = 30.0
WARM_STEPS = 30
NUM_POINTS = 1_000_000
SERIES = ("loss", "lr", "grad_norm", "samples_per_s", "step_s")
_NOTE_STEPS = """() => {
  window.seen = [];
  const note = () => {
    for (const drawn of document.querySelectorAll("figure.chart [role=img]")) {
      const step = /^loss\\. .*? at step (\\d+)/.exec(drawn.getAttribute("aria-label") || "");
      if (step) window.seen.push([Number(step[1]), Date.now() / 1000]);
    }
  };
  const options = {subtree: true, childList: true, attributes: true};
  new MutationObserver(note).observe(document.getElementById("charts"), options);
}"""


def spread(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {
        "num": len(ordered),
        "median": round(statistics.median(ordered), 4),
        "p99": round(p99, 4),
        "max": round(ordered[-1], 4),
    }


# ---------------------------------------------------------------- lag


def lag() -> dict[str, Any]:
    """Seconds from the end of a step, by its rank's clock, until followers know of it."""
    spec = {
        **WORKLOADS["digits"],
        "train": {**WORKLOADS["digits"]["train"], "max_steps": 1_000_000},
    }
    with ServiceProcess(nodes=2) as service:
        run = service.client().runs.create(spec)
        wait_for(lambda: run.refresh().step >= WARM_STEPS, 120, "the first steps")
        stream: dict[int, tuple[float, float]] = {}
        threading.Thread(target=_follow, args=(run, run.run.step, stream), daemon=True).start()
        page = asyncio.run(_watch_page(service, run.id))
        run.cancel()
        wait_for(lambda: run.refresh().status.terminal, 60, "the cancel")
    streamed = [seen - at for at, seen in stream.values()]
    shown = []
    for step, (at, _) in stream.items():
        later = [seen for drawn, seen in page if drawn >= step]
        if later and at > page[0][1]:
            shown.append(min(later) - at)
    return {"stream_s": spread(streamed), "page_s": spread(shown)}


def _follow(run: RunHandle, begin: int, found: dict[int, tuple[float, float]]) -> None:
    """For each step when its rank says that it was done, and when this follower knew."""
    after = list(run.events())[-1].seq
    for event in run.events(after, follow=True):
        now = time.time()
        for point in event.data["points"] if event.kind == "metrics" else ():
            if point["step"] > begin:
                found.setdefault(point["step"], (point["at"], now))


async def _watch_page(service: ServiceProcess, run_id: str) -> list[tuple[int, float]]:
    """(step, unix seconds) at each redraw of the loss for WATCH_S seconds."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium_path(), args=["--no-sandbox"]
        )
        context = await browser.new_context(base_url=service.url)
        await context.add_cookies([await session_cookie(service.url, service.token)])
        page = await context.new_page()
        await page.goto(f"/runs/{run_id}")
        await page.locator("figure.chart").first.wait_for()
        await page.evaluate(_NOTE_STEPS)
        await page.wait_for_timeout(WATCH_S * 1000)
        seen: list[tuple[int, float]] = [
            (int(step), float(at)) for step, at in await page.evaluate("window.seen")
        ]
        await browser.close()
    return seen


# ---------------------------------------------------------------- a million points


async def page_of_a_million(repeats: int) -> dict[str, Any]:
    """Seconds until the page, its curves, and the drawn curve are there; each time in a browser
    without a cache."""
    times: dict[str, list[float]] = {"html_s": [], "curves_s": [], "drawn_s": []}
    with tempfile.TemporaryDirectory() as home:
        async with ApiService(Path(home)) as api:
            run_id = (await tell(api)).running
            await asyncio.to_thread(fill, api, run_id)
            token = story_token(api)
            async with httpx.AsyncClient(
                base_url=api.url, cookies={COOKIE: await session_of(api.url, token)}, timeout=60
            ) as http:
                for _ in range(repeats):
                    for name, address in (
                        ("html_s", f"/runs/{run_id}"),
                        ("curves_s", f"/runs/{run_id}/curves.json"),
                    ):
                        began = time.perf_counter()
                        (await http.get(address)).raise_for_status()
                        times[name].append(time.perf_counter() - began)
            async with async_playwright() as playwright:
                browser = await playwright.chromium.launch(
                    executable_path=chromium_path(), args=["--no-sandbox"]
                )
                for _ in range(repeats):
                    context = await browser.new_context(base_url=api.url)
                    await context.add_cookies([await session_cookie(api.url, token)])
                    times["drawn_s"].append(
                        await _drawn_s(await context.new_page(), f"/runs/{run_id}")
                    )
                    await context.close()
                await browser.close()
    return {"num_points": NUM_POINTS, **{name: summary(values) for name, values in times.items()}}


async def _drawn_s(page: Page, address: str) -> float:
    began = time.perf_counter()
    await page.goto(address, wait_until="commit")
    await page.locator("figure.chart [role=img]").first.wait_for()
    return time.perf_counter() - began


def fill(api: ApiService, run_id: str) -> None:
    """Metrics of many steps behind those that the run has."""
    steps = range(1000, 1000 + NUM_POINTS // len(SERIES))
    for name in SERIES:
        rows = [
            {
                "run_id": run_id,
                "name": name,
                "step": step,
                "at": api.clock.now + step,
                "value": 1 / step + (step * 7919 % 101) / 1e4,
            }
            for step in steps
        ]
        with api.database.write() as connection:
            connection.execute(insert(metrics), rows)


# ---------------------------------------------------------------- throughput


def throughput(repeats: int, steps: int) -> dict[str, Any]:
    """Steps per second of the loop observed and not, in turn, and their ratio pair by pair."""
    pairs = []
    for number in range(repeats):
        with tempfile.TemporaryDirectory() as directory:
            found = {}
            for observed in (True, False) if number % 2 else (False, True):
                found[observed] = steps_per_s(
                    Path(directory, str(observed)), steps, observed=observed
                )
            pairs.append(found)
    return {
        "observed_steps_per_s": summary([pair[True] for pair in pairs]),
        "bare_steps_per_s": summary([pair[False] for pair in pairs]),
        "ratio": summary([pair[True] / pair[False] for pair in pairs]),
    }


def clock_cost_s(num_ranks: int = 64, steps: int = 20_000) -> float:
    """Seconds a step that a rank's clock and, on rank 0, the watch over so many ranks take."""
    layer = torch.nn.Linear(1, 1)
    clock = StepClock(list(layer.parameters()), torch.device("cpu"))
    watch = StragglerWatch(lambda kind, data: None, ["node"] * num_ranks, [1] * num_ranks)
    own_s = [0.1] * num_ranks
    began = time.perf_counter()
    for step in range(steps):
        for _ in range(3):
            clock._mark(layer.weight)
        clock.gate()
        watch.note(step, own_s, 0.1)
    return (time.perf_counter() - began) / steps


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args(argv)
    results: dict[str, Any] = {}
    with contextlib.suppress(KeyboardInterrupt):
        if "lag" in options.parts:
            results["lag"] = lag()
        if "page" in options.parts:
            results["page"] = asyncio.run(page_of_a_million(options.repeats))
        if "throughput" in options.parts:
            results["throughput"] = throughput(options.repeats, options.steps)
            results["clock_us_a_step"] = round(1e6 * clock_cost_s(), 2)
    write("observe", results)
