"""The options of the frontends, their checks, and their identity for caches.

    torch.compile(model, backend="weft", options={"weft.cluster": "h100-8", "weft.strict": True})
    weft.configure(cluster="h100-8", strict=True)      # the same for every graph that is compiled from now on

Contract: an option of torch.compile is `weft.` and the name of a field of `Options`. Options that are given there win
over those of `configure`, which win over those of the environment. `identity` differs wherever the
same graph could be rewritten otherwise: by another Weft, torch, pass, pipeline or cluster, or by another option.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch

import weft.version
from weft.api import Groups, Witness
from weft.cost.cluster import Cluster
from weft.errors import PipelineError, compose, nearest
from weft.passes.cache_key import digest_of_sources
from weft.passes.pipeline import Pipeline
from weft.plan.folder import PlanFolder
from weft.quantities import bytes_in

PREFIX = "weft."
LIMIT = "memory_limit"
"""Name of the option that gives `memory_limit_bytes` as a size with a unit."""
DISABLE = "WEFT_DISABLE"
"""Environment variable: `1` leaves all graphs of `torch.compile` unchanged."""
DISABLE_PASSES = "WEFT_DISABLE_PASSES"
"""Environment variable: names of passes that are not run, separated by commas."""
OPTIONS = "WEFT_OPTIONS"
"""Environment variable: defaults of the options as JSON, such as `{"cluster": "h100-8"}`."""
Effort = Literal["fast", "default", "best"]
_configured: dict[str, Any] = {}
"""The options that `configure` was given last, checked."""


@dataclass(frozen=True)
class Options:
    """The arguments of `weft.optimize` for each graph, and the folders of the reports."""

    cluster: str | None = None
    pipeline: str | Pipeline = "auto"
    memory_limit_bytes: int | None = None
    effort: Effort = "default"
    strict: bool = False
    verify: Witness = "structure"
    groups: Groups | None = None
    report: str | Path | None = None
    """The folder of the reports. None: next to Inductor's caches; no folder for a backend without a cache."""
    agreement: str | Path | None = None
    """A folder that all ranks see, new for each run, where each rank publishes its decisions and reads the others'."""
    plan: str | Path | None = None
    """A folder of plans. A graph that has a plan there gets it; the others are planned, and a warning says so."""
    record: str | Path | None = None
    """A folder where the plan of every graph is written."""
    cache: bool | str | Path = True
    """The folder of the plan cache. True: as the environment says; False: search for every plan."""
    offload: bool = False
    """Whether values may be offloaded to host memory to keep the memory limit; the cluster describes that memory."""

    def __post_init__(self) -> None:
        for name, (is_right, expected) in _CHECKS.items():
            value = getattr(self, name)
            if not is_right(value):
                raise PipelineError(compose("options", f"{PREFIX}{name} is {value!r}, expected {expected}"))
        _ = self.passes, self.description  # a spec that does not parse fails here, before anything is compiled

    @functools.cached_property
    def passes(self) -> Pipeline:
        """The pipeline as a value, without the passes that the environment switches off."""
        pipeline = Pipeline.parse(self.pipeline) if isinstance(self.pipeline, str) else self.pipeline
        return pipeline.without(filter(None, os.environ.get(DISABLE_PASSES, "").replace(" ", "").split(",")))

    @functools.cached_property
    def description(self) -> Cluster | None:
        """The cluster as it is described now: a file may change under its name."""
        return Cluster.load(self.cluster) if self.cluster is not None else None

    @functools.cached_property
    def identity(self) -> str:
        """Equal exactly if the same graph would be rewritten in the same way."""
        known = asdict(self) | {"pipeline": str(self.passes), "cluster": None}
        known |= {"report": None, "agreement": None, "cache": None}  # none of them changes a graph
        known |= {"plan": PlanFolder(self.plan).digest if self.plan else None}
        known |= {"cluster": self.description.digest} if self.description is not None else {}
        known |= {"disabled": is_disabled(), "left_out": sorted(self.passes.left_out)}
        known |= {"weft": weft.version.VERSION, "torch": torch.__version__, "source": _source_digest(self.passes)}
        return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:32]


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "cluster": (lambda value: value is None or isinstance(value, str), "a name"),
    "pipeline": (lambda value: isinstance(value, str | Pipeline), "a preset, a spec string or a Pipeline"),
    "memory_limit_bytes": (lambda value: value is None or type(value) is int, "an int"),
    "effort": (lambda value: value in get_args(Effort), f"one of {', '.join(get_args(Effort))}"),
    "strict": (lambda value: isinstance(value, bool), "True or False"),
    "verify": (lambda value: value in get_args(Witness), f"one of {', '.join(get_args(Witness))}"),
    "groups": (lambda value: value is None or isinstance(value, Mapping), "a dict such as {'tp': 8}"),
    "report": (lambda value: value is None or isinstance(value, str | Path), "a folder"),
    "agreement": (lambda value: value is None or isinstance(value, str | Path), "a folder"),
    "plan": (lambda value: value is None or isinstance(value, str | Path), "a folder"),
    "record": (lambda value: value is None or isinstance(value, str | Path), "a folder"),
    "cache": (lambda value: isinstance(value, bool | str | Path), "a folder, True or False"),
    "offload": (lambda value: isinstance(value, bool), "True or False"),
}


def is_disabled() -> bool:
    """Whether the environment switches Weft off."""
    return os.environ.get(DISABLE, "") not in ("", "0")


def split_options(options: Mapping[str, Any] | None) -> tuple[Options, dict[str, Any]]:
    """The options of torch.compile: those of Weft checked, and the rest."""
    given = dict(options or {})
    mine = {name.removeprefix(PREFIX): given.pop(name) for name in list(given) if name.startswith(PREFIX)}
    return make_options(mine), given


def make_options(given: Mapping[str, Any]) -> Options:
    """The options of these names, which have no prefix; the others have the defaults of this process."""
    return Options(**_from_environment() | _configured | _fields_of(given))


def configure(**options: Any) -> None:
    """Set defaults for Weft's options of `torch.compile`, without their prefix, as in `configure(cluster="h100-8")`.

    They hold for the backends, `inductor_pass` and `compiled_backward`, for graphs that are compiled afterwards;
    options that are given to `torch.compile` win. Each call replaces the defaults of earlier calls.
    """
    checked = _fields_of(options)
    Options(**checked)
    _configured.clear()
    _configured.update(checked)


def _from_environment() -> dict[str, Any]:
    """The defaults that the environment holds."""
    text = os.environ.get(OPTIONS, "")
    try:
        found = json.loads(text) if text else {}
        if not isinstance(found, dict):
            raise ValueError(f"it is a {type(found).__name__}")
    except ValueError as error:
        what = f"the environment variable {OPTIONS} is {text!r}: {error}"
        do = f"""write a JSON object, such as {OPTIONS}='{{"cluster": "h100-8x8"}}'"""
        raise PipelineError(compose("options", what, do=do)) from None
    return _fields_of(cast(dict[str, Any], found))


def _fields_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options as the fields of `Options`."""
    known, found = option_names(), dict(given)
    for name in found:
        if PREFIX + name not in known:
            do = nearest(PREFIX + name, known) or f"the options are {', '.join(known)}"
            raise PipelineError(compose("options", f"no option is called {PREFIX + name!r}", do=do))
    if LIMIT in found:
        found["memory_limit_bytes"] = _limit_of(found.pop(LIMIT), found.get("memory_limit_bytes"))
    return found


def _limit_of(size: Any, num_bytes: Any) -> int:
    """The bytes of a memory limit such as `60GiB`."""
    if num_bytes is not None:
        what = f"{PREFIX}{LIMIT} and {PREFIX}memory_limit_bytes are both given"
        raise PipelineError(compose("options", what, do="give one of them"))
    try:
        return bytes_in(size)
    except (ValueError, AttributeError):
        what = f"{PREFIX}{LIMIT} is {size!r}, expected a size such as '24GiB'"
        raise PipelineError(compose("options", what)) from None


def option_names() -> list[str]:
    """The options as torch.compile takes them."""
    return [PREFIX + name for name in (*(field.name for field in fields(Options)), LIMIT)]


def _source_digest(pipeline: Pipeline) -> str:
    """A digest of the source of Weft and of the passes."""
    return digest_of_sources(frozenset(filter(None, (inspect.getsourcefile(type(p)) for p in pipeline.passes))))
