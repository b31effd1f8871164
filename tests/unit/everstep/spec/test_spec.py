"""RunSpec: what is read, what is filled in, and what is written again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from everstep import RunSpec
from everstep.spec.parsing import parse_spec
from everstep.spec.run_spec import auto_micro_batch_size
from everstep.spec.sections import TrainSpec
from tests.support.raw_specs import OWN, OWN_FUNCTION, spec

CONTRACT: dict[str, Any] = {
    "name": "digits-resnet",
    "project": "default",
    "priority": 0,
    "tags": {"team": "vision"},
    "task": {
        "name": "image_classification",
        "model": {"name": "mini_resnet", "args": {"width": 16}},
        "data": {"name": "digits", "args": {}},
    },
    "code": None,
    "optimizer": {"name": "adamw", "lr": 0.003, "weight_decay": 0.01},
    "schedule": {"name": "cosine", "warmup_steps": 20},
    "train": {
        "epochs": 5,
        "max_steps": None,
        "batch_by": "samples",
        "global_batch_size": 128,
        "micro_batch_size": 32,
        "precision": "fp32",
        "grad_clip_norm": 1.0,
        "seed": 0,
        "eval_every_epochs": 1,
        "deterministic": "auto",
        "compile": False,
        "loader": {"num_workers": "auto", "prefetch_factor": 4},
        "unused_parameters": "zero",
        "exactness": "world_size",
        "on_out_of_memory": "fail",
        "audit_fraction": 0.0,
        "ema_decay": None,
        "sharding": "none",
        "heirs": True,
    },
    "scaling": {
        "min_workers": 1,
        "max_workers": 2,
        "resources_per_worker": {"CPU": 1},
        "use_gpu": "auto",
        "placement_strategy": "SPREAD",
        "accelerator_type": None,
        "grow_every_s": "auto",
        "shares": "equal",
    },
    "checkpoint": {
        "every_steps": 50,
        "every_s": None,
        "keep_latest": 3,
        "best_metric": None,
        "best_mode": "max",
        "parameters": "all",
        "safetensors": False,
        "max_failed_saves": 5,
        "on_failed_saves": "continue",
    },
    "recovery": {
        "max_user_errors": 1,
        "max_system_failures": 20,
        "hang_timeout_s": None,
        "in_process": True,
        "stragglers": "report",
        "deadline_s": None,
    },
    "resume_from": None,
    "env": {"NCCL_DEBUG": "WARN"},
    "secrets": {},
    "runtime_env": None,
}


def test_the_spec_of_the_contract_is_read_and_written_unchanged() -> None:
    parsed = parse_spec(CONTRACT)
    written = parsed.model_dump(mode="json")
    assert {
        key: written[key] for key in CONTRACT if key not in ("task", "optimizer", "schedule")
    } == {key: CONTRACT[key] for key in CONTRACT if key not in ("task", "optimizer", "schedule")}
    assert parse_spec(written) == parsed == RunSpec.model_validate_json(json.dumps(written))


def test_fields_of_earlier_versions_are_read_and_left_out() -> None:
    before = spec(checkpoint={"mtbf_s": None, "min_interval_s": 5.0})
    assert parse_spec(before) == parse_spec(spec(checkpoint={}))
    stored = json.dumps(spec(checkpoint={"mtbf_s": 60.0}))
    assert RunSpec.model_validate_json(stored) == parse_spec(spec(checkpoint={}))


def test_name_and_task_are_enough() -> None:
    parsed = parse_spec(spec())
    assert (
        parsed.project,
        parsed.optimizer.name,
        parsed.train.epochs,
        parsed.scaling.max_workers,
    ) == ("default", "adamw", 1, 1)


def test_a_section_without_a_name_is_the_default_one() -> None:
    parsed = parse_spec(spec(optimizer={"lr": 0.5}, schedule={"warmup_steps": 3}))
    assert (parsed.optimizer.name, parsed.optimizer.lr) == ("adamw", 0.5)
    assert (parsed.schedule.name, parsed.schedule.warmup_steps) == ("constant", 3)
    assert parse_spec(parsed.model_dump(mode="json")) == parsed


@pytest.mark.parametrize(
    "code", [OWN, {**OWN, "args": {"widths": [1, 2.5, None, True, {"a": "b"}]}}, OWN_FUNCTION]
)
def test_code_takes_the_place_of_a_task(code: dict[str, Any]) -> None:
    parsed = parse_spec({"name": "a", "code": code})
    assert parsed.task is None and parsed.code is not None
    assert parsed.runs_own_function is (code is OWN_FUNCTION)
    assert parse_spec(parsed.model_dump(mode="json")) == parsed


def test_a_spec_does_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        parse_spec(spec()).train.epochs = 3  # type: ignore[misc]


@given(global_batch_size=st.integers(1, 5000), max_workers=st.integers(1, 64))
def test_the_automatic_micro_batch_gives_every_rank_work(
    global_batch_size: int, max_workers: int
) -> None:
    micro = auto_micro_batch_size(global_batch_size, max_workers)
    assert 1 <= micro <= global_batch_size
    if global_batch_size >= max_workers:
        num_micro = -(-global_batch_size // micro)
        assert num_micro >= min(max_workers, global_batch_size // micro)


@pytest.mark.parametrize(
    ("batch", "workers", "micro"), [(128, 1, 128), (128, 2, 64), (120, 3, 20), (2, 4, 1)]
)
def test_the_automatic_micro_batch_divides_well(batch: int, workers: int, micro: int) -> None:
    assert auto_micro_batch_size(batch, workers) == micro


# ---------------------------------------------------------------- files


SMALLEST = (
    *("loss", "val_loss", "valLoss", "train/loss", "log_loss", "perplexity", "val_error"),
    *("mae", "rmse", "val_mse", "nll", "wer", "CER", "bits_per_token"),
)
LARGEST = (
    *("accuracy", "f1", "power", "cancer", "lossless", "map", "answer"),
    *("neg_log_loss", "val_neg_mean_squared_error", None),
)


@pytest.mark.parametrize("metric", SMALLEST + LARGEST)
def test_the_best_is_the_smallest_where_the_metric_s_name_says_so(
    metric: str | None,
) -> None:
    mode = "min" if metric in SMALLEST else "max"
    read = parse_spec(spec(checkpoint={"best_metric": metric}))
    assert (
        read.checkpoint.best_mode == read.model_dump(mode="json")["checkpoint"]["best_mode"] == mode
    )
    for explicit in ("min", "max"):
        checkpoint = parse_spec(
            spec(checkpoint={"best_metric": metric, "best_mode": explicit})
        ).checkpoint
        assert checkpoint.best_mode == explicit
        assert (
            RunSpec.model_validate(spec(checkpoint=checkpoint.model_dump())).checkpoint
            == checkpoint
        ), "as it was resolved"


def test_only_elastic_exactness_and_audits_make_auto_strict() -> None:
    for exactness, fraction, wanted, found in (
        ("elastic", 0, "auto", True),
        ("elastic", 0, True, True),
        ("world_size", 0.001, "auto", True),
        ("world_size", 0, "auto", "auto"),
        ("world_size", 0, False, False),
    ):
        train = TrainSpec.model_validate(
            {"exactness": exactness, "audit_fraction": fraction, "deterministic": wanted}
        )
        assert train.wants_determinism == found
    assert not TrainSpec(exactness="elastic").compile


def test_a_tasks_run_has_no_more_ranks_than_a_global_batch_has_micro_batches() -> None:
    scaling = {"max_workers": 32}
    train = {"global_batch_size": 256, "micro_batch_size": 64}
    assert parse_spec(spec(train=train, scaling=scaling)).most_workers == 4
    own = {"name": "a", "code": OWN_FUNCTION, "scaling": scaling}
    assert parse_spec(own).most_workers == 32
