"""A script for torchrun as its documentation has it; nothing in it knows of Everstep.

torchrun --nproc-per-node 2 train.py --epochs 20
everstep submit --code examples/own_script --script train.py --watch -- --epochs 20
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import load
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

SNAPSHOT = Path("snapshot.pt")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=3e-3)
    arguments = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=arguments.lr)
    first_epoch = 0
    if SNAPSHOT.exists():
        state = torch.load(SNAPSHOT, map_location=device, weights_only=True)
        bare.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1
    print(f"rank {rank} of {dist.get_world_size()} begins at epoch {first_epoch}")

    model = DistributedDataParallel(bare)
    data = load()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    for epoch in range(first_epoch, arguments.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
            state = {
                "model": bare.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch,
            }
            torch.save(state, "snapshot.tmp")
            Path("snapshot.tmp").replace(SNAPSHOT)  # a rank that dies here leaves a whole file
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
