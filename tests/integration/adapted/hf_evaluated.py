"""A Trainer of Hugging Face that evaluates and stops early, or reads a stream more than once.

``CASE`` names what it does. Rank 0 writes what the Trainer knows at the end.
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

import everstep.train as es

NAME = Path(sys.argv[0]).stem
EVALUATED = {
    "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3,
    "save_total_limit": 2, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
    "eval_on_start": True,
}  # fmt: skip
CASES = {
    "early": {**EVALUATED, "num_train_epochs": 3, "greater_is_better": True},
    "stream": {"save_strategy": "no", "max_steps": 20, "gradient_accumulation_steps": 1},
    "epochs": {
        "num_train_epochs": 3, "eval_strategy": "epoch", "save_strategy": "epoch",
        "save_total_limit": 1, "load_best_model_at_end": True,
    },
}  # fmt: skip


def sequence(index):
    draws = torch.randint(0, 8, (24,), generator=torch.Generator().manual_seed(index))
    tokens = draws.cumsum(0) % 64
    return {"input_ids": tokens, "labels": tokens}


class Stream(torch.utils.data.IterableDataset):
    """13 batches of 4 on each of two ranks."""

    def __iter__(self):
        return map(sequence, range(100))


if __name__ == "__main__":
    case = os.environ["CASE"]
    set_seed(0)
    size = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    settings = {"gradient_accumulation_steps": 2, **CASES[case]}
    args = TrainingArguments(
        output_dir=f"{NAME}-out", per_device_train_batch_size=4, learning_rate=3e-3,
        warmup_steps=5, report_to="none", use_cpu=True, disable_tqdm=True, **settings,
    )  # fmt: skip
    train = Stream() if case == "stream" else [sequence(index) for index in range(68)]
    held_out = [sequence(1000 + index) for index in range(16)]
    trainer = Trainer(model, args, train_dataset=train, eval_dataset=held_out)
    stopping = EarlyStoppingCallback(early_stopping_patience=3)
    if case == "early":
        trainer.add_callback(stopping)
    trainer.add_callback(es.hf.Protect(trainer))
    trainer.train()
    if os.environ["RANK"] == "0":
        told = {
            "steps": trainer.state.global_step,
            "evaluations": [
                (entry["step"], entry["eval_loss"])
                for entry in trainer.state.log_history
                if "eval_loss" in entry
            ],
            "patience": stopping.early_stopping_patience_counter,
            "best": [trainer.state.best_metric, trainer.state.best_global_step],
            "saved": sorted(each.name for each in Path(f"{NAME}-out").glob("checkpoint-*")),
            "weights": float(
                sum(each.double().abs().sum() for each in model.parameters()).detach()
            ),
        }
        Path(f"{NAME}.json").write_text(json.dumps(told))
