"""RunSpec: defaults, every fault at once and by name, and what may be overridden from the command
line."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from everstep import InvalidSpec, RunSpec, UsageError
from everstep.code.source import with_code
from everstep.spec.overrides import apply_overrides
from everstep.spec.parsing import parse_spec
from everstep.spec.run_spec import auto_micro_batch_size
from everstep.spec.yaml_file import parse_yaml, read_spec

ROOT = Path(__file__).parents[4]
TASK: dict[str, Any] = {
    "name": "image_classification",
    "model": {"name": "mini_resnet"},
    "data": {"name": "digits"},
}
OWN: dict[str, Any] = {"archive": f"sha256:{'0' * 64}", "task": "mine.task:Task"}
OWN_FUNCTION: dict[str, Any] = {
    "archive": OWN["archive"],
    "train_fn": "mine.train:train_fn",
    "config": {"lr": 0.1},
}
SCRIPT: dict[str, Any] = {"archive": OWN["archive"], "script": "train.py", "argv": ["--lr", "0.1"]}
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
        "ema_decay": None,
    },
    "scaling": {
        "min_workers": 1,
        "max_workers": 2,
        "resources_per_worker": {"CPU": 1},
        "use_gpu": "auto",
        "placement_strategy": "SPREAD",
        "accelerator_type": None,
    },
    "checkpoint": {
        "every_steps": 50,
        "every_s": None,
        "mtbf_s": None,
        "min_interval_s": 5.0,
        "max_interval_s": 1800.0,
        "keep_latest": 3,
        "best_metric": None,
        "best_mode": "max",
        "safetensors": False,
        "max_failed_saves": 5,
        "on_failed_saves": "continue",
    },
    "recovery": {
        "max_user_errors": 1,
        "max_system_failures": 100,
        "hang_timeout_s": None,
        "deadline_s": None,
    },
    "resume_from": None,
    "env": {"NCCL_DEBUG": "WARN"},
    "secrets": {},
    "runtime_env": None,
}


def spec(**fields: Any) -> dict[str, Any]:
    return {"name": "a", "task": copy.deepcopy(TASK), **fields}


def faults(raw: Any) -> dict[str, str]:
    with pytest.raises(InvalidSpec) as caught:
        parse_spec(raw)
    return {".".join(map(str, fault.loc)): fault.msg for fault in caught.value.errors}


def test_the_spec_of_the_contract_is_read_and_written_unchanged() -> None:
    parsed = parse_spec(CONTRACT)
    written = parsed.model_dump(mode="json")
    assert {
        key: written[key] for key in CONTRACT if key not in ("task", "optimizer", "schedule")
    } == {key: CONTRACT[key] for key in CONTRACT if key not in ("task", "optimizer", "schedule")}
    assert parse_spec(written) == parsed == RunSpec.model_validate_json(json.dumps(written))


def test_name_and_task_are_enough() -> None:
    parsed = parse_spec(spec())
    assert (
        parsed.project,
        parsed.optimizer.name,
        parsed.train.epochs,
        parsed.scaling.max_workers,
    ) == ("default", "adamw", 1, 1)


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
            spec(optimizer={"name": "adm"}),
            "optimizer.name",
            "'adm' is not known; choose one of 'adamw', 'adam', 'sgd'",
        ),
        (spec(optimizer={"lr": 1}), "optimizer.name", "is required"),
        (spec(task={**TASK, "model": {"name": "resnet19"}}), "task.model.name", "GET /v1/catalog"),
        (
            spec(task={**TASK, "model": {"name": "resnet18", "args": {"width": 1}}}),
            "task.model.args.width",
            "is not a field",
        ),
        (
            spec(task={"name": "image_classification", "data": {"name": "digits"}}),
            "task.model",
            "is required",
        ),
        (spec(train=5), "train", "mapping"),
        (
            spec(train={"micro_batch_size": "some"}),
            "train.micro_batch_size",
            "integer; or should be 'auto'",
        ),
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
        (spec(runtime_env={"pip": ["--index-url=x"]}), "runtime_env.pip.0", "pattern"),
        (spec(runtime_env={"pip": ["x @ https://x/x.whl"]}), "runtime_env.pip.0", "pattern"),
        (spec(runtime_env={"pip": []}), "runtime_env.pip", "at least 1"),
        (
            spec(runtime_env={"pip": ["x"], "working_dir": "s3://x"}),
            "runtime_env.working_dir",
            "is not a field",
        ),
        (spec(resume_from={"run_id": "run_1", "step": "newest"}), "resume_from.step", "latest"),
        (
            spec(resume_from={"run_id": "run_1", "step": -1}),
            "resume_from.step",
            "greater than or equal to 0",
        ),
        (spec(resume_from={"step": 1}), "resume_from.run_id", "is required"),
        ({"name": "a"}, "task", "set either task or code"),
        (spec(code=OWN), "task", "remove task or code"),
        ({"name": "a", "code": {**OWN, "task": "no colon"}}, "code.task", "pattern"),
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
        (
            {"name": "a", "code": {**OWN, "script": "train.py"}},
            "code.train_fn",
            "exactly one of task, script and train_fn",
        ),
        (
            {"name": "a", "code": {**OWN_FUNCTION, "script": "train.py"}},
            "code.train_fn",
            "exactly one of task, script and train_fn",
        ),
        ({"name": "a", "code": {**SCRIPT, "script": "/a/b.py"}}, "code.script", "absolute path"),
        ({"name": "a", "code": {**SCRIPT, "script": "../b.py"}}, "code.script", "not a plain path"),
        ({"name": "a", "code": {**SCRIPT, "script": "run.sh"}}, "code.script", "ends in .py"),
        ({"name": "a", "code": {**SCRIPT, "script": "-m a/b"}}, "code.script", "-m pkg.train"),
        ({"name": "a", "code": {**SCRIPT, "config": {"a": 1}}}, "code.config", "move it to argv"),
        ({"name": "a", "code": {**OWN, "argv": ["--lr", "1"]}}, "code.argv", "move it to args"),
        ({"name": "a", "code": {**SCRIPT, "argv": [0.1]}}, "code.argv.0", "must be text"),
        ({"name": "a", "code": SCRIPT, "train": {"epochs": 3}}, "train", "move it to code.argv"),
        ({"name": "a", "code": {**OWN, "config": {"a": 1}}}, "code.config", "move it to args"),
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
        (spec(checkpoint={"max_failed_saves": 0}), "checkpoint.max_failed_saves", "greater"),
        (
            spec(checkpoint={"min_interval_s": 9, "max_interval_s": 8}),
            "checkpoint.max_interval_s",
            "smaller than min_interval_s",
        ),
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
        (spec(name="../../etc"), "name", "pattern"),
        (
            spec(train={"global_batch_size": 10**12}),
            "train.global_batch_size",
            "less than or equal",
        ),
        ([], "", "mapping"),
        (None, "", "mapping"),
        ("name: a", "", "mapping"),
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


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name
)
def test_every_example_is_a_spec(path: Path) -> None:
    assert parse_spec(read_spec(str(path))).name


def test_yaml_says_numbers_as_people_write_them() -> None:
    assert parse_yaml("[1e-3, 1E5, -2e+3, 1.5, .5, 7, 1.e2, 1e]", "x") == [
        0.001,
        100000.0,
        -2000.0,
        1.5,
        0.5,
        7,
        100.0,
        "1e",
    ]


def test_yaml_says_words_and_dates_as_json_would() -> None:
    """What YAML 1.1 takes for booleans, octal numbers, minutes and dates is text, or the number
    that it looks like."""
    read = parse_yaml(
        "on: [FAILED]\nyes: [no, off, y, n, Yes, ON]\nt: [true, True, FALSE, null, ~, ]\n", "x"
    )
    assert read == {
        "on": ["FAILED"],
        "yes": ["no", "off", "y", "n", "Yes", "ON"],
        "t": [True, True, False, None, None],
    }
    numbers = parse_yaml("[010, 0x1f, 0o17, 1_000, 12:30, 2024-01-01, +3, -4, .inf, 1_0.5]", "x")
    assert numbers == [10, 31, 15, 1000, "12:30", "2024-01-01", 3, -4, math.inf, 10.5]
    assert parse_yaml("a: &a {b: 1}\nc: {<<: *a, d: 2}", "x") == {
        "a": {"b": 1},
        "c": {"b": 1, "d": 2},
    }


def test_a_webhook_s_statuses_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(
        json.dumps(spec())[:-1] + ", notify: {url: 'https://example.org', on: [FAILED]}}"
    )
    assert parse_spec(read_spec(str(path))).notify.on == ["FAILED"]  # type: ignore[union-attr]


def test_what_is_to_be_quoted_is_said_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(
        "name: 2024\ntags: {v: 1.10, w: 0x1f, 7: a, on: yes, none: }\nenv: {DEBUG: 1, TRACE: "
        "True}\n"
    )
    found = faults(
        apply_overrides(with_code(read_spec(str(path)), None, None, None)[0], ["train.epochs=2"])
    )
    assert found["tags.v"] == 'must be text, but the value 1.10 is a number; quote it: "1.10"'
    assert found["tags.w"].endswith('quote it: "0x1f"')
    assert found["tags.7"] == 'must be text, but the key 7 is a number; quote it: "7"'
    assert found["tags.none"] == 'must be text, but is empty; write "" for empty text, or remove it'
    assert found["env.DEBUG"].endswith('the value 1 is a number; quote it: "1"')
    assert found["env.TRACE"].endswith('the value True is a boolean; quote it: "True"')
    assert found["name"].endswith('quote it: "2024"') and "tags.on" not in found
    as_json = faults({"name": "a", "tags": {"v": 1.1, "w": True}})
    assert as_json["tags.v"].endswith('quote it: "1.1"') and as_json["tags.w"].endswith(
        'quote it: "true"'
    )


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


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        *(
            (name, "min")
            for name in (
                "loss",
                "val_loss",
                "valLoss",
                "train/loss",
                "log_loss",
                "perplexity",
                "ppl",
                "val_error",
                "error_rate",
            )
        ),
        *(
            (name, "min")
            for name in (
                "mae",
                "rmse",
                "val_mse",
                "nll",
                "wer",
                "CER",
                "val_wer",
                "mape",
                "bits_per_token",
            )
        ),
        *(
            (name, "max")
            for name in (
                "accuracy",
                "f1",
                "power",
                "cancer",
                "auc",
                "lossless",
                "name",
                "map",
                "top5_accuracy",
                "answer",
            )
        ),
        *((name, "max") for name in ("neg_log_loss", "val_neg_mean_squared_error", None)),
    ],
)
def test_the_best_is_the_smallest_where_the_metric_s_name_says_so(
    metric: str | None, mode: str
) -> None:
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: a\ntrain: {epochs: 3\noptimizer: x\n", "line 3"),
        ("name: a\n\tname: b\n", "line 2, column 1.*spaces, not tabs"),
        ("train:\n  epochs: 1\n  epochs: 2\n", "line 3, column 3: the key 'epochs' occurs twice"),
        ("name: 'open\n", "line 2"),
        ("a: !!python/object/apply:os.system [ls]\n", "line 1.*python/object"),
        ("a: \0\n", "line 1"),
        ("", "is empty"),
        ("- name: a\n", "contains a list"),
        ("just words\n", "contains a str"),
    ],
)
def test_a_file_that_is_no_spec_is_told_with_its_line(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=rf"(?s)spec\.yaml.*{words}"):
        read_spec(str(path))


def test_a_missing_file_is_told_with_what_was_meant(tmp_path: Path) -> None:
    (tmp_path / "digits.yaml").write_text("name: a")
    with pytest.raises(
        UsageError, match=r"digit\.yaml does not exist; did you mean .*digits\.yaml\?"
    ):
        read_spec(str(tmp_path / "digit.yaml"))


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"x" * (5 << 20)], ids=["not text", "huge"])
def test_what_is_no_text_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "spec.yaml").write_bytes(data)
    with pytest.raises(UsageError):
        read_spec(str(tmp_path / "spec.yaml"))
    with pytest.raises(UsageError, match="directory"):
        read_spec(str(tmp_path))


def test_aliases_cannot_blow_up_a_spec(tmp_path: Path) -> None:
    """Nine lines that mean a thousand million items: shared, not copied, and then refused as a
    field."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    path = tmp_path / "spec.yaml"
    path.write_text("\n".join(lines))
    assert "a8" in faults(read_spec(str(path)))


# ---------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("train.epochs=3", ("train", "epochs"), 3),
        ("optimizer.lr=1e-3", ("optimizer", "lr"), 0.001),
        ("train.max_steps=null", ("train", "max_steps"), None),
        ("train.compile=true", ("train", "compile"), True),
        ("train.micro_batch_size=auto", ("train", "micro_batch_size"), "auto"),
        ("task.model.args.width=8", ("task", "model", "args", "width"), 8),
        ("task.data.args.augment=false", ("task", "data", "args", "augment"), False),
        ("env.OMP_NUM_THREADS=1", ("env", "OMP_NUM_THREADS"), "1"),
        ("tags.a.b=c=d", ("tags", "a.b"), "c=d"),
        ("name=true", ("name",), "true"),
        ("scaling.resources_per_worker.GPU=0.5", ("scaling", "resources_per_worker", "GPU"), 0.5),
        ("schedule.name=cosine", ("schedule", "name"), "cosine"),
    ],
)
def test_any_field_can_be_set(setting: str, path: tuple[str, ...], value: Any) -> None:
    parsed = parse_spec(apply_overrides(spec(), [setting])).model_dump(mode="json")
    for part in path:
        parsed = parsed[part]
    assert parsed == value and type(parsed) is type(value)


def test_settings_come_in_order_and_leave_the_original_alone() -> None:
    raw = spec(optimizer={"name": "adamw", "lr": 0.1})
    changed = apply_overrides(
        raw, ["optimizer={name: sgd, lr: 0.2}", "optimizer.momentum=0.5", "optimizer.lr=0.3"]
    )
    assert changed["optimizer"] == {"name": "sgd", "lr": 0.3, "momentum": 0.5}
    assert raw == spec(optimizer={"name": "adamw", "lr": 0.1})


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "train.epoch=3",
            r"--set train\.epoch: train has no field 'epoch'; did you mean train\.epochs\?",
        ),
        ("epochs=3", r"did you mean train\.epochs\?"),
        ("optimizer.momentum=0.9", r"its fields are lr, weight_decay"),
        ("task.model.args.wdth=3", r"did you mean task\.model\.args\.width\?"),
        ("train.epochs.x=3", "it has no fields"),
        ("zzz=3", "its fields are name, project"),
        ("train.epochs=three", r"train\.epochs: should be a valid integer"),
        ("train.epochs=3.5", r"train\.epochs"),
        ("train=3", "train: must be a mapping"),
    ],
)
def test_what_cannot_be_set_is_named(setting: str, words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        parse_spec(apply_overrides(spec(), [setting]))


@pytest.mark.parametrize(
    "setting",
    ["train.epochs", "=3", ".epochs=3", "train..epochs=3", "train.=3", "", "train.epochs={"],
)
def test_what_is_no_setting_is_refused(setting: str) -> None:
    with pytest.raises(UsageError, match="--set"):
        apply_overrides(spec(), [setting])


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
            "AWS_ACCESS_KEY_ID",
            "AWS_SHARED_CREDENTIALS_FILE",
            "AWS_CONFIG_FILE",
            "AWS_ROLE_ARN",
            "AWS_ENDPOINT_URL",
        ),
        *(
            "AWS_ENDPOINT_URL_S3",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            "AWS_CA_BUNDLE",
            "aws_profile",
        ),
        *(
            "GOOGLE_APPLICATION_CREDENTIALS",
            "CLOUDSDK_CONFIG",
            "CLOUD_STORAGE_EMULATOR_ENDPOINT",
            "BOTO_CONFIG",
        ),
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
