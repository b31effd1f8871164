"""Ten runs over learning rates and widths, and the best of them. Start the service first: everstep
serve

python examples/sweep.py          submits what is missing, waits, prints a table and the best run

Started again, also after it was interrupted, it finds its runs by their idempotency keys and goes
on waiting.
"""

import itertools
import sys
from pathlib import Path

from everstep import Client, RunFailed

SWEEP = "digits-sweep-1"
METRIC = "val_accuracy"
GRID = list(itertools.product((1e-3, 2e-3, 4e-3, 8e-3, 16e-3), (8, 16)))


def spec_of(lr: float, width: int) -> dict[str, object]:
    return {
        "name": f"{SWEEP}-lr{lr:g}-w{width}",
        "tags": {"sweep": SWEEP, "lr": f"{lr:g}", "width": str(width)},
        "task": {
            "name": "image_classification",
            "model": {"name": "mini_resnet", "args": {"width": width}},
            "data": {"name": "digits"},
        },
        "optimizer": {"name": "adamw", "lr": lr, "weight_decay": 0.01},
        "schedule": {"name": "cosine", "warmup_steps": 20},
        "train": {"epochs": 5, "global_batch_size": 128, "micro_batch_size": 32},
        "scaling": {"min_workers": 1, "max_workers": 1},
        "checkpoint": {"best_metric": METRIC},
    }


def main() -> None:
    with Client() as client:
        # The service starts as many at a time as the cluster has room for; the rest wait in its
        # queue.
        runs = [
            client.runs.create(spec_of(lr, width), idempotency_key=f"{SWEEP}-{lr:g}-{width}")
            for lr, width in GRID
        ]
        scores = {}
        for run in runs:
            try:
                run.wait()
            except RunFailed as exc:
                # one failed run does not end the sweep
                print(f"{run.name}: {exc}", file=sys.stderr)
                continue
            best = run.run.best
            scores[run.id] = best.value if best is not None else float("-inf")
            print(f"{run.name:32} {METRIC} {scores[run.id]:.4f}")
        if not scores:
            sys.exit("every run failed; `everstep why RUN_ID` tells what happened")
        winner = max(runs, key=lambda run: scores.get(run.id, float("-inf")))
        directory = winner.download_checkpoint("best", Path("out") / SWEEP)
        print(
            f"best: {winner.name} with {METRIC} {scores[winner.id]:.4f}; its weights are in "
            f"{directory}"
        )


if __name__ == "__main__":
    main()
