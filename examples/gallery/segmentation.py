"""A segmentation model of torchvision with two losses, which loses no step.

torchrun --nproc-per-node 2 examples/gallery/segmentation.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torchvision.models.segmentation import lraspp_mobilenet_v3_large

import everstep.train as es


class Squares(torch.utils.data.Dataset):
    """A bright square on noise, another one each time that it is read."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        top, left = torch.randint(0, 32, (2,)).tolist()
        mask = torch.zeros(64, 64, dtype=torch.long)
        mask[top : top + 24, left : left + 24] = 1
        return torch.rand(3, 64, 64) + 0.5 * mask, mask


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = lraspp_mobilenet_v3_large(num_classes=2, weights_backbone=None)
    model = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=16, power=0.9)
    state = es.protect(model=model, optimizer=optimizer, scheduler=scheduler)
    data = es.loader(Squares(), global_batch_size=8)
    with state:
        for images, masks in data.batches(state, epochs=2):
            scores = model(images)["out"]
            overlap = (scores.softmax(1)[:, 1] * masks).sum() / masks.sum()
            loss = F.cross_entropy(scores, masks) + 1 - overlap
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            state.step(loss=loss)
