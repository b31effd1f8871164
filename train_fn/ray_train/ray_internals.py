"""Every private name of Ray that Everstep uses, in one table.

Importing this module with another Ray fails and names what changed. Otherwise a run would fail in
its first recovery.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray._private.state import state as cluster_state
from ray._raylet import RAY_NODE_ID_KEY, GcsClient, InnerGcsClient, PlacementGroupID  # type: ignore[attr-defined]
from ray.core.generated import autoscaler_pb2
from ray.train.v2._internal.callbacks import BackendSetupCallback, DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import CHECKPOINT_MANAGER_SNAPSHOT_FILENAME
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from ray.train.v2._internal.execution.callback import ReportCallback
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import (
    CheckpointManager,
    _CheckpointManagerState,
    _TrainingResultState,
)
from ray.train.v2._internal.execution.context import TrainContext, get_train_context
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.controller.controller import (
    TrainControllerLoopIterationResult as LoopResult,
)
from ray.train.v2._internal.execution.controller.state import (
    FinishedState,
    ReschedulingState,
    ResizingState,
    RestartingState,
    RunningState,
    SchedulingState,
    ShuttingDownState,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.scaling_policy import (
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
    ScalingPolicy,
)
from ray.train.v2._internal.execution.worker_group import worker_group as worker_group_module
from ray.train.v2._internal.execution.worker_group.placement_group_handle import (
    PlacementGroupHandle,
)
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus
from ray.train.v2._internal.execution.worker_group.state import WorkerGroupStateBuilder
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker, Worker
from ray.train.v2._internal.execution.worker_group.worker_group import (
    SynchronizationActor,
    WorkerGroup,
)
from ray.train.v2._internal.util import invoke_context_managers
from ray.train.v2.api.config import ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError

from everstep.supported import RAY

EXPECTED: dict[Callable[..., Any], str] = {
    TrainController.__init__: (
        "self, train_fn_ref, train_run_context, scaling_policy, failure_policy, callbacks, "
        "validation_config"
    ),
    TrainController._step: "self",
    TrainController._poll_workers: "self",
    TrainController._get_run_attempt_id: "self",
    TrainController._start_worker_group: "self, num_workers, resources_per_worker",
    TrainController._shutdown_worker_group: "self",
    TrainController._is_training_succeeded: "worker_group_status",
    TrainController.get_result: "self",
    WorkerGroup.create: "train_run_context, worker_group_context, callbacks",
    WorkerGroup.__init__: "self, train_run_context, worker_group_context, callbacks",
    WorkerGroup._start: "self",
    WorkerGroup._start_impl: "self, worker_group_state_builder",
    WorkerGroup._create_workers: (
        "self, num_workers, placement_group, resources_per_worker, placement_group_bundle_indices, "
        "starting_world_rank, world_size, replica_group_size"
    ),
    WorkerGroup._create_placement_group: "self, scaling_config, worker_group_context",
    WorkerGroup._assign_worker_ranks: (
        "workers, starting_world_rank, world_size, replica_group_size"
    ),
    WorkerGroup._poll_workers_and_collect_errors: "self, timeout",
    WorkerGroupPollStatus: "worker_statuses, worker_rank_to_replica_group_rank",
    WorkerStatus: "running, error, training_report, return_value, preemption_info",
    WorkerGroup.shutdown: "self",
    WorkerGroup._clear_state: "self",
    WorkerGroup._assert_active: "self",
    RayTrainWorker.clear_result_queue: "self",
    RayTrainWorker.run_train_fn: "self, train_fn_ref",
    WorkerGroup._init_train_context: "self, workers, sync_actor",
    WorkerGroup._init_train_context_on_workers: "self, workers, sync_actor, train_context_args",
    RayTrainWorker.poll_status: "self",
    RayTrainWorker.get_metadata: "self",
    ScalingPolicy.__init__: "self, scaling_config",
    ScalingPolicy.make_decision_for_non_running_worker_group: "self",
    ScalingPolicy.make_decision_for_running_worker_group: (
        "self, worker_group_state, worker_group_status"
    ),
    ScalingPolicy._maybe_send_resource_request: "self",
    ScalingPolicy._send_resource_request: "self",
    FailurePolicy.make_decision: "self, training_failed_error",
    DataParallelTrainer._initialize_and_run_controller: "self, controller_init_kwargs",
    InnerGcsClient.drain_node: (
        "self, node_id, reason, reason_message, deadline_timestamp_ms, timeout"
    ),
    TrainContext.get_world_rank: "self",
    TrainContext.get_world_size: "self",
    TrainContext.get_local_rank: "self",
    TrainContext.get_local_world_size: "self",
    TrainContext.get_node_rank: "self",
    TrainContext.report: (
        "self, metrics, checkpoint, checkpoint_dir_name, checkpoint_upload_mode, "
        "delete_local_checkpoint_after_upload, checkpoint_upload_fn, validation"
    ),
    TrainContext._sync_checkpoint_dir_name_across_ranks: "self, checkpoint_dir_name",
    ReportCallback.after_report: "self, training_report, metrics",
    DataParallelTrainer._create_default_callbacks: "self",
}
"""Functions that Everstep overrides or calls, with the parameters that it expects."""

ATTRIBUTES: dict[type, str] = {
    TrainController: "_checkpoint_manager _health_check_interval_s _latest_poll_time _worker_group",
    WorkerGroup: (
        "_callbacks _latest_poll_status _replica_group_callbacks _replica_groups _storage_context "
        "_train_run_context _worker_callbacks_to_propagate _worker_group_context "
        "_worker_group_state _worker_rank_to_replica_group_rank _worker_group_start_timeout_s "
        "_worker_health_check_timeout_s _world_rank_to_ongoing_poll"
    ),
    ScalingPolicy: "_coordinator_client",
    ScalingConfig: "_resources_per_worker_not_none",
    CheckpointManager: "_checkpoint_results _checkpoint_to_report_index _latest_checkpoint_result",
    _CheckpointManagerState: (
        "checkpoint_report_indices checkpoint_results failed_validation_checkpoint_dir_names "
        "latest_checkpoint_result pending_training_results pending_validation_specs ray_version "
        "timed_out_validation_checkpoint_dir_names validated_checkpoint_dir_names"
    ),
    _TrainingResultState: "checkpoint_dir_name metrics",
}
"""Attributes that Everstep reads or sets, by Ray's class. The last two classes are the file with
Ray's list of checkpoints."""


def check_ray(
    version: str,
    expected: Mapping[Callable[..., Any], str],
    attributes: Mapping[type, str],
) -> None:
    """Raise ImportError if the installed Ray differs, and name every difference.

    Args:
        version: of the installed Ray.
        expected: functions with the names of their parameters.
        attributes: names of attributes, with spaces between, by class.
    """
    if problem := RAY.problem(version, f"this node ({sys.prefix})"):
        raise ImportError(problem)
    differences = []
    for function, parameters in expected.items():
        found = ", ".join(inspect.signature(function).parameters)
        if found != parameters:
            differences.append(f"{function.__qualname__} takes ({found}), not ({parameters})")
    for owner, names in attributes.items():
        lost = sorted(set(names.split()) - names_of(owner))
        differences += [f"{owner.__name__} has no {name}" for name in lost]
    if differences:
        raise ImportError(
            f"Everstep uses private names of {RAY}, and this ray {version} differs: "
            + "; ".join(differences)
            + ". Install a release of Ray as the package index has it."
        )


def names_of(owner: type) -> set[str]:
    """Return the attributes that a class has, that its annotations declare, or that its methods
    use."""
    names: set[str] = set()
    for base in owner.__mro__:
        names |= set(vars(base)) | set(inspect.get_annotations(base))
        for member in vars(base).values():
            function = getattr(member, "__func__", getattr(member, "fget", member))
            names |= set(getattr(getattr(function, "__code__", None), "co_names", ()))
    return names


check_ray(ray.__version__, EXPECTED, ATTRIBUTES)
