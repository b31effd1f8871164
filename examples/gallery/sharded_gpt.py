"""A GPT as a task whose model is sharded over the ranks by FSDP2: each has its rows of all weights
and moments, and a rank or node that dies costs no reported step.

everstep submit --code examples/gallery --task sharded_gpt:ShardedGpt \\
    --set train.sharding=full --set train.precision=bf16 --set scaling.max_workers=2

On several nodes train.sharding=hybrid lets each of them have the whole model, so that only sums of
gradients travel between them.
"""

import torch
import torch.nn.functional as F
from small_gpt.model import GPT, GPTConfig
from torch.utils.data import Dataset


class Windows(Dataset):
    """Every window of a text, with what comes one character later."""

    def __init__(self, text, length):
        self.text, self.length = text, length

    def __len__(self):
        return len(self.text) - self.length

    def __getitem__(self, at):
        return self.text[at : at + self.length], self.text[at + 1 : at + 1 + self.length]


class ShardedGpt:
    def __init__(self, layers=4):
        self.config = GPTConfig(n_layer=layers)

    def build_model(self):
        return GPT(self.config)

    def shard_modules(self, model):
        return model.blocks  # the embedding, to which the head is tied, stays with the model

    def build_datasets(self):
        steps = torch.randint(0, 8, (1300,), generator=torch.Generator().manual_seed(0))
        text, length = steps.cumsum(0) % self.config.vocab_size, self.config.block_size
        return {"train": Windows(text[:1032], length), "val": Windows(text[1032:], length)}

    def loss(self, model, batch):
        tokens, targets = batch
        logits, _ = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return loss, targets.numel()
