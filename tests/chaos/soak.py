"""``python -m tests.chaos.soak --minutes 60 --report soak.md``: a mixed queue under random
faults, held against I1 to I8.

One service with an embedded cluster of three nodes. Runs of every sort come as long as the time
lasts; a fault strikes at random every few seconds. Then no further faults are made, everything may
end, and every run's history is checked.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from everstep.client.client import Client
from everstep.client.runs import RunHandle
from everstep.errors import Conflict, EverstepError, InvalidSpec
from everstep.wire import RunStatus
from tests.chaos.faults import KINDS, Fault, strike
from tests.chaos.history_checker import Expected, of_fault, strangers, violations
from tests.chaos.replay import replay, segments
from tests.chaos.soak_report import write_report
from tests.support.digits_run import SAMPLES, STEPS_PER_EPOCH
from tests.support.service_process import ServiceProcess, wait_for

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_task"
NUM_NODES = 3
LIVE = 4
MEAN_PAUSE_S = 6.0
DRAINED_S = 8.0
WITHIN_S = 30.0
"""A failure so soon after a fault is taken to be that fault."""
END_S = 150.0

SORTS = {
    "whole": 3,
    "single": 2,
    "wide": 2,
    "urgent": 1,
    "cancelled": 1,
    "paused": 2,
    "fork": 1,
    "raises": 1,
}
"""How often each sort of run comes."""
RAISES = """
from task import DigitsTask

class Raises(DigitsTask):
    calls = 0

    def loss(self, model, batch):
        Raises.calls += 1
        if Raises.calls > 40:
            raise ValueError("this task always breaks")
        return super().loss(model, batch)
"""
"""What a submitter got wrong: the run must end FAILED, and be the only sort that does."""
FAULTS = {
    "rank_killed": 6,
    "rank_stopped": 1,
    "node_killed": 2,
    "driver_killed": 2,
    "service_killed": 1,
    "node_drained": 2,
}
FAULTS |= {"checkpoint_damaged": 1}
EXPLAINS = {
    "rank_killed": {"worker_lost"},
    "rank_stopped": {"hang", "worker_lost"},
    "node_killed": {"node_lost", "worker_lost"},
    "driver_killed": {"control_plane"},
    "node_drained": {"preemption"},
    "checkpoint_damaged": {"control_plane"},
}
"""What a run may say of each fault; of the others it says nothing."""


@dataclass
class SoakRun:
    """A run of the queue, what it is for, and what was done to it."""

    sort: str
    handle: RunHandle
    spec: dict[str, Any]
    expected: Expected
    acts_at_step: int
    acted: bool = False
    faults: list[tuple[str, float]] = field(default_factory=list)
    """(kind, unix seconds)."""


@dataclass
class Record:
    """What a soak found."""

    seed: int
    minutes: float
    runs: list[SoakRun] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    verdicts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(fault, verdict): how often that followed."""
    false_verdicts: list[str] = field(default_factory=list)
    steps_lost: Counter[str] = field(default_factory=Counter)
    """By the fault that a failure is taken for."""
    replayed: int = 0
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: int = 0


class Soak:
    """One soak."""

    def __init__(self, service: ServiceProcess, record: Record) -> None:
        self.service = service
        self.client: Client = service.client()
        self.random = random.Random(record.seed)
        self.record = record
        self.stranger = self.client.tokens.create(
            "stranger", role="submitter", project="elsewhere", create_project=True
        ).token
        self.drained: dict[str, float] = {}
        with tempfile.TemporaryDirectory() as directory:
            code = Path(shutil.copytree(EXAMPLE, Path(directory) / "code"))
            (code / "raises.py").write_text(RAISES)
            self.archive = self.client.code.upload(code).digest

    def run(self, seconds: float) -> None:
        """Faults for so long, then the end of every run, then the check of all."""
        until = time.monotonic() + seconds
        fault_at = time.monotonic() + 10
        while time.monotonic() < until:
            self._keep_queue()
            self._act()
            if time.monotonic() >= fault_at:
                self._strike()
                fault_at = time.monotonic() + self.random.expovariate(1 / MEAN_PAUSE_S)
            time.sleep(0.2)
        self._let_end()
        for run in self.record.runs:
            self._check(run)

    def _live(self) -> list[SoakRun]:
        live = [run for run in self.record.runs if not run.handle.status.terminal]
        return [run for run in live if not run.handle.refresh().status.terminal]

    def _keep_queue(self) -> None:
        for _ in range(LIVE - len(self._live())):
            [sort] = self.random.choices(list(SORTS), list(SORTS.values()))
            spec, expected = self._made(sort)
            try:
                handle = self.client.runs.create(spec)
            except (InvalidSpec, Conflict) as exc:
                self.record.violations.append(f"I1: a run of sort {sort} was refused: {exc}")
                continue
            self.record.runs.append(
                SoakRun(sort, handle, spec, expected, self.random.randint(20, 60))
            )

    def _made(self, sort: str) -> tuple[dict[str, Any], Expected]:
        """A spec of this sort, and what may become of it."""
        epochs = self.random.choice((10, 20, 30))
        most = {"single": 1, "wide": NUM_NODES, "urgent": 1}.get(sort, 2)
        spec: dict[str, Any] = {
            "name": f"{sort} {len(self.record.runs)}",
            "task": {
                "name": "image_classification",
                "model": {"name": "mini_resnet"},
                "data": {"name": "digits"},
            },
            "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
            "train": {
                "epochs": epochs,
                "global_batch_size": 128,
                "micro_batch_size": 32,
                "seed": self.random.randrange(1000),
            },
            "scaling": {"min_workers": 1, "max_workers": most},
            "checkpoint": {"every_steps": 10},
            "recovery": {"hang_timeout_s": 10, "max_system_failures": 10_000},
            "priority": 5 if sort == "urgent" else 0,
        }
        statuses = (
            {RunStatus.SUCCEEDED, RunStatus.CANCELLED}
            if sort == "cancelled"
            else {RunStatus.SUCCEEDED}
        )
        expected = Expected(frozenset(statuses), epochs * STEPS_PER_EPOCH, SAMPLES, epochs)
        if sort == "raises":
            del spec["task"]
            spec["code"] = {"archive": self.archive, "task": "raises:Raises"}
            expected.statuses = frozenset({RunStatus.FAILED})
        done = [
            run
            for run in self.record.runs
            if run.handle.status == RunStatus.SUCCEEDED and not run.expected.corrupted
        ]
        # a fork has made all of its 40 epochs
        origins = [run for run in done if not run.expected.forked]
        if sort == "fork" and origins:
            parent = self.random.choice(origins)
            spec["resume_from"] = {"run_id": parent.handle.id, "step": "latest"}
            spec["train"] |= {"epochs": 40, "seed": parent.spec["train"]["seed"]}
            expected = Expected(frozenset(statuses), 40 * STEPS_PER_EPOCH, SAMPLES, 40, forked=True)
        return spec, expected

    def _act(self) -> None:
        """What users do to runs of some sorts, and what an operator takes back."""
        for run in self._live():
            if run.sort == "cancelled" and not run.acted and run.handle.step >= run.acts_at_step:
                run.acted = self._may(run.handle.cancel)
            elif run.sort == "paused" and not run.acted and run.handle.step >= run.acts_at_step:
                run.acted = self._may(run.handle.pause)
            elif run.handle.status == RunStatus.PAUSED:
                self._may(run.handle.resume)
        for node_id, at in list(self.drained.items()):
            if time.monotonic() >= at:
                del self.drained[node_id]
                self._may(lambda node_id=node_id: self.client.nodes.uncordon(node_id))  # type: ignore[misc]

    @staticmethod
    def _may(act: Any) -> bool:
        """Whether it was taken: runs end and pause while they are looked at."""
        try:
            act()
        except EverstepError:
            return False
        return True

    def _strike(self) -> None:
        victims = [
            run
            for run in self._live()
            if run.handle.status == RunStatus.RUNNING and run.handle.step >= 5
        ]
        if not victims:
            return
        victim = self.random.choice(victims)
        [kind] = self.random.choices(list(FAULTS), list(FAULTS.values()))
        at = time.time()
        if self._done(kind, victim):
            self.record.struck[kind] += 1
            victim.faults.append((kind, at))
            for words in strangers(self.service.url, self.stranger, victim.handle.id):
                self.record.violations.append(words)

    def _done(self, kind: str, victim: SoakRun) -> bool:
        if kind in KINDS:
            return (
                strike(Fault(kind, 0, 0.0, self.random.random()), self.service, victim.handle)
                is not None
            )
        attempts = victim.handle.attempts()
        if kind == "node_drained":
            if self.drained or not attempts or not attempts[-1].workers:
                return False
            node_id = attempts[-1].workers[-1].node_id
            self.drained[node_id] = time.monotonic() + DRAINED_S
            return self._may(lambda: self.client.nodes.drain(node_id, reason="soak"))
        return (
            self._damage(victim)
            and strike(Fault("driver_killed", 0, 0.0, 0.0), self.service, victim.handle) is not None
        )

    def _damage(self, victim: SoakRun) -> bool:
        """One byte of the newest checkpoint; a new driver begins from what it finds in storage."""
        kept = [
            checkpoint.step
            for checkpoint in victim.handle.checkpoints()
            if checkpoint.state == "committed"
        ]
        if len(kept) < 2:
            return False
        directory = self.service.home / "storage/runs" / victim.handle.id / "checkpoints"
        path = next(iter(directory.glob(f"step-{max(kept):09d}.*/model.pt")), None)
        if path is None:  # newer ones have taken its place since
            return False
        with path.open("r+b") as file:
            file.seek(1000)
            byte = file.read(1)
            file.seek(1000)
            file.write(bytes([byte[0] ^ 1]))
        victim.expected.corrupted.add(max(kept))
        return True

    def _let_end(self) -> None:
        def over() -> bool:
            self._act()
            return not self._live()

        try:
            wait_for(over, END_S, "the end of every run")
        except TimeoutError:
            return  # who has not ended is a violation of I1, and named as such

    def _check(self, run: SoakRun) -> None:
        record = self.record
        record.violations += violations(run.handle, run.expected)
        record.statuses[run.sort, run.handle.status.value] += 1
        failures = run.handle.failures()
        record.failures += len(failures)
        for kind, at in run.faults:
            failure = of_fault(failures, at, WITHIN_S)
            if kind not in EXPLAINS or failure is None:
                continue
            record.verdicts[kind, failure.verdict] += 1
            record.steps_lost[kind] += failure.steps_lost or 0
            near = [
                when for each in record.runs for _, when in each.faults if abs(when - at) < WITHIN_S
            ]
            if failure.verdict not in EXPLAINS[kind] and len(near) == 1:
                record.false_verdicts.append(
                    f"{kind} at {at:.0f} was told as {failure.verdict} by {run.handle.id}"
                )


def replays(record: Record, most: int, directory: Path) -> None:
    """I4: some of the disturbed runs once more without faults, at the same world sizes; weights
    must agree bit by bit."""
    disturbed = [
        run
        for run in record.runs
        if run.faults and run.handle.status == RunStatus.SUCCEEDED and not run.expected.forked
    ]
    for run in disturbed[:most]:
        found = run.handle.download_checkpoint("latest", directory / run.handle.id) / "model.pt"
        expected = replay(segments(run.handle), run.spec, directory / f"replay-{run.handle.id}")
        weights = torch.load(found, weights_only=True)
        if any(not torch.equal(weights[name], expected[name]) for name in expected):
            record.violations.append(
                f"I4: the weights of {run.handle.id} are not those of the same steps in peace"
            )
        record.replayed += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--replays",
        type=int,
        default=5,
        help="disturbed runs whose weights are held against a run in peace",
    )
    parser.add_argument("--report", type=Path, help="Markdown; a JSON of the same goes beside it")
    options = parser.parse_args()
    record = Record(options.seed, options.minutes)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is taken down
    with ServiceProcess(nodes=NUM_NODES) as service, tempfile.TemporaryDirectory() as scratch:
        service.mend()
        Soak(service, record).run(60 * options.minutes)
        replays(record, options.replays, Path(scratch))
    text = write_report(record, options.report)
    print(text)
    print(json.dumps({"violations": record.violations, "false_verdicts": record.false_verdicts}))
    return 1 if record.violations or record.false_verdicts else 0


if __name__ == "__main__":
    raise SystemExit(main())
