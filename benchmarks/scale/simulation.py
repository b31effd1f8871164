"""One training run on a cluster whose nodes fail and come back, as discrete events (SimPy).

Goodput is the useful work over what all nodes that the run holds, spare ones too, could have done:
a run on half of its nodes does half of the work, since the global batch stays what it was.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import simpy

from benchmarks.scale.parameters import (
    GPUS_PER_NODE,
    MTTF_AT_16384_S,
    NODE_SHARE,
    REPLACED_S,
    Costs,
)
from train_fn.recovery.sizing import is_worth_growing

What = Literal["node", "process", "joined"]
Process = Generator[Any, Any, None]
STABLE_S = 2.0
"""New room must stay for so long before a run grows onto it."""


@dataclass
class Account:
    """Node-seconds, by where they went; ``time`` has seconds, whatever the size of the group."""

    useful: float = 0.0
    rework: float = 0.0
    restarting: float = 0.0
    growing: float = 0.0
    saving: float = 0.0
    missing: float = 0.0
    """Of nodes that were away, or spare."""
    failures: int = 0
    growths: int = 0
    time: dict[str, float] = field(default_factory=lambda: {"useful": 0.0, "total": 0.0})

    def goodput(self, num_nodes: int, seconds: float) -> float:
        return self.useful / (num_nodes * seconds)

    def goodput_of_time(self) -> float:
        """Share of the time in which steps were made that counted, as a benchmark of a real run
        measures it."""
        return self.time["useful"] / self.time["total"]


class Cluster:
    """Nodes that fail at random or by a script, and come back."""

    def __init__(
        self, env: simpy.Environment, num_nodes: int, gpus_per_node: int, replaced_s: float
    ) -> None:
        self.env = env
        self.num_nodes = num_nodes
        self.gpus_per_node = gpus_per_node
        self.replaced_s = replaced_s
        self.alive = num_nodes
        self.trainer: simpy.Process | None = None

    def fail_at_random(self, seed: int) -> Process:
        """Failures of all nodes together; one that falls on a node that is away does nothing."""
        draw = random.Random(seed)
        per_s = self.num_nodes * self.gpus_per_node / 16_384 / MTTF_AT_16384_S
        while True:
            yield self.env.timeout(draw.expovariate(per_s))
            if draw.random() < self.alive / self.num_nodes:
                what: What = "node" if draw.random() < NODE_SHARE else "process"
                self.fail(what, draw.expovariate(1 / self.replaced_s))

    def fail_by_script(self, script: Sequence[tuple[float, What]]) -> Process:
        for at, what in script:
            yield self.env.timeout(max(0.0, at - self.env.now))
            self.fail(what, self.replaced_s)

    def fail(self, what: What, replaced_s: float) -> None:
        if what == "node":
            self.alive -= 1
            self.env.process(self._come_back(replaced_s))
        self._record(what)

    def _come_back(self, after_s: float) -> Process:
        yield self.env.timeout(after_s)
        self.alive += 1
        self._record("joined")

    def _record(self, what: What) -> None:
        if self.trainer is not None and self.trainer.is_alive:
            self.trainer.interrupt(what)


class Trainer:
    """The run: trains, restarts, waits, grows."""

    def __init__(self, cluster: Cluster, costs: Costs, num_spares: int) -> None:
        self.cluster = cluster
        self.env = cluster.env
        self.costs = costs
        self.most = cluster.num_nodes - num_spares
        self.fixed = costs.grow_s is None
        self.size = self.most
        self.account = Account()
        self.mttf_s = mttf_s = (
            16_384 / (cluster.num_nodes * cluster.gpus_per_node) * MTTF_AT_16384_S
        )
        young_daly_s = math.sqrt(2 * max(costs.stall_s, 0.01) * mttf_s)
        self.interval_s = min(max(young_daly_s, costs.stall_s, 5.0), costs.most_interval_s)
        self._since_save_s = 0.0
        self._recovered_at = -math.inf
        self._pending: list[What] = []

    def run(self) -> Process:
        """For ever; what it did is in ``account`` once ``settle`` was called."""
        self._mark = self.env.now
        while True:
            if self.cluster.alive == 0 or (self.fixed and self.cluster.alive < self.most):
                yield from self._interruptible(math.inf, "waiting")
                continue
            what = self._next()
            if what is None:
                yield from self._interruptible(math.inf, "training")
            elif what == "joined":
                if self._may_grow():
                    yield from self._grow()
            else:
                yield from self._restart()

    def settle(self) -> Account:
        """Book the time up to now as training: an interruption at the end would only be noise."""
        self._book("training")
        return self.account

    def _next(self) -> What | None:
        return self._pending.pop(0) if self._pending else None

    def _may_grow(self) -> bool:
        joining = min(self.cluster.alive, self.most) - self.size
        if self.costs.grow_s is None or joining <= 0:
            return False
        pause_s = self._restart_s(self.costs.grow_s)
        return not self.costs.weighs_growth or is_worth_growing(
            self.size, joining, pause_s, self.mttf_s
        )

    def _restart(self) -> Process:
        """Failures within a restart begin it again."""
        self.account.failures += 1
        self._lose(self.costs.loses_steps or (self.size == 1 and self.cluster.alive == 0))
        again = self.env.now - self._recovered_at < self.costs.warm_after_s
        recovery_s = self.costs.again_s if again else self.costs.recovery_s
        self.size = min(self.cluster.alive, self.most)
        yield from self._interruptible(self._restart_s(recovery_s), "restarting")
        self._recovered_at = self.env.now

    def _grow(self) -> Process:
        assert self.costs.grow_s is not None
        yield from self._interruptible(STABLE_S, "training")
        if any(what != "joined" for what in self._pending):
            return
        self._pending.clear()
        self.account.growths += 1
        self._lose(self.costs.grow_loses_steps)
        self.size = min(self.cluster.alive, self.most)
        yield from self._interruptible(self._restart_s(self.costs.grow_s), "growing")

    def _restart_s(self, seconds: float) -> float:
        return self.costs.restart_s(self.size * self.cluster.gpus_per_node, seconds)

    def _lose(self, loses: bool) -> None:
        """Steps since the last commit are done again."""
        if not loses:
            return
        lost_s = self._since_save_s
        if self._since_save_s < self.costs.write_s and self.interval_s < math.inf:
            lost_s += self.interval_s  # the last save was still being written
        worth = min(lost_s, self.account.time["useful"])
        self.account.useful -= worth * self.size
        self.account.rework += worth * self.size
        self.account.time["useful"] -= worth
        self._since_save_s = 0.0

    def _interruptible(self, seconds: float, what: str) -> Process:
        """Stay for so long, or until something happens, which is then pending."""
        try:
            yield self.env.event() if math.isinf(seconds) else self.env.timeout(max(0.0, seconds))
        except simpy.Interrupt as interrupt:
            self._pending.append(cast(Any, interrupt.cause))
        self._book(what)

    def _book(self, what: str) -> None:
        spent, self._mark = self.env.now - self._mark, self.env.now
        account, size = self.account, self.size
        account.time["total"] += spent
        account.missing += spent * (self.cluster.num_nodes - size)
        if what == "training":
            saves = (self._since_save_s + spent) // (self.interval_s + self.costs.stall_s)
            stalled = min(spent, saves * self.costs.stall_s)
            account.saving += stalled * size
            account.useful += (spent - stalled) * size
            account.time["useful"] += spent - stalled
            self._since_save_s = (self._since_save_s + spent) % (
                self.interval_s + self.costs.stall_s
            )
        elif what == "restarting":
            account.restarting += spent * size
        elif what == "growing":
            account.growing += spent * size
        else:
            account.missing += spent * size


def simulate(
    costs: Costs, num_gpus: int, *, seed: int = 0, num_failures: int = 400
) -> tuple[float, dict[str, float]]:
    """Goodput at a number of GPUs, over a time in which so many failures are to be expected, and
    where the rest went (shares)."""
    num_nodes = max(1, num_gpus // GPUS_PER_NODE)
    env = simpy.Environment()
    cluster = Cluster(env, num_nodes, min(num_gpus, GPUS_PER_NODE), REPLACED_S)
    trainer = Trainer(
        cluster, costs, math.ceil(num_nodes * costs.spare_share) if num_nodes > 1 else 0
    )
    cluster.trainer = env.process(trainer.run())
    env.process(cluster.fail_at_random(seed))
    seconds = num_failures * MTTF_AT_16384_S * 16_384 / num_gpus
    env.run(until=seconds)
    account = trainer.settle()
    total = num_nodes * seconds
    shares = {
        name: getattr(account, name) / total
        for name in ("rework", "restarting", "growing", "saving", "missing")
    }
    return account.goodput(num_nodes, seconds), shares


def predict(
    costs: Costs,
    kills: Sequence[tuple[float, What]],
    seconds: float,
    *,
    num_nodes: int = 2,
    node_back_s: float = 10.0,
) -> float:
    """Share of the time in which steps count, of a small run whose ranks or nodes are killed by a
    script: what ``python -m benchmarks goodput`` measures.

    Args:
        costs: With those of the small model: ``small`` makes them.
        kills: Seconds from the start, and what is killed.
        seconds: How long is looked at.
        num_nodes: Of one rank each.
        node_back_s: From a node's death to the start of another.
    """
    env = simpy.Environment()
    cluster = Cluster(env, num_nodes, 1, node_back_s)
    trainer = Trainer(cluster, costs, 0)
    cluster.trainer = env.process(trainer.run())
    env.process(cluster.fail_by_script(kills))
    env.run(until=seconds)
    return trainer.settle().goodput_of_time()
