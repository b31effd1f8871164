"""Goodput from 8 to 100,000 GPUs, simulated: Everstep, torchrun, plain Ray Train, and torchrun with
hot spares.

    python -m benchmarks scale [--seeds 3] [--plot docs/scale.svg]
    python -m benchmarks scale --ranks 100 1000 10000

The second one measures what grows with the number of ranks (``benchmarks/scale/ranks.py``). Nothing
is measured here; benchmarks/scale/parameters.py says where every figure is from,
docs/scale.md what follows.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.report import write
from benchmarks.scale.parameters import EVERSTEP, POLICIES, PROPOSALS, Costs
from benchmarks.scale.simulation import simulate

COUNTS = (8, 64, 512, 1024, 4096, 16_384, 32_768, 65_536, 100_000)
PARTS = {
    "rework": "done again",
    "restarting": "restarting",
    "growing": "growing",
    "saving": "saving",
    "missing": "nodes away",
}


def sweep(costs: Costs, seeds: int) -> list[dict[str, Any]]:
    """For each number of GPUs the goodput (mean over seeds) and the shares of what it lacks."""
    rows = []
    for num_gpus in COUNTS:
        found = [simulate(costs, num_gpus, seed=seed) for seed in range(seeds)]
        shares = {
            part: round(statistics.fmean(share[part] for _, share in found), 4) for part in PARTS
        }
        rows.append(
            {
                "gpus": num_gpus,
                "goodput": round(statistics.fmean(good for good, _ in found), 4),
                **shares,
            }
        )
    return rows


def plot(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Goodput of all policies, and where Everstep's rest goes, as one SVG."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "everstep", "svg.fonttype": "none", "font.size": 10}
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for (name, rows), style in zip(
        results.items(), ("-o", "-s", "-^", "-d", ":", "--", "-."), strict=True
    ):
        left.plot(
            [row["gpus"] for row in rows],
            [100 * row["goodput"] for row in rows],
            style,
            markersize=4,
            label=name,
            color="C0" if style in (":", "--", "-.") else None,
        )
    left.set(
        xscale="log", xlabel="GPUs", ylabel="goodput, %", ylim=(0, 101), title="simulated goodput"
    )
    left.legend(loc="lower left")
    rows = results[EVERSTEP.name]
    stacks = [[100 * row[part] for row in rows] for part in PARTS]
    right.stackplot([row["gpus"] for row in rows], stacks, labels=list(PARTS.values()))
    right.set(
        xscale="log", xlabel="GPUs", ylabel="% of all GPU time", title="where Everstep's rest goes"
    )
    right.legend(loc="upper left")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--whole", type=int, nargs="+")
    options = parser.parse_args(argv)
    if options.ranks:
        from benchmarks.scale import ranks  # imports torch and the service

        write("ranks", ranks.measure(options.ranks))
        return
    if options.whole:
        from benchmarks.scale import whole

        write("whole_runs", whole.measure(options.whole))
        return
    results = {costs.name: sweep(costs, options.seeds) for costs in (*POLICIES, *PROPOSALS)}
    if options.plot is not None:
        plot(results, options.plot)
    write("scale", results)
