"""Train a small GPT on the characters of a file. A trainer with callbacks, configured by YAML:

torchrun --nproc-per-node 2 small_gpt.py trainer.max_iters=100 model.width=64
"""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, RandomSampler


def configured(path, overrides):
    """Return the file's sections as objects, with SECTION.NAME=VALUE from the command line."""
    found = yaml.safe_load(Path(path).read_text())
    for override in overrides:
        place, _, value = override.partition("=")
        section, _, name = place.partition(".")
        found[section][name] = yaml.safe_load(value)
    return SimpleNamespace(**{name: SimpleNamespace(**part) for name, part in found.items()})


class Characters(Dataset):
    """Stretches of a text, and the same one character later."""

    def __init__(self, path, context):
        text = Path(path).read_text()
        self.characters, self.context = sorted(set(text)), context
        self.text = torch.tensor([self.characters.index(each) for each in text])

    def __len__(self):
        return len(self.text) - self.context

    def __getitem__(self, at):
        stretch = self.text[at : at + self.context + 1]
        return stretch[:-1], stretch[1:]


class GPT(nn.Module):
    def __init__(self, config, num_characters):
        super().__init__()
        self.tokens = nn.Embedding(num_characters, config.width)
        self.places = nn.Parameter(torch.zeros(config.context, config.width))
        block = nn.TransformerEncoderLayer(
            config.width, config.heads, 4 * config.width, config.dropout, "gelu", batch_first=True
        )
        self.blocks = nn.TransformerEncoder(block, config.layers)
        self.head = nn.Linear(config.width, num_characters)

    def forward(self, tokens):
        hidden = self.tokens(tokens) + self.places[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.blocks(hidden, mask, is_causal=True))


class Trainer:
    """Draws batches without end, and calls ``on_batch_end`` after each."""

    def __init__(self, config, model, dataset, batch_size):
        self.config, self.model = config, model
        self.callbacks, self.iteration, self.loss = [], 0, None
        self.optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate)
        sampler = RandomSampler(dataset, replacement=True, num_samples=10**6)
        self.loader = DataLoader(dataset, batch_size, sampler=sampler)

    def rate(self):
        warmup, end = self.config.warmup_iters, self.config.max_iters
        if self.iteration < warmup:
            return self.config.learning_rate * (self.iteration + 1) / warmup
        done = (self.iteration - warmup) / max(1, end - warmup)
        return self.config.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))

    def run(self):
        batches = iter(self.loader)
        while self.iteration < self.config.max_iters:
            tokens, targets = next(batches)
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate()
            logits = self.model(tokens)
            self.loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
            self.optimizer.step()
            self.iteration += 1
            for callback in self.callbacks:
                callback(self)


def tell(trainer):
    if trainer.iteration % 10 == 0 and dist.get_rank() == 0:
        print(f"iteration {trainer.iteration}: loss {trainer.loss.item():.4f}")


def main():
    overrides = [each for each in sys.argv[1:] if "=" in each]
    config = configured("small_gpt.yaml", overrides)
    dist.init_process_group("gloo")
    torch.manual_seed(config.trainer.seed + dist.get_rank())  # each rank draws for itself
    dataset = Characters(config.data.file, config.model.context)
    model = DistributedDataParallel(GPT(config.model, len(dataset.characters)))
    trainer = Trainer(config.trainer, model, dataset, config.data.batch_size)
    trainer.callbacks.append(tell)
    trainer.run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
