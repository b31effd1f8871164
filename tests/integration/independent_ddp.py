"""A plain DDP script, written against torch alone, that trains what Everstep's test trains and
prints the loss of every step.

It shares no code with the package. What it knows is the contract of the data order: a file gives
the sample indices of every global batch in order, and a run of r ranks cuts each into micro-batches
of 32 that ranks take in contiguous runs.

    torchrun --nproc-per-node 2 independent_ddp.py ORDER.json INITIAL.pt LOSSES.json
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCH = 32


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(max(1, outputs // 16), outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(max(1, outputs // 16), outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
        )

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.GroupNorm(1, 16), nn.ReLU()
        )
        shapes = [(16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
        self.blocks = nn.Sequential(*(Residual(*shape) for shape in shapes))
        self.classifier = nn.Linear(64, 10)

    def forward(self, x):
        return self.classifier(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))


def main(order_path, initial_path, losses_path):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    images = (images - 0.305) / 0.376
    labels = torch.tensor(digits.target)

    net = Net()
    net.load_state_dict(torch.load(initial_path, weights_only=True))
    model = DistributedDataParallel(net)
    decayed = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.002, momentum=0.5)
    losses = []
    batches = json.loads(Path(order_path).read_text())
    for batch in batches:
        cuts = [batch[start : start + MICRO_BATCH] for start in range(0, len(batch), MICRO_BATCH)]
        sizes = [len(cuts) // world_size + (r < len(cuts) % world_size) for r in range(world_size)]
        first = sum(sizes[:rank])
        mine = [index for cut in cuts[first : first + sizes[rank]] for index in cut]
        # The whole share at once; a rank without samples computes on one image and counts it for
        # nothing.
        chosen = torch.tensor(mine or batch[:1])
        loss_sum = F.cross_entropy(model(images[chosen]), labels[chosen], reduction="sum") * (
            1.0 if mine else 0.0
        )
        optimizer.zero_grad()
        (loss_sum / len(batch) * world_size).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total = loss_sum.detach().double()
        dist.all_reduce(total)
        losses.append(total.item() / len(batch))
    if rank == 0:
        Path(losses_path).write_text(json.dumps(losses))
    dist.barrier()
    # Gloo's tear-down at the end of the interpreter aborts about one process in forty ("terminate
    # called without an active exception"); the losses are what this script is for, and they are
    # written.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
