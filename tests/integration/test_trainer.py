"""Hugging Face's `Trainer` under DDP and models under the tensor parallelism of transformers train as without Weft."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.integration.test_examples import train_example
from tests.integration.worlds import World, as_by_torchrun
from weft.frontends.session import SESSION

pytestmark = [
    pytest.mark.long,
    pytest.mark.distributed,
    pytest.mark.needs_package("transformers"),
    pytest.mark.xdist_group("ranks"),
]
STEPS = 10


def train(backend: str) -> tuple[list[float], int, int]:
    """The losses of the example, and the number of collectives in its graphs before and after Weft."""
    losses = train_example("hugging_face", backend, STEPS)
    reports = [entry.report for entry in SESSION.report().entries]
    before, after = (sum(report[key]["num_collectives"] for report in reports) for key in ("before", "after"))
    return losses, before, after


@pytest.mark.parametrize(
    ("backend", "reference"),
    [("weft_eager", "aot_eager"), pytest.param("weft", "inductor", marks=pytest.mark.needs_cpp)],
)
def test_under_ddp_all_reduces_become_one(two_ranks: World, backend: str, reference: str):
    plain, woven = (two_ranks.run(train, backend=name) for name in (reference, backend))
    for (expected, *_), (losses, before, after) in zip(plain, woven, strict=True):
        assert len(losses) == STEPS
        assert losses == pytest.approx(expected, rel=1e-6)
        assert (before, after) == (21, 1)


def train_split(backend: str, folder: str) -> tuple[list[float], int]:
    """The losses of a Llama under the tensor parallelism of transformers, and the number of collectives seen."""
    torch._dynamo.reset()
    SESSION.reset()
    home = importlib.import_module("transformers")
    split = importlib.import_module("transformers.distributed").DistributedConfig(tp_size=dist.get_world_size())
    home.set_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = home.LlamaConfig(num_hidden_layers=2, use_cache=False, **sizes)
    if dist.get_rank() == 0:
        home.LlamaForCausalLM(config).save_pretrained(folder)
    dist.barrier()
    with as_by_torchrun():
        model = home.LlamaForCausalLM.from_pretrained(folder, distributed_config=split)
        run = torch.compile(model, backend=backend)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses: list[float] = []
        for step in range(STEPS):
            tokens = torch.randint(0, 8, (8, 16), generator=torch.Generator().manual_seed(step))
            loss = run(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, sum(entry.num_collectives for entry in SESSION.report().entries)


def test_under_its_tensor_parallelism_no_loss_changes(two_ranks: World, tmp_path: Path):
    plain, woven = (
        two_ranks.run(train_split, backend=name, folder=str(tmp_path)) for name in ("aot_eager", "weft_eager")
    )
    for (expected, _), (losses, num_collectives) in zip(plain, woven, strict=True):
        assert len(losses) == STEPS
        assert losses == pytest.approx(expected, rel=1e-6)
        assert num_collectives > 10
