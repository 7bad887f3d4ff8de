"""Advice with made-up figures, for tests of its texts."""

from __future__ import annotations

from weft.advice.evaluation import PlannedLayout
from weft.advice.layout import TrainingLayout
from weft.advice.ranking import Advice, Ranked
from weft.prediction.error_bars import ErrorBar

FOUND = PlannedLayout(
    microbatch=2,
    step_us=100.0,
    compute_us=90.0,
    optimizer_us=0.5,
    exposed_us=10.0,
    exposed_by_group={},
    peak_bytes=1 << 30,
    mfu=0.4,
    runtime="fsdp2",
    runtime_us=125.0,
    step_error=ErrorBar(0.01, "made up"),
    peak_error=ErrorBar(0.01, "made up"),
)


def advice_of(*layouts: TrainingLayout) -> Advice:
    """128 sequences of 1,024 tokens in a step; each rank takes two sequences at once."""
    ranked = tuple(Ranked(layout, 64 // layout.num_data_ranks, 1e3, 1e2, FOUND) for layout in layouts)
    return Advice("zoo:llama-debug", "h100-2x8", "h100-2x8", 16, 128 * 1024, 1024, None, ranked, (), ())
