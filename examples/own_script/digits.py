"""The data of train.py: a module beside the script."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset


def load():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    return TensorDataset(images, torch.tensor(digits.target))
