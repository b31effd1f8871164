"""A script for torchrun with a DataLoader of its own, which loses no step.

torchrun --nproc-per-node 2 examples/gallery/torchrun_script.py --epochs 3
everstep submit --code examples/gallery --script torchrun_script.py --set scaling.max_workers=2
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import everstep.train as es


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    digits = load_digits()
    images, labels = torch.tensor(digits.data[:400]).float() / 16, torch.tensor(digits.target[:400])
    dataset = TensorDataset(images, labels)
    loader = DataLoader(dataset, batch_size=20, sampler=DistributedSampler(dataset))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2))
    model = DistributedDataParallel(model.append(nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30, 0.97)

    data = es.loader(loader)
    state = es.protect(model, optimizer, scheduler, extra={"data": data})
    with state:
        for inputs, targets in data.batches(state, epochs=arguments.epochs):
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            state.step(loss=loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
