"""Six runs over learning rates and widths, of which only the best train to the end. Start the
service first: everstep serve

python examples/sweep.py          submits the sweep, waits, prints a table and the best run

Started again, also after it was interrupted, it finds its sweep by the idempotency key and goes on
waiting.
"""

from pathlib import Path
from typing import Any

from everstep import Client

METRIC = "val_accuracy"
SWEEP: dict[str, Any] = {
    "spec": {
        "name": "digits",
        "task": {
            "name": "image_classification",
            "model": {"name": "mini_resnet"},
            "data": {"name": "digits"},
        },
        "optimizer": {"name": "adamw", "weight_decay": 0.01},
        "train": {"epochs": 6, "global_batch_size": 128, "micro_batch_size": 32},
        "scaling": {"min_workers": 1, "max_workers": 1},
        "checkpoint": {"best_metric": METRIC},
    },
    "metric": METRIC,
    "grid": {"optimizer.lr": [1e-3, 4e-3, 16e-3], "task.model.args.width": [8, 16]},
    "scheduler": {"name": "asha"},
    "name": "digits-sweep-1",
}


def main() -> None:
    with Client() as client:
        # The service starts as many at a time as the cluster has room for; the rest wait in its
        # queue.
        sweep = client.sweeps.create(**SWEEP, idempotency_key=SWEEP["name"]).wait()
        for run in sweep.runs():
            print(f"{run.run_id} {run.status:9} {METRIC} {run.value} {dict(run.params)}")
        best = sweep.best()
        directory = best.download_checkpoint("best", Path("out") / sweep.name)
        value = sweep.sweep.best.value
        print(f"best: {best.id} with {METRIC} {value:.4f}; its weights are in {directory}")


if __name__ == "__main__":
    main()
