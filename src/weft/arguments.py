"""Checks of the arguments of the public functions, made before anything runs.

Contract: an argument of the wrong type raises an error that says what was given and what is needed. Nothing is
converted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, get_args

from torch import nn
from torch.fx import GraphModule

from weft.cost.cluster import Cluster
from weft.errors import (
    ClusterError,
    GraphError,
    PipelineError,
    PlanError,
    VerificationError,
    WeftError,
    compose,
    nearest,
)
from weft.graph.groups import GroupTable
from weft.passes.pipeline import Pipeline
from weft.scheduling.search import Effort

MESH_EXAMPLE = "give axes and sizes: mesh={'dp': 8}"
MAX_SHOWN = 60
"""Maximum number of characters of an argument that an error shows."""


def check_type(
    who: str,
    name: str,
    given: Any,
    wanted: type | tuple[type, ...],
    said: str,
    *,
    do: str = "",
    error: type[WeftError] = GraphError,
) -> None:
    """Raise unless `given` has one of the types `wanted`, which the message calls `said`. A bool is not a number."""
    if not isinstance(given, wanted) or isinstance(given, bool):
        raise error(compose(who, f"{name} is {_shown(given)}, {said} is needed", do=do))


def check_choice(who: str, name: str, given: Any, known: Sequence[str], *, error: type[WeftError]) -> None:
    """Raise unless `given` is one of the words `known`."""
    if given not in known:
        do = nearest(str(given), known) or f"use one of {', '.join(known)}"
        raise error(compose(who, f"{name} is {_shown(given)}, expected {', '.join(known)}", do=do))


def check_module(who: str, given: Any, *, name: str = "module", said: str = "a graph module") -> None:
    """Raise unless `given` is a graph module; the message says how to get one from what was given."""
    if isinstance(getattr(given, "module", None), GraphModule):
        do = "pass the module of the result: result.module"
    elif isinstance(given, str | Path):
        do = "read the listing of a file first: weft.parse(Path('step.txt').read_text())"
    elif isinstance(given, nn.Module):
        do = "capture it first: weft.capture(model, example_inputs, mesh={'dp': 8}, part='joint')"
    else:
        do = "pass what weft.capture or weft.parse returns"
    check_type(who, name, given, GraphModule, said, do=do)


def check_modules(who: str, given: Any, *, name: str = "modules") -> None:
    """Raise unless `given` is a graph module or a sequence of graph modules."""
    if isinstance(given, str | bytes | GraphModule) or not isinstance(given, Sequence):
        check_module(who, given, name=name, said="a graph module or a list of them")
        return
    if not given:
        raise GraphError(
            compose(
                who, f"{name} is empty, at least one graph is needed", do=f"give one graph module or more as {name}"
            )
        )
    for i, module in enumerate(given):
        check_module(who, module, name=f"{name}[{i}]")


def check_groups(who: str, given: Any) -> None:
    """Raise unless `given` maps the names of groups to sizes or ranks."""
    do = "give sizes or ranks: groups={'dp': 8} or groups={'dp': [[0, 1], [2, 3]]}"
    if given is None:
        return
    check_type(who, "groups", given, Mapping, "a mapping of names", do=do)
    for name, value in given.items():
        is_ranks = isinstance(value, list | tuple) and value and all(isinstance(part, Sequence) for part in value)
        if not is_ranks and not (type(value) is int and value >= 1):
            what = f"group {name!r} is given as {_shown(value)}, a size of at least 1 or lists of ranks are needed"
            raise GraphError(compose(who, what, do=do))
        parts: Any = value if is_ranks else ()
        ranks: list[Any] = [rank for part in parts for rank in part]
        wrong = next((rank for rank in ranks if type(rank) is not int or rank < 0), None)
        if wrong is not None:
            raise GraphError(compose(who, f"group {name!r} holds {_shown(wrong)}, which is not a rank", do=do))
        twice = next((rank for rank, count in Counter(ranks).items() if count > 1), None)
        if twice is not None:
            what = f"group {name!r} holds rank {twice} twice"
            raise GraphError(compose(who, what, do="give each rank once"))


def check_cache(who: str, given: Any) -> None:
    """Raise unless `given` is a folder, or says whether to use the plan cache."""
    if not isinstance(given, bool):
        do = "give a folder, or False to switch it off"
        check_type(who, "cache", given, (str, Path), "a folder, True or False", do=do, error=PlanError)


def check_optimization(
    who: str, module: Any, cluster: Any, pipeline: Any, memory_limit_bytes: Any, effort: Any, groups: Any
) -> None:
    """Raise if an argument cannot be used to run a pipeline."""
    check_module(who, module)
    if cluster is not None:
        check_cluster(who, cluster)
    do = "give it as pipeline='auto', or as Pipeline.parse('auto')"
    check_type(who, "pipeline", pipeline, (str, Pipeline), "a text or a Pipeline", do=do, error=PipelineError)
    if memory_limit_bytes is not None:
        do = "40 GiB are memory_limit_bytes=40 << 30"
        said = "a whole number of bytes"
        check_type(who, "memory_limit_bytes", memory_limit_bytes, int, said, do=do, error=PipelineError)
    if effort not in get_args(Effort):
        do = nearest(str(effort), get_args(Effort)) or f"use one of {', '.join(map(repr, get_args(Effort)))}"
        raise PipelineError(compose(who, f"no effort is called {effort!r}", do=do))
    check_groups(who, groups)


def check_cluster(who: str, given: Any) -> None:
    """Raise unless `given` is a cluster, the name of a preset, or the path of a file."""
    do = "give a preset, cluster='h100-8x8', or the path of a TOML file"
    check_type(who, "cluster", given, (str, Path, Cluster), "a name, a path or a Cluster", do=do, error=ClusterError)


def check_ranks(given: Any) -> None:
    """Raise unless `given` is None or a positive number of ranks."""
    do = "give ranks=4, or leave it out: the groups of the graph say how many"
    check_type("verify", "ranks", given, (int, type(None)), "a whole number", do=do, error=VerificationError)
    if given is not None and given < 1:
        raise VerificationError(compose("verify", f"ranks is {given}, at least 1 is needed", do=do))


def check_mesh(given: Any) -> None:
    """Raise unless `given` is None or maps mesh axes to sizes."""
    if given is None:
        return
    check_type("verify", "mesh", given, Mapping, "a mapping of axes", do=MESH_EXAMPLE, error=VerificationError)
    for axis, size in given.items():
        if type(size) is not int or size < 1:
            what = f"axis {axis!r} of the mesh has size {_shown(size)}, a whole number of at least 1 is needed"
            raise VerificationError(compose("verify", what, do=MESH_EXAMPLE))
    if not given:
        raise VerificationError(compose("verify", "the mesh has no axes", do=MESH_EXAMPLE))


def check_mesh_of(table: GroupTable, mesh: Mapping[str, int], given: Mapping[str, Any] | None) -> None:
    """Raise if the mesh leaves out a group of the graph.

    The mesh need not name groups that are `given`, that list their ranks, or that several neighbouring axes form
    together.
    """
    joint = _joint_axes(list(mesh.values()))
    left_out = [
        group
        for group in table
        if group.name not in mesh
        and group.name not in (given or {})
        and group.ranks is None
        and (group.size, group.stride) not in joint
        and (group.name, group.size) != ("world", prod(mesh.values()))
    ]
    if not left_out:
        return
    names = " and ".join(repr(group.name) for group in left_out)
    axes = ", ".join(map(repr, mesh))
    sizes = ", ".join(f"{group.name!r}: {group.size or 8}" for group in left_out)
    what = f"the graph has {'group' if len(left_out) == 1 else 'groups'} {names}, the mesh only {axes}"
    raise VerificationError(compose("verify", what, do=f"give every group of the graph its size: mesh={{{sizes}}}"))


def _joint_axes(sizes: Sequence[int]) -> set[tuple[int, int]]:
    """Size and stride of each group that two or more neighbouring axes form."""
    ends = range(len(sizes) + 1)
    return {(prod(sizes[i:j]), prod(sizes[j:])) for i in ends for j in ends if j - i >= 2}


def _shown(given: Any) -> str:
    """The argument as the message shows it: short values as they are, others by type."""
    if given is None or isinstance(given, bool | int | float | str | Path):
        text = str(given) if isinstance(given, Path) else repr(given)
        return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
    return f"of type {type(given).__name__}"
