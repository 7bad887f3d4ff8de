"""The Trainer of Hugging Face's transformers under DDP, with its all-reduces inside of the compiled graphs.

torchrun --standalone --nproc-per-node=2 examples/hugging_face.py
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import weft
from weft.integrations.accelerate import add_backends


class Tokens(Dataset):
    """Sentences of random tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 8, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def train(backend: str, steps: int) -> list[float]:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, use_cache=False
    )
    add_backends()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            torch_compile_backend=backend,
            use_cpu=True,
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=Tokens())
        with weft.compiled_backward(backend):  # DDP and backward belong to the Trainer
            trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if dist.get_rank() == 0:
        for step, loss in enumerate(losses):
            print(f"step {step}  loss {loss:.6f}", flush=True)
        reports = [entry.report for entry in weft.run_report().entries if entry.report]
        collectives = sum(report["before"]["num_collectives"] for report in reports)
        changes = sum(len(report["applied"]) for report in reports)
        print(f"weft: {len(reports)} graphs, {collectives} collectives, {changes} changes", flush=True)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="weft_eager", help="weft_eager, weft, aot_eager or inductor")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args.backend, args.steps)
    dist.destroy_process_group()
