"""Tokens, FLOPs and MFU: counted as closed formulas say, from shapes alone."""

from __future__ import annotations

import copy
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from everstep.spec.run_spec import RunSpec
from everstep.spec.tasks import GptArgs, MiniResNetArgs
from everstep.text import words
from everstep.wire.events import EventKind
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.one_rank import journal_of, one_rank
from tests.support.raw_specs import TASK
from tests.support.saves import make_state
from train_fn.errors import BadTask
from train_fn.loop import build
from train_fn.loop.attempt import train
from train_fn.models import Gpt, MiniResNet
from train_fn.session.report import Reporter
from train_fn.session.speed import FlopCount, Speed, declared, peak_of, speed_of

pytestmark = pytest.mark.own_process

SPEC = {
    "name": "speed",
    "task": TASK,
}


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    getattr(sys.modules.get("torch._dynamo.utils"), "counters", {}).clear()  # of other tests


class Text:
    def loss(self, model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"), 1


class Images:
    def loss(self, model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def counted(task: Any, model: nn.Module, batch: Any, num_samples: int) -> float | None:
    with FlopCount() as count:
        task.loss(model, batch)[0].backward()
    model.zero_grad(set_to_none=True)
    return count.of_sample(num_samples)


def test_a_gpt_takes_six_flops_a_weight_and_token_and_those_of_attention() -> None:
    args = GptArgs(num_layers=3, num_heads=2, width=32, context_length=16, dropout=0.1)
    model = Gpt(args, torch.arange(100))
    weights = sum(each.numel() for each in model.blocks.parameters() if each.ndim > 1)
    weights += model.tokens.weight.numel()  # as the last layer
    expected = 16 * (6 * weights + 12 * 3 * 32 * 16)
    batch = torch.zeros(5, 17, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH):  # a CPU's own kernel has no formula
        assert counted(Text(), model, batch, 5) == expected


def test_a_resnet_takes_three_times_its_convolutions_less_a_gradient_of_images() -> None:
    model, images = MiniResNet(MiniResNetArgs(width=8), 3, 10, 32), torch.zeros(4, 3, 32, 32)
    products: list[int] = []

    def note(module: Any, inputs: Any, output: torch.Tensor) -> None:
        products.append(output.numel() * module.weight[0].numel())

    hooks = [
        module.register_forward_hook(note)
        for module in model.modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
    ]
    model(images)
    for hook in hooks:
        hook.remove()
    expected = (6 * sum(products) - 2 * products[0]) / 4
    batch = (images, torch.zeros(4, dtype=torch.int64))
    assert counted(Images(), model, batch, 4) == expected


def test_frozen_weights_have_no_gradient_to_count() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 10, bias=False))
    batch = (torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64))
    assert counted(Images(), model, batch, 2) == 4 * 64 + 6 * 80
    model[0].weight.requires_grad_(False)
    assert counted(Images(), model, batch, 2) == 2 * 64 + 4 * 80


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB", "bf16", 312),
        ("NVIDIA A100-SXM4-40GB", "fp32", 156),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "fp16", 756),
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H200 NVL", "bf16", 835),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA A10G", "bf16", None),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla T4", "fp32", 8.1),
        ("NVIDIA GeForce RTX 3090", "bf16", None),
    ],
)
def test_the_peak_of_a_device_is_known_by_its_name_or_not_at_all(
    name: str, precision: str, tflops: float | None
) -> None:
    assert peak_of(name, precision) == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_each_figure_follows_from_what_is_known() -> None:
    assert Speed().figures(10.0) == {}
    assert Speed(tokens_per_sample=128).figures(10.0) == {"tokens_per_s": 1280.0}
    assert Speed(2e12).figures(10.0) == {"tflops_per_s": 20.0}
    assert Speed(2e12, None, 40e12).figures(10.0) == {"tflops_per_s": 20.0, "mfu": 0.5}


def test_a_task_may_say_what_a_sample_takes_in_either_form() -> None:
    class Says(Text):
        tokens_per_sample = 7

        def flops_per_sample(self) -> float:
            return 3e9

    task: Any = Says()
    assert (declared(task, "flops_per_sample"), declared(task, "tokens_per_sample")) == (3e9, 7)
    assert declared(Text(), "flops_per_sample") is None  # type: ignore[arg-type]


@pytest.mark.parametrize("said", ["many", 0, -1.0, float("nan"), float("inf"), True])
def test_anything_but_a_positive_number_is_refused(said: Any) -> None:
    task: Any = Text()
    task.flops_per_sample = said
    with pytest.raises(BadTask, match=r"flops_per_sample of Text is .*; set it to a positive"):
        declared(task, "flops_per_sample")


def test_every_step_reports_the_figures_beside_its_samples(tmp_path: Any) -> None:
    spec = RunSpec.model_validate(SPEC)
    ctx = one_rank(spec, RunDir(open_storage(str(tmp_path)), "run_speed"))
    task: Any = Text()
    task.tokens_per_sample = 16
    reporter = Reporter(ctx, make_state(), speed=speed_of(ctx, task, 2e6))
    reporter.step_done({"loss": 1.0}, 8)
    reporter.step_done({"loss": 1.0}, None, waited_s=1e9)
    reporter.close()
    points = [
        each for data in journal_of(ctx).of_kind(EventKind.METRICS) for each in data["points"]
    ]
    values = points[0]["values"]
    assert values["tokens_per_s"] == pytest.approx(16 * values["samples_per_s"])
    assert values["tflops_per_s"] == pytest.approx(2e-6 * values["samples_per_s"])
    assert "mfu" not in values, "a CPU has no published peak"
    assert points[1]["values"].keys() == {"loss", "step_s", "data_wait"}
    assert points[1]["values"]["data_wait"] == 1.0


# ---------------------------------------------------------------- measured in a run


def passed(model: nn.Module, batch: Any, count: FlopCount | None) -> list[torch.Tensor]:
    with nullcontext() if count is None else count:
        Images().loss(model, batch)[0].backward()  # type: ignore[no-untyped-call]
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_a_pass_that_is_counted_computes_the_same_bits() -> None:
    batch = (torch.randn(4, 3, 32, 32), torch.zeros(4, dtype=torch.int64))
    one = MiniResNet(MiniResNetArgs(width=8), 3, 10, 32)
    other, count = copy.deepcopy(one), FlopCount()
    assert all(map(torch.equal, passed(one, batch, None), passed(other, batch, count)))
    assert count.of_sample(4) == counted(Images(), one, batch, 4)


def test_a_pass_with_an_operator_of_unknown_work_has_no_count() -> None:
    @torch.library.custom_op("everstep_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    count = FlopCount()
    with count:
        twice(torch.ones(2, 2) @ torch.ones(2, 2))
    assert count.of_sample(1) is None
    for layer in (nn.LSTM(8, 8), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)):
        with (count := FlopCount()):
            layer(torch.ones(4, 2, 8))
        assert count.of_sample(1) is None, "torch has no formula for it on a CPU"


class Slow:
    """Says nothing of its work. Reading, or its loss, takes most of a step."""

    peak_flops_per_s = 1e12

    def __init__(self, *, reads: bool) -> None:
        self.reads = reads

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 2)

    def build_datasets(self) -> dict[str, Any]:
        return {"train": self, "val": None}

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.04 * self.reads)
        return torch.full((4,), float(index))

    def loss(self, model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        time.sleep(0.2 * (not self.reads))
        return model(batch).square().sum(), len(batch)


@pytest.mark.parametrize("reads", [False, True])
def test_a_run_says_its_work_and_how_long_it_waited_for_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    task = Slow(reads=reads)
    monkeypatch.setattr(build, "build_task", lambda spec: task)
    train_spec = {"global_batch_size": 8, "micro_batch_size": 4, "loader": {"num_workers": 0}}
    spec = {**SPEC, "train": train_spec, "scaling": {"use_gpu": False}}
    ctx = one_rank(RunSpec.model_validate(spec), RunDir(open_storage(str(tmp_path)), "run_slow"))
    assert train(ctx) is None
    points = [point["values"] for point in journal_of(ctx).points]
    assert [each["data_wait"] > 0.5 for each in points] == [reads, reads]
    flops = 4 * 8  # forward, and of the weights alone: images have no gradient
    for each in points:
        assert each["tflops_per_s"] == pytest.approx(flops * each["samples_per_s"] / 1e12)
        assert each["mfu"] == pytest.approx(each["tflops_per_s"])


def test_people_read_what_is_known() -> None:
    known = {"samples_per_s": 310.4, "tokens_per_s": 4966.4, "mfu": 0.41, "data_wait": 0.034}
    assert words.speed(known) == (
        "310 samples/s, 4,966 tokens/s, 41.0 % MFU, 3 % of a step waiting for data"
    )
    assert words.speed({"loss": 0.5, "mfu": 41.0}) is None, "a metric of the user's own"
