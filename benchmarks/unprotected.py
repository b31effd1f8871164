"""The loop without all that is there for the moment of a failure, and its driver: ``python -m benchmarks.unprotected``.

The same model, loader and optimizer in torch's DDP at its defaults; no gate and no totals, no copies of buffers, no ledger, no
reports while it trains, no checkpoints, no snapshots, no watch. What is left is a plain DDP loop.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from everstep.events import EventKind
from storage.run_dir import Stop
from train_fn.context import WorkerContext
from train_fn.driver import main
from train_fn.loop import Attempt
from train_fn.optim import lr_factor, set_lr
from train_fn.replica import Replica


def train(ctx: WorkerContext) -> Stop | None:
    attempt = Plain(ctx)
    attempt.begin()
    return attempt.run()


class Plain(Attempt):
    def run(self) -> Stop | None:
        replica = self._replica
        assert replica is not None and self._loader is not None
        del replica.step_module.carrier
        replica.wrapped = DistributedDataParallel(replica.step_module)
        points: list[dict[str, Any]] = []
        while replica.state.step < replica.total_steps:
            self._step(replica)
            points.append({"step": replica.state.step, "at": time.time(), "values": {"loss": 0.0}})
        self._loader.close()
        if self.ctx.world_rank == 0:
            self.ctx.journal.emit(EventKind.METRICS, {"points": points})
        return None

    def _step(self, replica: Replica) -> None:
        ctx, state = self.ctx, replica.state
        assert self._loader is not None
        num_samples, share, _ = replica.plans.of(state.step)
        scale = ctx.world_size / num_samples
        num_passes = replica.num_passes(len(share))
        for position in range(num_passes):
            batch = next(self._loader)[1] if position < len(share) else None
            with replica.synchronising(position == num_passes - 1):
                loss_sum, _ = replica.forward(batch)
                state.scaler.scale(loss_sum * scale).backward()  # type: ignore[no-untyped-call]
        self._loader.prefetch()
        state.scaler.unscale_(state.optimizer)
        set_lr(state.optimizer, lr_factor(ctx.spec.schedule, state.step, replica.total_steps, state.steps_per_epoch))
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad(set_to_none=True)
        state.step += 1


if __name__ == "__main__":
    sys.exit(main(train="benchmarks.unprotected:train"))
