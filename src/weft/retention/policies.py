"""Policies: one rule for all layers about what backward finds in memory, as people set it by hand.

Contract: a policy is carried out on a copy of a graph without regard to a memory limit or to time. Values that cannot
be made again stay as they are (`sites.py`), and so do values of little memory.
"""

from __future__ import annotations

from enum import StrEnum

from torch.fx import GraphModule

from weft.cost.cluster import Cluster
from weft.graph.dag import Dag
from weft.graph.edit import Edit, copy_module, recompile
from weft.graph.groups import GroupTable
from weft.graph.products import is_product
from weft.plan.context import Context
from weft.plan.plan import Retention
from weft.retention.decider import Decider
from weft.retention.repeats import repeat
from weft.retention.sites import SiteGroup


class RetentionPolicy(StrEnum):
    """The policies, from the most memory to the least."""

    KEEP = "all kept"
    GATHER = "weights gathered again"
    PRODUCTS = "products kept"
    PRODUCTS_GATHER = "products kept, weights gathered again"
    RECOMPUTE = "all recomputed"
    RECOMPUTE_GATHER = "all recomputed, weights gathered again"

    @property
    def gathers_again(self) -> bool:
        """Whether backward gathers weights again."""
        return self in (RetentionPolicy.GATHER, RetentionPolicy.PRODUCTS_GATHER, RetentionPolicy.RECOMPUTE_GATHER)

    def makes_again(self, group: SiteGroup, dag: Dag) -> bool:
        """Whether backward makes the values of a group again."""
        if group.is_gathered:
            return self.gathers_again
        if self in (RetentionPolicy.PRODUCTS, RetentionPolicy.PRODUCTS_GATHER):
            return not is_product(dag.nodes[group.sites[0]].target)
        return self in (RetentionPolicy.RECOMPUTE, RetentionPolicy.RECOMPUTE_GATHER)


def follow_policy(
    module: GraphModule, policy: RetentionPolicy, groups: GroupTable, cluster: Cluster
) -> tuple[GraphModule, tuple[Retention, ...]]:
    """A copy of the module that follows the policy, and what it keeps and makes again."""
    made = copy_module(module)
    decider = _decider(made, groups, cluster)
    sites = decider.sites
    choice = tuple(len(group.sites) if policy.makes_again(group, sites.dag) else 0 for group in sites.groups)
    action = decider.action(choice)
    table = decider.table(choice)
    if action is not None:
        with Edit(made.graph, keep_issue_order=False) as edit:
            repeat(edit, {node.name: node for node in made.graph.nodes}, action)
        recompile(made)
    return made, table


def read_policy(module: GraphModule, groups: GroupTable, cluster: Cluster) -> tuple[Retention, ...]:
    """The values that a graph keeps and makes again as it is."""
    return _decider(module, groups, cluster).table(None)


def _decider(module: GraphModule, groups: GroupTable, cluster: Cluster) -> Decider:
    """A decider that is asked for its sites, actions and tables only: no limit is kept, nothing is merged."""
    return Decider(module.graph, Context(groups, cluster), 0, frozenset(), None)
