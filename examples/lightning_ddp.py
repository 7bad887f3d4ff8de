"""Lightning's DDP strategy, with its all-reduces inside of the compiled graphs.

torchrun --standalone --nproc-per-node=2 examples/lightning_ddp.py
"""

import argparse

import lightning
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 8))
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.layers(inputs), targets)

    def on_train_batch_end(self, outputs: dict[str, Tensor], *_: object) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(backend: str, steps: int) -> list[float]:
    lightning.seed_everything(0, verbose=False)
    model = Classifier()
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs, targets = torch.randn(16, 32, generator=generator), torch.randint(0, 8, (16,), generator=generator)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=16)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp",
        use_distributed_sampler=False,  # each rank makes its own data
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with weft.compiled_backward(backend):  # DDP and backward belong to the Trainer
        trainer.fit(torch.compile(model, backend=backend), loader)
    if dist.get_rank() == 0:
        for step, loss in enumerate(model.losses):
            print(f"step {step}  loss {loss:.6f}", flush=True)
        reports = [entry.report for entry in weft.run_report().entries if entry.report]
        collectives = sum(report["before"]["num_collectives"] for report in reports)
        changes = sum(len(report["applied"]) for report in reports)
        print(f"weft: {len(reports)} graphs, {collectives} collectives, {changes} changes", flush=True)
    return model.losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="weft_eager", help="weft_eager, weft, aot_eager or inductor")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args.backend, args.steps)
    dist.destroy_process_group()
