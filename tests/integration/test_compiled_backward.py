"""`weft.compiled_backward` puts DDP's all-reduces into graphs for code that calls `backward()` itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import weft
from tests.integration.worlds import World
from weft.frontends.session import SESSION

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]
STEPS = 10


def train(backend: str | None, options: dict[str, Any] | None = None) -> tuple[list[float], int, int]:
    """Losses under plain DDP, or with the backward compiled by a backend; collectives before and after Weft."""
    torch._dynamo.reset()
    SESSION.reset()
    if backend is None:
        return _losses(), 0, 0
    with weft.compiled_backward(backend, options):
        losses = _losses()
    reports = [entry.report for entry in weft.run_report().entries]
    before, after = (sum(report[key]["num_collectives"] for report in reports) for key in ("before", "after"))
    return losses, before, after


def train_with_other_batches(backend: str) -> tuple[list[float], int, tuple[str, ...]]:
    """Losses under `weft.ddp` with dynamic shapes, the number of collectives that Weft saw, and its warnings."""
    torch._dynamo.reset()
    SESSION.reset()
    torch.manual_seed(0)
    with torch._dynamo.config.patch(optimize_ddp=True, compiled_autograd=False):  # set back what weft.ddp sets
        model = weft.ddp(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))

        @torch.compile(backend=backend, dynamic=True)
        def compute_gradients(inputs: Tensor) -> Tensor:
            loss = model(inputs).square().mean()
            loss.backward()
            return loss

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses: list[float] = []
        for size in (4, 6, 5):
            generator = torch.Generator().manual_seed(100 * size + dist.get_rank())
            losses.append(compute_gradients(torch.randn(size, 8, generator=generator)).item())
            optimizer.step()
            optimizer.zero_grad()
    report = SESSION.report()
    return losses, sum(entry.num_collectives for entry in report.entries), report.messages


def settings_after_an_error() -> tuple[object, object]:
    """Dynamo's setting for DDP before and after a block that fails."""
    config = torch._dynamo.config
    before = config.optimize_ddp
    with pytest.raises(ZeroDivisionError), weft.compiled_backward("weft_eager"):
        raise ZeroDivisionError
    return before, config.optimize_ddp


def _losses() -> list[float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[float] = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_losses_are_those_of_plain_ddp_and_the_all_reduces_are_merged(two_ranks: World):
    plain = two_ranks.run(train, backend=None)
    woven = two_ranks.run(train, backend="weft_eager", options={"weft.cluster": "h100-8"})
    for (expected, _, _), (losses, before, after) in zip(plain, woven, strict=True):
        assert losses == expected
        assert before == 6
        assert after < before


@pytest.mark.slow
def test_with_dynamic_shapes_no_warning_says_that_collectives_are_missing(two_ranks: World):
    plain, woven = (two_ranks.run(train_with_other_batches, backend=name) for name in ("aot_eager", "weft_eager"))
    for (expected, *_), (losses, num_collectives, messages) in zip(plain, woven, strict=True):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert num_collectives >= 4
        assert messages == ()


def test_settings_are_restored_after_the_block(two_ranks: World):
    for before, after in two_ranks.run(settings_after_an_error):
        assert before == after
