"""A process group of any number of ranks in one process; its collectives send nothing.

Contract: inside the context, this process is one rank of a process group of the requested size, and every axis of the
mesh has a group. An existing process group of that size is used and kept. On exit, a group that was made here is
destroyed, and the exception hook that torch installed with it is removed.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from weft.compat import fake_store
from weft.errors import CaptureError, compose
from weft.graph.groups import Group

MAX_RANKS = 1 << 20


@contextmanager
def fake_world(mesh: Mapping[str, int], *, rank: int = 0) -> Generator[DeviceMesh]:
    """A device mesh with these axes and sizes, the last one varying fastest, in a world of that many ranks."""
    num_ranks = _check(mesh, rank)
    names, sizes = tuple(mesh), tuple(mesh.values())
    if dist.is_initialized():
        _check_existing(num_ranks)
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
        return
    hook = sys.excepthook  # torch wraps it for each process group and never restores it
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=fake_store())
    try:
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def mesh_groups(mesh: DeviceMesh) -> dict[str, Group]:
    """The group of each axis of a live mesh, by the run-time name that it has on this rank and by the axis itself."""
    groups: dict[str, Group] = {}
    sizes = [mesh.size(dim) for dim in range(mesh.ndim)]
    for dim, axis in enumerate(mesh.mesh_dim_names or ()):
        group = Group(axis, sizes[dim], prod(sizes[dim + 1 :]))
        groups |= {axis: group, mesh.get_group(axis).group_name: group}
    return groups


def _check(mesh: Mapping[str, int], rank: int) -> int:
    if not mesh:
        raise CaptureError(compose("mesh", "it has no axes", do="give axes and sizes: mesh={'dp': 8}"))
    for axis, size in mesh.items():
        if not axis.isidentifier():
            raise CaptureError(
                compose("mesh", f"{axis!r} cannot be the name of an axis", do="use names such as dp and tp")
            )
        if type(size) is not int or size < 1:
            what = f"axis {axis!r} has size {size!r}, a whole number of at least 1 is needed"
            raise CaptureError(compose("mesh", what, do="give axes and sizes: mesh={'dp': 8}"))
    num_ranks = prod(mesh.values())
    if num_ranks > MAX_RANKS:
        what = f"it has {num_ranks} ranks, the limit is {MAX_RANKS}"
        raise CaptureError(compose("mesh", what, do="use a smaller mesh"))
    if not 0 <= rank < num_ranks:
        what = f"rank {rank} is not in a mesh of {num_ranks} ranks"
        raise CaptureError(compose("mesh", what, do=f"use a rank from 0 to {num_ranks - 1}"))
    return num_ranks


def _check_existing(num_ranks: int) -> None:
    found = dist.get_world_size()
    if found != num_ranks:
        what = f"a process group of {found} ranks exists, the mesh has {num_ranks}"
        raise CaptureError(compose("mesh", what, do="destroy it first, or give a mesh of its size"))
