"""Learn what users like from what they chose, with negatives that are drawn anew each epoch."""

import argparse

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import everstep.train as es

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=40, help="of all ranks together")
parser.add_argument("--patience", type=int, default=2)
NUM_USERS, NUM_ITEMS, CHOICES = 40, 60, 5


class Choices(Dataset):
    """Triples: a user, an item that was chosen, one that was not."""

    def __init__(self):
        draws = np.random.default_rng(0)
        near = np.arange(NUM_USERS)[:, None] + draws.integers(0, 12, (NUM_USERS, CHOICES + 1))
        self.chosen, self.held_out = near[:, :-1] % NUM_ITEMS, near[:, -1] % NUM_ITEMS
        self.negatives = None

    def set_epoch(self, epoch):
        draws = np.random.default_rng(epoch)
        self.negatives = draws.integers(0, NUM_ITEMS, (NUM_USERS, CHOICES))

    def __len__(self):
        return NUM_USERS * CHOICES

    def __getitem__(self, at):
        user, number = divmod(at, CHOICES)
        return user, int(self.chosen[user, number]), int(self.negatives[user, number])


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(NUM_USERS, 16), nn.Embedding(NUM_ITEMS, 16)

    def forward(self, users, items):
        return (self.users(users) * self.items(items)).sum(1)


class Patience:
    """Stops once the best score is some epochs old."""

    def __init__(self, most):
        self.most, self.best, self.waited = most, -1.0, 0

    def is_over(self, score):
        self.waited = 0 if score > self.best else self.waited + 1
        self.best = max(self.best, score)
        return self.waited >= self.most

    def state_dict(self):
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, saved):
        self.best, self.waited = saved["best"], saved["waited"]


@torch.no_grad()
def hit_rate(model, held_out):
    """Return the share of users whose held-out item is among their first ten."""
    scores = model.users.weight @ model.items.weight.T
    first = scores.topk(10).indices
    return (first == torch.tensor(held_out)[:, None]).any(1).float().mean().item()


def main():
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    choices, bare = Choices(), Factors()
    model = DistributedDataParallel(bare)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    patience = Patience(args.patience)
    data = es.loader(choices, args.batch_size)
    state = es.protect(model, optimizer, extra={"patience": patience})
    with state:
        for epoch in range(state.epoch, args.epochs):
            for users, chosen, others in data.batches(state, epochs=epoch + 1):
                both = model(users.repeat(2), torch.cat([chosen, others])).chunk(2)
                loss = -F.logsigmoid(both[0] - both[1]).mean() * data.weight
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                state.step(loss=loss)
            score = hit_rate(bare, choices.held_out)
            print(f"epoch {epoch}: loss {loss.item():.4f}, hit rate {score:.3f}")
            if patience.is_over(score):
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
