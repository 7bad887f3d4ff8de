"""The worlds that tests run in: what becomes of a rank that dies, and of one that fails."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.integration.worlds import RankDiedError, World

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


def die(log: str, times: int) -> int:
    """Rank 1 aborts so many times; the other one waits for it."""
    if dist.get_rank() == 1 and Path(log).read_text().count("died") < times:
        with Path(log).open("a") as file:
            file.write("died\n")
        os.kill(os.getpid(), signal.SIGABRT)
    found = torch.ones(1)
    dist.all_reduce(found)
    return int(found)


def fail() -> None:
    raise ValueError("no such thing")


def test_a_rank_that_dies_once_is_told_and_its_program_runs_again(tmp_path: Path):
    log = tmp_path / "log"
    log.touch()
    with World(2, tmp_path) as world:
        with pytest.warns(UserWarning, match="die is run again in new processes"):
            assert world.run(die, log=str(log), times=1) == [2, 2]
        with pytest.warns(UserWarning, match="die is run again"), pytest.raises(RankDiedError):
            world.run(die, log=str(log), times=9)
    assert log.read_text().count("died") == 3


def test_a_rank_that_fails_fails_the_test(tmp_path: Path):
    with World(2, tmp_path) as world, pytest.raises(RuntimeError, match="no such thing") as caught:
        world.run(fail)
    assert not isinstance(caught.value, RankDiedError)
