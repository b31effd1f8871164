"""BYOL, which loses no step: a target network follows the trained one by an average.

torchrun --nproc-per-node 2 examples/gallery/byol.py
"""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import everstep.train as es


def noisy(images):
    return images * (torch.rand_like(images) > 0.2) + 0.1 * torch.randn_like(images)


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    images = torch.tensor(load_digits().data[:400]).float() / 16
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 32))
    target = copy.deepcopy(encoder).requires_grad_(False)
    online = nn.Sequential(encoder, nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    model = DistributedDataParallel(online) if dist.is_initialized() else online
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    state = es.protect(model={"online": model, "target": target}, optimizer=optimizer)
    data = es.loader(TensorDataset(images), global_batch_size=40)
    with state:
        for (batch,) in data.batches(state, epochs=3):
            one, other = noisy(batch), noisy(batch)
            wanted = torch.cat([target(other), target(one)])
            guessed = model(torch.cat([one, other]))
            loss = (2 - 2 * F.cosine_similarity(guessed, wanted).mean()) * data.weight
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for average, weight in zip(target.parameters(), encoder.parameters(), strict=True):
                    average.lerp_(weight, 0.01)
            state.step(loss=loss)
