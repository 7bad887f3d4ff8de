"""Ranking: the planned layouts in order, with the reason why the second lost."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from weft.advice.evaluation import PlannedLayout
from weft.advice.layout import TrainingLayout
from weft.passes.runtimes import RUNTIMES
from weft.quantities import count_text, duration_text, share_text, size_text
from weft.report.plain_text import table

HEAD = (
    "",
    "layout",
    "reshard",
    "checkpoint",
    "batch",
    "step",
    "error bar",
    "tokens/s/GPU",
    "MFU",
    "peak",
    "exposed",
    "usual",
    "cost",
)
MAX_LEFT_OUT = 8
"""Layouts that the text names among those left out; the JSON has all."""


@dataclass(frozen=True)
class Ranked:
    """One layout planned in full."""

    layout: TrainingLayout
    num_microbatches: int
    tokens_per_second_per_gpu: float
    gpu_hours_per_billion_tokens: float
    found: PlannedLayout

    @property
    def batch(self) -> str:
        """`2 x 8`: sequences that a rank takes at once, and number of microbatches."""
        microbatch = self.found.microbatch
        return str(microbatch) if self.num_microbatches == 1 else f"{microbatch} x {self.num_microbatches}"


@dataclass(frozen=True)
class LeftOut:
    """One layout that is not ranked."""

    layout: TrainingLayout
    reason: str
    bound_us: float | None = None
    """A lower bound on its step, if that is the reason."""
    peak_bytes: int | None = None
    """The least peak that was found, if that is the reason."""


@dataclass(frozen=True)
class Advice:
    """Layouts for a model on a cluster, the fastest first."""

    model: str
    cluster: str
    cluster_option: str | None
    """The value of the option `weft.cluster` for this cluster; None if it was given as an object that no name loads."""
    num_ranks: int
    num_tokens: int
    """Of a step, of all ranks."""
    tokens_per_sample: int
    limit_bytes: int | None
    ranked: tuple[Ranked, ...]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]

    @property
    def best(self) -> Ranked:
        return self.ranked[0]

    def front(self) -> list[Ranked]:
        """The layouts that no other one beats in both throughput and memory, the fastest first."""
        found: list[Ranked] = []
        for each in self.ranked:
            if not found or each.found.peak_bytes < found[-1].found.peak_bytes:
                found.append(each)
        return found

    def to_json(self) -> str:
        """The advice as JSON: raw numbers, units in the keys."""
        data: dict[str, Any] = asdict(self)
        for each, ranked in zip(data["ranked"], self.ranked, strict=True):
            each["on_front"] = ranked in self.front()
            del each["found"]["lanes"]  # a picture, not figures
        return json.dumps(data, indent=1, sort_keys=True, allow_nan=False)

    def lines(self) -> list[str]:
        """The advice as text."""
        rows = [HEAD, *(row_texts(number, each) for number, each in enumerate(self.ranked, 1))]
        limit = "" if self.limit_bytes is None else f", {size_text(self.limit_bytes)} for each"
        return [
            f"{self.model} on {self.cluster}: {self.num_ranks} ranks{limit}",
            f"{count_text(self.num_tokens)} tokens a step",
            "",
            *table(rows),
            "",
            *self.reasons(),
            "",
            *self._left_out_lines(),
            *(f"note: {note}" for note in self.notes),
        ]

    def reasons(self) -> list[str]:
        """Sentences on the best layout: its error bar, the second, and what would run without Weft."""
        best = self.best.found
        bar = best.step_error
        told = [f"error bar of steps: {f'{bar.text}, ' if bar.text else ''}{bar.basis}"]
        told += [why_longer(self.best, each) for each in self._rivals()]
        usual = usual_line(self.ranked)
        return told + ([usual] if usual else [])

    def _rivals(self) -> list[Ranked]:
        """The second layout, and the fastest one of each parallelism that these two do not have."""
        others: dict[str, Ranked] = {}
        for each in self.ranked[2:]:
            others.setdefault(each.layout.parallel, each)
        shown = {each.layout.parallel for each in self.ranked[:2]}
        return [*self.ranked[1:2], *(each for parallel, each in others.items() if parallel not in shown)]

    def _left_out_lines(self) -> list[str]:
        if not self.left_out:
            return []
        shown = [f"    {each.layout.text}: {each.reason}" for each in self.left_out[:MAX_LEFT_OUT]]
        rest = len(self.left_out) - MAX_LEFT_OUT
        return [f"left out: {len(self.left_out)} layouts", *shown, *([f"    ... and {rest} more"] if rest > 0 else [])]


def row_texts(number: int, each: Ranked) -> tuple[str, ...]:
    """The cells of one row of the table, under `HEAD`."""
    found = each.found
    usual = "-" if found.runtime is None or found.runtime_us is None else duration_text(found.runtime_us)
    return (
        str(number),
        each.layout.shape,
        each.layout.reshard if each.layout.strategy.shard else "-",
        each.layout.checkpoint,
        each.batch,
        duration_text(found.step_us),
        found.step_error.text or "-",
        count_text(each.tokens_per_second_per_gpu),
        "-" if found.mfu is None else share_text(found.mfu),
        size_text(found.peak_bytes),
        duration_text(found.exposed_us),
        usual,
        f"{each.gpu_hours_per_billion_tokens:.1f} GPU-h/Gtok",
    )


def why_longer(best: Ranked, second: Ranked) -> str:
    """One line: how much longer another layout takes than the best, and which part of the step makes it so."""
    ours, theirs = best.found, second.found
    share = theirs.step_us / ours.step_us - 1
    compute, exposed = theirs.compute_us - ours.compute_us, theirs.exposed_us - ours.exposed_us
    text = f"{second.layout.text} takes {share_text(share)} longer"
    if exposed > max(compute, 0.0):
        group = max(theirs.exposed_by_group, key=lambda name: theirs.exposed_by_group[name])
        text += f": it has {duration_text(exposed)} more exposed communication, most of it in group {group!r}"
    elif compute > 0:
        text += f": it has {duration_text(compute)} more compute"
        update = theirs.optimizer_us - ours.optimizer_us
        text += f", most of it in the optimizer ({duration_text(update)})" if update > compute / 2 else ""
    bar = ours.step_error.share
    if bar is not None and share < bar:
        text += f". Too close to call: the error bar is {share_text(bar)}"
    return text


def usual_line(ranked: tuple[Ranked, ...]) -> str | None:
    """One line: the fastest layout with the runtime that people use for it, against the best planned one."""
    known = [
        (each.found.runtime_us, each.found.runtime, each.layout)
        for each in ranked
        if each.found.runtime_us is not None and each.found.runtime is not None
    ]
    if not known:
        return None
    runtime_us, runtime, layout = min(known, key=lambda each: each[0])
    change = share_text(1 - ranked[0].found.step_us / runtime_us)
    return (
        f"without Weft, the fastest of these is {layout.text}: {RUNTIMES[runtime].title} takes"
        f" {duration_text(runtime_us)}; the first row is {change} shorter"
    )
