"""The planner is never longer than a simple pipeline that needs no more memory than the planner may use.

Random graphs, on clusters so slow that operators on tiny tensors take as long as collectives. `make test` runs a
seeded sample of 30, the long test 126, and `make test-full` (WEFT_FUZZ=full) 500 graphs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import pytest

from tests.property.test_planner import Case, random_case, timeline
from weft.errors import WeftError
from weft.passes.communication import schedule_overlap
from weft.passes.pipeline import Pipeline
from weft.scheduling.search import allowed_bytes

STRATEGIES = ("concat", "coalesced", "pack")
BUCKETS = ("bucket-all-gathers", "bucket-reduce-scatters", "bucket-all-reduces", "bucket-transfers")
ENDS = ("", "hoist-launches,sink-waits")
NUM_SAMPLED, CHUNK = 30, 24
NUM_ALL = 500 if os.environ.get("WEFT_FUZZ") == "full" else 126


def simple_pipelines() -> Iterator[str]:
    """Each pass that merges in each strategy that it has, all of them together, DDP's buckets, and none."""
    yield "hoist-launches,sink-waits"
    yield "sink-waits"
    for strategy, end in product(STRATEGIES, ENDS):
        chosen = [f"{name}{{strategy={strategy}}}" for name in BUCKETS]
        chosen = [spec for spec in chosen if spec != "bucket-transfers{strategy=coalesced}"]
        yield from (f"{spec},{end}" for spec in chosen)
        yield f"{','.join(chosen)},{end}"
        yield f"fuse-ddp-all-reduces{{max-bytes=1048576/26214400 strategy={strategy}}},{end}"


def case_of(seed: int) -> Case:
    return replace(random_case(seed), pipeline=Pipeline.parse("schedule-overlap"))


def check_no_simple_pipeline_is_shorter(seed: int, specs: Iterable[str] | None = None) -> int:
    """Returns by how many nanoseconds the best simple pipeline is longer."""
    case = case_of(seed)
    planned = case.pipeline.run(case.module, cluster=case.cluster, effort=case.effort)
    step = timeline(planned.module, case.cluster).step_ns
    allowed = allowed_bytes(timeline(case.module, case.cluster).peak_bytes)
    best = timeline(case.module, case.cluster).step_ns
    for spec in simple_pipelines() if specs is None else specs:
        try:
            made = timeline(Pipeline.parse(spec).run(case.module, cluster=case.cluster).module, case.cluster)
        except WeftError as error:
            raise AssertionError(f"{spec} fails on {case}") from error
        if made.peak_bytes <= allowed:
            assert step <= made.step_ns, f"{spec} takes {made.step_ns} ns, planned {step}: {case}\n{planned.after}"
            best = min(best, made.step_ns)
    return best - step


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_no_simple_pipeline_is_shorter_than_the_planner(part: int):
    gains = [check_no_simple_pipeline_is_shorter(seed) for seed in range(part, NUM_SAMPLED, 3)]
    assert sum(gain > 0 for gain in gains) > len(gains) // 3


def test_in_graphs_of_any_size_hoisted_launches_and_sunk_waits_are_no_shorter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(schedule_overlap, "MOST_NODES", {"fast": 0, "default": 0, "best": 0})
    for seed in range(NUM_SAMPLED):
        check_no_simple_pipeline_is_shorter(seed, ["hoist-launches,sink-waits"])


@pytest.mark.long
@pytest.mark.parametrize("first", range(NUM_SAMPLED, NUM_ALL, CHUNK))
def test_no_simple_pipeline_is_shorter_than_the_planner_on_many_graphs(first: int):
    for seed in range(first, min(first + CHUNK, NUM_ALL)):
        check_no_simple_pipeline_is_shorter(seed)
