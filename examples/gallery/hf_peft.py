"""LoRA of PEFT with the Seq2SeqTrainer of Hugging Face, which loses no step: a small T5 from its
config, and batches of samples of like length.

torchrun --nproc-per-node 2 examples/gallery/hf_peft.py
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

import everstep.train as es


def pair(index):
    draws = torch.Generator().manual_seed(index)
    tokens = torch.randint(2, 64, (16 + index % 8,), generator=draws)
    return {"input_ids": tokens, "labels": tokens.flip(0)}


def padded(samples):
    tokens = {}
    for name, filler in (("input_ids", 0), ("labels", -100)):
        each = [sample[name] for sample in samples]
        tokens[name] = torch.nn.utils.rnn.pad_sequence(each, True, filler)
    return {**tokens, "attention_mask": (tokens["input_ids"] != 0).long()}


if __name__ == "__main__":
    pairs = [pair(index) for index in range(144)]
    set_seed(0)
    size = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2}
    model = T5ForConditionalGeneration(T5Config(**size, num_heads=2, decoder_start_token_id=0))
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q", "v"], lora_dropout=0.1))
    args = Seq2SeqTrainingArguments(
        output_dir="out/peft", num_train_epochs=4, per_device_train_batch_size=8,
        learning_rate=1e-2, train_sampling_strategy="group_by_length", save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Seq2SeqTrainer(model, args, train_dataset=pairs, data_collator=padded)
    trainer.add_callback(es.hf.Protect(trainer))
    trainer.train()
