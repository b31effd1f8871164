"""A model of timm with stochastic depth and its optimizer's groups, which loses no step.

torchrun --nproc-per-node 2 examples/gallery/timm_model.py
"""

import os

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch.nn.parallel import DistributedDataParallel

import everstep.train as es

if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    digits = load_digits()
    images = torch.tensor(digits.images[:400]).float().div(16).unsqueeze(1)
    dataset = torch.utils.data.TensorDataset(images, torch.tensor(digits.target[:400]))
    torch.manual_seed(0)
    size = {"img_size": 8, "patch_size": 2, "in_chans": 1, "num_classes": 10}
    model = timm.models.VisionTransformer(
        **size, embed_dim=32, depth=2, num_heads=2, drop_path_rate=0.1
    )
    optimizer = create_optimizer_v2(model, opt="adamw", lr=3e-3, weight_decay=0.05)
    scheduler = CosineLRScheduler(optimizer, t_initial=30, warmup_t=5, t_in_epochs=False)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    state = es.protect(model=model, optimizer=optimizer, scheduler=scheduler)
    data = es.loader(dataset, global_batch_size=40)
    with state:
        for inputs, targets in data.batches(state, epochs=3):
            loss = F.cross_entropy(model(inputs), targets, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step_update(state.step_number + 1)
            state.step(loss=loss)
