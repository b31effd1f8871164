"""``everstep demo``: train on three local nodes, kill one, show that the run continues, and prove
by a replay that it has the bits of a run on one worker.
"""

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

from everstep.cli.drills import report_fields
from everstep.cli.runs import Watcher
from everstep.cli.terminal import Exit, Terminal, exit_code_of_status
from everstep.client.client import Client
from everstep.client.handles import DrillHandle
from everstep.client.runs import RunHandle
from everstep.errors import EverstepError, Unavailable
from everstep.options.serve import VARIABLES
from everstep.wire import Run
from everstep.wire.drills import Drill, DrillKind
from everstep.wire.events import EventKind
from everstep.wire.run import Replay

# ---------------------------------------------------------------- service

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0


SERVE = (
    *(sys.executable, "-P", "-m", "everstep.cli.main", "serve"),
    *("--port", "0", "--nodes", "3", "--cpus-per-node", "1", "--drills"),
)


class DemoFailed(EverstepError):
    """The demo cannot continue; the message says where to look."""

    code = "demo_failed"


@dataclass(frozen=True)
class Service:
    """The service that the demo uses."""

    client: Client
    home: Path
    pid: int

    @property
    def log(self) -> Path:
        return self.home / "serve.log"


def keep_log(service: Service) -> Path | None:
    """Copy the service's log out of its home directory, which is removed."""
    if not service.log.exists():
        return None
    return Path(
        shutil.copy(service.log, Path(tempfile.mkdtemp(prefix="everstep-demo-")) / "serve.log")
    )


@contextlib.contextmanager
def own_service(terminal: Terminal, keep: bool) -> Iterator[Service]:
    """Start a service with three one-CPU nodes in a temporary home directory; stop all of it at the
    end."""
    # Ray's unix sockets are below it, and their paths are limited to 107 bytes.
    home = Path(tempfile.mkdtemp(prefix="es-", dir="/tmp" if Path("/tmp").is_dir() else None))
    terminal.note(
        "starting the service with a Ray cluster of three nodes on this machine (about 15 s)"
    )
    # without settings of a service: the demo's has a cluster and a database of its own
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    with (home / "serve.log").open("ab") as log:
        process = subprocess.Popen(
            SERVE,
            env={"OMP_NUM_THREADS": "1", **inherited, "EVERSTEP_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Ctrl-C is for this process, which stops the service at its end
            start_new_session=True,
        )
    is_kept = False
    try:
        service = _await_ready(process, home)
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
    """Stop the service gracefully, which stops its cluster; kill it after a timeout. Signals are
    ignored meanwhile."""
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


def kill_all_of(home: Path) -> None:
    """Send SIGKILL to every process of the service of ``home``, found by its EVERSTEP_HOME."""
    marker = f"EVERSTEP_HOME={home}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        pid = int(entry.parent.name)
        with contextlib.suppress(OSError):
            if pid != os.getpid() and marker in entry.read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)


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


def run_demo(terminal: Terminal, *, keep: bool, out: str) -> int:
    """Run the demo and return the exit code. Stop everything that it started, unless ``keep`` is
    set and it succeeded."""
    phases = Phases()
    with _terminated_as_interrupted(), contextlib.ExitStack() as stack:
        with phases.timed("service"):
            service = stack.enter_context(own_service(terminal, keep))
        terminal.note(
            f"service {service.client.url}, home {service.home}: {phases.said('service')}"
        )
        run = service.client.runs.create(SPEC)
        terminal.note(
            f"{run.id}: MiniResNet on 1,797 handwritten digits, {SPEC['scaling']['max_workers']} "
            "ranks"
        )
        with phases.timed("training"):
            drill = _train(terminal, service, run)
        if exit_code_of_status(run.refresh().status) != Exit.SUCCEEDED:
            raise _failed(service, run)
        with phases.timed("replay"):
            proof = _proof(terminal, run)
        ending = _Ending(drill, proof, phases, Path(out), keep)
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


@dataclass(frozen=True)
class _Ending:
    """What the summary is made of."""

    drill: Drill
    proof: Replay
    phases: Phases
    out: Path
    keep: bool


def _train(terminal: Terminal, service: Service, run: RunHandle) -> Drill:
    """Follow the run to its end, and kill a node on the way. Return what the run made of it."""
    begun: DrillHandle | None = None
    total = 0
    with Watcher(terminal, run) as watcher:
        for event in run.events(follow=True):
            watcher.show(event)
            if event.kind == EventKind.TRAINING_STARTED:
                total = event.data.get("total_steps") or 0
            points = event.data.get("points") if event.kind == EventKind.METRICS else None
            if begun is None and points and total and points[-1]["step"] >= KILL_AT * total:
                rank = _rank_to_hit(service, run)
                begun = run.drill(DrillKind.KILL_NODE, rank=rank)
                if not terminal.as_json:
                    watcher.say(f"SIGKILL to the node of rank {rank}")
    if begun is None:
        raise _failed(service, run.refresh())
    return begun.wait(PROOF_TIMEOUT_S).drill


def _rank_to_hit(service: Service, run: RunHandle) -> int:
    """Return the highest rank that is not on the head, whose death would end the cluster."""
    heads = {node.id for node in service.client.cluster().nodes if node.is_head}
    ranks = [each.rank for each in run.attempts()[-1].workers if each.node_id not in heads]
    return max(ranks, default=0)


def _proof(terminal: Terminal, run: RunHandle) -> Replay:
    """Train all steps of the run again on one worker. Return the comparison of each."""
    terminal.note(f"training the same {run.step} steps again, on one worker, to compare every bit")
    found = run.replay(0, run.step, workers=1).wait(PROOF_TIMEOUT_S).replay_of
    assert found is not None, "the run is a replay"
    return found


def _print_summary(terminal: Terminal, service: Service, run: RunHandle, ending: _Ending) -> int:
    """Print the summary; return the exit code."""
    proof, out, keep = ending.proof, ending.out, ending.keep
    code, headline, style = _conclusion(proof)
    checkpoint = run.checkpoint("latest")
    run.download_checkpoint(checkpoint.step, out)
    result = _result(run, ending)
    if terminal.as_json:
        served = {"url": service.client.url, "home": str(service.home), "pid": service.pid}
        terminal.json({**result, **(served if keep else {})})
        return code
    terminal.line()
    terminal.line(headline, style=style)
    weights = (out / "model.pt").absolute()
    terminal.fields(
        [
            *_summary(run, ending.drill, result),
            ("proof", f"a replay on one worker: {proof.message}"),
            ("checkpoint", f"{weights} (step {checkpoint.step}, verified)"),
            ("took", ending.phases),
        ]
    )
    if keep:
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


def _summary(run: RunHandle, drill: Drill, result: dict[str, Any]) -> list[tuple[str, object]]:
    """Return names and values that say what happened to the run."""
    accuracy = run.latest_metrics.get("val_accuracy")
    shown = (
        ("accuracy", f"{accuracy:.1%} on the held-out digits" if accuracy is not None else None),
        ("killed", f"the node of rank {drill.rank}"),
        ("problem", drill.problem),
    )
    samples = "each used exactly once in every epoch"
    if not result["every_sample_once"]:
        samples = "NOT each used once; run everstep show RUN --samples"
    report = report_fields(drill.report) if drill.report else []
    own = ("hit", "samples")
    return [*shown, *(pair for pair in report if pair[0] not in own), ("samples", samples)]


def _result(run: RunHandle, ending: _Ending) -> dict[str, Any]:
    report, epochs = ending.drill.report, run.samples().epochs
    return {
        "run": run.run,
        "drill": ending.drill,
        "recovery_s": report and report.total_s,
        "steps_lost": run.steps_lost,
        "world_size_after": report and report.world_size_after,
        "every_sample_once": bool(epochs)
        and all(e.used_once == e.samples and not e.duplicates and not e.missing for e in epochs),
        "failures": run.failures(),
        "checkpoint": str(ending.out.absolute()),
        "proof": ending.proof,
        "seconds": ending.phases.seconds,
    }


def _print_next_commands(terminal: Terminal, service: Service, run: Run) -> None:
    terminal.line()
    terminal.fields(
        [
            ("service", f"{service.client.url}  (API reference: {service.client.url}/docs)"),
            ("Ray", run.links.ray_dashboard),
            ("use it", f"EVERSTEP_HOME={service.home} everstep runs"),
            ("stop it", f"kill {service.pid}"),
        ]
    )


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
