"""Hugging Face's accelerate takes Weft's backends by name, and trains under DDP with the losses of torch's own."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.integration.worlds import World, as_by_torchrun
from weft.frontends.session import SESSION
from weft.integrations.accelerate import add_backends

pytestmark = [
    pytest.mark.long,
    pytest.mark.distributed,
    pytest.mark.needs_package("accelerate"),
    pytest.mark.xdist_group("ranks"),
]


def train(backend: str, steps: int = 10) -> tuple[list[float], int]:
    """Train under DDP by an Accelerator; the losses, and the number of collectives that Weft saw."""
    torch._dynamo.reset()
    SESSION.reset()
    torch.manual_seed(0)
    add_backends()
    accelerate = importlib.import_module("accelerate")
    state = importlib.import_module("accelerate.state").AcceleratorState
    plugin = importlib.import_module("accelerate.utils").TorchDynamoPlugin(backend=backend)
    with as_by_torchrun(), weft.compiled_backward(backend):
        state._reset_state(True)
        accelerator = accelerate.Accelerator(dynamo_plugin=plugin, cpu=True)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses: list[float] = []
        for step in range(steps):
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            loss = model(torch.randn(4, 8, generator=generator)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        state._reset_state(True)
    return losses, sum(entry.num_collectives for entry in weft.run_report().entries)


def names() -> list[str]:
    """The backends that accelerate passes to `torch.compile`, by the names that it is given."""
    add_backends()
    plugin = importlib.import_module("accelerate.utils").TorchDynamoPlugin
    found = [plugin(backend=name).to_kwargs()["backend"] for name in ("weft", "weft_eager", "inductor")]
    with pytest.raises(ValueError, match="NONESUCH"):
        plugin(backend="nonesuch")
    return found


@pytest.mark.parametrize(
    ("backend", "reference"),
    [("weft_eager", "aot_eager"), pytest.param("weft", "inductor", marks=pytest.mark.needs_cpp)],
)
def test_losses_are_those_without_weft(two_ranks: World, backend: str, reference: str):
    plain, woven = (two_ranks.run(train, backend=name) for name in (reference, backend))
    for (expected, _), (losses, num_collectives) in zip(plain, woven, strict=True):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert num_collectives == 4


def test_only_weft_and_the_backends_of_accelerate_are_known(two_ranks: World):
    assert two_ranks.run(names) == [["weft", "weft_eager", "inductor"]] * 2
