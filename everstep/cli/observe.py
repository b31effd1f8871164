"""Show a run in every way: `everstep show` with its views, `everstep profile` and `everstep
tensorboard`.
"""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.history import compare, open_page, show_samples
from everstep.cli.terminal import (
    Columns,
    Exit,
    RunArgument,
    RunsArgument,
    Said,
    Terminal,
    command,
    print_found,
    terminal,
)
from everstep.cli.terminal import run_ids as newest_ids
from everstep.errors import UsageError
from everstep.text import events as event_words
from everstep.text import failure, words
from everstep.wire import Goodput, GoodputBuckets, ProjectGoodput, Run
from everstep.wire.drills import MOST_STEPS, Profile, ProfileState, StackReport
from everstep.wire.figures import GpuUse, RankTimes, StragglerReport

_STACK_LINES = 8
"""Lines of each rank's stack that are shown unless one rank is asked for, the innermost."""


@command()
def show(
    run_ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN…", help="Ids of runs.", show_default=False, autocompletion=newest_ids
        ),
    ] = None,
    web: Annotated[
        bool,
        typer.Option(
            "--web", help="Open the page in a browser, and print its address; without RUN the list."
        ),
    ] = False,
    ranks: Annotated[
        bool,
        typer.Option(
            "--ranks",
            help="Each rank's step time and its wait for the others, stragglers, and GPUs.",
        ),
    ] = False,
    stacks: Annotated[
        bool,
        typer.Option(
            "--stacks",
            help="What every rank does now, and where its code is. Ranks are not interrupted.",
        ),
    ] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="With --stacks: the whole stack of this rank only.")
    ] = None,
    samples: Annotated[
        bool,
        typer.Option(
            "--samples",
            help="For each finished epoch how often its samples were used, over the committed "
            "lineage.",
        ),
    ] = False,
    goodput: Annotated[
        bool,
        typer.Option(
            "--goodput",
            help="How the wall time was spent; without RUN by all runs of each project.",
        ),
    ] = False,
    project: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --goodput: only runs of this project.")
    ] = None,
) -> None:
    """Show a run, or one view of it. Show several runs side by side: how they did, and where their
    specs differ."""
    ids = list(dict.fromkeys(run_ids or ()))
    views = {"web": web, "ranks": ranks, "stacks": stacks, "samples": samples, "goodput": goodput}
    chosen = [name for name, is_given in views.items() if is_given]
    if len(chosen) > 1 or (chosen and len(ids) > 1):
        raise UsageError(f"--{chosen[0]} shows one run in one way; leave out the others")
    view = chosen[0] if chosen else None
    client = terminal().client()
    if not ids:
        if view == "web":
            open_page(f"{client.url}/runs")
        elif view == "goodput":
            print_found({"items": client.goodput(project)}, _goodput_of_projects)
        else:
            raise UsageError("name a run: everstep show RUN; `everstep runs` lists them")
        return
    if len(ids) > 1:
        compare(ids)
        return
    run = client.runs.get(ids[0])
    match view:
        case "web":
            open_page(run.run.links.dashboard or f"{client.url}/runs/{run.id}")
        case "ranks":
            print_found(run.stragglers(), _show_stragglers)
        case "stacks":
            print_found(run.stacks(), partial(_show_stacks, rank))
        case "samples":
            print_found(run.samples(), show_samples)
        case "goodput":
            print_found(run.goodput(), _goodput_of_run)
        case _:
            print_found(run.run, lambda found: terminal().fields(_fields(found)))


def _fields(run: Run) -> list[tuple[str, object]]:
    """Return names and values to show of a run; None is left out."""
    checkpoint, is_live = run.latest_checkpoint, not run.status.terminal
    survives = ", ".join(run.protection.survives) or "nothing"
    lost = f"at most {words.count(run.protection.worst_case_steps_lost, 'step')}"
    if run.redone_s is not None:
        lost = "the work since the last checkpoint that it reported"
    return [
        ("id", run.id),
        ("name", run.name),
        ("project", run.project),
        ("status", run.status),
        ("reason", f"{run.reason.code}: {run.reason.message}" if run.reason else None),
        ("tags", ", ".join(f"{key}={value}" for key, value in run.tags.items()) or None),
        ("created", words.ago(run.created_at)),
        ("owner", run.owner),
        ("notes", " ".join(run.notes.split()) if run.notes else None),
        (
            "forked from",
            f"step {run.forked_from.step} of {run.forked_from.run_id}" if run.forked_from else None,
        ),
        ("progress", words.headline(run)),
        (
            "step",
            words.progress(run)
            if words.has_no_steps(run)
            else f"{words.progress(run)}, {words.count(run.epoch, 'epoch')} done",
        ),
        ("ranks", run.world_size),
        ("speed", words.speed(run.metrics)),
        ("metrics", words.numbers(run.metrics) or None),
        (
            "best",
            f"{run.best.metric} {words.number(run.best.value)} at step {run.best.step}"
            if run.best
            else None,
        ),
        (
            "checkpoint",
            f"step {checkpoint.step}, {words.size(checkpoint.size_bytes)}" if checkpoint else None,
        ),
        ("attempt", f"{run.attempt} of submission {run.submission}"),
        (
            "failures",
            f"{words.count(run.restarts, 'restart')}, {failure.of_run(run)}",
        ),
        (
            "survives",
            f"loss of {survives}; {lost} would be repeated" if is_live else None,
        ),
        ("protection", run.protection.message if is_live else None),
        ("replays", run.replay_of and words.replay(run.replay_of)),
        ("digest of its steps", run.chain),
        (
            "exactness",
            "elastic: the same bits at any number of ranks" if run.exactness == "elastic" else None,
        ),
        (
            "audits",
            f"in a share of {words.number(run.audit_fraction)} of the steps, ranks compute "
            "micro-batches of each other again"
            if run.audit_fraction
            else None,
        ),
        ("samples", run.guarantee),
        ("goodput", f"{run.goodput:.0%}" if run.goodput is not None else None),
        ("Ray job", run.links.ray_job),
    ]


# ---------------------------------------------------------------- time


def _goodput_of_run(found: Goodput) -> None:
    out = terminal()
    out.table(
        ("bucket", "time", "share"),
        _rows(found.buckets, found.wall_s),
        empty="no time has passed yet",
    )
    if found.first_start is not None and (start := words.first_start(found.first_start)):
        out.line(f"first step: {start}")


def _goodput_of_projects(found: dict[str, list[ProjectGoodput]]) -> None:
    out = terminal()
    for each in found["items"]:
        share = (
            ""
            if each.goodput is None
            else f", goodput {each.goodput:.1%} of the time with resources"
        )
        out.line(
            f"{each.project}: {words.count(each.runs, 'run')}, {words.duration(each.wall_s)}{share}"
        )
        out.table(
            ("bucket", "time", "share"),
            _rows(each.buckets, each.wall_s),
            empty="no time has passed yet",
        )
    if not found["items"]:
        out.note("no runs")


def _rows(buckets: GoodputBuckets, wall_s: float) -> list[tuple[object, ...]]:
    spent = buckets.model_dump()
    return [
        (name, words.duration(spent[name]), f"{spent[name] / wall_s:.1%}" if wall_s else None)
        for name in spent
        if spent[name]
    ]


def _show_stragglers(report: StragglerReport) -> None:
    show_ranks = Columns[RankTimes](
        ("rank", "node", "micro-batches", "computes", "waits", "of peers' time"),
        lambda each: (
            each.rank,
            each.node_id[:8],
            each.micro_batches,
            f"{each.own_s * 1e3:.1f} ms",
            f"{each.wait_s * 1e3:.1f} ms",
            f"x {words.number(each.skew)}",
        ),
        empty="no times yet: they appear after some seconds of training on at least two ranks",
    )
    show_ranks(report.ranks)
    if report.gpus:
        show_gpus = Columns[GpuUse](
            ("rank", "node", "GPU", "busy", "memory", "own tensors"),
            lambda each: (
                each.rank,
                each.node_id[:8],
                each.name,
                None if each.busy is None else f"{each.busy:.0%}",
                f"{words.size(each.used_bytes)} of {words.size(each.total_bytes)}",
                words.size(each.allocated_bytes),
            ),
            text=("GPU", "memory", "own tensors"),
        )
        show_gpus(report.gpus)
    for line in event_words.stragglers(report):
        terminal().line(line)


def _show_stacks(rank: int | None, found: StackReport) -> None:
    out = terminal()
    out.line(event_words.standing_still(found))
    for each in found.ranks:
        if rank not in (None, each.rank):
            continue
        out.line()
        out.line(f"rank {each.rank} on node {each.node_id[:8]} {each.does}")
        lines = (each.stack or "").rpartition("Thread ")[2].rstrip().splitlines()
        for line in lines if rank is not None else lines[-_STACK_LINES:]:
            out.line(f"  {line}")


@command()
def profile(
    run_id: RunArgument,
    rank: Annotated[int, typer.Option(min=0, help="Rank to profile.")] = 0,
    steps: Annotated[
        int, typer.Option(min=1, max=MOST_STEPS, help="Number of steps to record.")
    ] = 10,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File for the trace.",
            show_default="RUN-rank-N.json.gz",
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait for the trace and download it.")
    ] = True,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0, help="Maximum time to wait.")
    ] = 600.0,
) -> None:
    """Profile some steps of a training rank, and show the time of its all-reduces. Open the trace
    at https://ui.perfetto.dev."""
    out = terminal()
    begun = out.client().runs.get(run_id).profile(rank=rank, steps=steps)
    if not wait:
        out.json(begun.profile) if out.as_json else out.line(begun.id)
        return
    if not out.as_json:
        out.note(f"{begun.id}: waiting for {words.count(steps, 'step')} of rank {rank}")
    found = begun.wait(timeout_s)
    path = None
    if found.state is ProfileState.DONE:
        path = found.download(output or Path(f"{run_id}-rank-{rank}.json.gz"))
    if out.as_json:
        out.json(
            {**found.profile.model_dump(mode="json"), "path": None if path is None else str(path)}
        )
    elif path is not None:
        _show_profile(out, found.profile, path)
    if path is None:
        why = found.problem or "the attempt ended before the trace was complete"
        raise out.fail(f"profile {found.id} is {found.state}: {why}", Exit.FAILED)


def _show_profile(out: Terminal, found: Profile, path: Path) -> None:
    out.table(
        ("all-reduce of", "size", "times", "mean", "longest"),
        [
            (
                "everything else" if each.bucket is None else f"bucket {each.bucket}",
                words.size(each.size_bytes),
                each.count,
                f"{each.mean_s * 1e3:.2f} ms",
                f"{each.max_s * 1e3:.2f} ms",
            )
            for each in found.all_reduces
        ],
        empty="no all-reduces: the run has one rank",
    )
    if found.step_s is not None:
        out.line(
            f"{words.count(found.steps, 'step')} from step {found.first_step}, "
            f"{found.step_s * 1e3:.2f} ms each"
        )
    out.line(f"{path}: {words.size(found.size_bytes or 0)}; open it in https://ui.perfetto.dev")


# ---------------------------------------------------------------- tensorboard


@command()
def tensorboard(
    run_ids: RunsArgument,
    directory: Annotated[
        Path, typer.Option("--download", metavar="DIRECTORY", help="Where to put the files.")
    ] = Path("out/tensorboard"),
) -> Said:
    """Download the TensorBoard files of runs, and print the command that shows them. The same
    again fetches what is new."""
    client = terminal().client()
    runs = [client.runs.get(run_id) for run_id in dict.fromkeys(run_ids)]
    num_bytes = sum(
        run.download_event_files(directory / f"{run.run.name.replace('/', '_')}-{run.id}")
        for run in runs
    )
    shown = f"tensorboard --reload_multifile=true --logdir {shlex.quote(str(directory))}"
    return Said(
        {"directory": str(directory.absolute()), "new_bytes": num_bytes},
        [f"{directory}: {words.size(num_bytes)} more"],
        notes=[f"show it with: {shown}"],
    )
