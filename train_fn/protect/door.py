"""The functions behind ``everstep.train``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DataLoader

from train_fn.errors import BadTask
from train_fn.protect.adapters.accelerate import AcceleratedLoop
from train_fn.protect.arguments import check_torn, parts_of
from train_fn.protect.batches import Batches
from train_fn.protect.data_order import is_loader
from train_fn.protect.followed import FollowedLoader
from train_fn.protect.protected import Protected
from train_fn.protect.training import OnItsOwn


def protect(
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    extra: Any = None,
    torn: str = "refuse",
    *,
    heirs: bool | int = True,
    accelerator: Any = None,
    storage: str = "out/protect",
    run_id: str | None = None,
    checkpoint: Mapping[str, Any] | None = None,
    fresh: bool | None = None,
    total_steps: int | None = None,
) -> Protected:
    """Return the protected state of a training loop, a context manager.

    Args:
        model: the module, or several in a list or dict, as they are called (wrapped by DDP, or
            sharded by FSDP2's ``fully_shard`` over a mesh of all ranks).
        optimizer: likewise.
        scheduler: likewise; every learning-rate scheduler of the optimizers.
        extra: what else the loop needs to go on: anything with state_dict and load_state_dict.
        torn: ``refuse`` leaves no state of a rank that fails between its optimizer's step and
            ``state.step()``. ``shadow`` copies the state after every step, and leaves the copy.
            Several optimizers need it.
        heirs: of a sharded model, whether a rank of another node gets a copy of each rank's rows
            after every step, or after every so many. As ``train.heirs`` of a spec.
        accelerator: of Hugging Face Accelerate, after ``prepare``. It takes the place of model,
            optimizer and scheduler, and ``step`` then commits once for accumulated gradients.
        storage, run_id, checkpoint: of a loop that no service runs: where its checkpoints are, the
            name of its directory there (by default made of the script's path and its arguments),
            the spec's section ``checkpoint`` (``every_steps`` is ``auto`` unless given). In a
            service, the run has its own.
        fresh: True begins such a run anew. False goes on with one that was finished, even if the
            script, its arguments or its place have changed since; by default that is refused.
        total_steps: of the whole run, if no loader's ``epochs`` or ``steps`` says it: the page then
            shows how far it is.

    Raises BadTask for arguments that cannot be protected.
    """
    settings = OnItsOwn(storage, run_id, checkpoint or {}, fresh)
    if accelerator is not None:
        if not (model is optimizer is scheduler is None and heirs is True):
            raise BadTask(
                "es.protect(accelerator=…) takes what accelerator.prepare returned; leave model, "
                "optimizer, scheduler and heirs out"
            )
        return AcceleratedLoop(accelerator, extra, torn, settings, total_steps)
    parts = parts_of(model, optimizer, scheduler, extra, heirs)
    return Protected(parts, check_torn(torn, parts), settings, total_steps)


def loader(
    dataset: Any,
    global_batch_size: int | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    seed: int = 0,
    *,
    drop_last: bool = False,
    num_workers: int = 0,
    batch_sampler: Any = None,
) -> Any:
    """Return a loader whose global batches do not depend on the world size. ``batches(state)``
    yields this rank's share from the very step on.

    Args:
        dataset: a map-style data set. Or a DataLoader of your own, and no other argument: its place
            becomes part of the state, if you pass what this returns as ``es.protect(extra=…)``.
        global_batch_size: samples of a step over all ranks.
        collate: makes a batch of a list of samples; by default torch's ``default_collate``.
        seed: of the order of the samples, and of their random transforms.
        drop_last: leave out the short batch at an epoch's end.
        num_workers: processes that read ahead.
        batch_sampler: yields lists of indices, this rank's batches, in place of
            ``global_batch_size``, as in a DataLoader of your own. Its order follows from its epoch.
    """
    if batch_sampler is not None and not is_loader(dataset):
        if (global_batch_size, seed, drop_last) != (None, 0, False):
            raise BadTask(
                "es.loader(batch_sampler=…) decides the batches and their order: leave "
                "global_batch_size, seed and drop_last out"
            )
        if not hasattr(batch_sampler, "__iter__") or hasattr(batch_sampler, "__next__"):
            raise BadTask(
                f"es.loader(batch_sampler=…) is a {type(batch_sampler).__name__}, which cannot "
                "begin an epoch again. Pass an object with __iter__ that yields lists of indices, "
                "as torch.utils.data.BatchSampler"
            )
        dataset = DataLoader(
            dataset, batch_sampler=batch_sampler, collate_fn=collate, num_workers=num_workers
        )
        return FollowedLoader(dataset)
    if is_loader(dataset):
        others = (global_batch_size, collate, seed, drop_last, num_workers, batch_sampler)
        if others != (None, None, 0, False, 0, None):
            raise BadTask(
                "es.loader(DataLoader) takes no other argument: batches are those of the "
                "DataLoader. Or pass loader.dataset with a global_batch_size"
            )
        if getattr(dataset, "num_workers", 0) > 1 and not getattr(dataset, "in_order", True):
            raise BadTask(
                "es.loader: DataLoader(in_order=False) yields batches as its processes finish "
                "them, so no restart could go on in the same order. Leave in_order out"
            )
        return FollowedLoader(dataset)
    if global_batch_size is None and not hasattr(dataset, "__getitem__"):
        raise BadTask(
            f"es.loader was given a {type(dataset).__name__}, which is no DataLoader. Pass the "
            "DataLoader itself, before Fabric or others wrap it"
        )
    if global_batch_size is None:
        raise BadTask(
            "es.loader(global_batch_size=…) is missing; pass the samples of a step, or a "
            "batch_sampler"
        )
    return Batches(dataset, global_batch_size, collate, seed, drop_last, num_workers)
