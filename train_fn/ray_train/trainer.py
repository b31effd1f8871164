"""A TorchTrainer that runs Everstep's controller."""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
import torch
from ray.exceptions import RayError
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer

from everstep.spec.run_spec import RunSpec
from train_fn.ray_train.controller import EverstepController
from train_fn.ray_train.journal_actor import NAMESPACE, controller_name
from train_fn.ray_train.ray_checkpoints import KeepCheckpointList
from train_fn.ray_train.ray_internals import (
    RAY_NODE_ID_KEY,
    DatasetsCallback,
    PlacementGroupCleanerCallback,
)
from train_fn.ray_train.worker_actor import run_rank
from train_fn.recovery.launch import ControllerOutcome, Engine, Meeting, RankJob
from train_fn.recovery.sizing import worker_resources
from train_fn.step.nccl import group_backend

_NOT_NEEDED = (PlacementGroupCleanerCallback, DatasetsCallback)
"""Ray's callbacks that are left out. The driver removes a dead controller's placement groups, and
Everstep does not use Ray Data. Each would start a process for every ``fit``."""

_RELAY_S = 0.5
"""Pause in seconds between two reads of the controller's log."""
_RELAY_PATIENCE_S = 60.0
"""Timeout in seconds of one read."""


class EverstepTrainer(TorchTrainer):  # type: ignore[misc]
    """Train like Ray's TorchTrainer. After ``fit``, ``outcome`` is the run's outcome; None if the
    controller itself was lost."""

    def __init__(self, engine: Engine) -> None:
        job, settings = engine.job, engine.settings
        config_of = TorchConfig if job.calls_ray else RankGroupConfig
        super().__init__(
            run_rank,
            train_loop_config={"job": job},
            torch_config=config_of(
                backend=group_backend(torch.device("cuda" if job.use_gpu else "cpu")),
                timeout_s=settings.collective_timeout_s,
            ),
            scaling_config=_scaling_config(job.spec, job.use_gpu),
            run_config=ray.train.RunConfig(
                name=job.run_dir.run_id,
                storage_path=job.run_dir.parent_uri,
                failure_config=ray.train.FailureConfig(
                    max_failures=-1, controller_failure_limit=-1
                ),
                checkpoint_config=_checkpoint_config(job),
            ),
        )
        self._engine = engine
        self.outcome: ControllerOutcome | None = None

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = [
            callback
            for callback in super()._create_default_callbacks()
            if not isinstance(callback, _NOT_NEEDED)
        ]
        job = self._engine.job
        return [*callbacks, KeepCheckpointList(job.run_dir)] if job.calls_ray else callbacks

    def _initialize_and_run_controller(self, **controller_init_kwargs: Any) -> Any:
        """Run Everstep's controller on the driver's node. It has no runtime_env, since its ranks
        would inherit it and could then not reuse idle processes. It is detached, so that Ray does
        not end the ranks when the driver dies: they save first."""
        del controller_init_kwargs["scaling_policy"], controller_init_kwargs["failure_policy"]
        actor_class = ray.remote(
            num_cpus=0, label_selector={RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()}
        )(EverstepController)
        name = controller_name(self._engine.job.run_dir.run_id, self._engine.job.submission)
        controller = actor_class.options(
            name=name, namespace=NAMESPACE, lifetime="detached"
        ).remote(engine=self._engine, **controller_init_kwargs)
        ended = threading.Event()
        threading.Thread(
            target=_relay_log, args=(controller, ended), name="controller-log", daemon=True
        ).start()
        try:
            ray.get(controller.run.remote())
            self.outcome = ray.get(controller.outcome.remote())
            result = ray.get(controller.get_result.remote())
            _relay(ray.get(controller.take_log.remote(0.0)))
        except Exception:
            ray.kill(controller)
            raise
        finally:  # a driver that must exit leaves the ranks to its controller
            ended.set()
        ray.kill(controller)
        return result


def _relay_log(controller: Any, ended: threading.Event) -> None:
    """Copy the controller's log continuously into the driver's log, which is stored with the
    run."""
    while not ended.wait(_RELAY_S):
        try:
            _relay(ray.get(controller.take_log.remote(_RELAY_PATIENCE_S)))
        except RayError:
            return  # the controller is gone; fit() raises for it


def _relay(lines: list[tuple[int, str]]) -> None:
    for level, message in lines:
        logging.getLogger("controller").log(level, "%s", message)


def _checkpoint_config(job: RankJob) -> ray.train.CheckpointConfig:
    """Return Ray's retention of checkpoints. Ray deletes old checkpoints that a user's function
    reports, but none of Everstep's own."""
    if not job.calls_ray:
        return ray.train.CheckpointConfig()
    wanted = job.spec.checkpoint
    return ray.train.CheckpointConfig(
        num_to_keep=wanted.keep_latest,
        checkpoint_score_attribute=wanted.named_metric,
        checkpoint_score_order=wanted.best_mode,
    )


def _scaling_config(run: RunSpec, use_gpu: bool) -> ray.train.ScalingConfig:
    """Return the scaling limits of the spec. The scaling policy applies the number of ranks that
    the service currently allows within them."""
    spec = run.scaling
    return ray.train.ScalingConfig(
        num_workers=(spec.min_workers, run.most_workers),
        use_gpu=use_gpu,
        resources_per_worker=worker_resources(spec, use_gpu),
        placement_strategy=spec.placement_strategy,
        accelerator_type=spec.accelerator_type if use_gpu else None,
    )


# ---------------------------------------------------------------- rank group

# The process group of forked ranks, in place of Ray's own backend for torch, which would form it in
# the hosts.


class RankGroup(Backend):  # type: ignore[misc]
    """Let all ranks meet at the first one's node."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Form the group. Raises RayError."""
        actors = [worker.actor for worker in worker_group.get_workers()]
        timeout_s = backend_config.timeout_s
        address, port = ray.get(actors[0].open_store.remote(timeout_s))
        meeting = Meeting(address, port, backend_config.backend, timeout_s)
        ray.get([actor.join.remote(meeting) for actor in actors])


@dataclass
class RankGroupConfig(TorchConfig):  # type: ignore[misc]
    """Ray's settings of torch, for forked ranks."""

    @property
    def backend_cls(self) -> type[Backend]:
        return RankGroup

    @property
    def train_func_context(self) -> Any:
        """Return a context that does nothing: Ray's would open the GPU in the host."""
        return nullcontext
