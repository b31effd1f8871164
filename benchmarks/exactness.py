"""What ``train.exactness: elastic`` and audits cost: steps over those of ``world_size``, by turns.

    python -m benchmarks elastic

Two or three processes exchange gradients over gloo. Each has the same model once in each mode, and
takes steps of one and of the other in turn, so that what drifts falls on both. A ratio is that of
the medians of two turns beside each other. Memory is the peak of a rank that knows one mode only.

Audits are measured with every step audited. ``train.audit_fraction`` of the steps costs that share.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
import timeit
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import summary, write

MODES = ("world_size", "elastic")
AUDITED = ("world_size", "audited")
AUDIT_FRACTION = 0.001
"""For which the cost of audits is reported."""
AUDIT_CASES = ("mini_resnet", "gpt_3m")
NUM_MICRO = 8
TEXT = "".join(f"{number} bottles of beer on the wall, " for number in range(4000))


class Case(NamedTuple):
    """One model at one world size."""

    model: dict[str, Any]
    """Arguments of the GPT; of MiniResNet on digits if it has no layers."""
    world_size: int
    micro_batch_size: int
    turns: int
    """Pairs of turns."""
    steps: int
    """Steps of a turn that count."""


def _gpt(width: int, layers: int) -> dict[str, Any]:
    return {"width": width, "num_layers": layers, "num_heads": 8, "context_length": 32}


CASES = {
    "mini_resnet": Case({"width": 16}, 2, 16, 8, 6),
    "gpt_3m": Case(_gpt(256, 4), 2, 4, 6, 4),
    "gpt_25m": Case(_gpt(512, 8), 2, 2, 3, 3),
    "gpt_3m_at_three": Case(_gpt(256, 4), 3, 4, 2, 4),
}


def _spec(case: Case, base: str, mode: str) -> Any:
    from everstep.spec.run_spec import RunSpec

    images = {
        "name": "image_classification",
        "model": {"name": "mini_resnet", "args": case.model},
        "data": {"name": "digits"},
    }
    text = {
        "name": "language_modeling",
        "model": {"name": "gpt", "args": case.model},
        "data": {"name": "text_files", "args": {"path": f"{base}/text.txt", "level": "char"}},
    }
    train = {
        "epochs": 10_000,
        "global_batch_size": NUM_MICRO * case.micro_batch_size,
        "micro_batch_size": case.micro_batch_size,
        "eval_every_epochs": 10_000,
        "exactness": "elastic" if mode == "elastic" else "world_size",
        "audit_fraction": 1.0 if mode == "audited" else 0.0,
    }
    return RunSpec.model_validate(
        {
            "name": mode,
            "task": text if "num_layers" in case.model else images,
            "train": train,
            "scaling": {"max_workers": case.world_size},
            "checkpoint": {"every_steps": 1_000_000},
        }
    )


class _Silent:
    """A journal that keeps nothing."""

    stop_requested = None

    def emit(self, kind: object, data: object) -> None:
        pass

    def flush(self, timeout_s: float) -> bool:
        return True


def _prepared(case: Case, base: str, rank: int, mode: str) -> Any:
    import torch

    from storage.filesystem import open_storage
    from storage.run_dir import RunDir
    from train_fn.context import WorkerContext
    from train_fn.loop.training import RankProgress, prepare

    return prepare(
        WorkerContext(
            spec=_spec(case, base, mode),
            run_dir=RunDir(open_storage(f"{base}/storage"), f"bench-{mode}-{os.getppid()}"),
            submission=1,
            attempt=1,
            world_rank=rank,
            world_size=case.world_size,
            local_rank=0,
            local_world_size=1,
            node_id=f"node{rank}",
            num_nodes=case.world_size,
            device=torch.device("cpu"),
            journal=_Silent(),
            report_checkpoint=lambda name, metrics: None,
        ),
        RankProgress(),
    )


def _rank(rank: int, case: Case, modes: tuple[str, ...], base: str) -> None:
    import torch
    import torch.distributed as dist

    from train_fn.loop.attempt import take_step
    from train_fn.snapshots import whole

    whole.COST_RATIO = 1e9  # no snapshots, which a turn of one mode would leave to the other
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{base}/rendezvous", rank=rank, world_size=case.world_size
    )
    trainings = {mode: _prepared(case, base, rank, mode) for mode in modes}
    turns: list[tuple[str, list[float], list[float]]] = []
    for number in range(2 * case.turns if len(modes) > 1 else 1):
        mode = modes[0] if len(modes) == 1 else modes[number % 4 in (1, 2)]
        walls, cpus = [], []
        for step in range(case.steps + 2):
            dist.barrier()
            began, began_cpu = time.perf_counter(), time.process_time()
            take_step(trainings[mode])
            if step >= 2:  # the first ones settle
                walls.append(time.perf_counter() - began)
                cpus.append(time.process_time() - began_cpu)
        turns.append((mode, walls, cpus))
    passes = trainings[modes[-1]].replica.passes
    gradient_bytes = sum(parameter.nbytes for parameter in passes.parts.trained.parameters)
    sent = passes.tree.num_bytes_sent if passes.tree is not None else None
    audit = trainings[modes[-1]].audit
    begin_s = None
    if audit is not None:
        audit._fraction = AUDIT_FRACTION  # so that nearly no step is due
        begin_s = timeit.timeit(audit.begin, number=1000) / 1000
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ranks: list[Any] = [None] * case.world_size
    dist.all_gather_object(ranks, (turns, sent, peak_bytes))
    if rank == 0:
        found = {"ranks": ranks, "gradient_bytes": gradient_bytes, "audit_begin_s": begin_s}
        Path(base, "found.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # loaders and savers of two trainings need no orderly end


def _run(case: Case, modes: tuple[str, ...]) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bench-") as base:
        Path(base, "text.txt").write_text(TEXT)
        ranks = [
            context.Process(target=_rank, args=(rank, case, modes, base))
            for rank in range(case.world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError(f"ranks ended with {[process.exitcode for process in ranks]}")
        found: dict[str, Any] = json.loads(Path(base, "found.json").read_text())
        return found


def _ratios(found: dict[str, Any], modes: tuple[str, str]) -> tuple[list[float], list[float]]:
    """Return the wall time and the CPU time of the second mode over those of the first, of each
    pair of turns beside each other."""
    ranks = found["ranks"]
    turns = ranks[0][0]
    ratios, cpu_ratios = [], []
    for at in range(0, len(turns) - 1, 2):
        of_mode = {turns[place][0]: place for place in (at, at + 1)}
        first, second = (of_mode[mode] for mode in modes)
        ratios.append(statistics.median(turns[second][1]) / statistics.median(turns[first][1]))
        first_cpu, second_cpu = (
            sum(sum(rank[0][place][2]) for rank in ranks) for place in (first, second)
        )
        cpu_ratios.append(second_cpu / first_cpu)
    return ratios, cpu_ratios


def audits_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return what audits cost: a step with one over a step without, and what follows for
    ``AUDIT_FRACTION``."""
    ratios, cpu_ratios = _ratios(found, AUDITED)
    plain_s = statistics.median(
        s for mode, walls, _ in found["ranks"][0][0] if mode == AUDITED[0] for s in walls
    )
    schedule = found["audit_begin_s"] / plain_s
    return {
        "audited_wall_ratio": summary(ratios),
        "audited_cpu_ratio": summary(cpu_ratios),
        "schedule_of_step": round(schedule, 6),
        f"cpu_ratio_at_{AUDIT_FRACTION}": round(
            1 + schedule + AUDIT_FRACTION * (statistics.median(cpu_ratios) - 1), 5
        ),
    }


def results_of(found: dict[str, Any]) -> dict[str, Any]:
    """Compare elastic steps with others."""
    ranks, gradient_bytes = found["ranks"], found["gradient_bytes"]
    turns = ranks[0][0]
    ratios, cpu_ratios = _ratios(found, MODES)
    world_size = len(ranks)
    ring_bytes = 2 * (world_size - 1) / world_size * gradient_bytes
    return {
        "step_ms": {
            mode: round(
                1000
                * statistics.median(s for kind, walls, _ in turns if kind == mode for s in walls),
                2,
            )
            for mode in MODES
        },
        "wall_ratio": summary(ratios),
        "cpu_ratio": summary(cpu_ratios),
        "gradient_bytes": gradient_bytes,
        "sent_over_ring": round(max(rank[1] for rank in ranks) / ring_bytes, 4),
    }


def _memory(case: Case) -> dict[str, Any]:
    """Return the peak memory of each mode, and the difference in gradients."""
    found = {mode: _run(case, (mode,)) for mode in MODES}
    peaks = {mode: max(rank[2] for rank in each["ranks"]) for mode, each in found.items()}
    difference = peaks["elastic"] - peaks["world_size"]
    size = found["elastic"]["gradient_bytes"]
    return {"peak_bytes": peaks, "more_gradients": round(difference / size, 2)}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--cases", default=",".join(CASES), help="names, with commas between")
    options = parser.parse_args(argv)
    names = options.cases.split(",")
    results = {name: results_of(_run(CASES[name], MODES)) for name in names}
    for name in AUDIT_CASES:
        if name in names:
            results[name]["audits"] = audits_of(_run(CASES[name], AUDITED))
    if "gpt_25m" in names:
        results["gpt_25m"]["memory"] = _memory(CASES["gpt_25m"])
    write("elastic", results)


if __name__ == "__main__":
    main([])
