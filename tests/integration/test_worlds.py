"""The worlds that tests run in: what becomes of a rank that dies, and of one that fails."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.integration.worlds import World

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


def die() -> None:
    """Rank 1 aborts; the other one waits for it."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGABRT)
    dist.all_reduce(torch.ones(1))


def add() -> int:
    found = torch.ones(1)
    dist.all_reduce(found)
    return int(found)


def fail() -> None:
    raise ValueError("no such thing")


def test_a_rank_that_dies_fails_the_test_and_is_told(tmp_path: Path):
    with World(2, tmp_path) as world:
        with pytest.raises(RuntimeError, match="rank 1, which ended with exit code -6"):
            world.run(die)
        assert world.run(add) == [2, 2], "in new processes"


def test_a_rank_that_fails_fails_the_test(tmp_path: Path):
    with World(2, tmp_path) as world, pytest.raises(RuntimeError, match="no such thing"):
        world.run(fail)
