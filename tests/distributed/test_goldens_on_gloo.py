"""Every golden section on real gloo ranks, before and after its pass; what no pass changes, as virtual ranks run it.

`make test` runs the first section of each file that shows a change; `make test-all` runs all.
"""

from __future__ import annotations

import pytest
from torch.fx import GraphModule

from tests.golden.goldens import CHECKS, Section, coarsest_dtype, sections
from tests.golden.operators import NAMESPACE
from tests.tiers import quick_only
from weft.graph.groups import read_groups
from weft.passes.base import Numerics
from weft.passes.pipeline import Pipeline
from weft.verification.comparison import compare
from weft.verification.rank import RankResult
from weft.verification.real_ranks.world import RealRanks
from weft.verification.virtual.cluster import VirtualCluster

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]

SECTIONS = [
    section
    for section in sections()
    # Operators of tests exist in this process only, not on the ranks.
    if section.spec != CHECKS and section.error is None and section.is_run and NAMESPACE not in section.before
]
FIRST = list({section.path: section for section in reversed(SECTIONS) if section.after}.values())
"""The first section of each golden file in which the pass changes the graph."""


def run(ranks: RealRanks, section: Section, modules: GraphModule | list[GraphModule]) -> list[RankResult]:
    first = modules if isinstance(modules, GraphModule) else modules[0]
    return ranks.run(modules, section.inputs(), read_groups(first))


def run_virtually(section: Section, modules: GraphModule | list[GraphModule]) -> list[RankResult]:
    """What stays as it was is held against the virtual cluster: it would be the same as itself."""
    first = modules if isinstance(modules, GraphModule) else modules[0]
    return VirtualCluster(section.num_ranks).run(modules, section.inputs(), read_groups(first))


def behind(section: Section, before: GraphModule | list[GraphModule]) -> GraphModule | list[GraphModule]:
    """What the pass makes of the listing: as the section shows it, or as each rank makes it."""
    if section.is_by_rank and isinstance(before, list):
        return [section.run(module, rank).module for rank, module in enumerate(before)]
    return section.modules(section.after or section.before)


@pytest.mark.parametrize("section", quick_only(SECTIONS, *FIRST), ids=lambda section: section.id)
def test_a_golden_listing_and_what_its_pass_makes_of_it_compute_the_same(ranks: RealRanks, section: Section):
    modules = section.modules(section.before)
    after = run(ranks, section, behind(section, modules))
    before = run(ranks, section, modules) if section.after else run_virtually(section, modules)
    coarsest = coarsest_dtype(section, behind(section, modules)) if section.after else None
    verdict = compare(before, after, num_terms=section.num_ranks, backend="gloo", compute_dtype=coarsest)
    exact = section.after and all(p.numerics is Numerics.EXACT for p in Pipeline.parse(section.spec).passes)
    assert verdict.bitwise if exact else verdict.equal, str(verdict)
