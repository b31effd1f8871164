"""``everstep demo``: train on three local nodes, kill one, show that the run continues, and prove
by a replay that it has the bits of a run on one worker.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from everstep.cli.demo_service import (
    DemoFailed,
    Service,
    Victim,
    choose_victim,
    existing,
    keep_log,
    kill,
    own_service,
)
from everstep.cli.runs import Watcher
from everstep.cli.terminal import Exit, Terminal, exit_code_of_status
from everstep.client.runs import RunHandle
from everstep.errors import EverstepError
from everstep.wire import Event, Run
from everstep.wire.events import EventKind
from everstep.wire.run import Replay

# ---------------------------------------------------------------- demo

PROOF_TIMEOUT_S = 300.0
KILL_AT = 0.4
"""Share of the steps after which the node is killed."""
SPEC: dict[str, Any] = {
    "name": "demo",
    "task": {
        "name": "image_classification",
        "model": {"name": "mini_resnet", "args": {"width": 16}},
        "data": {"name": "digits"},
    },
    "optimizer": {"name": "adamw", "lr": 0.003, "weight_decay": 0.01},
    "schedule": {"name": "cosine", "warmup_steps": 20},
    "train": {
        "epochs": 20,
        "global_batch_size": 128,
        "micro_batch_size": 16,
        "grad_clip_norm": 1.0,
        "exactness": "elastic",
    },
    "scaling": {"min_workers": 1, "max_workers": 3},
    "checkpoint": {"every_steps": 20, "best_metric": "val_accuracy"},
    "recovery": {"deadline_s": 1200.0},
}


def run_demo(terminal: Terminal, *, url: str | None, keep: bool, out: str) -> int:
    """Run the demo and return the exit code. Stop everything that it started, unless ``keep`` is
    set and it succeeded."""
    phases = Phases()
    with _terminated_as_interrupted(), contextlib.ExitStack() as stack:
        with phases.timed("service"):
            service = existing(url) if url else stack.enter_context(own_service(terminal, keep))
        terminal.note(
            f"service {service.client.url}, home {service.home}: {phases.said('service')}"
        )
        run = service.client.runs.create(SPEC)
        terminal.note(
            f"{run.id}: MiniResNet on 1,797 handwritten digits, {SPEC['scaling']['max_workers']} "
            "ranks"
        )
        try:
            with phases.timed("training"):
                story = _train(terminal, service, run)
        except BaseException:
            if service.pid is None:
                _cancel_quietly(run)
            raise
        if exit_code_of_status(run.refresh().status) != Exit.SUCCEEDED:
            raise _failed(service, run)
        terminal.note(f"trained: {phases.said('training')}")
        with phases.timed("replay"):
            proof = _proof(terminal, service, run)
        terminal.note(f"compared: {phases.said('replay')}")
        ending = _Ending(story, proof, phases, Path(out), keep)
        return _print_summary(terminal, service, run, ending)


class Phases:
    """Seconds that each phase of the demo took, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - began, 1)

    def said(self, name: str) -> str:
        return f"{self.seconds[name]:.0f} s"

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {self.said(name)}" for name in self.seconds)
        return f"{sum(self.seconds.values()):.0f} s: {parts}"


@dataclass
class DemoStory:
    """What happened to the run, from its events."""

    victim: Victim | None = None
    killed_at: float | None = None
    """Unix seconds of the SIGKILL."""
    killed_step: int = 0
    next_step_at: float | None = None
    """Unix seconds of the first step after the kill, by the rank's clock, which is this
    machine's."""
    world_size_after: int | None = None
    _attempt: int = 0
    _restored_step: int = 0
    total_steps: int | None = None

    def take(self, event: Event) -> None:
        if event.kind == EventKind.TRAINING_STARTED:
            self.total_steps = event.data.get("total_steps")
        if event.kind == EventKind.ATTEMPT_STARTED and self.killed_at and self.next_step_at is None:
            self.world_size_after = event.data.get("world_size")
        if event.kind == EventKind.RESTORED:
            self._restored_step = event.data["step"]
        if event.kind == EventKind.METRICS and (points := event.data.get("points")):
            if self.killed_at is None:
                self.killed_step, self._attempt = points[-1]["step"], event.attempt
            elif self.next_step_at is None and event.attempt > self._attempt:
                # The first report of an attempt may repeat steps of the one before.
                new = [point["at"] for point in points if point["step"] > self._restored_step]
                self.next_step_at = min(new, default=None)

    @property
    def is_due(self) -> bool:
        """Return whether it is time to kill."""
        return (
            self.killed_at is None
            and self.total_steps is not None
            and self.killed_step >= KILL_AT * self.total_steps
        )


@dataclass(frozen=True)
class _Ending:
    """What the summary is made of."""

    story: DemoStory
    proof: Replay
    phases: Phases
    out: Path
    keep: bool


def _train(terminal: Terminal, service: Service, run: RunHandle) -> DemoStory:
    story = DemoStory()
    with Watcher(terminal, run) as watcher:
        for event in run.events(follow=True):
            watcher.show(event)
            story.take(event)
            if story.is_due:
                victim = choose_victim(service.home / "cluster.json", run.attempts()[-1].workers)
                if not terminal.as_json:
                    watcher.say(
                        f"SIGKILL to node {victim.node_id[:8]}, with its rank {victim.rank}"
                    )
                kill(victim)
                story.victim, story.killed_at = victim, time.time()
    return story


def _proof(terminal: Terminal, service: Service, run: RunHandle) -> Replay:
    """Train all steps of the run again on one worker. Return the comparison of each."""
    terminal.note(f"training the same {run.step} steps again, on one worker, to compare every bit")
    replay = run.replay(0, run.step, workers=1)
    try:
        found = replay.wait(PROOF_TIMEOUT_S).replay_of
    except BaseException:
        if service.pid is None:
            _cancel_quietly(replay)
        raise
    assert found is not None, "the run is a replay"
    return found


def _print_summary(terminal: Terminal, service: Service, run: RunHandle, ending: _Ending) -> int:
    """Print the summary; return the exit code."""
    story, proof, out, keep = ending.story, ending.proof, ending.out, ending.keep
    code, headline, style = _conclusion(proof)
    checkpoint = run.checkpoint("latest")
    run.download_checkpoint(checkpoint.step, out)
    result = {**_result(run, story, out), "proof": proof, "seconds": ending.phases.seconds}
    if terminal.as_json:
        served = {"url": service.client.url, "home": str(service.home), "pid": service.pid}
        terminal.json({**result, **(served if keep or not service.pid else {})})
        return code
    terminal.line()
    terminal.line(headline, style=style)
    weights = (out / "model.pt").absolute()
    terminal.fields(
        [
            *_summary(run, story, result),
            ("proof", f"a replay on one worker: {proof.message}"),
            ("checkpoint", f"{weights} (step {checkpoint.step}, verified)"),
            ("took", ending.phases),
        ]
    )
    if keep or service.pid is None:
        _print_next_commands(terminal, service, run.run)
    return code


def _conclusion(proof: Replay) -> tuple[Exit, str, str]:
    """Return the exit code, the headline, and its style."""
    if proof.result == "equal":
        return (
            Exit.SUCCEEDED,
            "The run continued: the same bits as a run on one worker.",
            "bold green",
        )
    what = "OTHER bits than" if proof.result == "differs" else "NOT PROVEN to have the bits of"
    return Exit.FAILED, f"The run continued: {what} a run on one worker.", "bold red"


def _failed(service: Service, run: RunHandle) -> DemoFailed:
    """Return the error for a run that did not succeed, with the place of the service's log."""
    reason = f"{run.reason.code}: {run.reason.message}" if run.reason else "no reason was given"
    kept = keep_log(service)
    return DemoFailed(
        f"the demo's run ended {run.status}: "
        f"{reason}{f'; read the service log in {kept}' if kept else ''}"
    )


def _summary(run: RunHandle, story: DemoStory, result: dict[str, Any]) -> list[tuple[str, object]]:
    """Return names and values that say what happened to the run."""
    accuracy = run.latest_metrics.get("val_accuracy")
    recovery_s, once = result["recovery_s"], result["every_sample_once"]
    victim = story.victim
    return [
        (
            "accuracy",
            f"{accuracy:.1%} on the held-out digits" if accuracy is not None else None,
        ),
        (
            "killed",
            f"node {victim.node_id[:8]} with rank {victim.rank}, at step {story.killed_step}"
            if victim
            else None,
        ),
        (
            "recovered",
            f"{recovery_s:.1f} s from the kill to the next step"
            if recovery_s is not None
            else "no step after it",
        ),
        (
            "ranks",
            f"{SPEC['scaling']['max_workers']} before, {story.world_size_after} after"
            if victim
            else None,
        ),
        ("steps lost", run.steps_lost),
        (
            "samples",
            "each used exactly once in every epoch"
            if once
            else "NOT each used once; run everstep samples",
        ),
    ]


def _result(run: RunHandle, story: DemoStory, out: Path) -> dict[str, Any]:
    recovery_s = (
        story.next_step_at - story.killed_at if story.next_step_at and story.killed_at else None
    )
    epochs = run.samples().epochs
    return {
        "run": run.run,
        "killed_node": story.victim and story.victim.node_id,
        "killed_at_step": story.killed_step,
        "recovery_s": recovery_s,
        "steps_lost": run.steps_lost,
        "world_size_after": story.world_size_after,
        "every_sample_once": bool(epochs)
        and all(e.used_once == e.samples and not e.duplicates and not e.missing for e in epochs),
        "failures": run.failures(),
        "checkpoint": str(out.absolute()),
    }


def _print_next_commands(terminal: Terminal, service: Service, run: Run) -> None:
    terminal.line()
    terminal.fields(
        [
            ("service", f"{service.client.url}  (API reference: {service.client.url}/docs)"),
            ("Ray", run.links.ray_dashboard),
            ("use it", f"EVERSTEP_HOME={service.home} everstep runs"),
            ("stop it", f"kill {service.pid}" if service.pid else None),
        ]
    )


def _cancel_quietly(run: RunHandle) -> None:
    with contextlib.suppress(EverstepError):
        run.cancel()


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C, so that cleanup runs."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {
        number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
