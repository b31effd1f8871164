"""What a task must be like for ``train.exactness: elastic``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train_fn.elastic.exchange import Exchange
from train_fn.errors import BadTask
from train_fn.tasks.checks import where

if TYPE_CHECKING:
    from train_fn.loop.replica import Replica

_WAY_OUT = "or set train.exactness to world_size"


def elastic_exchange(replica: Replica, max_workers: int) -> Exchange:
    """Return the exchange of a replica whose steps are the same at every world size.

    Raises BadTask if its task computes something else at another world size.

    Args:
        max_workers: ``RunSpec.full_size``.
    """
    model = where(replica.task, "build_model")
    if replica.own_updates is not None:
        raise BadTask(
            f"{replica.own_updates.source} gets a rank's whole share of the global batch, so its "
            "steps depend on the world size, and train.exactness elastic cannot hold. Let the task "
            f"return a loss instead, {_WAY_OUT}"
        )
    if replica.exchanges_in_forward:
        raise BadTask(
            f"{model} returned a model that exchanges in its forward pass, so its results depend "
            "on the world size, and train.exactness elastic cannot hold. Use layers that "
            f"see one micro-batch only, as BatchNorm for SyncBatchNorm, {_WAY_OUT}"
        )
    if replica.step_module.sparse:
        raise BadTask(
            f"{model} returned embeddings with sparse gradients, which train.exactness elastic "
            f"does not add. Make them with sparse=False, {_WAY_OUT}"
        )
    return Exchange(replica.peers, replica.parameters, replica.sampler, max_workers)
