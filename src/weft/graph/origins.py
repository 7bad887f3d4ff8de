"""Origins: the module, parameter, layer, phase and source line that a node comes from.

Contract: an origin is for people. No decision rests on it, except through `module_paths`, which reads the record of
modules as it is. Sources, in this order:

    nn_module_stack          the modules of a traced node
    fwd_nn_module_stack      for a backward node of torch.compile, the modules of its forward node
    custom["module_fqn"]     an annotation of the user's program, as torchtitan writes it
    names of graph inputs    `layers_7_feed_forward_up_weight` is a parameter of the module `layers.7.feed_forward.up`
    desc                     for an input or an output, how AOTAutograd describes it: as a parameter, or its gradient

Paths read as in `model.named_modules()`: `layers.7.feed_forward.up`. A layer is the part of a path up to
its first number, such as `layers.7`; a module outside of all layers is its own layer.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from weft.compat import described_gradient, described_input
from weft.graph.collective import Collective, collectives
from weft.graph.edit import MEMBERS_KEY, ORIGINS_KEY
from weft.graph.listings.writer import source_of
from weft.graph.operator_effects import is_cheap
from weft.quantities import size_text

PHASES = {"is_forward": "forward", "is_backward": "backward", "is_optimizer": "optimizer"}
"""The names of the phases, by `partitioner_tag`."""
PHASE_KEY = "weft.phase"
"""In `GraphModule.meta`: the phase of all nodes that have none of their own. Backward repeats work of forward: the tags
of these nodes say forward, but they run in backward."""
INPUTS_KEY = "weft.inputs"
"""In `GraphModule.meta`: the paths of the parameters that torch.compile passes to AOTAutograd, by the index of the
input; empty for other inputs. AOTAutograd describes inputs by this index."""
MAX_PARTS = 3
"""Maximum number of layers, or ranges of layers, that a label names."""
_GENERIC = re.compile(r"(primals|arg|tangents|args)_?\d*(_\d+)*$")
"""Names that compilers give to inputs."""
_NUMBERED = re.compile(r"_(\d+)_")
"""The index of a list of modules inside the name of an input."""
_INDEX = re.compile(r"\.?_modules\['([^']*)'\]|\[['\"]?([^'\"\]]*)['\"]?\]")
_PARAMETRIZED = re.compile(r"\.?parametrizations\.(\w+)(\.(original\d*|\d+))*")


@dataclass(frozen=True)
class CollectiveOrigin:
    """Where a collective of the original graph comes from; each part is empty if it is unknown."""

    subject: str
    """The parameter or module: `layers.7.feed_forward.up`. The suffix `.weight` is left out."""
    layer: str
    """`layers.7`."""
    phase: str
    """`forward`, `backward` or `optimizer`."""
    source: str
    """`model.py:41 in forward: q = self.wq(x)`."""
    num_bytes: int | None
    """Of the full tensor."""


def module_paths(node: Node) -> list[str]:
    """The modules of a node as recorded, outermost first. A node without a record takes those of its first inputs."""
    stack: Mapping[str, Any] | None = node.meta.get("nn_module_stack")
    while not stack and node.all_input_nodes:
        node = node.all_input_nodes[0]
        stack = node.meta.get("nn_module_stack")
    return [str(entry[0]) for entry in stack.values()] if stack else []


def path_of(meta: Mapping[str, Any]) -> str:
    """The innermost module of a node with this metadata; empty if it is unknown."""
    stack: Mapping[str, Any] | None = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    last = [*stack.values()][-1] if isinstance(stack, Mapping) and stack else None
    if isinstance(last, tuple | list) and last:
        return plain_path(str(last[0]))
    custom = meta.get("custom")
    named = custom.get("module_fqn") if isinstance(custom, Mapping) else None
    return plain_path(named) if isinstance(named, str) else ""


@functools.lru_cache(maxsize=1 << 14)
def plain_path(path: str) -> str:
    """A path without the spelling of Dynamo and of parametrisations: `L['self'].layers[0].up` is `layers.0.up`."""
    if path.startswith(("L[", "G[")):
        path = path.partition("]")[2]
    path = _INDEX.sub(lambda found: f".{found[1] or found[2]}", path).strip(".")
    return _PARAMETRIZED.sub(lambda found: f".{found[1]}", path).removesuffix(".weight").strip(".")


def layer_of(path: str) -> str:
    """The part of a path up to its first number; the whole path if it has none."""
    parts = path.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


def phase_of(meta: Mapping[str, Any]) -> str:
    """`forward`, `backward` or `optimizer`; empty if it is unknown."""
    return PHASES.get(str(meta.get("partitioner_tag")), "backward" if "fwd_nn_module_stack" in meta else "")


def origins_of(
    graph: Graph, originals: Mapping[str, CollectiveOrigin] | None = None, names: Container[str] | None = None
) -> dict[str, tuple[CollectiveOrigin, ...]]:
    """The origins of each collective by the name of its launch; of a merged launch, those of all its members.

    `originals` are the origins in the graph that this one was made from, by the name of the launch. `names` are the
    launches to look up; None: all.
    """
    wanted = [each for each in collectives(graph) if names is None or each.launch.name in names]
    if not wanted:
        return {}
    known = originals or {}
    phase = str(graph.owning_module.meta.get(PHASE_KEY, "")) if graph.owning_module is not None else ""
    modules = dict.fromkeys(path_of(node.meta) for node in graph.nodes)
    paths = {path.replace(".", "_"): path for module in modules for path in _prefixes(module)}
    described = _described(graph)
    found: dict[str, tuple[CollectiveOrigin, ...]] = {}
    for each in wanted:
        launch = each.launch
        members: tuple[str, ...] = launch.meta.get(MEMBERS_KEY, (launch.name,))
        named = tuple(known[name] for name in members if name in known)
        kept: Iterable[Mapping[str, Any]] = launch.meta.get(ORIGINS_KEY, ())
        from_members = [_origin(path_of(meta), meta, phase, "", None) for meta in kept]
        found[launch.name] = (
            named or tuple(o for o in from_members if o.subject) or (_own(each, paths, described, phase),)
        )
    return found


def originals_of(graph: Graph) -> dict[str, CollectiveOrigin]:
    """The origin of each collective of an original graph by the name of its launch."""
    return {name: origins[0] for name, origins in origins_of(graph).items()}


def tell_subject(origins: Iterable[CollectiveOrigin]) -> str:
    """`layers.7.feed_forward.up`, or the layers of several: `layers.3-5`; empty if it is unknown."""
    subjects = dict.fromkeys(origin.subject for origin in origins if origin.subject)
    if len(subjects) <= 1:
        return next(iter(subjects), "")
    parts = fold_layers(origin.layer for origin in origins if origin.layer)
    told = ", ".join(parts[:MAX_PARTS])
    return told if len(parts) <= MAX_PARTS else f"{told} and {len(parts) - MAX_PARTS} more"


def tell_origins(kind: str, num_bytes: int | None, origins: Iterable[CollectiveOrigin]) -> str:
    """`all-gather of layers.7.feed_forward.up (112 MiB)`; empty if the origin is unknown."""
    origins = tuple(origins)
    subject = tell_subject(origins)
    if not subject:
        return ""
    size = "unknown size" if num_bytes is None else size_text(num_bytes)
    several = f"{len(origins)} tensors, " if len(origins) > 1 else ""
    return f"{kind.replace('_', '-')} of {subject} ({several}{size})"


def fold_layers(layers: Iterable[str]) -> list[str]:
    """Layers with consecutive numbers as one: `layers.1` and `layers.2` are `layers.1-2`. Others keep their order."""
    numbers: dict[str, set[int]] = {}
    order: dict[str, None] = {}
    for layer in layers:
        prefix, _, number = layer.rpartition(".")
        if number.isdigit():
            numbers.setdefault(prefix, set()).add(int(number))
            order[prefix] = None
        else:
            order[f"={layer}"] = None
    found: list[str] = []
    for name in order:
        if name.startswith("="):
            found.append(name[1:])
            continue
        prefix = f"{name}." if name else ""
        for first, last in _runs(numbers[name]):
            found.append(f"{prefix}{first}" if first == last else f"{prefix}{first}-{last}")
    return found


def name_nodes(graph: Graph, names: Container[str]) -> dict[str, str]:
    """The innermost module of each of these nodes that has one, by name; of a collective, its subject."""
    origins = origins_of(graph, names=names)
    found = {
        node.name: tell_subject(origins.get(node.name, ())) or path_of(node.meta)
        for node in graph.nodes
        if node.name in names
    }
    return {name: path for name, path in found.items() if path}


def _own(
    collective: Collective, paths: Mapping[str, str], described: Mapping[Node, str], phase: str
) -> CollectiveOrigin:
    """The origin of a collective that stands in the graph as it was traced."""
    launch = collective.launch
    path = path_of(launch.meta)
    if not path and collective.inputs:
        path = next((found for node in _way_back(collective.inputs[0]) if (found := path_of(node.meta))), "")
    source = next(iter(collective.inputs), None)
    *_, first = _way_back(source) if source is not None else (None,)
    subject = next((described[node] for node in _way_on(collective) if node in described), path)
    if first is not None and first.op in ("placeholder", "get_attr"):
        subject = described.get(first) or _parameter(str(first.target), paths) or subject
    sizes = collective.input_bytes, collective.output_bytes
    num_bytes = None if sizes[0] is None or sizes[1] is None else max(sizes[0], sizes[1])
    return _origin(subject, launch.meta, phase, _source(collective), num_bytes)


def _origin(subject: str, meta: Mapping[str, Any], phase: str, source: str, num_bytes: int | None) -> CollectiveOrigin:
    own = phase_of(meta)
    own = phase if (own, phase) == ("forward", "backward") else own or phase
    return CollectiveOrigin(subject, layer_of(subject), own, source, num_bytes)


def _source(collective: Collective) -> str:
    """The line of a collective; if only torch's own is known, as in logs, that of a user or of its input."""
    users = [user for wait in collective.waits for user in wait.users]
    near = (collective.launch, *users, *collective.inputs)
    return next(filter(None, map(source_of, near)), "")


def _way_back(node: Node) -> list[Node]:
    """The node and the single inputs before it, up to the first that does more than move, cast or scale data."""
    found = [node]
    while node.op == "call_function" and len(node.all_input_nodes) == 1 and is_cheap(node.target):
        node = node.all_input_nodes[0]
        found.append(node)
    return found


def _way_on(collective: Collective) -> list[Node]:
    """The waits of a collective and the single users after each, up to the first that does more than move, cast or
    scale data."""
    found: list[Node] = []
    for node in collective.waits:
        found.append(node)
        while len(node.users) == 1:
            (node,) = node.users
            if node.op != "call_function" or len(node.all_input_nodes) != 1 or not is_cheap(node.target):
                break
            found.append(node)
    return found


def _described(graph: Graph) -> dict[Node, str]:
    """The paths of inputs that are parameters and of outputs that are their gradients, by their descriptions."""
    names: Sequence[str] = graph.owning_module.meta.get(INPUTS_KEY, ()) if graph.owning_module is not None else ()
    described: list[tuple[Any, str | int | None]] = []
    for node in graph.nodes:
        description = node.meta.get("desc")
        if node.op == "placeholder":
            described.append((node, described_input(description)))
        elif node.op == "output" and isinstance(description, list | tuple) and isinstance(node.args[0], list | tuple):
            described += zip(node.args[0], map(described_gradient, description), strict=False)
    found: dict[Node, str] = {}
    for node, name in described:
        path = name if isinstance(name, str) else names[name] if name is not None and name < len(names) else ""
        if path and isinstance(node, Node):
            found[node] = plain_path(path)
    return found


def _parameter(name: str, paths: Mapping[str, str]) -> str:
    """The path of the parameter that an input is named after; empty for a name that a compiler made up."""
    if _GENERIC.match(name):
        return ""
    if "." in name:
        return plain_path(name)
    parts = name.split("_")
    for end in range(len(parts), 0, -1):
        if (module := paths.get("_".join(parts[:end]))) is not None:
            return plain_path(".".join([module, *(["_".join(parts[end:])] if parts[end:] else [])]))
    return _NUMBERED.sub(r".\1.", name)


def _prefixes(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found
