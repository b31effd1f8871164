"""CLIP, which loses no step: the negatives of a pair are all other pairs of the global batch.

torchrun --nproc-per-node 2 examples/gallery/clip.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import everstep.train as es


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(64, 32), nn.EmbeddingBag(64, 32)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images, texts):
        images, texts = F.normalize(self.image(images)), F.normalize(self.text(texts))
        if dist.is_initialized():  # gradients flow back to all ranks
            images, texts = torch.cat(all_gather(images)), torch.cat(all_gather(texts))
        scores, pairs = self.scale.exp() * images @ texts.T, torch.arange(len(images))
        return (F.cross_entropy(scores, pairs) + F.cross_entropy(scores.T, pairs)) / 2


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    images, labels = (torch.tensor(each[:400]) for each in load_digits(return_X_y=True))
    images, texts = images.float() / 16, labels[:, None] * 6 + torch.arange(6)
    torch.manual_seed(0)
    model = DistributedDataParallel(Clip()) if dist.is_initialized() else Clip()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state = es.protect(model=model, optimizer=optimizer)
    data = es.loader(TensorDataset(images, texts), global_batch_size=40, drop_last=True)
    with state:
        for batch in data.batches(state, epochs=3):
            (loss := model(*batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
            state.step(loss=loss)
