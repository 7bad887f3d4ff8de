"""Error bars from the residuals of validated steps, in `residuals.toml`.

Three commands write that file, each its own set: `benchmarks/validate.py --record` for published steps,
`benchmarks/gpu/steps_table.py --record` for steps on one GPU, `benchmarks/gpu/train.py --record` for several ranks.

A residual is how far a predicted step time or peak was from the published or measured one, as a share. The bar of a new
prediction is the smallest share that `QUANTILE` of the residuals of steps of its kind do not exceed. With n residuals
it is the ceil((n + 1) QUANTILE)-th smallest, so that a further step of that kind lies inside with that probability.

A simulation without an execution leaves out more than a prediction with one, so it has residuals of its own: those of
the same steps, simulated without an execution.

If too few steps of its kind were validated, the bar is borrowed from the next wider set that has enough of them. A
borrowed bar is always wider than the bars of the kinds that lend it, and covers the errors of its own kind. A step that
is bound by the host takes its time from the host, not from the device or the network, so such steps lend only to each
other.
"""

from __future__ import annotations

import functools
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

RESIDUALS = Path(__file__).with_name("residuals.toml")
QUANTILE = 0.8
SINGLE = "single"
"""The parallelism of a step without collectives."""
PLAIN = "plain"
"""The execution of a simulation that does not state one: the host takes no time, and every value takes memory."""
BORROWED_FACTOR = 1.5
"""Widening of the bar if too few steps of the kind were validated, but others on this device. A choice, not a fit."""
OTHER_DEVICE_FACTOR = 2.0
"""The same if too few steps were validated on this device."""
HOST_BOUND_SHARE = 0.5
"""A step is bound by the host if the host issues work for more than this share of it. The time of one operator differs
by a factor of two between hosts, so from there on the host may decide how long the step takes."""


@dataclass(frozen=True)
class StepKind:
    """The properties of a step that decide which residuals apply to it."""

    device: str
    parallel: str
    """The parallelism that the collectives serve: `fsdp`, `tp`, `fsdp-tp`, `ddp`, or `single` without collectives."""
    execution: str
    """`compiled`, `blocks`, `eager`, `cuda-graphs`, or `plain` if the simulation states none of them."""
    is_host_bound: bool = False
    """The host takes so long to issue the step that it may decide how long the step takes."""


@dataclass(frozen=True)
class StepResidual:
    """The error of one validated step; None: not published."""

    kind: StepKind
    step: float | None
    """Predicted over published step time, minus one."""
    peak: float | None
    """The same for peak memory."""


@dataclass(frozen=True)
class ErrorBar:
    """How far a figure may be off, as a share of it."""

    share: float | None
    """None: nothing was validated."""
    basis: str
    """The steps that it rests on, or why the bar is missing."""

    @property
    def text(self) -> str:
        """`± 5.0 %`, or nothing without a bar."""
        return "" if self.share is None else f"± {self.share * 100:.1f} %"


def error_bars(kind: StepKind) -> tuple[ErrorBar, ErrorBar]:
    """The bars of the step time and of the peak of such a step."""
    known = residuals()
    step = _bar(kind, [(each.kind, each.step) for each in known])
    peak = _bar(_whoever_bounds(kind), [(_whoever_bounds(each.kind), each.peak) for each in known])
    return step, peak


def _whoever_bounds(kind: StepKind) -> StepKind:
    """The kind without its host, on which memory does not depend."""
    return replace(kind, is_host_bound=False)


def is_host_bound(host: float, step: float) -> bool:
    """Whether the host may decide how long a step takes, by the times of host and step in one unit."""
    return host > HOST_BOUND_SHARE * step


def _bar(kind: StepKind, known: Sequence[tuple[StepKind, float | None]]) -> ErrorBar:
    measured = [(other, abs(error)) for other, error in known if error is not None]
    found = [pair for pair in measured if _is_comparable(pair[0], kind)]
    if kind.execution == PLAIN and not found:
        lent = _bar_of_executions(kind, known)
        if lent is not None:
            return lent
    here = [pair for pair in found if pair[0].device == kind.device]
    alike = [pair for pair in here if pair[0].parallel == kind.parallel]
    same = [pair for pair in alike if pair[0].execution == kind.execution]
    which = ", bound by the host" if kind.is_host_bound else ""
    which += ", simulated without an execution" if kind.execution == PLAIN else ""
    share = quantile([error for _, error in same])
    if share is not None:
        ran = "" if kind.execution == PLAIN else f", {kind.execution}"
        return ErrorBar(share, f"{len(same)} {kind.parallel} steps{ran}, on {kind.device}{which}")
    sets = (
        (alike, BORROWED_FACTOR, f"{kind.parallel} steps on {kind.device}{which}; few or none were {kind.execution}"),
        (here, BORROWED_FACTOR, f"steps on {kind.device}{which}; few or none were {kind.parallel}"),
        (found, OTHER_DEVICE_FACTOR, f"steps on other devices{which}, doubled: not validated on this device"),
    )
    nearest: list[float] = [error for _, error in same]
    for pairs, factor, told in sets:
        lent = _widest(pairs)
        if lent is not None:
            return ErrorBar(max(lent * factor, *nearest, 0.0), f"{len(pairs)} {told}")
        nearest = [error for _, error in pairs] or nearest
    if found:
        return ErrorBar(max(nearest) * OTHER_DEVICE_FACTOR, f"{len(found)} steps{which}, too few to tell: doubled")
    return ErrorBar(None, "not validated on this device")


def _bar_of_executions(kind: StepKind, known: Sequence[tuple[StepKind, float | None]]) -> ErrorBar | None:
    """The widest bar that this step has under any execution, widened; None without any."""
    executions = dict.fromkeys(other.execution for other, _ in known if other.execution != PLAIN)
    bars = [_bar(replace(kind, execution=execution), known) for execution in executions]
    share, basis = max(((bar.share, bar.basis) for bar in bars if bar.share is not None), default=(None, ""))
    if share is None:
        return None
    return ErrorBar(share * BORROWED_FACTOR, f"{basis}; widened: none was simulated without an execution")


def _is_comparable(one: StepKind, other: StepKind) -> bool:
    """Whether the error of one step says something about the other.

    The host bounds steps with and without collectives alike. Otherwise, steps without collectives say nothing about a
    network, so they count only for one another.
    """
    if (one.execution == PLAIN) != (other.execution == PLAIN):
        return False
    if one.is_host_bound or other.is_host_bound:
        return one.is_host_bound and other.is_host_bound
    return (one.parallel == SINGLE) == (other.parallel == SINGLE)


def _widest(pairs: Sequence[tuple[StepKind, float]]) -> float | None:
    """The widest bar among those of all pairs together and of each kind; None if all pairs are too few to tell."""
    kinds: dict[StepKind, list[float]] = {}
    for kind, error in pairs:
        kinds.setdefault(kind, []).append(error)
    together = quantile([error for _, error in pairs])
    bars = [bar for errors in kinds.values() if (bar := quantile(errors)) is not None]
    return None if together is None else max([together, *bars])


def quantile(errors: Sequence[float]) -> float | None:
    """The error that `QUANTILE` of all further steps do not exceed; None if these are too few to tell."""
    k = math.ceil((len(errors) + 1) * QUANTILE)
    return sorted(errors)[k - 1] if k <= len(errors) else None


@functools.cache
def residuals() -> tuple[StepResidual, ...]:
    """The residuals of all validated steps."""
    return read_residuals(tomllib.loads(RESIDUALS.read_text(encoding="utf-8")))


def read_residuals(data: dict[str, Any]) -> tuple[StepResidual, ...]:
    """The residuals in the content of such a file."""
    return tuple(
        StepResidual(
            StepKind(row["device"], row["parallel"], row["execution"], row.get("is_host_bound", False)),
            row.get("step"),
            row.get("peak"),
        )
        for row in data.get("residuals", ())
    )


def write_residuals(path: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace the residuals of one set in the file; each row has `set` equal to `name`."""
    text = path.read_text(encoding="utf-8")
    kept = [row for row in tomllib.loads(text).get("residuals", ()) if row.get("set") != name]
    parts = ["\n".join(line for line in text.splitlines() if line.startswith("#"))]
    for row in (*kept, *rows):
        lines = (f"{key} = {json.dumps(value)}" for key, value in row.items())
        parts.append("\n".join(["[[residuals]]", *lines]))
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
