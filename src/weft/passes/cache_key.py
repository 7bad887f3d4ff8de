"""The key of a plan in the cache: everything that planning depends on.

Contract: two runs with the same key find the same plan. The key does not depend on the names of nodes, on the values
of constants or on the run-time names of groups, which differ between ranks. If it cannot be known whether two runs plan
alike, the run has no key: its pipeline has passes from another package, or its graph has symbolic sizes.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

import weft.version
from weft.compat import has_symmetric_memory, resolve_group
from weft.cost.execution import is_in_block
from weft.graph import ops
from weft.graph.edit import IN_POLICY_KEY, MEMBERS_KEY
from weft.graph.groups import GroupTable
from weft.graph.listings.text import canonical_digest
from weft.graph.origins import PHASE_KEY
from weft.passes.pipeline import Pipeline
from weft.plan.context import Context


def key_of(module: GraphModule, pipeline: Pipeline, context: Context) -> str | None:
    """The key of a run, or None if its plan cannot be kept."""
    if any(not type(each).__module__.startswith("weft.") for each in pipeline.passes):
        return None
    graph = canonical_digest(module, context.groups)
    if graph is None:
        return None
    known = {
        "graph": graph,
        "metadata": [_digest_of_metadata(module.graph), module.meta.get(PHASE_KEY)],
        "groups": [*_live_groups(context.groups)],
        "cluster": None if context.cluster is None else context.cluster.digest,
        "pipeline": [str(pipeline), sorted(pipeline.left_out), sorted(pipeline.from_presets)],
        "options": [context.memory_limit_bytes, context.effort, context.strict, sorted(context.withheld.items())],
        "versions": [weft.version.VERSION, torch.__version__, digest_of_sources()],
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


def _live_groups(groups: GroupTable) -> Iterator[list[Any]]:
    """For each group whether it is live and shares memory: only then can some kernels be chosen."""
    for group in groups:
        name = groups.runtime.get(group.name, group.name)
        shared = [has_symmetric_memory(name, enabled=enabled) for enabled in (False, True)]
        yield [group.name, resolve_group(name) is not None, *shared, group.name in groups.unplaced]


def _digest_of_metadata(graph: Graph) -> str:
    """A digest of the metadata that passes read and listings leave out."""
    found = hashlib.sha256()
    for node in graph.nodes:
        found.update(repr(_metadata(node)).encode())
    return found.hexdigest()


def _metadata(node: Node) -> tuple[Any, ...]:
    value, meta = ops.value_of(node), node.meta
    strides = value.stride() if isinstance(value, Tensor) and value.layout is torch.strided else None
    paths = [str(entry[0]) for entry in (meta.get("nn_module_stack") or {}).values()]
    marks = meta.get(MEMBERS_KEY), meta.get(IN_POLICY_KEY)
    return strides, meta.get("partitioner_tag"), paths, is_in_block(node), *marks


@functools.cache
def digest_of_sources(others: frozenset[str] = frozenset()) -> str:
    """A digest of the source of Weft and of other files: edited code must not reuse results of the old one."""
    own = Path(weft.version.__file__).parent.rglob("*")
    found = hashlib.sha256()
    for path in sorted({*(str(path) for path in own if path.suffix in (".py", ".toml")), *others}):
        found.update(Path(path).read_bytes())
    return found.hexdigest()
