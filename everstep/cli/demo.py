"""``everstep demo``: three nodes on this machine, a run on all of them, one node killed in the
middle, and the run carries on."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from everstep.cli.demo_node import Victim, choose_victim, kill, kill_all_of
from everstep.cli.terminal import Exit, Terminal, exit_code_of_status
from everstep.cli.watch import Watcher
from everstep.client.address import home_directory
from everstep.client.client import Client
from everstep.client.runs import RunHandle
from everstep.errors import EverstepError, Unavailable, UsageError
from everstep.wire import Event, Run
from everstep.wire.events import EventKind

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
SERVE = (
    sys.executable,
    "-m",
    "service.process.serve",
    "--port",
    "0",
    "--nodes",
    "3",
    "--cpus-per-node",
    "1",
)
KILL_AT = 0.4
"""Share of the steps after which the node dies."""
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
    },
    "scaling": {"min_workers": 1, "max_workers": 3},
    "checkpoint": {"every_steps": 20, "best_metric": "val_accuracy"},
    "recovery": {"deadline_s": 1200.0},
}


class DemoFailed(EverstepError):
    """The demo cannot go on; the message says where to look."""

    code = "demo_failed"


@dataclass(frozen=True)
class Service:
    """The service that the demo uses."""

    client: Client
    home: Path
    pid: int | None
    """None where it was there before."""

    @property
    def log(self) -> Path:
        return self.home / "serve.log"


def run_demo(terminal: Terminal, *, url: str | None, keep: bool, out: str) -> int:
    """The whole demo; returns the exit code. Ends what it started, however it ends, but for
    ``keep`` and a good end."""
    with _terminated_as_interrupted(), contextlib.ExitStack() as stack:
        service = _existing(url) if url else stack.enter_context(_own_service(terminal, keep))
        run = service.client.runs.create(SPEC)
        terminal.note(
            f"{run.id}: MiniResNet on 1,797 handwritten digits, {SPEC['scaling']['max_workers']} "
            "ranks"
        )
        try:
            story = _train(terminal, service, run)
        except BaseException:
            if service.pid is None:
                _cancel_quietly(run)
            raise
        return _tell(terminal, service, run.refresh(), story, Path(out), keep)


@dataclass
class Story:
    """What happened to the run, as the demo saw it."""

    victim: Victim | None = None
    killed_at: float | None = None
    """Unix seconds of the SIGKILL."""
    killed_step: int = 0
    next_step_at: float | None = None
    """Unix seconds of the first step after it, by the clock of the rank, which is this
    machine's."""
    world_size_after: int | None = None
    _attempt: int = 0
    total_steps: int | None = None

    def take(self, event: Event) -> None:
        if event.kind == EventKind.TRAINING_STARTED:
            self.total_steps = event.data.get("total_steps")
        if event.kind == EventKind.ATTEMPT_STARTED and self.killed_at and self.next_step_at is None:
            self.world_size_after = event.data.get("world_size")
        if event.kind == EventKind.METRICS and (points := event.data.get("points")):
            if self.killed_at is None:
                self.killed_step, self._attempt = points[-1]["step"], event.attempt
            elif self.next_step_at is None and event.attempt > self._attempt:
                self.next_step_at = points[0]["at"]

    @property
    def is_due(self) -> bool:
        """Whether it is time to kill."""
        return (
            self.killed_at is None
            and self.total_steps is not None
            and self.killed_step >= KILL_AT * self.total_steps
        )


def _train(terminal: Terminal, service: Service, run: RunHandle) -> Story:
    story = Story()
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


def _tell(
    terminal: Terminal, service: Service, run: RunHandle, story: Story, out: Path, keep: bool
) -> int:
    """The summary; returns the exit code."""
    code = exit_code_of_status(run.status)
    if code != Exit.SUCCEEDED:
        reason = f"{run.reason.code}: {run.reason.message}" if run.reason else "no reason was given"
        kept = _keep_log(service)
        raise DemoFailed(
            f"the demo's run ended {run.status}: "
            f"{reason}{f'; the service log is in {kept}' if kept else ''}"
        )
    checkpoint = run.checkpoint("latest")
    run.download_checkpoint(checkpoint.step, out)
    result = _result(run, story, out)
    if terminal.as_json:
        terminal.json({**result, **(_how_to_go_on(service) if keep or not service.pid else {})})
        return code
    accuracy = run.run.metrics.get("val_accuracy")
    recovery_s, once = result["recovery_s"], result["every_sample_once"]
    victim = story.victim
    terminal.line()
    terminal.line("The run carried on.", style="bold green")
    terminal.fields(
        [
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
                "each used exactly once in every epoch, by the ledger"
                if once
                else "NOT each used once: everstep samples",
            ),
            ("checkpoint", f"{(out / 'model.pt').absolute()} (step {checkpoint.step}, verified)"),
        ]
    )
    if keep or service.pid is None:
        _tell_how_to_go_on(terminal, service, run.run)
    return code


def _result(run: RunHandle, story: Story, out: Path) -> dict[str, Any]:
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


def _how_to_go_on(service: Service) -> dict[str, Any]:
    return {"url": service.client.url, "home": str(service.home), "pid": service.pid}


def _tell_how_to_go_on(terminal: Terminal, service: Service, run: Run) -> None:
    terminal.line()
    terminal.fields(
        [
            ("service", f"{service.client.url}  (API reference: {service.client.url}/docs)"),
            ("Ray", run.links.ray_dashboard),
            ("use it", f"EVERSTEP_HOME={service.home} everstep runs"),
            ("stop it", f"kill {service.pid}" if service.pid else None),
        ]
    )


def _keep_log(service: Service) -> Path | None:
    """A copy of the service's log that outlives its home directory."""
    if service.pid is None or not service.log.exists():
        return None
    return Path(
        shutil.copy(service.log, Path(tempfile.mkdtemp(prefix="everstep-demo-")) / "serve.log")
    )


def _cancel_quietly(run: RunHandle) -> None:
    with contextlib.suppress(EverstepError):
        run.cancel()


def _existing(url: str) -> Service:
    """A service that runs already on this machine, with its own embedded cluster."""
    home = home_directory()
    if not (home / "cluster.json").exists():
        raise UsageError(
            f"{home} has no cluster.json: the demo kills a node of a service's own cluster; set "
            "EVERSTEP_HOME to its home"
        )
    return Service(Client(url), home, None)


@contextlib.contextmanager
def _own_service(terminal: Terminal, keep: bool) -> Iterator[Service]:
    """A service with three one-CPU nodes in a home directory of its own, ended with everything it
    started."""
    # Ray's unix sockets lie below, and their paths may have 107 bytes.
    home = Path(tempfile.mkdtemp(prefix="es-", dir="/tmp" if Path("/tmp").is_dir() else None))
    terminal.note(
        "starting the service with a Ray cluster of three nodes on this machine (about 15 s)"
    )
    with (home / "serve.log").open("ab") as log:
        process = subprocess.Popen(
            SERVE,
            env={"OMP_NUM_THREADS": "1", **os.environ, "EVERSTEP_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Ctrl-C is ours to handle: the service is told to stop when we are done with it
            start_new_session=True,
        )
    is_kept = False
    try:
        service = _await_ready(process, home)
        terminal.note(f"service {service.client.url}, home {home}")
        yield service
        is_kept = keep
    finally:
        if not is_kept:
            _stop(terminal, process, home)


def _await_ready(process: subprocess.Popen[bytes], home: Path) -> Service:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError, Unavailable):
            client = Client(
                (home / "url").read_text().strip(),
                (home / "token").read_text().strip(),
                max_tries=3,
            )
            state = client.ready()
            if state.status == "ready" and state.ray == "up":
                return Service(client, home, process.pid)
        time.sleep(0.1)
    ended = process.poll()
    what = (
        f"did not become ready in {START_TIMEOUT_S:g} s"
        if ended is None
        else f"ended with exit code {ended}"
    )
    tail = "\n".join((home / "serve.log").read_text(errors="replace").splitlines()[-15:])
    raise DemoFailed(f"the service {what}; its log ends:\n{tail}")


def _stop(terminal: Terminal, process: subprocess.Popen[bytes], home: Path) -> None:
    """End the service gracefully, which ends its cluster; by force where that takes too long.
    Signals wait meanwhile."""
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        if process.poll() is None:
            terminal.note("stopping the service and its nodes")
            process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        kill_all_of(home)
        shutil.rmtree(home, ignore_errors=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind as Ctrl-C does, so that nothing is left behind."""

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
