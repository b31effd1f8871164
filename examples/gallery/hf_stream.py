"""The Trainer of Hugging Face over a stream of the library datasets, which loses no step.

torchrun --nproc-per-node 2 examples/gallery/hf_stream.py
"""

import torch
from datasets import IterableDataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments, set_seed

import everstep.train as es


def sentences():
    for index in range(200):
        draws = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 8, (24,), generator=draws).cumsum(0) % 64
        yield {"input_ids": tokens.tolist(), "labels": tokens.tolist()}


if __name__ == "__main__":
    set_seed(0)
    size = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    model = BertForMaskedLM(BertConfig(**size, num_attention_heads=2))
    args = TrainingArguments(
        output_dir="out/stream",
        max_steps=30,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    stream = IterableDataset.from_generator(sentences).shuffle(seed=0, buffer_size=50)
    trainer = Trainer(model, args, train_dataset=stream.with_format("torch"))
    trainer.add_callback(es.hf.Protect(trainer))
    trainer.train()
