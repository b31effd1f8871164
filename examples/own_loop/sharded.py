"""The loop of train.py with a model that FSDP2 shards: each rank has a part of the weights and of
the optimizer's state, and no reported step is lost when ranks die.

everstep submit --code examples/own_loop --train-fn sharded:train_fn --set scaling.min_workers=2 \
    --set scaling.max_workers=2
torchrun --nproc-per-node 2 examples/own_loop/sharded.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import everstep.train as es


def train_fn(config):
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    state = es.protect(model=model, optimizer=optimizer)
    data = es.loader(TensorDataset(images, torch.tensor(digits.target)), global_batch_size=64)
    with state:
        for inputs, labels in data.batches(state, epochs=config.get("epochs", 5)):
            loss = F.cross_entropy(model(inputs), labels) * data.weight
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            state.step(loss=loss)


if __name__ == "__main__":
    dist.init_process_group()
    train_fn({})
