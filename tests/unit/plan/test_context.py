"""Context: which cluster is in effect, decided once for all passes."""

from __future__ import annotations

from weft.cost.cluster import Cluster
from weft.graph.groups import Group, GroupTable
from weft.plan.context import Context


def table(*groups: Group) -> GroupTable:
    return GroupTable({group.name: group for group in groups})


def test_the_given_cluster_is_the_target():
    cluster = Cluster.load("a100-2x8")
    assert Context(table(Group("dp", 2)), cluster).target_cluster is cluster


def test_without_a_cluster_as_many_nodes_are_assumed_as_all_groups_need():
    assert Context().target_cluster == Cluster.load("h100-1x8")
    assert Context(table(Group("dp", 3))).target_cluster == Cluster.load("h100-1x8")
    wide = Context(table(Group("tp", 8), Group("dp", 8, stride=8)))
    assert wide.target_cluster == Cluster.load("h100-8x8")
    assert wide.cluster is None
