"""Every golden section, before and after its pass, on real gloo ranks."""

from __future__ import annotations

import pytest
from torch.fx import GraphModule

from tests.golden.goldens import CHECKS, Section, sections
from tests.golden.operators import NAMESPACE
from weft.graph.groups import read_groups
from weft.passes.base import Numerics
from weft.passes.pipeline import Pipeline
from weft.verification.comparison import compare
from weft.verification.rank import RankResult
from weft.verification.real_ranks import RealRanks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]

SECTIONS = [
    section
    for section in sections()
    # Operators of tests exist in this process only, not on the ranks.
    if section.spec != CHECKS and section.error is None and section.is_run and NAMESPACE not in section.before
]


def run(ranks: RealRanks, section: Section, listing: str) -> list[RankResult]:
    modules = section.modules(listing)
    first = modules if isinstance(modules, GraphModule) else modules[0]
    return ranks.run(modules, section.inputs(), read_groups(first))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.id)
def test_a_golden_listing_and_what_its_pass_makes_of_it_compute_the_same(ranks: RealRanks, section: Section):
    before = run(ranks, section, section.before)
    after = run(ranks, section, section.after or section.before)
    verdict = compare(before, after, num_terms=section.num_ranks, backend="gloo")
    exact = all(p.numerics is Numerics.EXACT for p in Pipeline.parse(section.spec).passes)
    assert verdict.bitwise if exact else verdict.equal, str(verdict)
