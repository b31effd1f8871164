"""A service full of runs that look like a team's week: for pages to be looked at, without a
cluster."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from everstep.wire import Node, NodeState, Reason, ReasonCode, RunStatus
from everstep.wire.events import EventKind
from service.annexes.drills import routes as orders
from storage.logs.journal import JournalEvent
from storage.logs.rank_logs import LogRecord, RankLogWriter
from storage.run_dir import RunDir
from tests.support.api_service import ApiService, Journal

NODES = ("3b321ac3f0d1", "9ff8478f77ab", "e88586c9d4c2", "71c0aa5e9b13")


@dataclass(frozen=True)
class Story:
    """Ids of the runs that tests ask for."""

    finished: str
    running: str
    queued: str
    failed: str


class Teller:
    """One run's life as its driver would journal it; the service's clock goes along."""

    def __init__(self, api: ApiService, run_id: str, seed: int, total_steps: int) -> None:
        self.api = api
        self.run_id = run_id
        self.total_steps = total_steps
        self.random = random.Random(seed)
        self.journal = Journal(attempt=0, at=api.clock.now)
        self.step = 0
        self.nodes: tuple[str, ...] = ()
        api.runs.claim_submission(run_id, 0)
        api.runs.record_job(run_id, 1, f"{run_id}-s001")

    def wait(self, seconds: float) -> None:
        self.api.clock.now += seconds
        self.journal.at = self.api.clock.now

    def tell(self, *events: JournalEvent) -> None:
        self.api.apply(self.run_id, events)

    def begin(self, *nodes: str) -> None:
        """A worker group with a rank on each of these nodes, up to its first step."""
        journal = self.journal
        journal.attempt += 1
        workers = [
            {"rank": rank, "node_id": node, "node_ip": "10.0.0.1", "pid": 100 + rank}
            for rank, node in enumerate(nodes)
        ]
        self.nodes = nodes
        source = "fresh" if journal.attempt == 1 else "snapshot"
        self.tell(journal.event(EventKind.ATTEMPT_STARTED, world_size=len(nodes), workers=workers))
        self.wait(1.5)
        self.tell(
            journal.event(
                EventKind.RESTORED,
                step=self.step,
                epoch=self.step // 50,
                source=source,
                checkpoint=None,
                rejected=[],
            ),
            journal.event(
                EventKind.TRAINING_STARTED,
                total_steps=self.total_steps,
                steps_per_epoch=50,
                snapshots="survivors",
                device="cpu",
                backend="gloo",
            ),
        )
        self.log(0, f"training from step {self.step} with {len(nodes)} ranks")

    def train(self, to: int, step_s: float = 0.4) -> None:
        """Steps up to ``to``, an evaluation and a checkpoint every 50."""
        while self.step < to:
            points = []
            for _ in range(min(10, to - self.step)):
                self.step += 1
                self.wait(step_s * self.random.uniform(0.9, 1.1))
                points.append(
                    {"step": self.step, "at": self.api.clock.now, "values": self.values()}
                )
            self.tell(self.journal.event(EventKind.METRICS, points=points))
            if self.step % 50 == 0:
                self.evaluate()

    def values(self) -> dict[str, float]:
        noise = self.random.gauss(0, 0.05)
        loss = 0.12 + 2.1 * math.exp(-self.step / 140) * (1 + noise) + abs(noise) * 0.1
        rate = 0.003 * (0.5 + 0.5 * math.cos(math.pi * self.step / self.total_steps))
        return {
            "loss": loss,
            "lr": rate,
            "grad_norm": 0.4 + loss * (1 + noise),
            "samples_per_s": 310 + 900 * noise / 5,
        }

    def evaluate(self) -> None:
        loss = 0.16 + 2.1 * math.exp(-self.step / 150)
        accuracy = 0.985 - 0.85 * math.exp(-self.step / 110)
        self.tell(
            self.journal.event(
                EventKind.EVALUATED,
                step=self.step,
                epoch=self.step // 50,
                metrics={"loss": loss, "accuracy": accuracy},
            ),
            self.journal.checkpoint(self.step, accuracy=accuracy, loss=loss),
        )
        for rank, node_id in enumerate(self.nodes):
            use = {
                "cpu_cores": 1.4 + 0.1 * rank,
                "rss_bytes": 2_100_000_000 + 1_000_000 * self.step,
                "net_in_bytes_per_s": 41_000_000,
                "net_out_bytes_per_s": 40_000_000,
                "seconds": 60.0,
            }
            event = self.journal.event(EventKind.RANK_USE, rank=rank, node_id=node_id, **use)
            self.tell(event)
        self.log(0, f"step {self.step}: val_loss {loss:.4f}, val_accuracy {accuracy:.4f}")

    def fail(
        self, verdict: str, rank: int, node: str, detect_s: float, *, after: int, **data: Any
    ) -> None:
        """The group is lost; ``after`` ranks go on."""
        self.wait(detect_s)
        before = self.api.runs.get(self.run_id)
        fields = {
            "verdict": verdict,
            "first_rank": rank,
            "node_id": node,
            "step": self.step,
            "exception": None,
            "budget": "system",
        }
        fields |= {
            "evidence": {},
            "action": "restarted from the survivors' state",
            "steps_lost": 0,
            "detect_s": detect_s,
        }
        fields |= {
            "recovery_s": 3.1,
            "world_size_before": before.world_size if before else None,
            "world_size_after": after,
        }
        self.tell(
            self.journal.event(EventKind.FAILURE, **fields | data),
            self.journal.event(EventKind.ATTEMPT_ENDED, cause=verdict, last_step=self.step),
        )
        self.log(rank, f"{verdict} noticed at step {self.step}", "error")
        self.wait(1.2)

    def observe(self, own_s: dict[str, float], step_s: float) -> None:
        """Each rank's time in a step, of which the last is slow; its GPU; and a profile of rank
        0."""
        rows, fastest = [], min(own_s.values())
        for rank, (node_id, seconds) in enumerate(own_s.items()):
            times = {
                "micro_batches": 2,
                "own_s": seconds,
                "wait_s": step_s - seconds,
                "skew": seconds / fastest,
            }
            rows.append({"rank": rank, "node_id": node_id, **times})
            use = {
                "busy": 0.97 - 0.9 * (step_s - seconds),
                "used_bytes": 31_200_000_000,
                "total_bytes": 85_100_000_000,
                "allocated_bytes": 27_900_000_000,
            }
            gpu_use = {
                "rank": rank,
                "node_id": node_id,
                "name": "NVIDIA A100-SXM4-80GB",
                **use,
                "power_w": 311.5,
                "celsius": 64,
                "seconds": 60.0,
            }
            self.tell(self.journal.event(EventKind.GPU_USE, **gpu_use))
        slow = {
            "rank": rank,
            "node_id": node_id,
            "own_s": seconds,
            "peers_s": fastest,
            "skew": seconds / fastest,
        }
        self.tell(
            self.journal.event(EventKind.STRAGGLER, step=self.step, slow=True, **slow),
            self.journal.event(EventKind.RANK_TIMES, step=self.step, step_s=step_s, ranks=rows),
        )
        run = self.api.runs.get(self.run_id)
        assert run is not None
        order = {"id": "prof_13bfjjg021c5", "rank": 0, "steps": 10}
        orders.record(self.api.database, run, orders.PROFILE, order, self.api.clock.now)
        all_reduces = [
            {
                "bucket": bucket,
                "size_bytes": size,
                "count": 10,
                "mean_s": mean_s,
                "max_s": 2 * mean_s,
            }
            for bucket, size, mean_s in (
                (0, 26_214_400, 0.0123),
                (1, 25_165_824, 0.0086),
                (2, 4_100_000, 0.0021),
            )
        ]
        done = {**order, "step_s": step_s, "size_bytes": 1_300_000, "all_reduces": all_reduces}
        self.tell(
            self.journal.event(
                EventKind.PROFILE_STARTED, id=order["id"], rank=0, step=self.step + 1
            ),
            self.journal.event(EventKind.PROFILE_DONE, **done),
        )

    def finish(self, outcome: str, reason: dict[str, str] | None = None) -> None:
        self.tell(
            self.journal.event(EventKind.FINISHED, outcome=outcome, reason=reason, step=self.step)
        )

    def log(self, rank: int, message: str, level: str = "info") -> None:
        with RankLogWriter(
            RunDir(self.api.storage, self.run_id), 1, self.journal.attempt, rank
        ) as writer:
            writer.write([LogRecord(self.api.clock.now, level, message)])


def story_token(api: ApiService) -> str:
    """A token of the administrator in the story."""
    return api.tokens.create("ada", "admin", None)[1]


def node(
    node_id: str,
    hostname: str,
    state: NodeState = "ALIVE",
    *,
    is_head: bool = False,
    cpus: float = 8.0,
) -> Node:
    resources = {"CPU": cpus, "memory": 34e9, f"node:{hostname}": 1.0} if cpus else {"memory": 8e9}
    return Node(
        id=node_id,
        hostname=hostname,
        ip="10.0.0.1",
        state=state,
        is_head=is_head,
        resources_total=resources,
        runs=(),
    )


async def tell(api: ApiService) -> Story:
    """Fill the service. The clock ends while one run trains."""
    names = ("trainer-a", "trainer-b", "trainer-c", "trainer-d")
    api.cluster.nodes = (
        node("0" * 12, "head", is_head=True, cpus=0.0),
        *(node(node_id, name) for node_id, name in zip(NODES, names, strict=True)),
    )
    wide = {"min_workers": 1, "max_workers": 4}
    finished = await api.create(
        name="resnet-width-16",
        project="vision",
        tags={"team": "vision", "sweep": "width"},
        scaling=wide,
        train={"epochs": 12},
    )
    life = Teller(api, finished, 1, 600)
    life.begin(*NODES[:3])
    life.train(230)
    life.fail(
        "node_lost",
        2,
        NODES[2],
        1.1,
        after=2,
        evidence={"node_state": "DEAD", "raylet": "connection refused"},
    )
    life.begin(*NODES[:2])
    life.train(600)
    life.finish("succeeded")
    api.clock.now += 600

    failed = await api.create(
        name="resnet-width-32",
        project="vision",
        tags={"team": "vision", "sweep": "width"},
        train={"epochs": 12, "seed": 3},
    )
    life = Teller(api, failed, 2, 600)
    life.begin(NODES[0])
    life.train(120)
    trace = (
        'Traceback (most recent call last):\n  File "task.py", line 41, in loss\nRuntimeError: '
        "shapes [32, 10] and [32] differ"
    )
    life.fail(
        "user_error",
        0,
        NODES[0],
        0.2,
        after=0,
        exception=trace,
        action="gave up",
        budget="user",
        recovery_s=None,
    )
    life.finish(
        "failed",
        {
            "code": "user_error",
            "message": "The run's own code failed twice at step 120: RuntimeError: shapes differ.",
        },
    )
    api.clock.now += 900

    for index, name in enumerate(("warmup-100", "warmup-200")):
        cancelled = await api.create(name=name, project="speech", tags={"team": "speech"})
        life = Teller(api, cancelled, 10 + index, 400)
        life.begin(NODES[3])
        life.train(150 + 100 * index)
        api.runs.request_stop(cancelled, "cancel" if index else "pause")
        life.finish("stopped")
    running, queued = await _now(api, wide)
    return Story(finished, running, queued, failed)


async def _now(api: ApiService, wide: dict[str, int]) -> tuple[str, str]:
    """What goes on while the pages are looked at: a run that trains, and one that waits."""
    running = await api.create(
        name="resnet-width-16-cosine",
        project="vision",
        tags={"team": "vision", "sweep": "schedule"},
        scaling=wide,
        train={"epochs": 18},
        schedule={"name": "cosine", "warmup_steps": 20},
        checkpoint={"best_metric": "accuracy"},
    )
    life = Teller(api, running, 3, 900)
    life.begin(*NODES)
    life.train(180)
    life.fail(
        "node_lost",
        2,
        NODES[2],
        1.4,
        after=3,
        evidence={"node_state": "DEAD", "last_lines": ["step 179", "step 180"]},
    )
    life.begin(NODES[0], NODES[1], NODES[3])
    life.train(390)
    life.fail(
        "hang",
        1,
        NODES[1],
        24.0,
        after=3,
        evidence={"stacks": {"rank 1": "all_reduce\n  backward\n  train_step"}},
    )
    life.begin(NODES[0], NODES[1], NODES[3])
    life.train(480)
    life.observe({NODES[0]: 0.272, NODES[1]: 0.281, NODES[3]: 0.371}, step_s=0.4)
    life.train(560)
    queued = await api.create(
        name="wide-sweep",
        project="speech",
        priority=5,
        scaling={"min_workers": 8, "max_workers": 16},
    )
    message = "needs 8 x 1 CPU; run resnet-width-16-cosine holds 3 of 32, 5 fit now"
    api.runs.set_reason(
        queued, RunStatus.QUEUED, Reason(code=ReasonCode.WAITING_FOR_CAPACITY, message=message)
    )
    admin = await api.client(story_token(api))
    await admin.post(
        f"/v1/cluster/nodes/{NODES[2]}/cordon", json={"reason": "3 runs failed here within an hour"}
    )
    api.clock.now += 2
    return running, queued
