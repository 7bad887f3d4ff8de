"""Error bars from the residuals of the validation set (`benchmarks/validate.py --record` writes `residuals.toml`).

A residual is how far a predicted step time or peak was from the published or measured one, as a share. The bar of a new
prediction is the smallest share that `QUANTILE` of the residuals of similar steps do not exceed: those with the same
device, parallelism and execution, or the next wider set that has enough of them. With n residuals it is the
ceil((n + 1) QUANTILE)-th smallest, so that a further step of that kind lies inside with that probability. Residuals of
other devices count twice, because nothing is known of this one.
"""

from __future__ import annotations

import functools
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESIDUALS = Path(__file__).with_name("residuals.toml")
QUANTILE = 0.8
SINGLE = "single"
"""The parallelism of a step without collectives."""
OTHER_DEVICE_FACTOR = 2.0
"""Widening of the bar if no step was validated on this device."""


@dataclass(frozen=True)
class StepKind:
    """The properties of a step that decide which residuals apply to it."""

    device: str
    parallel: str
    """The parallelism that the collectives serve: `fsdp`, `tp`, `fsdp-tp`, `ddp`, or `single` without collectives."""
    execution: str
    """`compiled`, `blocks`, `eager` or `cuda-graphs`."""


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
    return _bar(kind, [(each.kind, each.step) for each in known]), _bar(
        kind, [(each.kind, each.peak) for each in known]
    )


def _bar(kind: StepKind, known: Sequence[tuple[StepKind, float | None]]) -> ErrorBar:
    # Steps without collectives say nothing about a network, so they count only for one another.
    comparable = [pair for pair in known if (pair[0].parallel == SINGLE) == (kind.parallel == SINGLE)]
    found = [(other, abs(error)) for other, error in comparable if error is not None]
    here = [pair for pair in found if pair[0].device == kind.device]
    alike = [pair for pair in here if pair[0].parallel == kind.parallel]
    same = [pair for pair in alike if pair[0].execution == kind.execution]
    sets = (
        (same, 1.0, f"{kind.parallel} steps, {kind.execution}, on {kind.device}"),
        (alike, 1.0, f"{kind.parallel} steps on {kind.device}; none or few were {kind.execution}"),
        (here, 1.0, f"steps on {kind.device}; none or few were {kind.parallel}"),
        (found, OTHER_DEVICE_FACTOR, "steps on other devices, doubled: not validated on this device"),
    )
    for pairs, factor, told in sets:
        share = quantile([error for _, error in pairs])
        if share is not None:
            return ErrorBar(share * factor, f"{len(pairs)} {told}")
    return ErrorBar(None, "not validated on this device")


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
        StepResidual(StepKind(row["device"], row["parallel"], row["execution"]), row.get("step"), row.get("peak"))
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
