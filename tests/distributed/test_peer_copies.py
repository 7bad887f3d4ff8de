"""Copies between ranks as the operators run them without CUDA: values equal those of the collectives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from weft.streaming.peer_copies import GATHER, SCATTER

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]
RANKS = 2
wait = torch.ops._c10d_functional.wait_tensor.default


def _run(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    group = dist.group.WORLD
    assert group is not None
    x = torch.arange(8.0).view(4, 2) + 100 * rank
    gathered, scattered = (wait(GATHER(x, group.group_name)), wait(SCATTER(x, "sum", group.group_name)))
    torch.save((gathered, scattered), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.timeout(120)
def test_copies_give_what_the_collectives_give(tmp_path: Path):
    mp.start_processes(_run, (str(tmp_path),), RANKS, start_method="spawn")
    x = torch.arange(8.0).view(4, 2)
    for rank in range(RANKS):
        gathered, scattered = torch.load(tmp_path / f"{rank}.pt")
        assert torch.equal(gathered, torch.cat([x, x + 100]))
        assert torch.equal(scattered, (2 * x + 100)[2 * rank : 2 * rank + 2])
