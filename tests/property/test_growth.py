"""The work of cleaning grows with the graph, not with its square.

Work is counted as calls of Python's functions, so that a busy machine changes nothing.
"""

from __future__ import annotations

import sys
import time
from types import FrameType
from typing import Any

import pytest
from torch.fx import GraphModule

from tests.property.strategies.chains import CHAINS
from weft.graph.listings.text import parse
from weft.passes.pipeline import Pipeline

CLEAN = "clean,algebra"
SIZE = 120


def num_calls(module: GraphModule) -> int:
    count = 0

    def called(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    pipeline = Pipeline.parse(CLEAN)
    sys.setprofile(called)
    try:
        pipeline.run(module)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", CHAINS)
def test_twice_the_graph_is_about_twice_the_work(name: str) -> None:
    small, large = (parse(CHAINS[name](size)) for size in (SIZE, 2 * SIZE))
    for module in (small, large):  # what is loaded or remembered once does not count
        Pipeline.parse(CLEAN).run(module)
    assert num_calls(large) < 2.6 * num_calls(small)


@pytest.mark.long
@pytest.mark.parametrize(("name", "size"), [("slices", 4000), ("nested concatenations", 1000)])
def test_long_chains_are_cleaned_in_seconds(name: str, size: int) -> None:
    module = parse(CHAINS[name](size))
    begin = time.process_time()
    Pipeline.parse(CLEAN).run(module)
    assert time.process_time() - begin < 8
