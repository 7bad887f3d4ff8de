"""What unit tests share: a world of fake ranks in which real programs are traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_mesh(rank: int = 0) -> Iterator[DeviceMesh]:
    """A mesh of four by two ranks, `dp` by `tp`, in which nothing is sent; this process is one of them."""
    dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh() as made:
        yield made
