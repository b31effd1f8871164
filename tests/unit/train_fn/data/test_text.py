"""Text: every token predicted once, the same packing on every node, a clear word where there is
none; and the model over it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from everstep.errors import InvalidSpec
from everstep.spec.parsing import parse_spec
from everstep.spec.tasks import GptArgs, LanguageModelingSpec, TextFilesArgs
from train_fn.data.text_files import END_OF_TEXT, load_text_files
from train_fn.errors import DataMissing
from train_fn.models import Gpt
from train_fn.tasks.builtin import LanguageModeling

pytestmark = pytest.mark.own_process


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    (root / "b").mkdir(parents=True)
    (root / "a.txt").write_text("Straße")
    (root / "b" / "c.txt").write_text("ab")
    (root / "notes.md").write_text("not read")
    (root / "z.txt").symlink_to(root / "a.txt")
    return root


def make_task(path: Path, *, length: int = 8, **args: object) -> LanguageModeling:
    model = {
        "name": "gpt",
        "args": {
            "num_layers": 2,
            "num_heads": 2,
            "width": 16,
            "context_length": length,
            "dropout": 0.5,
        },
    }
    data = {"name": "text_files", "args": {"path": str(path), "val_fraction": 0.0, **args}}
    spec = {"name": "language_modeling", "model": model, "data": data}
    return LanguageModeling(LanguageModelingSpec.model_validate(spec))


def test_characters_and_bytes_of_each_file_once_in_the_order_of_paths(texts: Path) -> None:
    chars = load_text_files(TextFilesArgs(path=str(texts), level="char", val_fraction=0), 1)
    tokens = [int(chars.train[index][0]) for index in range(len(chars.train))]
    points = [int(chars.vocabulary[token]) for token in tokens]
    assert "".join("|" if point == END_OF_TEXT else chr(point) for point in points) == "Straße|ab"
    raw = load_text_files(TextFilesArgs(path=str(texts), level="byte", val_fraction=0), 1)
    assert len(raw.vocabulary) == 257
    assert bytes(int(raw.train[index][0]) for index in range(7)) == "Straße".encode()
    assert (
        load_text_files(
            TextFilesArgs(path=str(texts / "a.txt"), val_fraction=0), 2
        ).train.fingerprint
        != raw.train.fingerprint
    )


def test_sequences_predict_every_token_once_and_the_end_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "numbers.txt"
    path.write_bytes(bytes(range(100)))
    data = load_text_files(TextFilesArgs(path=str(path), val_fraction=0.3), 10)
    assert data.val is not None
    # 71 and 30 tokens, the last one ends the text
    assert (len(data.train), len(data.val)) == (7, 2)
    batch = data.train.fetch(0, 0, np.arange(7))
    assert batch[:, 1:].flatten().tolist() == list(range(1, 71))
    assert torch.equal(batch[1:, 0], batch[:-1, -1])
    assert data.val.fetch(0, None, np.array([0]))[0].tolist() == list(range(71, 82))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"path": "/nowhere"}, "there is no /nowhere on this node"),
        ({"pattern": "*.tex"}, r"is called \*.tex; set task.data.args.pattern"),
        ({"level": "char", "pattern": "*"}, "latin1 is not UTF-8 .byte 0.; leave it out"),
        ({"pattern": "c.txt"}, "3 tokens to train on, fewer than one sequence of 9"),
    ],
)
def test_what_is_wrong_with_the_text_is_said(texts: Path, args: dict[str, str], words: str) -> None:
    (texts / "latin1").write_bytes(b"\xe4")
    with pytest.raises(DataMissing, match=words):
        make_task(**{"path": texts, **args})  # type: ignore[arg-type]


def test_the_loss_is_a_sum_over_tokens_and_metrics_agree_with_it(texts: Path) -> None:
    task = make_task(texts, length=4, level="char")
    model = task.build_model().eval()
    batch = task.data.train.fetch(0, 0, np.array([0, 1]))
    with torch.no_grad():
        loss_sum, num_tokens = task.loss(model, batch)
        measured = task.metrics(model, batch)
    assert num_tokens == 8
    logits = model(batch[:, :-1]).detach().log_softmax(-1)
    by_hand = -sum(logits[n, t, batch[n, t + 1]] for n in range(2) for t in range(4))
    torch.testing.assert_close(loss_sum, by_hand)
    assert measured["loss"] == (loss_sum, 8)
    total, weight = measured["bits_per_token"]
    assert float(total / weight) == pytest.approx(float(loss_sum) / 8 / float(np.log(2)))


def test_no_token_sees_what_follows_it() -> None:
    torch.manual_seed(0)
    model = Gpt(
        GptArgs(num_layers=2, num_heads=2, width=16, context_length=8), torch.arange(20)
    ).eval()
    tokens = torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, 5] = 19
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5], after[0, 5])


def test_a_gpt_learns_a_text_by_heart(tmp_path: Path) -> None:
    (tmp_path / "poem.txt").write_text("the sun the sea the sand " * 4)
    torch.manual_seed(0)
    task = make_task(tmp_path / "poem.txt", level="char")
    model = task.build_model().eval()  # without dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    batch = task.data.train.fetch(0, 0, np.arange(len(task.data.train)))
    losses = []
    for _ in range(25):
        loss_sum, weight = task.loss(model, batch)
        optimizer.zero_grad()
        (loss_sum / weight).backward()
        optimizer.step()
        losses.append(float(loss_sum.detach() / weight))
    assert losses[-1] < 0.5 * losses[0]


def test_heads_must_share_the_width() -> None:
    spec = {
        "name": "gpt",
        "task": {
            "name": "language_modeling",
            "model": {"name": "gpt", "args": {"num_heads": 3, "width": 16}},
            "data": {"name": "text_files", "args": {"path": "/data"}},
        },
    }
    with pytest.raises(
        InvalidSpec, match=r"task\.model\.args\.width: width 16 is not a multiple of num_heads 3"
    ):
        parse_spec(spec)
