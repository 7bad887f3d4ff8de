"""Policies made by hand: what a graph keeps and makes again under each, and that its results stay the same."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
from torch.fx import GraphModule

import weft
import weft.zoo
from tests.tiers import quick_first, quick_only
from weft.cost.cluster import Cluster
from weft.graph.groups import read_groups
from weft.plan.plan import Retention
from weft.retention.policies import RetentionPolicy, follow_policy, read_policy
from weft.verification.symbolic.equivalence import prove

CLUSTER = Cluster.load("h100-8")
LESS = RetentionPolicy.RECOMPUTE_GATHER


@functools.cache
def captured(**changes: Any) -> GraphModule:
    return weft.zoo.load("llama-debug", "fsdp", ranks=8, layers=2, part="step", **changes)


def follow(policy: RetentionPolicy) -> tuple[GraphModule, tuple[Retention, ...]]:
    return follow_policy(captured(), policy, read_groups(captured()), CLUSTER)


def count(table: tuple[Retention, ...]) -> Counter[str]:
    counts = Counter[str]()
    for row in table:
        counts[row.choice] += row.num_values
    return counts


@pytest.mark.parametrize("policy", quick_only(RetentionPolicy, LESS))
def test_a_policy_keeps_the_results_and_leaves_the_given_graph_alone(policy: RetentionPolicy):
    before = weft.listing(captured())
    made, _ = follow(policy)
    assert prove(captured(), made)
    assert weft.listing(captured()) == before


@pytest.mark.slow
def test_keeping_all_and_gathering_again_are_what_the_zoo_captures():
    for policy, reshard in ((RetentionPolicy.KEEP, "never"), (RetentionPolicy.GATHER, "always")):
        made, zoo = (weft.simulate(each, CLUSTER) for each in (follow(policy)[0], captured(reshard=reshard)))
        assert (made.step_ns, made.peak_bytes) == (zoo.step_ns, zoo.peak_bytes)


def test_the_less_a_policy_keeps_the_more_is_made_again():
    kept, products, nothing = (
        count(follow(policy)[1])
        for policy in (RetentionPolicy.KEEP, RetentionPolicy.PRODUCTS, RetentionPolicy.RECOMPUTE)
    )
    assert (kept["recomputed"], kept["gathered again"]) == (0, 0)
    assert 0 < products["recomputed"] < nothing["recomputed"]
    assert products["gathered again"] == nothing["gathered again"] == 0
    again = count(follow(LESS)[1])
    assert again["recomputed"] == nothing["recomputed"]
    assert again["gathered again"] > 0


@pytest.mark.parametrize("policy", quick_first([LESS, RetentionPolicy.GATHER]))
def test_the_graph_that_was_made_is_read_as_its_policy(policy: RetentionPolicy):
    made, table = follow(policy)
    found = count(read_policy(made, read_groups(made), CLUSTER))
    assert (found["recomputed"], found["gathered again"]) == (
        count(table)["recomputed"],
        count(table)["gathered again"],
    )


def test_checkpointing_of_the_zoo_is_read_from_the_graph():
    found = [
        count(read_policy(module, read_groups(module), CLUSTER))
        for module in (captured(), captured(checkpoint="full"), captured(checkpoint="full", reshard="never"))
    ]
    assert [counts["recomputed"] > 0 for counts in found] == [False, True, True]
    assert [counts["gathered again"] > 0 for counts in found] == [True, True, False]
