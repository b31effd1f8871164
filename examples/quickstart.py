"""Submit a run, follow it, fetch what it learned. Start the service first: everstep serve"""

from pathlib import Path

from everstep import Client

SPEC = {
    "name": "quickstart",
    "task": {
        "name": "image_classification",
        "model": {"name": "mini_resnet"},
        "data": {"name": "digits"},
    },
    "optimizer": {"name": "adamw", "lr": 0.003},
    "train": {"epochs": 10, "global_batch_size": 128, "micro_batch_size": 32},
    "scaling": {"min_workers": 1, "max_workers": 2},
    "checkpoint": {"best_metric": "val_accuracy"},
}


def main() -> None:
    with Client() as client:
        run = client.runs.create(SPEC)
        print(f"submitted {run.id}")
        for event in run.events(follow=True):
            if event.kind == "evaluated":
                print(f"epoch {event.data['epoch']}: {event.data['metrics']}")
        # it has ended; raises RunFailed, with the verdict, unless it succeeded
        run.wait(timeout_s=60)
        directory = run.download_checkpoint("best", Path("out") / run.id)
        print(
            f"best weights: {directory / 'model.pt'}, to be read by torch.load(..., "
            "weights_only=True)"
        )


if __name__ == "__main__":
    main()
