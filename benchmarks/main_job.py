"""The main job: seconds from POST to 201, to the first step and to SUCCEEDED, accuracy reached, and
what an idle service costs.

python -m benchmarks main_job
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import psutil

from benchmarks.report import summary, write
from everstep import Client
from tests.support.service_process import ServiceProcess

DIGITS: dict[str, Any] = {
    "name": "digits",
    "task": {
        "name": "image_classification",
        "model": {"name": "mini_resnet"},
        "data": {"name": "digits"},
    },
    "optimizer": {"name": "adamw", "lr": 3e-3, "weight_decay": 0.01},
    "schedule": {"name": "cosine", "warmup_steps": 20},
    "train": {
        "epochs": 20,
        "global_batch_size": 128,
        "micro_batch_size": 32,
        "grad_clip_norm": 1.0,
    },
    "scaling": {"min_workers": 2, "max_workers": 2},
    "checkpoint": {"every_steps": 50, "best_metric": "val_accuracy"},
}
FASHION_MNIST: dict[str, Any] = {
    **DIGITS,
    "name": "fashion-mnist",
    "task": {
        "name": "image_classification",
        "model": {"name": "mini_resnet"},
        "data": {"name": "fashion_mnist"},
    },
    "train": {"epochs": 3, "global_batch_size": 128, "micro_batch_size": 64, "grad_clip_norm": 1.0},
}


def train(client: Client, spec: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """One run from POST to SUCCEEDED; seconds are by this process's clock but for the first step,
    which the rank stamped."""
    posted_at = time.time()
    run = client.runs.create(spec)
    run.wait(timeout_s=timeout_s)
    done_at = time.time()
    run.refresh()
    first_point = run.metrics("loss", max_points=10_000)["loss"][0]
    return {
        "post_to_first_step_s": round(first_point[1] - posted_at, 2),
        "post_to_succeeded_s": round(done_at - posted_at, 2),
        "val_accuracy": run.run.metrics["val_accuracy"],
        "steps": run.step,
    }


def post_latency_ms(client: Client, num_posts: int = 100) -> dict[str, Any]:
    """POST of runs that no cluster can hold, so that nothing but the service works."""
    spec = {
        **DIGITS,
        "name": "never",
        "scaling": {"min_workers": 4, "max_workers": 4, "resources_per_worker": {"CPU": 64}},
    }
    latencies = []
    for _ in range(num_posts):
        started = time.perf_counter()
        client.runs.create(spec)
        latencies.append((time.perf_counter() - started) * 1000)
    for run in list(client.runs.list(status="QUEUED")):
        run.cancel()
    return {
        "median": round(statistics.median(latencies), 2),
        "p99": round(sorted(latencies)[int(0.99 * num_posts) - 1], 2),
    }


def idle_share_of_a_core(service: ServiceProcess, seconds: float) -> float:
    assert service.process is not None
    process = psutil.Process(service.process.pid)
    before = process.cpu_times()
    time.sleep(seconds)
    after = process.cpu_times()
    return round((after.user + after.system - before.user - before.system) / seconds, 4)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--idle-s", type=float, default=20)
    options = parser.parse_args(argv)
    with ServiceProcess(nodes=2) as service:
        client = service.client()
        digits = [train(client, DIGITS, 300) for _ in range(options.repeats)]
        fashion = train(client, FASHION_MNIST, 1200)
        posts = post_latency_ms(client)
        idle = idle_share_of_a_core(service, options.idle_s)
    keys = ("post_to_first_step_s", "post_to_succeeded_s", "val_accuracy")
    write(
        "main_job",
        {
            "digits": {key: summary([result[key] for result in digits]) for key in keys},
            "fashion_mnist": fashion,
            "post_to_201_ms": posts,
            "idle_share_of_a_core": idle,
        },
    )
