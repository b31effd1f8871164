"""What the adapters of other people's trainers refuse: each error names the field and the way
out."""

from __future__ import annotations

import copy
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedType
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import everstep.train as es
from tests.support.two_groups import only_in_chaos
from train_fn.errors import BadTask, DataChanged

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the libraries
    pytest.mark.timeout(120),
]


@pytest.fixture(autouse=True)
def own_place(shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shared_memory.parent)


class Tiny(nn.Module):
    """A model as the Trainer of Hugging Face calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(inputs).square().mean()}

    main_input_name = "inputs"

    def num_parameters(self, **_: Any) -> int:
        return 10


def hf_trainer(model: Any = None, **settings: Any) -> Any:
    arguments = {"model_init": Tiny} if model is None else {"model": model}
    args = transformers.TrainingArguments(
        output_dir="out/trainer",
        max_steps=2,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    samples = [{"inputs": torch.ones(4)} for _ in range(8)]
    return transformers.Trainer(args=args, train_dataset=samples, eval_dataset=samples, **arguments)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size .* set per_device_train_batch_size"),
        ({"ignore_data_skip": True}, "ignore_data_skip=True .* leave it out"),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"},
            "lr_scheduler_type=.*plateau.* choose one that steps with the optimizer",
        ),
    ],
)
def test_arguments_of_a_trainer_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(BadTask, match=f"es.hf.Protect: {words}"):
        es.hf.Protect(hf_trainer(Tiny(), **settings))


def test_a_trainer_that_makes_its_model_anew_is_refused() -> None:
    with pytest.raises(BadTask, match=r"Trainer\(model_init=…\) .* pass model=…"):
        es.hf.Protect(hf_trainer())


@pytest.mark.parametrize("sharded", ["is_deepspeed_enabled", "is_fsdp_enabled"])  # FSDP1
def test_a_trainer_that_shards_its_state_is_refused(sharded: str) -> None:
    trainer = hf_trainer(Tiny())
    setattr(trainer, sharded, True)
    with pytest.raises(
        BadTask, match=r"by DeepSpeed or FSDP1, .* Set fsdp_config={'version': 2}, or leave es.hf"
    ):
        es.hf.Protect(trainer)


def test_an_older_trainer_is_refused_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = hf_trainer(Tiny())
    library = sys.modules[es.hf.Protect.__module__].transformers  # as the adapter sees it
    with monkeypatch.context() as older:
        older.setattr(library, "__version__", "4.57.1")
        with pytest.raises(BadTask, match=r"transformers 4.57.1; install .* at least 5"):
            es.hf.Protect(trainer)
    monkeypatch.delattr(transformers.Trainer, "_run_epoch")
    with pytest.raises(BadTask, match=f"transformers {transformers.__version__}; install"):
        es.hf.Protect(trainer)


def test_a_trainer_is_refused_by_how_it_is_called() -> None:
    trainer = hf_trainer(Tiny())
    protect = es.hf.Protect(trainer, run_id="hf")
    with pytest.raises(BadTask, match=r"no callback of its Trainer; call trainer.add_callback"):
        trainer.train()
    trainer.add_callback(protect)
    with pytest.raises(BadTask, match="cannot protect a hyperparameter search; leave it out"):
        trainer.train(trial={"learning_rate": 1e-3})
    with pytest.raises(BadTask, match=r"resume_from_checkpoint=….* leave it out, or load those"):
        trainer.train(resume_from_checkpoint="out/trainer/checkpoint-1")


class Net(LightningModule):
    """A module whose optimizers a test chooses."""

    def __init__(self, chosen: Callable[[Any], Any]) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.chosen = chosen

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.head(self.backbone(batch[0])).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return self.chosen(self.parameters())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def plateau(parameters: Any) -> Any:
    optimizer = sgd(parameters)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}


def several(parameters: Any) -> list[torch.optim.Optimizer]:
    first, *rest = parameters
    return [sgd([first]), sgd(rest)]


def fit(chosen: Callable[[Any], Any] = sgd, *callbacks: Any, **settings: Any) -> Any:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[*callbacks, es.lightning.Protect(run_id="lightning")],
        **settings,
    )
    net = Net(chosen)
    net.automatic_optimization = chosen is not several
    trainer.fit(net, DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4))
    return trainer


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (lambda _: None, r"configure_optimizers\(\) returned no optimizer; return one"),
        (lambda given: torch.optim.LBFGS(given), "LBFGS runs several passes .* use another one"),
        (plateau, "ReduceLROnPlateau steps after .* choose a scheduler that steps with"),
        (several, r"with 2 optimizers: .* Pass torn='shadow'"),
    ],
)
def test_optimizers_of_a_module_are_refused_by_name(
    chosen: Callable[[Any], Any], words: str
) -> None:
    with pytest.raises(BadTask, match=words):
        fit(chosen)


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (
            lambda: StochasticWeightAveraging(0.1),
            r"swaps weights .* average them in optimizer_step",
        ),
        (EMAWeightAveraging, r"swaps weights .* average them in optimizer_step"),
        (BackboneFinetuning, "changes what is trained .* build the optimizer with all"),
    ],
)
def test_callbacks_that_change_what_is_trained_are_refused(
    callback: Callable[[], Any], words: str
) -> None:
    made = callback()
    made.on_fit_start = lambda *_: None  # its own demands come first
    with pytest.raises(BadTask, match=f"es.lightning.Protect: {type(made).__name__} {words}"):
        fit(sgd, made)


def test_loaders_that_are_made_anew_now_and_then_are_refused() -> None:
    with pytest.raises(BadTask, match=r"reload_dataloaders_every_n_epochs=2 .* set it to 1 or 0"):
        fit(reload_dataloaders_every_n_epochs=2)
    assert fit(reload_dataloaders_every_n_epochs=1).global_step == 1


def accelerator(*prepared: Any) -> Accelerator:
    made = Accelerator(cpu=True)
    made.prepare(*prepared)
    return made


def test_an_accelerator_that_shards_its_state_is_refused() -> None:
    given = SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=False)
    with pytest.raises(
        BadTask, match=r"accelerator=….* by FSDP.* Use DDP, or FSDP2: .*\(fsdp_version=2\)"
    ):
        es.protect(accelerator=given)


def test_what_an_accelerator_lacks_or_has_twice_is_refused() -> None:
    model = nn.Linear(4, 2)
    optimizer = sgd(model.parameters())
    with pytest.raises(BadTask, match=r"no model or no optimizer yet; call accelerator.prepare\("):
        es.protect(accelerator=accelerator(model))
    whole = accelerator(model, optimizer)
    for beside in ({"model": model}, {"heirs": 10}):
        with pytest.raises(BadTask, match="leave model, optimizer, scheduler and heirs out"):
            es.protect(**beside, accelerator=whole)
    whole.register_for_checkpointing(optimizer)
    with pytest.raises(BadTask, match=r"extra=….* has the name 'registered0'; use another one"):
        es.protect(accelerator=whole, extra={"registered0": optimizer})


def test_a_scheduler_that_was_not_prepared_is_refused() -> None:
    model = nn.Linear(4, 2)
    optimizer = sgd(model.parameters())
    whole = accelerator(model, optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with pytest.raises(BadTask, match=r"scheduler=….* is missing.* Pass it"):
        es.protect(accelerator=whole)


@pytest.mark.parametrize("kind", [FSDPStrategy, DeepSpeedStrategy])
def test_a_strategy_whose_shards_nothing_can_take_apart_is_refused(kind: Any) -> None:
    trainer = SimpleNamespace(strategy=object.__new__(kind))  # it needs a GPU to be made
    with pytest.raises(BadTask, match=f"{kind.__name__} shards .* Use FSDP2: ModelParallelStrat"):
        es.lightning.Protect().on_fit_start(trainer, nn.Linear(4, 2))


class Following(LightningModule):
    """A teacher follows at the end of each batch, and the learning rate falls at that of each
    epoch, in the module's own hooks."""

    def __init__(self, dies: int | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net, self.teacher = nn.Linear(4, 2), nn.Linear(4, 2).requires_grad_(False)
        self.dies, self.num_hooks = dies, 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == self.dies:
            raise LookupError("planned")
        self.log("falls", -float(self.trainer.global_step))
        found: torch.Tensor = (self.net(batch[0]) - self.teacher(batch[0])).square().mean()
        return found + self.net(batch[0]).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.num_hooks += 1
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.1)

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self.net.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        seldom = {"scheduler": scheduler, "frequency": 1000}
        return {"optimizer": optimizer, "lr_scheduler": seldom}


class Kept:
    """An average of the weights, which a callback updates."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight.detach().clone()

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight = state["weight"].clone()


def follow(run_id: str, dies: int | None = None, **options: Any) -> tuple[Following, int]:
    net = Following(dies)
    best = {"monitor": "falls", "mode": "max", "save_top_k": 1, "save_last": True}
    saving = ModelCheckpoint("saved", every_n_train_steps=2, **best)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[es.lightning.Protect(run_id=run_id), saving],
    )
    inputs = torch.arange(64.0).reshape(16, 4).sin()
    loader = DataLoader(TensorDataset(inputs), batch_size=4, shuffle=True)
    own = vars(net).get("on_train_batch_end")
    trainer.fit(net, loader, **options)
    assert vars(net).get("on_train_batch_end") is own
    assert saving.current_score == -1, "of the best, which was before any restart"
    return net, trainer.global_step


@pytest.mark.parametrize("options", [{}, {"ckpt_path": "last"}])
@pytest.mark.parametrize("dies", [4, 7])
def test_what_a_module_does_at_a_batch_s_end_belongs_to_the_step(
    dies: int, options: dict[str, Any]
) -> None:
    """Also where a checkpoint of Lightning's is named in the call: the run goes on by itself."""
    whole, steps = follow("whole")
    assert whole.num_hooks == steps == 12, "called once for each batch"
    shutil.rmtree("saved")
    with pytest.raises(LookupError):
        follow("broken", dies)
    again, steps = follow("broken", **options)
    assert (again.num_hooks, steps) == (12 - dies, 12)
    for name, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


class Averaging(transformers.TrainerCallback):  # type: ignore[misc]
    """Averages the weights, in an object of its own or in one that is kept."""

    def __init__(self, kept: Kept | None, dies: int | None) -> None:
        self.kept, self.dies, self.num_steps = kept, dies, 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.dies:
            raise LookupError("planned")

    def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        weight = facts["model"].layer.weight.detach()
        if self.kept is None:
            self.average = weight.clone()
        else:
            self.kept.weight = self.kept.weight.lerp(weight, 0.1)

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("the Trainer asks no callback for it")


def average(run_id: str, dies: int | None = None, *, is_kept: bool = True) -> Kept:
    torch.manual_seed(3)
    model = Tiny()
    kept = Kept(model.layer.weight)
    trainer = hf_trainer(model, learning_rate=0.1)
    trainer.args.max_steps = 6
    extra = {"average": kept} if is_kept else None
    trainer.add_callback(es.hf.Protect(trainer, extra=extra, run_id=run_id))
    # Added later, and yet part of the step.
    trainer.add_callback(Averaging(kept if is_kept else None, dies))
    trainer.train()
    assert trainer.state.total_flos == 6 * 6 * 8 * 4 * 10, "also of the steps before a restart"
    return kept


def test_an_average_of_a_callback_is_kept_or_refused_in_the_first_step() -> None:
    whole = average("whole")
    with pytest.raises(LookupError):
        average("broken", 4)
    assert torch.equal(average("broken").weight, whole.weight)
    words = r"tensors that no checkpoint holds, in Averaging.average: .*hf.Protect\(trainer, extra"
    with pytest.raises(BadTask, match=words):
        average("lost", is_kept=False)


# ---------------------------------------------------------------- data after a restart


class Listening(nn.Module):
    """A model of the Trainer that keeps what it was given."""

    def __init__(self, dies: int | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(4, 2)
        self.dies, self.seen = dies, list[list[float]]()

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        if len(self.seen) == self.dies:
            raise LookupError("planned")
        self.seen.append(inputs[:, 0].tolist())
        return {"loss": self.layer(inputs).square().mean()}


class Hearing(LightningModule):
    """The same of Lightning's."""

    def __init__(self, dies: int | None) -> None:
        super().__init__()
        self.inner = Listening(dies)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        found: torch.Tensor = self.inner(batch[0] if isinstance(batch, list) else batch)["loss"]
        return found

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.parameters())


def rows(offset: int = 0) -> list[torch.Tensor]:
    return [torch.full((4,), float((index + offset) % 24)) for index in range(24)]


class Stateful(transformers.Trainer):  # type: ignore[misc]
    def get_train_dataloader(self) -> Any:
        return StatefulDataLoader(
            self.train_dataset, batch_size=8, shuffle=True, collate_fn=self.data_collator
        )


Seen = list[list[float]]


def train_hf(run_id: str, data: Any, dies: int | None = None, **options: Any) -> Seen:
    """Train for three epochs of a Trainer, eight samples a step."""
    model = Listening(dies)
    args = transformers.TrainingArguments(
        output_dir="out/trainer",
        max_steps=9,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        learning_rate=0.01,
    )
    trainer = options.get("kind", transformers.Trainer)(
        model,
        args,
        train_dataset=data,
        data_collator=lambda found: {"inputs": torch.stack(found)},
    )
    trainer.add_callback(es.hf.Protect(trainer, run_id=run_id))
    trainer.train()
    return model.seen


def train_lightning(run_id: str, data: Any, dies: int | None = None, **options: Any) -> Seen:
    """Train for three epochs of Lightning, eight samples a step."""
    net = Hearing(dies)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[es.lightning.Protect(run_id=run_id)],
    )
    loader = options.get("loader", DataLoader)(
        data, batch_size=8, shuffle=True, collate_fn=torch.stack
    )
    trainer.fit(net, loader)
    return net.inner.seen


TRAINERS = pytest.mark.parametrize(
    ("train", "who", "part"),
    [
        (train_hf, "es.hf.Protect", r"batch\['inputs'\]"),
        (train_lightning, "es.lightning.Protect", "batch"),
    ],
)


@TRAINERS
def test_a_second_training_of_a_process_is_one_of_its_own(
    train: Callable[..., Seen], who: str, part: str
) -> None:
    first = train("run", rows())
    assert len(train("run", rows(offset=1))) == len(first) == 9


def test_a_second_call_of_one_trainer_is_refused() -> None:
    trainer = hf_trainer(Tiny())
    trainer.add_callback(es.hf.Protect(trainer, run_id="hf"))
    trainer.train()
    with pytest.raises(BadTask, match=r"train\(\) was called a second time; make another Trainer"):
        trainer.train()
    again = fit(sgd)
    with pytest.raises(BadTask, match=r"fit\(\) was called a second time; make another Trainer"):
        again.fit(again.lightning_module, again.train_dataloader)


class Copied(Following):
    """A module that is copied and written in each step, as for an average of one's own."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for copied in (copy.deepcopy(self), pickle.loads(pickle.dumps(self))):
            assert "on_train_batch_end" not in vars(copied), "it would call that of the original"
        return super().training_step(batch, batch_idx)


class HookOfItsOwn(Following):
    """A module whose hook was set on the object."""

    def __init__(self, dies: int | None) -> None:
        super().__init__(dies)
        self.on_train_batch_end = super().on_train_batch_end  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [Copied, HookOfItsOwn])
def test_a_module_s_own_hook_and_its_copies_are_as_without_everstep(
    monkeypatch: pytest.MonkeyPatch, kind: type[Following]
) -> None:
    monkeypatch.setitem(globals(), "Following", kind)
    net, steps = follow("copied")
    assert net.num_hooks == steps == 12


@TRAINERS
@pytest.mark.parametrize("dies", [5, *only_in_chaos(1, 2)])
def test_a_trainer_reads_its_last_batch_again_and_refuses_another_one(
    train: Callable[..., Seen], who: str, part: str, dies: int
) -> None:
    whole = train("whole", rows())
    for run_id in ("same", "other"):
        with pytest.raises(LookupError):
            train(run_id, rows(), dies)
    assert train("same", rows()) == whole[dies:]
    place = f"batch {(dies - 1) % 3 + 1} of epoch {(dies - 1) // 3}, the last one of step {dies}"
    with pytest.raises(DataChanged, match=f"{who}: {place}, is another one than before: {part}"):
        train("other", rows(offset=1))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # in torchdata
@TRAINERS
@pytest.mark.parametrize("dies", [5, *only_in_chaos(2, 3)])
def test_a_loader_with_a_state_of_its_own_goes_on_in_a_trainer(
    train: Callable[..., Seen], who: str, part: str, dies: int
) -> None:
    options = {"kind": Stateful, "loader": StatefulDataLoader}
    whole = train("whole", rows(), **options)
    for run_id in ("same", "other"):
        with pytest.raises(LookupError):
            train(run_id, rows(), dies, **options)
    assert train("same", rows(), **options) == whole[dies:]
    if dies % 3:  # within an epoch
        with pytest.raises(DataChanged, match=part):
            train("other", rows(offset=1), **options)
