"""Faults of a spec: all at once, each by its field's name and with the way out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep import InvalidSpec, RunSpec
from everstep.spec.parsing import parse_spec
from tests.support.raw_specs import OWN, OWN_FUNCTION, SCRIPT, TASK, faults, spec


def test_all_faults_are_found_at_once() -> None:
    found = faults(
        {
            "task": {
                "name": "image_classification",
                "model": {"name": "mini_resnet", "args": {"wdth": 1}},
                "data": {"name": "nope"},
            },
            "optimizer": {"name": "adamw", "lr": float("nan"), "weight_decay": -1},
            "schedule": {"name": "cosine", "warmup_steps": -1},
            "train": {
                "epochs": 0,
                "micro_batch_size": 256,
                "precision": "fp8",
                "seed": -1,
                "loader": {"num_workers": "many"},
            },
            "scaling": {"min_workers": 3, "max_workers": 2, "resources_per_worker": {"CPU": 0}},
            "checkpoint": {"best_mode": "median"},
            "env": {"RAY_ADDRESS": "x", "LD_PRELOAD": "y", "pythonpath": "z", "1A": "", "B": 1},
            "code": {"archive": "sha256:0"},
            "secrets": {"RAY_TOKEN": "b", "A": "../b"},
            "colour": "red",
        }
    )
    assert set(found) == {
        "name",
        "task.model.args.wdth",
        "task.data.name",
        "optimizer.lr",
        "optimizer.weight_decay",
        "schedule.warmup_steps",
        "train.epochs",
        "train.micro_batch_size",
        "train.precision",
        "train.seed",
        "train.loader.num_workers",
        "scaling.max_workers",
        "scaling.resources_per_worker.CPU",
        "checkpoint.best_mode",
        *(f"env.{name}" for name in ("RAY_ADDRESS", "LD_PRELOAD", "pythonpath", "1A", "B")),
        "code.archive",
        "code.train_fn",
        *(f"secrets.{name}" for name in ("RAY_TOKEN", "A")),
        "colour",
    }
    assert all(found.values())


@pytest.mark.parametrize(
    ("raw", "path", "words"),
    [
        (spec(train={"epoks": 3}), "train.epoks", "did you mean 'epochs'?"),
        (
            spec(train={"exactness": "elastic", "compile": True}),
            "train.compile",
            "compile is true, and exactness elastic needs false",
        ),
        (
            spec(train={"deterministic": False, "exactness": "elastic"}),
            "train.deterministic",
            "deterministic is false, and exactness elastic needs true",
        ),
        *(
            (
                spec(train={"on_out_of_memory": "smaller", field: value}),
                "train.on_out_of_memory",
                f"is smaller, and {field} is {value}",
            )
            for field, value in (("exactness", "elastic"), ("batch_by", "tokens"))
        ),
        (
            spec(train={"audit_fraction": 0.5, "compile": True}),
            "train.compile",
            "compile is true, and audit_fraction 0.5 needs false",
        ),
        *(
            (
                spec(train={"sharding": sharding, **train}),
                "train.sharding",
                f"is {sharding}, and {words}",
            )
            for sharding in ("optimizer", "full", "hybrid")
            for train, words in (
                ({"exactness": "elastic"}, "exactness is elastic, which no sharded model has yet"),
                ({"audit_fraction": 0.5}, "audit_fraction is 0.5, which no sharded model has yet"),
                ({"unused_parameters": "allow"}, "unused_parameters is allow"),
                ({"precision": "fp16"}, "precision is fp16, whose loss scaler no sharded model"),
            )
        ),
        (
            spec(train={"heirs": "off"}),
            "train.heirs",
            "is false, and sharding is none: every rank has all of the model. Leave heirs out, or",
        ),
        (spec(train={"sharding": "full", "heirs": 0.5}), "train.heirs", "valid"),
        (spec(train={"sharding": "full", "heirs": -1}), "train.heirs", "valid"),
        *(
            (spec(train={"sharding": "full"}, **section), path, f"{words}, or set train.sharding")
            for section, path, words in (
                ({"checkpoint": {"safetensors": True}}, "checkpoint", "checkpoints.sharded"),
                ({"checkpoint": {"parameters": "trainable"}}, "checkpoint", "Set it to all"),
            )
        ),
        (
            spec(optimizer={"name": "adm"}),
            "optimizer.name",
            "'adm' is not known; choose one of 'adamw', 'adam', 'sgd'",
        ),
        (spec(task={**TASK, "model": {"name": "resnet19"}}), "task.model.name", "GET /v1/catalog"),
        (
            spec(task={**TASK, "model": {"name": "resnet18", "args": {"width": 1}}}),
            "task.model.args.width",
            "is not a field",
        ),
        (spec(train=5), "train", "mapping"),
        (
            spec(train={"micro_batch_size": 129}),
            "train.micro_batch_size",
            "larger than global_batch_size 128",
        ),
        (
            spec(scaling={"min_workers": 2}),
            "scaling.max_workers",
            "max_workers 1 is smaller than min_workers 2",
        ),
        (
            spec(scaling={"use_gpu": False, "accelerator_type": "A100"}),
            "scaling.accelerator_type",
            "needs use_gpu",
        ),
        (
            spec(optimizer={"name": "sgd", "momentum": 0, "nesterov": True}),
            "optimizer.nesterov",
            "momentum > 0",
        ),
        (spec(runtime_env={"pip": ["x"]}), "runtime_env", "only applies to runs with code"),
        (
            spec(runtime_env={"pip": ["--index-url=x"]}),
            "runtime_env.pip.0",
            "not a package by name",
        ),
        (
            spec(runtime_env={"pip": ["x"], "working_dir": "s3://x"}),
            "runtime_env.working_dir",
            "is not a field",
        ),
        (spec(resume_from={"run_id": "run_1", "step": "newest"}), "resume_from.step", "latest"),
        (spec(resume_from={"step": 1}), "resume_from.run_id", "is required"),
        ({"name": "a"}, "task", "set either task or code"),
        (spec(code=OWN), "task", "remove task or code"),
        ({"name": "a", "code": {**OWN, "task": "no colon"}}, "code.task", "write MODULE:NAME"),
        (
            {"name": "a", "code": {"archive": OWN["archive"]}},
            "code.train_fn",
            "exactly one of task, script and train_fn",
        ),
        (
            {"name": "a", "code": {**OWN, "train_fn": "a:b"}},
            "code.train_fn",
            "exactly one of task, script and train_fn",
        ),
        ({"name": "a", "code": {**SCRIPT, "script": "/a/b.py"}}, "code.script", "absolute path"),
        ({"name": "a", "code": {**SCRIPT, "script": "../b.py"}}, "code.script", "not a plain path"),
        ({"name": "a", "code": {**SCRIPT, "script": "run.sh"}}, "code.script", "ends in .py"),
        ({"name": "a", "code": {**SCRIPT, "script": "-m a/b"}}, "code.script", "-m pkg.train"),
        ({"name": "a", "code": {**SCRIPT, "config": {"a": 1}}}, "code.config", "to code.argv"),
        ({"name": "a", "code": {**OWN, "datasets": "a:b"}}, "code.datasets", "set train_fn"),
        ({"name": "a", "code": {**OWN, "argv": ["--lr", "1"]}}, "code.argv", "to code.args"),
        ({"name": "a", "code": {**SCRIPT, "argv": [0.1]}}, "code.argv.0", "must be text"),
        ({"name": "a", "code": SCRIPT, "train": {"epochs": 3}}, "train", "move it to code.argv"),
        ({"name": "a", "code": {**OWN, "config": {"a": 1}}}, "code.config", "move it to code.args"),
        (
            {"name": "a", "code": {**OWN, "args": {"a": [{"b": float("inf")}]}}},
            "code.args",
            "use finite numbers",
        ),
        ({"name": "a", "code": {**OWN, "args": {"a": {1: 2}}}}, "code.args", "not text"),
        (
            {"name": "a", "code": OWN_FUNCTION, "train": {"epochs": 3}},
            "train",
            "move it to code.config",
        ),
        (spec(checkpoint={"every_steps": "automatic"}), "checkpoint.every_steps", "auto"),
        (spec(checkpoint={"mtbf_s": 60.0}), "checkpoint.mtbf_s", "is gone"),
        (
            {"name": "a", "code": SCRIPT, "recovery": {"stragglers": "move"}},
            "recovery",
            "needs a task",
        ),
        (spec(recovery={"stragglers": "kill"}), "recovery.stragglers", "'report' or 'move'"),
        (
            spec(env={"AWS_SECRET_ACCESS_KEY": "x"}),
            "env.AWS_SECRET_ACCESS_KEY",
            "others can read the spec",
        ),
        (spec(env={"MASTER_PORT": "1"}), "env.MASTER_PORT", "is reserved"),
        (spec(env={"PIP_INDEX_URL": "http://elsewhere"}), "env.PIP_INDEX_URL", "is reserved"),
        (spec(env={"TOKEN": "1"}, secrets={"TOKEN": "hub"}), "secrets", "TOKEN: also set in env"),
        (
            spec(scaling={"resources_per_worker": {"CPU": 1e-308}}),
            "scaling.resources_per_worker.CPU",
            "at least 0.0001",
        ),
        (spec(env={"A": "x\x00"}), "env.A", "cannot be stored"),
        (spec(tags={"team\x00": "a"}), "tags.team\\x00", "cannot be stored"),
        (
            {"name": "a", "code": {**OWN, "args": {"a": ["\udce9"]}}},
            "code.args.a.0",
            "cannot be stored",
        ),
        (spec(name="../../etc"), "name", "is not a name; use"),
        ([], "", "mapping"),
        (None, "", "mapping"),
    ],
)
def test_a_fault_names_its_field_and_the_way_out(raw: Any, path: str, words: str) -> None:
    found = faults(raw)
    assert list(found) == [path] and words in found[path]


def test_too_many_workers_for_the_micro_batches_is_found_beside_other_faults() -> None:
    raw = spec(
        train={"global_batch_size": 8, "micro_batch_size": 4},
        scaling={"min_workers": 3, "max_workers": 4},
        checkpoint={"every_steps": 0},
    )
    found = faults(raw)
    assert set(found) == {"scaling", "checkpoint.every_steps"}
    assert "min_workers is 3, but a global batch has only 2 micro" in found["scaling"]


def test_shares_by_speed_are_refused_where_they_would_change_bits() -> None:
    own_loop = {"name": "own", "code": {"train_fn": "a:b", "archive": OWN["archive"]}}
    for raw in (spec(), own_loop):
        found = faults({**raw, "scaling": {"shares": "by_speed"}})
        assert (
            list(found) == ["scaling"] and "needs a task with train.exactness" in found["scaling"]
        )
    parse_spec(spec(scaling={"shares": "by_speed"}, train={"exactness": "elastic"}))


@pytest.mark.parametrize("value", ["3", 3.0, True, [3], {"a": 3}, None])
def test_a_number_is_not_guessed_from_something_else(value: Any) -> None:
    assert "train.epochs" in faults(spec(train={"epochs": value}))


@given(
    raw=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "name",
                        "task",
                        "model",
                        "data",
                        "args",
                        "train",
                        "epochs",
                        "optimizer",
                        "env",
                        "scaling",
                        "x",
                    ]
                ),
                inner,
                max_size=5,
            )
        ),
        max_leaves=12,
    )
)
def test_whatever_comes_in_is_a_spec_or_invalid_with_a_message(raw: Any) -> None:
    try:
        parse_spec(raw)
    except InvalidSpec as exc:
        assert exc.errors and all(fault.msg for fault in exc.errors)


# ---------------------------------------------------------------- files


def test_resources_are_told_in_ray_s_letters() -> None:
    found = faults(
        spec(
            scaling={
                "resources_per_worker": {
                    "cpu": 2,
                    "gpus": 1,
                    "CPU": 1,
                    "Memory": 5,
                    "tpu": 1,
                    "cpu_of_mine": 1,
                }
            }
        )
    )
    assert {name.rpartition(".")[2] for name in found} == {"cpu", "gpus", "Memory"}
    assert found["scaling.resources_per_worker.cpu"].endswith("did you mean CPU?")
    assert found["scaling.resources_per_worker.gpus"].endswith("did you mean GPU?")
    old = RunSpec.model_validate(spec(scaling={"resources_per_worker": {"cpu": 2}}))
    assert old.scaling.resources_per_worker == {"cpu": 2}, (
        "a run that was once taken with it is read"
    )


# ---------------------------------------------------------------- overrides


def test_a_fault_inside_a_list_is_named_with_its_place() -> None:
    groups = [{"parameters": "a.*"}, {"parameters": "b.*", "lr_scale": -1, "lr_scal": 2}]
    with pytest.raises(InvalidSpec) as caught:
        parse_spec({"name": "a", "task": TASK, "optimizer": {"name": "sgd", "groups": groups}})
    faults = {".".join(map(str, fault.loc)): fault.msg for fault in caught.value.errors}
    assert faults.keys() == {"optimizer.groups.1.lr_scale", "optimizer.groups.1.lr_scal"}
    assert "did you mean 'lr_scale'?" in faults["optimizer.groups.1.lr_scal"]


@pytest.mark.parametrize("field", ["env", "secrets"])
@pytest.mark.parametrize(
    "name",
    [
        *(
            "AWS_ENDPOINT_URL_S3",
            "aws_profile",
            "GOOGLE_APPLICATION_CREDENTIALS",
            "CLOUDSDK_CONFIG",
        ),
        *("CLOUD_STORAGE_EMULATOR_ENDPOINT", "BOTO_CONFIG"),
        *("HOME", "XDG_CONFIG_HOME", "HIP_VISIBLE_DEVICES"),
    ],
)
def test_what_leads_ranks_to_another_storage_or_place_may_not_be_set(name: str, field: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse_spec(spec(**{field: {name: "x", "NCCL_DEBUG": "WARN"}}))
    [fault] = caught.value.errors
    assert fault.loc == (field, name) and "is reserved: " in fault.msg


def test_a_run_that_was_taken_with_such_a_variable_can_still_be_read() -> None:
    assert RunSpec.model_validate(spec(env={"AWS_ENDPOINT_URL": "http://here"})).env == {
        "AWS_ENDPOINT_URL": "http://here"
    }
