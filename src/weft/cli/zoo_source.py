"""Models of the zoo on the command line: `zoo:llama-debug/fsdp-tp?layers=2&ranks=4`.

The keys are the options of `weft.zoo.load` and the fields of the model's configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import product
from typing import Any

from torch.fx import GraphModule

from weft.cli.usage import UsageError
from weft.errors import CaptureError, compose, nearest
from weft.graph.listings.types import DTYPES
from weft.zoo.catalog import ENTRIES, load
from weft.zoo.parallel.strategies import strategy_of

PREFIX = "zoo:"
EXAMPLE = "zoo:llama-debug/fsdp-tp?layers=2&ranks=4"


def _bool(text: str) -> bool:
    return {"true": True, "false": False}[text]


def _mesh(text: str) -> dict[str, int]:
    pairs = [part.split(":") for part in text.split(",")]
    mesh = {axis: int(size) for axis, size in pairs}
    if len(mesh) < len(pairs):
        raise ValueError
    return mesh


# Each option of weft.zoo.load: its parser, and the expected text.
OPTIONS: dict[str, tuple[Callable[[str], Any], str]] = {
    "ranks": (int, "a whole number"),
    "layers": (int, "a whole number"),
    "part": (str, "step, joint, forward or backward"),
    "batch": (int, "a whole number"),
    "mesh": (_mesh, "sizes by axis such as dp:2,tp:4"),
    "reshard": (lambda text: {"true": True, "false": False}.get(text, text), "always, default or never"),
    "compute_dtype": (DTYPES.__getitem__, "a dtype such as bf16"),
    "reduce_dtype": (DTYPES.__getitem__, "a dtype such as f32"),
    "optimizer": (str, "adamw, fused-adamw or sgd"),
    "clip_norm": (float, "a number"),
    "accumulate": (int, "a whole number"),
    "reduce": (str, "last or each"),
    "dynamic": (_bool, "true or false"),
    "rank": (int, "a whole number"),
    "partition": (str, "autograd, min-cut or min-cut-layers"),
    "memory_budget": (float, "a number from 0 to 1"),
}
FIELDS: dict[type, tuple[Callable[[str], Any], str]] = {
    bool: (_bool, "true or false"),
    int: (int, "a whole number"),
    float: (float, "a number"),
}


POLICIES = {"checkpoint": ("none", "selective", "full"), "reshard": ("always", "never")}
"""Options that say what backward finds in memory, with the values that `weft sweep` compares."""


def load_zoo(source: str) -> GraphModule:
    """The graph that a source describes."""
    name, options = parse_zoo(source)
    return _load(name, options)


def load_policies(source: str) -> Iterator[tuple[str, GraphModule]]:
    """The step of a source with all values of `POLICIES` that its model and parallelism know, by name."""
    name, options = parse_zoo(source)
    options.pop("partition", None)  # min-cut would decide against the policy
    options.pop("memory_budget", None)
    if options.get("part", "joint") not in ("joint", "step"):
        return
    known = dict(POLICIES)
    if not hasattr(ENTRIES[name].config, "checkpoint"):
        del known["checkpoint"]
    if not strategy_of(options.get("parallel", "fsdp")).shard:
        del known["reshard"]
    for values in product(*known.values()):
        policy = dict(zip(known, values, strict=True))
        if policy:
            yield ", ".join(f"{key}={value}" for key, value in policy.items()), _load(name, {**options, **policy})


def _load(name: str, options: dict[str, Any]) -> GraphModule:
    try:
        return load(name, **options)
    except CaptureError as error:
        raise UsageError(str(error)) from None


def parse_zoo(source: str) -> tuple[str, dict[str, Any]]:
    """The model's name and the options for `weft.zoo.load`."""
    path, has_options, text = source.removeprefix(PREFIX).partition("?")
    name, has_parallel, parallel = path.partition("/")
    if not name or (has_parallel and not parallel) or "/" in parallel or (has_options and not text):
        raise UsageError(compose(source, "it is not a model of the zoo", do=f"write {EXAMPLE}"))
    if name not in ENTRIES:
        do = nearest(name, ENTRIES) or f"use one of {', '.join(ENTRIES)}"
        raise UsageError(compose(source, f"no model is called {name!r}", do=do))
    options: dict[str, Any] = {"parallel": parallel} if has_parallel else {}
    for pair in text.split("&") if text else ():
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(compose(source, f"{pair!r} is not an option", do=f"write key=value, as in {EXAMPLE}"))
        if key in options:
            raise UsageError(compose(source, f"{key!r} is given twice", do="give it once"))
        options[key] = _value(source, name, key, value)
    return name, options


def _value(source: str, name: str, key: str, text: str) -> Any:
    config = ENTRIES[name].config
    known = {field.name: FIELDS.get(type(getattr(config, field.name)), (str, "a text")) for field in fields(config)}
    known = {key: reader for key, reader in known.items() if key != "num_layers"} | OPTIONS
    if key not in known:
        do = nearest(key, known) or f"use one of {', '.join(known)}"
        raise UsageError(compose(source, f"no option is called {key!r}", do=do))
    read, expected = known[key]
    try:
        return read(text)
    except (ValueError, KeyError):
        raise UsageError(compose(source, f"{key} is {text!r}, expected {expected}")) from None
