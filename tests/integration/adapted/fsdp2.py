"""Trainers of other libraries whose model FSDP2 shards. ``CASE`` names the library.

Accelerate shards on GPUs only, and so does the Trainer of Hugging Face, which uses it: their choice
is the one thing that is replaced here. Rank 0 writes what the trainer knows at the end.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed
from transformers import Trainer as HuggingFaceTrainer

import everstep.train as es

NAME, CASE = Path(sys.argv[0]).stem, os.environ["CASE"]


def shard_on_cpus():
    own = AcceleratorState.__init__

    def chosen(state, *args, fsdp_plugin=None, **settings):
        own(state, *args, fsdp_plugin=fsdp_plugin, **settings)
        if fsdp_plugin is not None:
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = chosen


def digits(first, last, shuffle=True):
    found = load_digits()
    images, labels = torch.tensor(found.data[first:last]).float() / 16, found.target[first:last]
    return DataLoader(TensorDataset(images, torch.tensor(labels)), batch_size=10, shuffle=shuffle)


def network():
    return nn.Sequential(
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def accelerate():
    shard_on_cpus()
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1000
    )  # fmt: skip
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    prepared = accelerator.prepare(model, optimizer, scheduler, digits(0, 400))
    model, optimizer, scheduler, loader = prepared
    data = es.loader(loader)
    state = es.protect(accelerator=accelerator, extra={"data": data})
    with state:
        for inputs, targets in data.batches(state, epochs=3):
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            state.step(loss=loss)
    return {"kind": accelerator.distributed_type.name, "steps": state.step_number}


def sequence(index):
    draws = torch.randint(0, 8, (24,), generator=torch.Generator().manual_seed(index))
    tokens = draws.cumsum(0) % 64
    return {"input_ids": tokens, "labels": tokens}


def hugging_face():
    shard_on_cpus()
    set_seed(0)
    size = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    args = TrainingArguments(
        output_dir=f"{NAME}-out", num_train_epochs=3, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, learning_rate=3e-3, warmup_steps=5, report_to="none",
        use_cpu=True, disable_tqdm=True, eval_strategy="steps", eval_steps=4, save_strategy="steps",
        save_steps=4, save_total_limit=2, load_best_model_at_end=True,
        fsdp=True, fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
    )  # fmt: skip
    trainer = HuggingFaceTrainer(
        model, args, train_dataset=[sequence(index) for index in range(72)],
        eval_dataset=[sequence(1000 + index) for index in range(16)],
    )  # fmt: skip
    trainer.add_callback(es.hf.Protect(trainer))
    trainer.train()
    log = trainer.state.log_history
    found = [(entry["step"], entry["eval_loss"]) for entry in log if "eval_loss" in entry]
    saved = sorted(each.name for each in Path(f"{NAME}-out").glob("checkpoint-*"))
    kind = trainer.accelerator.distributed_type.name
    return {"kind": kind, "steps": trainer.state.global_step, "evaluations": found, "saved": saved}


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.trace = network(), []

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self):
        self.trace.append([self.global_step, float(self.trainer.callback_metrics["val_loss"])])

    def on_save_checkpoint(self, checkpoint):
        checkpoint["trace"] = list(self.trace)

    def on_load_checkpoint(self, checkpoint):
        self.trace = list(checkpoint["trace"])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def lightning():
    seed_everything(0)
    trainer = Trainer(
        accelerator="cpu", devices=2, logger=False, enable_progress_bar=False, max_epochs=3,
        enable_model_summary=False, enable_checkpointing=False, gradient_clip_val=1.0,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        accumulate_grad_batches=2, callbacks=[es.lightning.Protect()],
    )  # fmt: skip
    net = Net()
    trainer.fit(net, digits(0, 200), digits(400, 480, shuffle=False))
    return {"kind": "FSDP", "steps": trainer.global_step, "trace": net.trace}


if __name__ == "__main__":
    told = {"accelerate": accelerate, "hf": hugging_face, "lightning": lightning}[CASE]()
    assert told["kind"] == "FSDP", told
    if os.environ["RANK"] == "0":
        Path(f"{NAME}.json").write_text(json.dumps(told))
