"""The Trainer of Hugging Face, which loses no step: a small GPT-2 from its config, with dropout,
gradient accumulation and a learning rate that falls.

torchrun --nproc-per-node 2 examples/gallery/hf_trainer.py
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import everstep.train as es


class Text(torch.utils.data.Dataset):
    """Sequences in which each token follows from the one before."""

    def __len__(self):
        return 144

    def __getitem__(self, index):
        draws = torch.randint(0, 8, (24,), generator=torch.Generator().manual_seed(index))
        tokens = draws.cumsum(0) % 64
        return {"input_ids": tokens, "labels": tokens}


def train_fn(config):
    set_seed(0)
    size = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    args = TrainingArguments(
        output_dir="out/trainer",
        num_train_epochs=config.get("epochs", 4),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        warmup_steps=5,
        logging_steps=7,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, args, train_dataset=Text())
    trainer.add_callback(es.hf.Protect(trainer))
    trainer.train()


if __name__ == "__main__":
    train_fn({})
