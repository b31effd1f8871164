"""A plain PyTorch script in the style of the tutorials, which knows nothing of Everstep: `python
digits_script.py`."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    def __init__(self, train: bool) -> None:
        digits = load_digits()
        split = slice(0, 1500) if train else slice(1500, None)
        self.images = torch.tensor(digits.images[split], dtype=torch.float32) / 16
        self.labels = torch.tensor(digits.target[split])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.labels[index]


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, width),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(Digits(train=True), batch_size=64, shuffle=True)
    for epoch in range(10):
        model.train()
        for images, labels in loader:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            test = Digits(train=False)
            accuracy = (model(test.images.to(device)).argmax(1).cpu() == test.labels).float().mean()
        print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
