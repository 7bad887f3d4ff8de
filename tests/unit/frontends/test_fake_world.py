"""A world of fake ranks: its mesh, its groups, and what is left of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from weft.frontends.fake_world import fake_world, mesh_groups
from weft.graph.groups import Group

MESH = {"pp": 2, "dp": 4, "tp": 8}


def test_the_last_axis_varies_fastest_and_the_process_plays_one_rank():
    with fake_world(MESH, rank=21) as mesh:
        assert dist.get_world_size() == 64
        assert dist.get_rank() == 21
        assert [mesh.get_local_rank(axis) for axis in MESH] == [0, 2, 5]
        assert dist.get_process_group_ranks(mesh.get_group("dp")) == [5, 13, 21, 29]


def test_groups_are_known_by_their_axes_and_by_their_names_on_this_rank():
    with fake_world(MESH, rank=21) as mesh:
        groups = mesh_groups(mesh)
        for axis, stride in (("pp", 32), ("dp", 8), ("tp", 1)):
            expected = Group(axis, MESH[axis], stride)
            assert groups[axis] == expected
            assert groups[mesh.get_group(axis).group_name] == expected


def test_the_group_of_an_only_axis_is_that_of_all_ranks():
    with fake_world({"dp": 4}) as mesh:
        assert mesh_groups(mesh)[dist.group.WORLD.group_name] == Group("dp", 4)


def test_nothing_is_left_behind_even_after_an_error():
    with pytest.raises(KeyError), fake_world({"dp": 2}):
        raise KeyError
    assert not dist.is_initialized()
    with fake_world({"dp": 3}):
        assert dist.get_world_size() == 3


def test_a_world_inside_a_world_of_its_size_shares_its_process_group():
    with fake_world({"dp": 4}), fake_world({"dp": 2, "tp": 2}) as inner:
        assert dist.get_process_group_ranks(inner.get_group("tp")) == [0, 1]
        x = torch.ones(2)
        dist.all_reduce(x, group=inner.get_group("tp"))  # nothing is sent, nothing hangs
    assert not dist.is_initialized()
