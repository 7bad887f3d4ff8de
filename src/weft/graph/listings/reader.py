"""Reading listings: text to graph, by look-up.

Contract: the text is parsed by `ast` and walked; names of operators, dtypes and groups are looked up in tables; no
part of the text is run. Types are recomputed and compared with what is written. Every fault is a ListingError with
its line.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping, Sequence, Set
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from weft.compat import (
    HigherOrderOperator,
    OpOverload,
    expression_of,
    input_nodes,
    new_symbol,
    storage_key,
    symbols_of,
    with_bits,
)
from weft.errors import GraphError, ListingError, compose, nearest, point_at
from weft.graph import metadata, ops
from weft.graph.about import ABOUT_KEY, TOKENS_KEY
from weft.graph.aliasing import APART_KEY, place_of, places, span_bytes
from weft.graph.dag import collector_paused
from weft.graph.edit import Edit, finish
from weft.graph.groups import TABLE_KEY, Group, GroupTable
from weft.graph.listings.literals import LiteralReader, dotted
from weft.graph.listings.types import MAX_SHARED_BYTES, MAY_SHARE, plain_name
from weft.graph.unknown_graph import UnknownGraph

MAX_CHARACTERS = 1 << 28
# For each declaration: the keywords it knows, and how many values it takes besides a type.
DECLARATIONS: dict[str, tuple[tuple[str, ...], int]] = {
    "group": (("size", "stride", "ranks", "id"), 1),
    "symbol": (("hint",), 1),
    "device": ((), 1),
    "tensor": ((), 2),
    "inputs": ((), 1),
    "nested": ((), 1),
}
EXAMPLES = {
    "group": "group('dp', size=8)",
    "symbol": "symbol('s0', hint=8)",
    "device": "device('cuda')",
    "tensor": "tensor('c', f32[2], [1.0, 2.0])",
    "inputs": "inputs('may share memory')",
    "nested": "nested('score_graph')",
}


def parse(text: str, constants: Mapping[str, Tensor] | None = None) -> GraphModule:
    """The graph module of a listing. `constants` gives the values of constants too large for the listing."""
    try:
        with collector_paused():
            return _Reader(text, constants or {}).read()
    except RecursionError:
        raise ListingError(compose("listing", "it is nested too deeply")) from None


class _Reader(LiteralReader):
    """Reads one listing; holds its groups and constants."""

    def __init__(self, text: str, constants: Mapping[str, Tensor]) -> None:
        super().__init__(text)
        self.text = text
        self.given = constants
        self.groups: dict[str, Group] = {}
        self.constants: dict[str, Tensor] = {}
        self.lost: dict[str, UnknownGraph] = {}
        """Nested graphs whose body is unknown, by path."""
        self.declared: dict[str, tuple[ast.Call, Tensor | None]] = {}
        """The declarations of constants by path, with their values if the listing has them."""
        self.num_tokens: int | None = None
        """Tokens of a step, of all ranks, if the listing says so."""
        self.may_share = False
        """Whether inputs may share memory although their types do not say so."""
        self.reshaped: dict[Node, Node] = {}
        """Nodes whose tensor a later call gave another shape in place, with that call."""

    def read(self) -> GraphModule:
        function: ast.FunctionDef | None = None
        for statement in self._tree().body:
            if isinstance(statement, ast.FunctionDef) and statement.name == "graph" and function is None:
                function = statement
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and function is None:
                self._declare(statement.value)
            elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                self.fail(
                    statement, "expected a declaration or `def graph(...)`", "print weft.listing of a graph to see one"
                )
        if function is None:
            raise ListingError(compose("listing", "it has no `def graph(...)`", do="write the graph as a function"))
        self._make_constants(_named_by_inputs(function))
        module = self.function(function)
        module.meta[TABLE_KEY] = GroupTable(self.groups)
        if self.num_tokens is not None:
            module.meta[ABOUT_KEY] = {TOKENS_KEY: self.num_tokens}
        return module

    def _tree(self) -> ast.Module:
        if len(self.text) > MAX_CHARACTERS:
            raise ListingError(compose("listing", f"it has {len(self.text)} characters, at most {MAX_CHARACTERS}"))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse(self.text)
        except SyntaxError as error:
            line = self.lines[error.lineno - 1] if error.lineno and error.lineno <= len(self.lines) else ""
            where = point_at(line.strip(), line.strip()[:1])
            raise ListingError(compose(f"listing line {error.lineno}", str(error.msg), where=where)) from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise ListingError(compose("listing", f"it does not parse: {type(error).__name__}: {error}")) from None

    # Declarations: tokens_per_step(...), group(...), symbol(...), device(...), tensor(...), inputs(...), nested(...).

    def _declare(self, call: ast.Call) -> None:
        kind = str(dotted(call.func))
        if kind == TOKENS_KEY:
            self._tokens(call)
            return
        declare = {
            "group": self._group,
            "symbol": self._symbol,
            "device": self._device,
            "tensor": self._tensor,
            "inputs": self._inputs,
            "nested": self._nested,
        }
        if kind not in declare:
            self.fail(call, f"no declaration is called {kind!r}", nearest(kind, [TOKENS_KEY, *declare]), kind)
        arguments = (
            [a for a in call.args if kind != "tensor" or a is not call.args[1]] if len(call.args) > 1 else call.args
        )
        values = [self.literal(a) for a in arguments]
        words, most = DECLARATIONS[kind]
        keywords = self.keywords(call, words)
        if not values or not isinstance(values[0], str):
            self.fail(call, f"{kind} takes a name first", name=kind)
        if len(values) > most or (call.keywords and not words):
            self.fail(call, f"{kind} takes fewer values", f"write {EXAMPLES[kind]}", kind)
        declare[kind](call, values[0], values[1:], keywords)

    def _tokens(self, call: ast.Call) -> None:
        values = [self.literal(argument) for argument in call.args]
        if len(values) != 1 or call.keywords or type(values[0]) is not int or values[0] < 1:
            self.fail(
                call, f"{TOKENS_KEY} takes a whole number of at least 1", f"write {TOKENS_KEY}(65536)", TOKENS_KEY
            )
        self.num_tokens = values[0]

    def _group(self, call: ast.Call, name: str, _rest: list[Any], keywords: dict[str, Any]) -> None:
        ranks, known = keywords.get("ranks"), keywords.get("id")
        if known is not None and not isinstance(known, str):
            self.fail(call, f"the id of group {name!r} is not a string", "write group('g1', size=8, id='#1')", "id")
        if ranks is not None:
            try:
                parts = tuple(tuple(int(rank) for rank in part) for part in ranks)
                sizes = {len(part) for part in parts}
            except TypeError:
                self.fail(call, "ranks are lists of numbers, one list per group", name="ranks")
            listed = [rank for part in parts for rank in part]
            if len(set(listed)) < len(listed) or min(listed, default=0) < 0:
                self.fail(call, f"group {name!r} holds a rank twice, or one below 0", "give each rank once", "ranks")
            self.groups[name] = Group(name, max(sizes, default=0), 1, parts, known)
            return
        size, stride = keywords.get("size"), keywords.get("stride", 1)
        if not isinstance(size, int) or not isinstance(stride, int) or size < 1 or stride < 1:
            self.fail(call, f"group {name!r} needs a size of at least 1", "write group('dp', size=8)", name)
        self.groups[name] = Group(name, size, stride, id=known)

    def _symbol(self, call: ast.Call, name: str, _rest: list[Any], keywords: dict[str, Any]) -> None:
        hint = keywords.get("hint")
        if hint is not None and not isinstance(hint, int):
            self.fail(call, f"the hint of {name} is not a whole number", name="hint")
        if hint is not None and not 1 < hint < 1 << 62:
            do = "leave the hint out: torch takes 0 and 1 for constants" if hint in (0, 1) else ""
            self.fail(call, f"the hint of {name} is not a size", do, "hint")
        number = new_symbol(self.mode.shape_env, name, hint)  # type: ignore[arg-type]
        self.numbers[name] = number
        for symbol in symbols_of(number):
            self.types.name_symbol(symbol, name)

    def _device(self, call: ast.Call, name: str, _rest: list[Any], _keywords: dict[str, Any]) -> None:
        try:
            self.types.device = torch.device(name)
        except RuntimeError:
            self.fail(call, f"{name!r} is not a device", "write device('cuda')", name)

    def _inputs(self, call: ast.Call, said: str, _rest: list[Any], _keywords: dict[str, Any]) -> None:
        if said != MAY_SHARE:
            self.fail(call, f"inputs({said!r}) has no meaning", f"write {EXAMPLES['inputs']}", "inputs")
        self.may_share = True

    def _nested(self, call: ast.Call, path: str, _rest: list[Any], _keywords: dict[str, Any]) -> None:
        self._check_path(call, path, EXAMPLES["nested"])
        self.lost[path] = UnknownGraph()

    def _check_path(self, call: ast.Call, path: str, example: str) -> None:
        if not all(part.isidentifier() or part.isdecimal() for part in path.split(".")):
            # torch inserts the path verbatim into the code of the module, and runs that code
            self.fail(call, f"{path!r} is not a path of names", f"write {example}")

    def _tensor(self, call: ast.Call, path: str, rest: list[Any], _keywords: dict[str, Any]) -> None:
        fake = self.value_of_type(call.args[1], self.fakes) if len(call.args) > 1 else None
        if not isinstance(fake, Tensor):
            self.fail(call, f"constant {path!r} needs a type", "write tensor('c', f32[2], [1.0, 2.0])", path)
        self._check_path(call, path, "tensor('block.weight', f32[2])")
        self.fakes[path] = fake
        wide = torch.float64 if fake.dtype.is_floating_point else fake.dtype
        value: Tensor | None = None
        try:
            if rest:
                value = torch.tensor(rest[0], dtype=wide).reshape(tuple(fake.shape)).to(fake.dtype)
        except (TypeError, ValueError, RuntimeError) as error:
            self.fail(call, f"the values of {path!r} do not fit its type: {str(error).splitlines()[0]}", name=path)
        self.declared[path] = (call, value)

    def _make_constants(self, shared: Set[str]) -> None:
        """Create the declared constants, one storage for those that share memory; inputs lie in those of `shared`."""
        together: dict[int, list[str]] = {}
        for path, fake in self.fakes.items():
            together.setdefault(storage_key(fake), []).append(path)
        for paths in together.values():
            if len(paths) > 1 or paths[0] in shared:
                self._make_together(paths)
            else:
                self._make_alone(paths[0])

    def _make_alone(self, path: str) -> None:
        (call, value), fake = self.declared[path], self.fakes[path]
        size, stride = tuple(fake.shape), fake.stride()
        if path in self.given:
            self.constants[path] = with_bits(self.given[path], conj=fake.is_conj(), neg=fake.is_neg())
            return
        try:
            made = torch.empty_strided(size, stride, dtype=fake.dtype, device="cpu" if value is not None else "meta")
            made = with_bits(made, conj=fake.is_conj(), neg=fake.is_neg())
            if value is not None:
                _fill(made, value)
        except RuntimeError as error:
            self.fail(call, f"the values of {path!r} do not fit its type: {str(error).splitlines()[0]}", name=path)
        self.constants[path] = made
        self._check_values(path)

    def _make_together(self, paths: Sequence[str]) -> None:
        known = [path for path in paths if path in self.given]
        told = [path for path in paths if self.declared[path][1] is not None]
        for found, verb, lacks in ((known, "is given", "is not"), (told, "has values", "has none")):
            if 0 < len(found) < len(paths) and (found is known or not known):
                other = next(path for path in paths if path not in found)
                what = f"{found[0]!r} {verb}, but {other!r}, which shares its memory, {lacks}"
                do = "give all constants that share memory, or none"
                self.fail(self.declared[found[0]][0], what, do, found[0])
        starts = {path: place_of(path, self.fakes[path]).start for path in paths}
        if known:
            self._take_together(paths, starts)
            return
        fakes = {path: self.fakes[path] for path in paths}
        end = max(starts[path] + span_bytes(f.shape, f.stride(), f.dtype) for path, f in fakes.items())
        if told and end > MAX_SHARED_BYTES:
            what = f"the memory of {paths[0]!r} has {end} bytes, a listing may have at most {MAX_SHARED_BYTES}"
            self.fail(self.declared[paths[0]][0], what, "leave the values out, or give them by `constants`", paths[0])
        raw = torch.zeros(end, dtype=torch.uint8) if told else torch.empty(end, dtype=torch.uint8, device="meta")
        for path, fake in fakes.items():
            made = torch.empty(0, dtype=fake.dtype, device=raw.device)
            made.set_(raw.untyped_storage(), fake.storage_offset(), tuple(fake.shape), fake.stride())
            self.constants[path] = made = with_bits(made, conj=fake.is_conj(), neg=fake.is_neg())
            value = self.declared[path][1]
            if value is not None:
                _fill(made, value)
        for path in told:
            self._check_values(path)

    def _check_values(self, path: str) -> None:
        if not _is_equal(self.constants[path], self.declared[path][1]):
            what = f"the values of {path!r} differ from those of a constant in the same memory"
            self.fail(self.declared[path][0], what, "write the same values for the same memory", path)

    def _take_together(self, paths: Sequence[str], starts: Mapping[str, int]) -> None:
        """Use the given constants if they share memory as the listing declares."""
        given = {path: self.given[path] for path in paths}
        found = places(given) if len(paths) > 1 else {paths[0]: place_of(paths[0], given[paths[0]])}
        for path in paths:
            alike = path in found and found[path].base == paths[0]
            if not alike or found[path].start - found[paths[0]].start != starts[path] - starts[paths[0]]:
                what = f"{path!r} is given, but not in the memory of {paths[0]!r} as its type says"
                self.fail(self.declared[path][0], what, "give constants that share memory as the listing says", path)
            fake = self.fakes[path]
            self.constants[path] = with_bits(given[path], conj=fake.is_conj(), neg=fake.is_neg())

    # Functions and their lines.

    def function(self, at: ast.FunctionDef) -> GraphModule:
        """The graph module of one `def`."""
        edit = Edit(Graph(), mode=self.mode)
        names: dict[str, Node] = {}
        root: dict[str, Any] = {}
        if at.args.posonlyargs or at.args.kwonlyargs or at.args.vararg or at.args.kwarg or at.args.defaults:
            self.fail(at, "inputs are plain names with types", name=at.name)
        if at.decorator_list or at.returns is not None:
            self.fail(at, "a graph has neither decorators nor a return type", name=at.name)
        for argument in at.args.args:
            value = self.value_of_type(argument.annotation, names) if argument.annotation else None
            name = plain_name(argument.arg)
            names[argument.arg] = self._unique(argument, name, edit.placeholder(name, value))
        for statement in at.body:
            if isinstance(statement, ast.FunctionDef):
                root[statement.name] = self.function(statement)
            elif isinstance(statement, ast.Return) and statement is at.body[-1]:
                edit.output(self.literal(statement.value, names) if statement.value else None)
            else:
                self._line(statement, names, edit, root)
        if not isinstance(at.body[-1], ast.Return):
            self.fail(at, f"{at.name} returns nothing", "end it with `return [...]`", at.name)
        made = finish(root, edit.graph)
        made.meta[APART_KEY] = not self.may_share
        return made

    def _line(self, at: ast.stmt, names: dict[str, Node], edit: Edit, root: dict[str, Any]) -> None:
        target = at.target if isinstance(at, ast.AnnAssign) else None
        if isinstance(at, ast.Assign) and len(at.targets) == 1:
            target = at.targets[0]
        value = at.value if isinstance(at, ast.Assign | ast.AnnAssign) else None
        if not isinstance(target, ast.Name) or value is None:
            self.fail(at, "expected a line such as `r: f32[4] = relu(x)`")
        annotation = at.annotation if isinstance(at, ast.AnnAssign) else None
        if target.id in names:
            self.fail(at, f"{target.id} is defined twice", "every line defines a new name", target.id)
        name = plain_name(target.id)
        names[target.id] = self._unique(at, name, self._node(name, value, annotation, names, edit, root))
        if isinstance(at, ast.AnnAssign):
            self._compare(at, target.id, at.annotation, ops.value_of(names[target.id]))
            self._learn_symbols(ops.value_of(names[target.id]))

    def _learn_symbols(self, value: Any) -> None:
        """Remember the sizes that a call made, for types that are taken as written."""
        for number in value.shape if isinstance(value, Tensor) else (value,):
            symbol = expression_of(number) if isinstance(number, torch.SymInt) else None
            if isinstance(symbol, sympy.Symbol) and symbol in self.types.symbols:
                self.numbers.setdefault(self.types.symbols[symbol], number)

    def _unique(self, at: ast.AST, name: str, node: Node) -> Node:
        if node.name != name:
            self.fail(at, f"{name!r} cannot be the name of a node", f"call it {name}_0", name)
        return node

    def _node(
        self,
        name: str,
        at: ast.expr,
        annotation: ast.expr | None,
        names: dict[str, Node],
        edit: Edit,
        root: dict[str, Any],
    ) -> Node:
        if isinstance(at, ast.Subscript):
            return self._call(
                at,
                ops.op_of("operator.getitem"),
                (self.literal(at.value, names), self.literal(at.slice, names)),
                {},
                name,
                edit,
            )
        if not isinstance(at, ast.Call):
            self.fail(at, "the right side of a line is a call or an item", name=name)
        called = dotted(at.func) or ast.unparse(at.func)
        if called == "attribute":
            return self._attribute(at, name, edit, root)
        target = ops.op_of(called)
        if target is None:
            self.fail(at, f"no operator is called {called!r}", nearest(called, _known_names()), called)
        args = tuple(self.literal(a, names) for a in at.args)
        kwargs = self.keywords(at, (), names=names)
        if isinstance(target, HigherOrderOperator) or ops.has_unknown_result(target):
            # Its type is taken as written: the call is not run, not even on fake values.
            value = self.value_of_type(annotation) if annotation is not None else None
            if metadata.has_own_kernel(target):  # a written type does not state the strides of a result
                computed = self._computed(target, args, kwargs)
                value = computed if value is None or self.types.of(computed) == self.types.of(value) else value
            return edit.call(target, args, kwargs, name=name, value=value if value is not None else ())
        return self._call(at, target, args, kwargs, name, edit)

    def _computed(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value of a call by its fake kernel; None if it refuses the arguments, as another torch's may."""
        try:
            values, keywords = map_arg((args, kwargs), ops.value_of)
            return metadata.compute(target, values, keywords, self.mode)
        except GraphError:
            return None

    def _call(
        self, at: ast.AST, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, edit: Edit
    ) -> Node:
        try:
            made = edit.call(target, args, kwargs, name=name)
        except GraphError as error:
            self.fail(at, str(error), name=name)
        except (TypeError, IndexError, KeyError, AttributeError) as error:
            self.fail(at, f"{ops.name_of(target)}: {error}", name=name)
        reshaped = next((source for source in input_nodes(made) if source in self.reshaped), None)
        if reshaped is not None:
            by = self.reshaped[reshaped].name
            self.fail(at, f"{reshaped.name} has another type since {by}", f"use the result of {by}", reshaped.name)
        if isinstance(target, OpOverload) and torch.Tag.inplace_view in target.tags:
            first = next(iter(input_nodes(made)))
            self.reshaped |= {} if _has_type_of(first, made) else {first: made}
        return made

    def _attribute(self, at: ast.Call, name: str, edit: Edit, root: dict[str, Any]) -> Node:
        path = self.literal(at.args[0]) if at.args else None
        if path in self.constants:
            root[path] = self.constants[path]
            return edit.attribute(path, self.fakes[path], name=name)
        if path in self.lost:
            root[path] = self.lost[path]
        if path not in root:
            self.fail(at, f"nothing is called {path!r}", "declare it: tensor('c', f32[2], [1.0, 2.0])", "attribute")
        return edit.attribute(path, None, name=name)

    def _compare(self, at: ast.AnnAssign, name: str, annotation: ast.expr, value: Any) -> None:
        computed = self.types.of(value)
        line = self.lines[annotation.lineno - 1]
        same_line = annotation.lineno == annotation.end_lineno and line.isascii()
        written = line[annotation.col_offset : annotation.end_col_offset] if same_line else ast.unparse(annotation)
        if computed and written != computed and ast.unparse(annotation) != computed:
            what = f"{name} is {computed} according to its operator, but the listing says {written}"
            self.fail(at, what, "correct the type, or leave it out", name)


def _named_by_inputs(at: ast.FunctionDef) -> set[str]:
    """The constants that share memory with inputs."""
    words = [
        word for a in at.args.args if isinstance(a.annotation, ast.Call) for word in a.annotation.keywords if word.arg
    ]
    found = [word.value.value for word in words if word.arg == "constant" and isinstance(word.value, ast.Constant)]
    return {path for path in found if isinstance(path, str)}


def _fill(made: Tensor, value: Tensor) -> None:
    """Copy values into a tensor whose elements may share memory, such as an expanded one."""
    try:
        made.copy_(value)
    except RuntimeError:  # torch refuses to write two elements of one memory at once
        if not made.dim():
            raise
        for part, values in zip(made.unbind(), value.unbind(), strict=True):
            _fill(part, values)


def _has_type_of(first: Node, second: Node) -> bool:
    old, new = ops.value_of(first), ops.value_of(second)
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return True
    return (old.shape, old.stride(), old.dtype) == (new.shape, new.stride(), new.dtype)


def _is_equal(made: Tensor, value: Tensor | None) -> bool:
    if value is None:
        return True
    wide = torch.complex128 if value.dtype.is_complex else torch.float64
    exact = value if not (value.dtype.is_floating_point or value.dtype.is_complex) else value.to(wide)
    held = made.to(exact.dtype)
    return bool(((held == exact) | ((held != held) & (exact != exact))).all())


def _known_names() -> list[str]:
    return [*ops.op_names(), *dir(torch.ops.aten), *ops.PYTHON_FUNCTIONS]
