"""Sharded training by FSDP as Ray's and torch's own guides have it; nothing in it knows of
Everstep.

everstep submit --code examples/own_train_fn_fsdp --train-fn train:train_fn --set
code.config.epochs=20 \
    --set scaling.max_workers=2 --watch

Every rank holds a part of the weights and of the optimizer's state, and writes that part alone:
torch.distributed.checkpoint names the parts in `.metadata`, Ray brings all ranks' files together in
one checkpoint, and any number of ranks can load it.
"""

import tempfile

import ray.train
import ray.train.torch
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset


class AppState(Stateful):
    """What a checkpoint holds, taken apart by ranks and put together again by torch."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.epoch = model, optimizer, -1

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "epoch": self.epoch}

    def load_state_dict(self, state):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.epoch = state["epoch"]


def train_fn(config):
    digits = load_digits()
    images, labels = (
        torch.tensor(digits.images, dtype=torch.float32) / 16,
        torch.tensor(digits.target),
    )
    loader = DataLoader(
        TensorDataset(images, labels), batch_size=config.get("batch_size", 64), shuffle=True
    )
    loader = ray.train.torch.prepare_data_loader(loader)

    device = ray.train.torch.get_device()
    mesh = init_device_mesh(device.type, (ray.train.get_context().get_world_size(),))
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    ).to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.get("lr", 3e-3))

    state = AppState(model, optimizer)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            dcp.load({"app": state}, checkpoint_id=directory)
        print(f"going on with epoch {state.epoch + 1}")

    for epoch in range(state.epoch + 1, config.get("epochs", 10)):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for batch_images, batch_labels in loader:
            loss = F.cross_entropy(model(batch_images), batch_labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state.epoch = epoch
        with tempfile.TemporaryDirectory() as directory:
            dcp.save({"app": state}, checkpoint_id=directory)
            ray.train.report(
                {"loss": loss.item(), "epoch": epoch},
                checkpoint=ray.train.Checkpoint.from_directory(directory),
            )
