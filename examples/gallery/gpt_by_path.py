"""A small GPT from a file of one's own (small_gpt/model.py), which loses no step: batches are drawn
by the loop itself, at random places of a text, and gradients of two micro-batches make a step.

torchrun --nproc-per-node 2 examples/gallery/gpt_by_path.py
"""

import math
import os

import torch
import torch.distributed as dist
from small_gpt.model import GPT, GPTConfig
from torch.nn.parallel import DistributedDataParallel

import everstep.train as es

if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    text = torch.randint(0, 8, (4000,)).cumsum(0) % 64
    config = GPTConfig()
    model = GPT(config)
    model = DistributedDataParallel(model) if dist.is_initialized() else model
    decayed = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))

    state = es.protect(model=model, optimizer=optimizer)
    with state:
        while state.step_number < 40:
            for group in optimizer.param_groups:  # warms up, then falls: a function of the step
                step = state.step_number
                group["lr"] = 3e-3 * min((step + 1) / 5, (1 + math.cos(math.pi * step / 40)) / 2)
            for _ in range(2):
                first = torch.randint(len(text) - config.block_size - 1, (8,))
                windows = torch.stack([text[at : at + config.block_size + 1] for at in first])
                loss = model(windows[:, :-1], windows[:, 1:])[1] / 2
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            state.step(loss=loss)
