"""A Ray Train function as Ray's own documentation has it; nothing in it knows of Everstep.

everstep submit --code examples/own_train_fn --train-fn train:train_fn --set code.config.epochs=20
--watch
"""

import tempfile
from pathlib import Path

import ray.train
import ray.train.torch
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


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
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = ray.train.torch.prepare_model(model)
    # one rank alone is not wrapped: its weights must fit several, and theirs it
    bare = getattr(model, "module", model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.get("lr", 3e-3))

    first_epoch = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory, "state.pt"), weights_only=True)
        bare.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1
        print(f"going on with epoch {first_epoch}")

    for epoch in range(first_epoch, config.get("epochs", 10)):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for batch_images, batch_labels in loader:
            loss = F.cross_entropy(model(batch_images), batch_labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        metrics = {"loss": loss.item(), "epoch": epoch}
        with tempfile.TemporaryDirectory() as directory:
            saved = None
            if ray.train.get_context().get_world_rank() == 0:
                state = {
                    "model": bare.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "epoch": epoch,
                }
                torch.save(state, Path(directory, "state.pt"))
                saved = ray.train.Checkpoint.from_directory(directory)
            ray.train.report(metrics, checkpoint=saved)
