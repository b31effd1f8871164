"""Classify a folder of images: epochs, a schedule by epoch, and the best accuracy."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

import everstep.train as es

parser = argparse.ArgumentParser()
parser.add_argument("data", nargs="?", default="images", help="holds train/CLASS and val/CLASS")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=8, help="of all ranks together")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--workers", type=int, default=0)


def small_net(num_classes):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, num_classes),
    )  # fmt: skip


class Meter:
    """The mean of what was added since the epoch began."""

    def __init__(self):
        self.sum = self.count = 0.0

    def add(self, value, num):
        self.sum, self.count = self.sum + float(value) * num, self.count + num

    @property
    def mean(self):
        return self.sum / self.count


class Best:
    """The best accuracy so far."""

    top1 = 0.0

    def state_dict(self):
        return {"top1": self.top1}

    def load_state_dict(self, saved):
        self.top1 = saved["top1"]


@torch.no_grad()
def validate(model, loader):
    model.eval()
    top1 = Meter()
    for images, target in loader:
        top1.add((model(images).argmax(1) == target).float().mean(), len(target))
    model.train()
    return top1.mean


def main():
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    crop = [transforms.RandomResizedCrop(16, scale=(0.5, 1)), transforms.RandomHorizontalFlip()]
    train_set = datasets.ImageFolder(
        Path(args.data, "train"), transforms.Compose([*crop, transforms.ToTensor()])
    )
    val_set = datasets.ImageFolder(Path(args.data, "val"), transforms.ToTensor())
    data = es.loader(train_set, args.batch_size, num_workers=args.workers)
    val_loader = DataLoader(val_set, 64)
    bare = small_net(len(train_set.classes))
    model = DistributedDataParallel(bare)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    best = Best()
    state = es.protect(model, optimizer, scheduler, extra={"best": best})
    with state:
        for epoch in range(state.epoch, args.epochs):
            losses = Meter()
            for images, target in data.batches(state, epochs=epoch + 1):
                loss = F.cross_entropy(model(images), target) * data.weight
                losses.add(loss.detach(), len(target))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                state.step(loss=loss)
            top1 = validate(bare, val_loader)
            scheduler.step()
            print(f"epoch {epoch}: loss {losses.mean:.4f}, top-1 {top1:.3f}, best {best.top1:.3f}")
            if top1 >= best.top1 and dist.get_rank() == 0:
                torch.save(bare.state_dict(), "best.pt")
            best.top1 = max(best.top1, top1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
