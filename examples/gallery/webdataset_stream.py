"""A loop over tar files by webdataset that loses no step: a restart skips to the very batch.

torchrun --nproc-per-node 2 examples/gallery/webdataset_stream.py
"""

import os
import random
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from webdataset import ShardWriter, WebDataset, shuffle, split_by_node

import everstep.train as es


def shuffled(samples):
    """Shuffle by the seed that es.loader sets before each epoch."""
    yield from shuffle(100, rng=random.Random(torch.initial_seed()))(samples)


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    digits, directory = load_digits(), tempfile.mkdtemp()
    with ShardWriter(f"{directory}/%d.tar", maxcount=50, verbose=0) as shards:
        for index in range(400):
            sample = {"image.pth": torch.tensor(digits.data[index]).float() / 16}
            shards.write({"__key__": f"{index:04d}", "label.cls": digits.target[index], **sample})
    shards = f"{directory}/{{0..7}}.tar"
    samples = WebDataset(shards, shardshuffle=False, nodesplitter=split_by_node).compose(shuffled)
    pairs = samples.decode().to_tuple("image.pth", "label.cls")
    data = es.loader(torch.utils.data.DataLoader(pairs, batch_size=20))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    model = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with es.protect(model=model, optimizer=optimizer, extra={"data": data}) as state:
        for inputs, targets in data.batches(state, epochs=3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            state.step(loss=loss)
