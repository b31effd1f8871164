"""Ray Data sets of a user's Ray Train function: built on rank 0 once an attempt, and split over all
ranks as Ray's own trainer does.

They are built where the function runs and not on the driver: the code and its packages are there,
and what it raises is an error of the user's, with file and line.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
import ray.cloudpickle
import ray.train
import ray.train.collective

from everstep.spec.code import CodeSpec
from train_fn.context import WorkerContext
from train_fn.errors import BadTask, few
from train_fn.user_code.modules import CodeOnNode, load_named, place_of

logger = logging.getLogger(__name__)


def shards_of(ctx: WorkerContext, code: CodeOnNode, spec: CodeSpec) -> Callable[..., Any]:
    """Return what stands in for ``TrainContext.get_dataset_shard`` on this rank. A collective.

    The function ``datasets`` of the spec returns the data sets, and a ``ray.train.DataConfig``
    beside them if they are not all to be split. It gets the config if it has a parameter. Raises
    BadTask on rank 0 if it returns anything else.
    """
    built, entry = None, str(spec.datasets)
    if ctx.world_rank == 0:
        _warn_of_no_room()
        datasets, config = _built(entry, dict(spec.config), code.directory)
        built = config.configure(
            datasets, ctx.world_size, worker_handles=None, worker_node_ids=None
        )
    of_ranks: list[dict[str, Any]] = ray.train.collective.broadcast_from_rank_zero(built)
    own = of_ranks[ctx.world_rank]

    def get_dataset_shard(_: Any, dataset_info: Any) -> Any:
        name = dataset_info.dataset_name
        if name not in own:
            raise BadTask(
                f"ray.train.get_dataset_shard({name!r}): {entry} returned the data sets "
                f"{few(sorted(own))}; ask for one of them"
            )
        return own[name]

    return get_dataset_shard


def _built(
    entry: str, given: dict[str, Any], directory: Path
) -> tuple[dict[str, Any], ray.train.DataConfig]:
    """Call the user's function, and return what it returns. Raises BadTask."""
    from ray.data import Dataset

    function = load_named(entry)
    if not callable(function):
        raise BadTask(
            f"{entry} is a {type(function).__name__}, not a function. Set code.datasets to a "
            "function that returns {name: ray.data.Dataset}"
        )
    said = function(*([given] if inspect.signature(function).parameters else []))
    found, config = said if isinstance(said, tuple) and len(said) == 2 else (said, None)
    config = ray.train.DataConfig() if config is None else config
    is_named = isinstance(found, Mapping) and all(isinstance(name, str) for name in found)
    if not is_named or not found or not all(isinstance(each, Dataset) for each in found.values()):
        raise BadTask(
            f"{entry}{place_of(function)} returned {found!r:.200}; return a dict with a "
            "ray.data.Dataset for each name"
        )
    if not isinstance(config, ray.train.DataConfig):
        raise BadTask(
            f"{entry}{place_of(function)} returned a {type(config).__name__} beside its data sets; "
            "return a ray.train.DataConfig, or the data sets alone"
        )
    # Ray Data's processes do not have the archive: what they call travels as it is.
    for name, module in [*sys.modules.items()]:
        path = getattr(module, "__file__", None)
        is_own = isinstance(path, str) and directory in Path(path).parents
        if is_own and module.__name__ == name:
            ray.cloudpickle.register_pickle_by_value(module)
    return dict(found), config


def _warn_of_no_room() -> None:
    free = ray.available_resources().get("CPU", 0.0)
    if free < 1.0:  # what a task of Ray Data takes by default
        logger.warning(
            "Ray Data's tasks take CPUs beside those of the ranks, and the cluster has %g free: "
            "reading waits until some are. Lower scaling.max_workers or "
            "scaling.resources_per_worker, or add nodes",
            free,
        )
