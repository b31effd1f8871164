"""Fork a run from a checkpoint of another run: find the checkpoint, check that it fits, and adopt
its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch

from everstep.spec.run_spec import RunSpec
from everstep.spec.sections import ResumeFrom
from storage.checkpoints.manifest import Manifest
from storage.checkpoints.reader import best_of
from storage.checkpoints.store import CheckpointStore
from storage.errors import CorruptCheckpoint, StorageNotFound
from storage.run_dir import RunDir
from train_fn.checkpoints.commit import load_pieces, load_trusted, num_pieces
from train_fn.context import WorkerContext
from train_fn.errors import ForkRefused, few
from train_fn.state.contents import other_base, sums_of
from train_fn.state.optim import unpacked
from train_fn.state.pieces import joined
from train_fn.state.sound_state import ledger_fault
from train_fn.state.train_state import TrainState

_SCHEDULED = frozenset(
    ["lr", "initial_lr", "max_lr", "min_lr", "momentum", "base_momentum", "max_momentum", "betas"]
)
"""Options of an optimizer's groups that a scheduler sets."""
MAX_NAMED = 20
"""Limit on the differences of one kind that an error names. It gives the number of the others."""


@dataclass(frozen=True)
class Origin:
    """Describe where a forked run starts: the other run's checkpoint, and its ledger's facts about
    the data up to there."""

    run_id: str
    checkpoint: str
    step: int
    epoch: int
    """Epoch in progress."""
    samples: int
    """Samples of that epoch that the other run used."""
    digest: str
    """The ledger's hash chain over all steps up to there."""

    @property
    def name(self) -> str:
        """Return ``RUN_ID/CHECKPOINT``."""
        return f"{self.run_id}/{self.checkpoint}"


def read_origin(
    ctx: WorkerContext,
    resume_from: ResumeFrom,
    adopted: Callable[[dict[str, Any], Origin], dict[str, Any]] | None,
) -> tuple[Origin, dict[str, Any]]:
    """Return the checkpoint that the run starts from, and its state as this run adopts it.

    Args:
        adopted: returns the state as the initial one of this run. None for a sharded model, whose
            ranks each adopt their own part of what is returned: of a checkpoint in pieces, what
            these have in common.

    Raises:
        ForkRefused: the checkpoint is missing, damaged or struck, or its model or optimizer does
            not match this run's.
        StorageError: the storage could not be read.
    """
    run_dir = RunDir(ctx.run_dir.storage, resume_from.run_id)
    candidates = _candidates(run_dir, resume_from)
    _check_groups(run_dir, ctx.spec)
    problems, distrusted = [], run_dir.distrusted()
    for manifest in candidates:
        try:
            state = load_trusted(run_dir, manifest, distrusted)
        except (CorruptCheckpoint, StorageNotFound) as exc:
            problems.append(str(exc))
            continue
        ledger = state["ledger"]
        origin = Origin(
            run_dir.run_id,
            manifest.name,
            state["step"],
            state["epoch"],
            ledger["samples"],
            ledger["chain"],
        )
        if adopted is None:
            return origin, state
        if (of := num_pieces(manifest)) and "own_loop" not in state:
            state = joined(state, load_pieces(run_dir, manifest, range(of)), of)
        return origin, adopted(state, origin)
    wanted = f"checkpoint {resume_from.step} of run {resume_from.run_id}"
    why = "; ".join(problems) or "it is not there, perhaps deleted since"
    raise ForkRefused(
        f"{wanted}, which this run begins from, cannot be used: {why}. Submit it again from "
        "another step"
    )


def _check_groups(run_dir: RunDir, spec: RunSpec) -> None:
    """Raise ForkRefused if ``optimizer.groups`` has other patterns than the other run. Moments are
    stored by a parameter's index, which depends on the groups."""
    try:
        there = run_dir.read_spec().optimizer
    except StorageNotFound:  # only the checkpoint was copied here
        return
    named, own = ([group.parameters for group in each.groups] for each in (there, spec.optimizer))
    if named != own:
        raise ForkRefused(
            f"optimizer.groups names {own} here and {named} in run {run_dir.run_id}, whose "
            "moments this run takes over; keep the "
            "patterns and their order (lr_scale and weight_decay may change), or leave "
            "resume_from out"
        )


def _candidates(run_dir: RunDir, resume_from: ResumeFrom) -> list[Manifest]:
    """Return the checkpoints that the request may mean, the likeliest first. The service has
    already resolved ``latest`` and ``best`` to a step."""
    lineage = CheckpointStore(run_dir).lineage()[::-1]
    if resume_from.step == "latest":
        return lineage[:1]
    if resume_from.step == "best":
        best_by = run_dir.read_spec().best_by
        best = best_of(lineage, *best_by) if best_by else None
        return [best] if best else []
    return [manifest for manifest in lineage if manifest.step == resume_from.step]


def adopt(
    state: dict[str, Any], origin: Origin, *, into: TrainState, ctx: WorkerContext
) -> dict[str, Any]:
    """Return another run's state as the initial state of this one.

    Weights, moments, position in the data, ledger and loss scale are kept. Settings of this run's
    spec (learning rate, decay) apply, but a task's scheduler goes on with its own rates. If the
    other run kept no average of its weights, the average starts at its weights. Events of the other
    run are not reported again.
    """
    _check_model(state, into, origin)
    if divmod(state["step"], into.steps_per_epoch) != (state["epoch"], state["k"]):
        raise ForkRefused(
            f"{origin.name} ends at global batch {state['k']} of epoch {state['epoch']}, but this "
            f"run has {into.steps_per_epoch} "
            "steps an epoch. Keep the data and train.global_batch_size, or leave resume_from out"
        )
    fault = ledger_fault(state, into.sampler) if into.sampler else None
    if fault is not None:
        raise ForkRefused(
            f"{origin.name} ends within an epoch, and {fault} here: samples would be used twice "
            "or not at all. Keep "
            "train.global_batch_size, begin from a checkpoint of an epoch's end, or leave "
            "resume_from out"
        )
    scheduler = _scheduler(state.get("scheduler"), into, origin)
    averages = state["ema"]
    if averages is None and into.ema is not None and into.shards is None:
        averages = state["model"]
    return {
        **state,
        "optimizer": _with_own_settings(
            unpacked(state["optimizer"]),
            into.optimizer.state_dict(),
            origin,
            keep=_SCHEDULED if scheduler is not None else frozenset(),
        ),
        "scheduler": scheduler,
        "scaler": state["scaler"] or into.scaler.state_dict(),
        "skipped": into.skipped.state_dict(),
        "ema": averages,
        "numerics": None,  # of the other run's initial weights
        # A fork may change its samples, for example by augmentation or another split.
        "contents": None,
        "best": _best(state, ctx),
        "parent": origin.name,
        "tail": "[]",
    }


def _check_model(state: Mapping[str, Any], into: TrainState, origin: Origin) -> None:
    """Raise ForkRefused if keys or shapes differ, and name them; also for other contents of frozen
    parameters that one of the two runs leaves out of its checkpoints."""
    own, left_out = into.model.state_dict(), state.get("frozen") or {}
    if left_out and into.shards is not None:
        raise ForkRefused(
            f"{origin.name} holds trained parameters only (checkpoint.parameters: trainable), and "
            "a sharded model begins from all of them. Set train.sharding to none, or leave "
            "resume_from out"
        )
    saved = {**{name: own.get(name) for name in left_out}, **state["model"]}
    _check_shapes(saved, own, origin)
    changed = other_base(left_out, own)
    if into.frozen is not None:
        there = sums_of(state["model"], into.frozen.names)
        changed += [name for name, value in there.items() if value != into.frozen.sums[name]]
    if changed:
        raise ForkRefused(
            f"build_model returned other frozen parameters than {origin.name} was trained with: "
            f"{few(sorted(set(changed)))}. With checkpoint.parameters: trainable no checkpoint "
            "holds them: let build_model load the same weights, or leave resume_from out"
        )


def _check_shapes(saved: Mapping[str, Any], own: Mapping[str, Any], origin: Origin) -> None:
    shapes = {name: _shape(value) for name, value in saved.items()}
    wanted = {name: _shape(value) for name, value in own.items()}
    other = [
        f"{name} is {shapes[name]} there and {shape} here"
        for name, shape in wanted.items()
        if name in shapes and shapes[name] != shape
    ]
    faults = [
        *_named(
            "only in this run's model",
            [f"{name} {shape}" for name, shape in wanted.items() if name not in shapes],
        ),
        *_named(
            "only in the checkpoint",
            [f"{name} {shape}" for name, shape in shapes.items() if name not in wanted],
        ),
        *_named("of another shape", other),
    ]
    if faults:
        raise ForkRefused(
            f"the model differs from that of {origin.name}: {'; '.join(faults)}. Give task.model "
            "the arguments that it had there, "
            "or leave resume_from out"
        )


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__


def _named(words: str, items: list[str]) -> list[str]:
    if not items:
        return []
    more = f" and {len(items) - MAX_NAMED} more" if len(items) > MAX_NAMED else ""
    return [f"{words}: {', '.join(items[:MAX_NAMED])}{more}"]


def _scheduler(
    saved: dict[str, Any] | None, into: TrainState, origin: Origin
) -> dict[str, Any] | None:
    """Return the state of the scheduler that the run continues; None if it begins its own, or has
    none. Raise ForkRefused if the task builds another kind."""
    if saved is None or into.scheduler is None:
        return None
    differing = saved.keys() ^ into.scheduler.state_dict().keys()
    if differing:
        raise ForkRefused(
            f"the scheduler differs from that of {origin.name} in {sorted(differing)}. Let "
            "build_scheduler return the same kind, or leave resume_from out"
        )
    return saved


def _with_own_settings(
    saved: dict[str, Any], own: dict[str, Any], origin: Origin, keep: Set[str]
) -> dict[str, Any]:
    """Return the saved moments with the settings of this run's optimizer, but for those that
    ``keep`` names. Raise ForkRefused if it is another kind of optimizer."""
    sizes, own_sizes = (
        [len(group["params"]) for group in each["param_groups"]] for each in (saved, own)
    )
    if sizes != own_sizes:
        raise ForkRefused(
            f"the optimizer differs from that of {origin.name}: its groups held {sizes} "
            f"parameters, now {own_sizes}. Build it as "
            "it was, or leave resume_from out"
        )
    groups = []
    for group, own_group in zip(saved["param_groups"], own["param_groups"], strict=True):
        # LearningRates.set adds ``initial_lr``, which a new optimizer does not have yet.
        foreign = (group.keys() ^ own_group.keys()) - {"initial_lr"}
        if foreign:
            raise ForkRefused(
                f"the optimizer differs from that of {origin.name} in its settings "
                f"{sorted(foreign)}. Use the same kind of "
                "optimizer, or leave resume_from out"
            )
        kept = {name: group[name] for name in ("params", *(keep & group.keys()))}
        groups.append({**own_group, **kept})
    return {"state": saved["state"], "param_groups": groups}


def _best(state: Mapping[str, Any], ctx: WorkerContext) -> dict[str, Any] | None:
    """Return the initial state as this run's best so far, if it was evaluated by this run's best
    metric; else None."""
    wanted, _ = ctx.spec.best_by or (None, "")
    metrics = state["metrics"]
    metric = wanted if wanted in metrics else f"val_{wanted}"
    if wanted is None or metric not in metrics or state["evaluated_step"] != state["step"]:
        return None
    checkpoint = str(ctx.checkpoint_name(state["step"]))
    return {
        "metric": metric,
        "value": metrics[metric],
        "step": state["step"],
        "checkpoint": checkpoint,
    }
