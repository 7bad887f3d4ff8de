"""Writing listings: graph to text. `text` describes the format."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from weft.compat import FakeTensor, is_process_group, symbol_hint, with_bits
from weft.errors import GraphError, compose, point_at
from weft.graph import ops
from weft.graph.about import TOKENS_KEY, tokens_per_step
from weft.graph.aliasing import Place, constants_of_inputs, may_share_inputs, placed, span_bytes
from weft.graph.groups import Group, GroupTable, group_argument, read_groups
from weft.graph.listings.types import MAX_SHARED_BYTES, MAY_SHARE, TypeText, listed_name, torch_literal
from weft.graph.ops import attribute
from weft.graph.unknown_graph import UnknownGraph

INLINE_NUMEL = 64
"""Maximum number of elements of a constant that a listing shows with its values."""
VALUES = re.compile(
    r"^(tensor\((?:'[^']*'|\"[^\"]*\"), \w+\[[^\]]*\](?:\([^()]*(?:\([^()]*\)[^()]*)*\))?), .*\)$", re.MULTILINE
)
TOKENS = re.compile(rf"\A{TOKENS_KEY}\(\d+\)\n\n?")
"""The line of the tokens, with the empty line after it if no other declaration follows."""
INDENT = "    "


class KnownLines(dict[Node, tuple[Any, ...]]):
    """The lines of earlier versions of one graph, each with the parts of the node that it was written from.

    Only lines without symbols are known: a listing names its symbols by first use.
    """


def render(module: GraphModule, groups: GroupTable | None = None, known: KnownLines | None = None) -> str:
    """The listing of a graph module. `known` holds lines from earlier calls with the same groups, and gets the new."""
    writer = _Writer(module, groups if groups is not None else read_groups(module), known)
    writer.collect(module)
    body = writer.function("graph", module, "")
    header, num_tokens = writer.header(), tokens_per_step(module)
    if num_tokens is not None:
        header = [f"{TOKENS_KEY}({num_tokens})", *(header or [""])]
    return "\n".join([*header, *body]) + "\n"


def canonical_digest(module: GraphModule, groups: GroupTable) -> str | None:
    """The digest of the listing with each node named by its position; None for a graph with symbolic sizes.

    Graphs that differ only in the names of their nodes have the same one. Nodes of nested graphs keep their names.
    """
    writer = _Writer(module, groups, names={node: f"n{i}" for i, node in enumerate(module.graph.nodes)})
    writer.collect(module)
    body = writer.function("graph", module, "")
    return None if writer.types.symbols else digest("\n".join([*writer.header(), *body]))


def symbol_names(module: GraphModule) -> dict[sympy.Symbol, str]:
    """The symbols of sizes in a module, with their names in its listing."""
    writer = _Writer(module, read_groups(module))
    writer.collect(module)
    writer.function("graph", module, "")
    return writer.types.symbols


def digest(text: str) -> str:
    """The digest of a listing in plans and reports.

    It leaves out values of constants, which differ between ranks, and the number of tokens, which changes no plan.
    """
    return hashlib.sha256(without_values(text).encode()).hexdigest()[:32]


def without_values(text: str) -> str:
    """The part of a listing that its digest covers."""
    text = TOKENS.sub("", text)
    return VALUES.sub(r"\1)", text) if "tensor(" in text else text


def line_of(node: Node, groups: GroupTable | None = None) -> str:
    """The line of one node."""
    owner = node.graph.owning_module
    module = owner if isinstance(owner, GraphModule) else GraphModule({}, Graph())
    return _Writer(module, groups or GroupTable()).line(node)


def excerpt(node: Node, groups: GroupTable | None = None) -> list[str]:
    """The lines that an error shows for a node: its listing line, and a caret with the user's source line."""
    return point_at(line_of(node, groups), node.name, source_of(node))


def source_of(node: Node) -> str:
    """`model.py:41 in forward: q = self.wq(x)`, from the innermost frame of the stack trace outside of torch."""
    frames = [line.strip() for line in (node.meta.get("stack_trace") or node.stack_trace or "").splitlines() if line]
    places = [i for i, line in enumerate(frames) if line.startswith('File "') and not _OF_TORCH.match(line)]
    if not places:
        return ""
    file, number, function = (part.strip() for part in [*frames[places[-1]].split(","), "", ""][:3])
    name = file.removeprefix('File "').rstrip('"').rpartition("/")[2]
    code = frames[places[-1] + 1] if places[-1] + 1 < len(frames) else ""
    return f"{name}:{number.removeprefix('line ')} {function}: {code}".rstrip(": ")


_OF_TORCH = re.compile(rf'File "({re.escape(str(Path(torch.__file__).parent))}|([^"]*/)?(site|dist)-packages/torch)/')
"""A line of a stack trace in torch's own files, here or on the machine that wrote a log."""


class _Writer:
    """Writes one module; holds the groups, symbols and node names that its lines share."""

    def __init__(
        self,
        module: GraphModule,
        groups: GroupTable,
        known: KnownLines | None = None,
        names: Mapping[Node, str] | None = None,
    ) -> None:
        self.module, self.groups, self.known, self.names = module, groups, known, names
        self.types = TypeText(default_device(module.graph))
        self.constants: dict[str, tuple[Tensor, Any]] = {}
        self.lost: dict[str, None] = {}
        """The paths of nested graphs whose body is unknown."""
        self.inside: dict[Node, str] = {}
        """The inputs that lie in the memory of a constant, with its path."""

    def collect(self, module: GraphModule) -> None:
        """Find the constants of a module and of the graphs nested in it."""
        for node in module.graph.nodes:
            value = attribute(module, str(node.target)) if node.op == "get_attr" else None
            if isinstance(value, GraphModule):
                self.collect(value)
            elif isinstance(value, UnknownGraph):
                self.lost[str(node.target)] = None
            elif isinstance(value, Tensor):
                self.constants[str(node.target)] = (value, ops.value_of(node))
        if module is self.module and self.constants:
            self.inside = constants_of_inputs(module)

    def header(self) -> list[str]:
        lines = [_group_line(group) for group in self.groups]
        if self.types.device is not None and self.types.device != torch.device("cpu"):
            lines.append(f"device({str(self.types.device)!r})")
        for symbol, name in self.types.symbols.items():
            hint = symbol_hint(self.module, symbol)
            if hint is not None:
                lines.append(f"symbol({name!r}, hint={hint})")
            elif symbol in self.types.of_inputs:  # operators recreate the others
                lines.append(f"symbol({name!r})")
        if may_share_inputs(self.module):
            lines.append(f"inputs({MAY_SHARE!r})")
        lines += [f"nested({path!r})" for path in self.lost]
        places = placed(self.module, {path: value for path, (value, _) in self.constants.items()})
        silent = {place.base for path, place in places.items() if not self._is_told(path, place)}
        for path, (value, fake) in self.constants.items():
            place = places.get(path)
            known = self._is_told(path, place) and (place is None or place.base not in silent)
            # Tracing drops the bits from the metadata of a constant.
            shown = with_bits(fake if isinstance(fake, Tensor) else value, conj=value.is_conj(), neg=value.is_neg())
            text = self._constant_type(path, shown, place)
            lines.append(f"tensor({path!r}, {text}" + (f", {self.value(value.tolist())})" if known else ")"))
        return [*lines, ""] if lines else []

    def _is_told(self, path: str, place: Place | None) -> bool:
        """Whether a constant is small enough for the listing to show its values."""
        value = self.constants[path][0]
        if isinstance(value, FakeTensor) or value.device.type == "meta" or value.numel() > INLINE_NUMEL:
            return False
        return place is None or place.start + span_bytes(value.shape, value.stride(), value.dtype) <= MAX_SHARED_BYTES

    def _constant_type(self, path: str, value: Tensor, place: Place | None) -> str:
        if place is None:
            return self.types.of_input(value, {}, "")
        offset, rest = divmod(place.start, value.element_size())
        if rest:
            what = f"constant {path!r} begins {place.start} bytes after {place.base!r}, between two of its elements"
            raise GraphError(compose("listing", what, do="make it a copy, or a graph input"))
        return self.types.placed(value, offset, place.base if place.base != path else None)

    def name_of(self, node: Node) -> str:
        """The name of a node in this listing."""
        given = None if self.names is None else self.names.get(node)
        return given if given is not None else name_of(node)

    def function(self, name: str, module: GraphModule, indent: str) -> list[str]:
        inner = indent + INDENT
        shared: dict[int, str] = {}
        parameters: list[str] = []
        lines: list[str] = []
        for node in module.graph.nodes:
            if node.op == "placeholder":
                text = self._input_type(node, shared)
                parameters.append(f"{self.name_of(node)}: {text}" if text else self.name_of(node))
            elif node.op == "output":
                lines.append(f"{inner}return {self.value(node.args[0])}")
            else:
                lines += self._nested(node, module, inner)
                lines.append(inner + self._known_line(node))
        return [f"{indent}def {name}({', '.join(parameters)}):", *lines]

    def _input_type(self, node: Node, shared: dict[int, str]) -> str:
        value = ops.value_of(node)
        if value is not None and is_process_group(value):
            return f"group[{self.groups.canonical(node)!r}]"
        if node in self.inside:
            return self.types.of_input(value, {}, self.name_of(node), constant=self.inside[node])
        return self.types.of_input(value, shared, self.name_of(node))

    def _nested(self, node: Node, module: GraphModule, indent: str) -> list[str]:
        if node.op != "get_attr":
            return []
        value = attribute(module, str(node.target))
        return self.function(str(node.target), value, indent) if isinstance(value, GraphModule) else []

    def _known_line(self, node: Node) -> str:
        """The line of a node, from an earlier listing if the node is still the same."""
        if self.known is None:
            return self.line(node)
        device, name, target, args, kwargs, value = parts = (
            self.types.device,
            node.name,
            node.target,
            node.args,
            node.kwargs,
            node.meta.get("val"),
        )
        found = self.known.get(node)
        if (
            found is not None
            and found[3] is args
            and found[5] is value
            and found[4] is kwargs
            and found[1] is name
            and found[2] is target
            and found[0] is device
        ):
            return found[6]
        text = self.line(node)
        if not self.types.symbols:
            self.known[node] = (*parts, text)
        return text

    def line(self, node: Node) -> str:
        if node.op == "output":
            return f"return {self.value(node.args[0])}"
        text = self._input_type(node, {}) if node.op == "placeholder" else self.types.of(ops.value_of(node))
        head = f"{self.name_of(node)}: {text}" if text else self.name_of(node)
        return head if node.op == "placeholder" else f"{head} = {self._right_side(node)}"

    def _right_side(self, node: Node) -> str:
        if node.op == "get_attr":
            return f"attribute({node.target!r})"
        arguments, keywords = node.args, node.kwargs
        if node.op == "call_function":
            name = ops.name_of(node.target)
            if name == "operator.getitem" and len(arguments) == 2:
                return f"{self.value(arguments[0])}[{self.value(arguments[1])}]"
            if name is None:
                name = getattr(node.target, "__module__", "?") + "." + getattr(node.target, "__name__", "?")
            if ops.is_communication(node.target):
                arguments, keywords = self._with_group_names(node)
        else:
            name = f"{node.op}.{node.target}"
        parts = [self.value(a) for a in arguments]
        parts += [f"{key}={self.value(value)}" for key, value in keywords.items()]
        return f"{name}({', '.join(parts)})"

    def _with_group_names(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a launch, with its group by canonical name; a group that is a node stays one."""
        group = group_argument(node)
        if group is None or isinstance(group, Node):
            return node.args, dict(node.kwargs)
        name = self.groups.canonical(group)
        return (
            tuple(name if a is group else a for a in node.args),
            {key: name if value is group else value for key, value in node.kwargs.items()},
        )

    def value(self, value: Any) -> str:
        """An argument: a node by name, a literal, or a container of them."""
        if isinstance(value, Node):
            return self.name_of(value)
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        if isinstance(value, list):
            return f"[{', '.join(map(self.value, value))}]"
        if isinstance(value, tuple):
            return f"({', '.join(map(self.value, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{k!r}: {self.value(v)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({self.value(value.start)}, {self.value(value.stop)}, {self.value(value.step)})"
        return self._literal(value)

    def _literal(self, value: Any) -> str:
        if isinstance(value, float):
            return repr(value)
        if isinstance(value, complex):
            return f"complex({value.real!r}, {value.imag!r})"
        if (literal := torch_literal(value)) is not None:
            return literal
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return f"symbolic({self.types.number(value)})"
        operator = ops.name_of(value) if isinstance(value, ops.OpOverload) else None
        if operator is not None:
            return f"operator({operator!r})"
        if is_process_group(value):
            return repr(self.groups.canonical(value))
        raise GraphError(
            compose("listing", f"an argument of type {type(value).__name__} has no text", do="make it a graph input")
        )


def name_of(node: Node) -> str:
    """The name of a node in listings."""
    return listed_name(node.name)


def default_device(graph: Graph) -> torch.device | None:
    """The device of the first tensor of the graph."""
    values = (ops.value_of(node) for node in graph.nodes)
    return next((value.device for value in values if isinstance(value, Tensor)), None)


def _group_line(group: Group) -> str:
    known = "" if group.id is None else f", id={group.id!r}"
    if group.ranks is not None:
        return f"group({group.name!r}, ranks={[list(part) for part in group.ranks]}{known})"
    stride = f", stride={group.stride}" if group.stride != 1 else ""
    return f"group({group.name!r}, size={group.size}{stride}{known})"
