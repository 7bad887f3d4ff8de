"""Weft weaves the communication of distributed PyTorch programs into their computation.

The public names are loaded on first use, so that `import weft` and `weft --help` do not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from weft.core import use_if_built
from weft.process import left_as_it_was
from weft.version import VERSION

if TYPE_CHECKING:
    from weft import zoo
    from weft.advice.advisor import advise
    from weft.advice.ranking import Advice
    from weft.api import Fault, Result, apply, bisect, listing, optimize, parse, predict, simulate, verify
    from weft.cost.cluster import Cluster
    from weft.errors import WeftError
    from weft.frontends.capture import TrainingStep, capture
    from weft.frontends.ddp import compiled_backward, ddp
    from weft.frontends.inductor import inductor_pass
    from weft.frontends.options import configure
    from weft.frontends.session import check_agreement, run_report
    from weft.passes.base import Numerics, Pass
    from weft.passes.pipeline import Pipeline
    from weft.plan.context import Context
    from weft.plan.decision import Decision
    from weft.plan.plan import Plan, Step
    from weft.prediction.prediction import Prediction
    from weft.report.report import Report
    from weft.verification.comparison import Verdict
    from weft.zoo.parallel.simple_fsdp import simple_fsdp

__version__ = VERSION
use_if_built()

__all__ = [
    "Advice",
    "Cluster",
    "Context",
    "Decision",
    "Fault",
    "Numerics",
    "Pass",
    "Pipeline",
    "Plan",
    "Prediction",
    "Report",
    "Result",
    "Step",
    "TrainingStep",
    "Verdict",
    "WeftError",
    "__version__",
    "advise",
    "apply",
    "bisect",
    "capture",
    "check_agreement",
    "compiled_backward",
    "configure",
    "ddp",
    "inductor_pass",
    "listing",
    "optimize",
    "parse",
    "predict",
    "run_report",
    "simple_fsdp",
    "simulate",
    "verify",
    "zoo",
]

_HOMES = {
    "weft.advice.advisor": ("advise",),
    "weft.advice.ranking": ("Advice",),
    "weft.api": ("Fault", "Result", "apply", "bisect", "listing", "optimize", "parse", "predict", "simulate", "verify"),
    "weft.cost.cluster": ("Cluster",),
    "weft.errors": ("WeftError",),
    "weft.frontends.capture": ("TrainingStep", "capture"),
    "weft.frontends.ddp": ("compiled_backward", "ddp"),
    "weft.frontends.inductor": ("inductor_pass",),
    "weft.frontends.options": ("configure",),
    "weft.frontends.session": ("check_agreement", "run_report"),
    "weft.passes.base": ("Context", "Numerics", "Pass"),
    "weft.passes.pipeline": ("Pipeline",),
    "weft.plan.plan": ("Decision", "Plan", "Step"),
    "weft.prediction.prediction": ("Prediction",),
    "weft.report.report": ("Report",),
    "weft.verification.comparison": ("Verdict",),
    "weft.zoo.parallel.simple_fsdp": ("simple_fsdp",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            with left_as_it_was():
                return getattr(importlib.import_module(home), name)
    if name == "zoo":
        with left_as_it_was():
            return importlib.import_module("weft.zoo")
    raise AttributeError(f"module 'weft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
