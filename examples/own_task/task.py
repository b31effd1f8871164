"""The script next door as a task: its model, its data and its loss, without its loop.

everstep submit --code examples/own_task --task task:DigitsTask --set train.epochs=20 --watch
"""

import torch.nn.functional as F
from digits_script import Digits, Net


class DigitsTask:
    def __init__(self, width=64):
        self.width = width

    def build_model(self):
        return Net(self.width)

    def build_datasets(self):
        return {"train": Digits(train=True), "val": Digits(train=False)}

    def loss(self, model, batch):
        images, labels = batch
        return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)

    def metrics(self, model, batch):
        images, labels = batch
        return {"accuracy": ((model(images).argmax(1) == labels).sum(), len(labels))}
