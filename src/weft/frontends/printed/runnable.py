"""Reading `fx_graph_runnable` texts: the scripts that Inductor writes to reproduce a compilation.

    class Repro(torch.nn.Module):
        def forward(self, primals_1, primals_2):
            mm = torch.ops.aten.mm.default(primals_1, primals_2);  primals_1 = primals_2 = None
            return (mm,)

    def load_args(reader):
        buf0 = reader.storage(None, 256, device=device(type='cuda', index=0))
        reader.tensor(buf0, (4, 16), is_leaf=True)  # primals_1

Contract: the reader walks the script's syntax tree and executes nothing. `load_args` gives the dtypes, sizes, strides,
devices and shared storages of the inputs. The script's set-up gives the sizes of the groups. Constants have types but
no values, since the script rounds them. The script names nested graphs without their bodies: they are unknown.
Values that it gives to sizes known only at run time (`u3 = u4 = 512`) are placeholders, which the reader ignores.
"""

from __future__ import annotations

import ast
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from weft.compat import quiet_fake_kernels
from weft.errors import ReadError, compose
from weft.frontends.printed.graph import GraphReader, Groups, is_text
from weft.frontends.printed.inputs import inputs_of
from weft.frontends.printed.text import MAX_CHARACTERS, PrintedText, open_bytes
from weft.frontends.printed.types import SYMBOL, UNBACKED, PrintedTypes, first_line, is_number
from weft.frontends.printed.values import ValueReader
from weft.graph.about import ABOUT_KEY
from weft.graph.aliasing import APART_KEY
from weft.graph.listings.literals import dotted
from weft.graph.metadata import contiguous_strides
from weft.graph.unknown_graph import UnknownGraph

VERSION = re.compile(r"^# torch version: ([\w.+]{1,80})$", re.MULTILINE)
VALUELESS = ("const", "unsupported", "generator", "opaque")
"""Methods of `load_args`'s reader for inputs that have no type in a graph."""


def read_runnable(
    source: str | Path, *, groups: Groups | None = None, hints: Mapping[str, int] | None = None
) -> GraphModule:
    """The graph of a runnable: a path, or the text itself.

    `groups` gives the sizes or ranks of groups that the text does not state, by their names in the text. `hints` gives
    sizes for symbols and overrides those of the text.
    """
    if isinstance(source, str) and "\n" in source:
        return read_source(PrintedText("runnable", source), groups=groups, hints=hints)
    path = Path(source)
    try:
        with open_bytes(path) as file:
            content = file.read(4 * MAX_CHARACTERS).decode()
    except (OSError, EOFError, ValueError, zlib.error) as fault:
        raise ReadError(compose(str(path), f"it cannot be read: {fault}")) from None
    return read_source(PrintedText(str(path), content), groups=groups, hints=hints)


def read_source(
    text: PrintedText, *, groups: Groups | None = None, hints: Mapping[str, int] | None = None
) -> GraphModule:
    """The graph of a runnable inside a file."""
    body = text.tree().body
    made = next((s for s in body if isinstance(s, ast.ClassDef) and s.name == "Repro"), None)
    loads = next((s for s in body if isinstance(s, ast.FunctionDef) and s.name == "load_args"), None)
    if made is None or loads is None:
        missing = "class Repro" if made is None else "function load_args"
        text.fail(1, f"it is not a runnable: it has no {missing}", "give an fx_graph_runnable text of Inductor")
    types = PrintedTypes(text, {**_hints(body), **(hints or {})})
    script = _Script(text, types)
    try:
        inputs = script.inputs(made, loads)
        constants = script.constants(made)
        sizes = script.group_sizes(body)
    except RecursionError:
        text.fail(made, "the text is nested too deeply")
    reader = GraphReader(text, types=types, groups=groups, sizes=sizes, inputs=inputs, constants=constants)
    module = reader.read(made)
    module.meta[APART_KEY] = True  # `load_args` states which inputs share a storage
    version = VERSION.search(text.text)
    module.meta[ABOUT_KEY] = {"source": "runnable", "torch": version[1] if version else ""}
    return module


def _hints(body: list[ast.stmt]) -> dict[str, int]:
    """The sizes in lines such as `s77 = 8`, without those that are known only at run time."""
    hints: dict[str, int] = {}
    for at in body:
        if isinstance(at, ast.Assign) and is_number(at.value):
            names = [target.id for target in at.targets if isinstance(target, ast.Name)]
            found = [name for name in names if SYMBOL.fullmatch(name) and not name.startswith(UNBACKED)]
            hints.update(dict.fromkeys(found, at.value.value))  # type: ignore[attr-defined]
    return hints


class _Script:
    """Reads the parts of the script around the graph."""

    def __init__(self, text: PrintedText, types: PrintedTypes) -> None:
        self.text, self.types = text, types
        self.values = ValueReader(text, types)
        self.are_placeholders = False
        """Whether the numbers of inputs that are numbers mean nothing."""

    # Inputs.

    def inputs(self, made: ast.ClassDef, loads: ast.FunctionDef) -> dict[str, Any]:
        """The fake values of the inputs by name."""
        forward = next((s for s in made.body if isinstance(s, ast.FunctionDef) and s.name == "forward"), None)
        names = [each.name for each in inputs_of(self.text, forward)[0]] if forward is not None else []
        calls = [at for at in loads.body if self._is_load(at)]
        read = [call for at in calls if (call := self._reader_call(at)) is not None]
        storages = self._storages(calls)
        if any(method == "symint" and not call.keywords for method, call in read):
            # torch 2.11 does not name the symbol of such an input, so each symbol is replaced by its hint
            self.types.numbers.update(self.types.hints)
        used = {part.id for call in calls for part in ast.walk(call) if isinstance(part, ast.Name)}
        # Numbers beside sizes that are known only at run time are placeholders.
        self.are_placeholders = any(SYMBOL.fullmatch(name) and name.startswith(UNBACKED) for name in used)
        if len(read) != len(names):
            what = f"load_args reads {len(read)} inputs, forward takes {len(names)}"
            self.text.fail(loads, what, "is the text complete?", "load_args")
        values: dict[str, Any] = {}
        wholes: dict[str, Tensor] = {}
        for name, (method, call) in zip(names, read, strict=True):
            if method == "tensor":
                values[name] = self._tensor(name, call, storages, wholes)
            elif method == "symint":
                values[name] = self._symint(name, call)
            else:
                values[name] = None
        return values

    def _is_load(self, at: ast.stmt) -> bool:
        """Whether a line reads an input; lines that fix up the values of tensors are skipped."""
        if is_text(at) or isinstance(at, ast.If):
            return False
        value = at.value if isinstance(at, ast.Assign | ast.Expr) else None
        if isinstance(value, ast.Call) and (dotted(value.func) or "").startswith("reader."):
            return True
        self.text.fail(at, "expected a line such as `reader.tensor(buf0, (4, 4))`")

    def _reader_call(self, at: ast.stmt) -> tuple[str, ast.Call] | None:
        call: Any = at.value  # type: ignore[attr-defined]
        method = (dotted(call.func) or "").removeprefix("reader.")
        if method == "storage":
            return None
        if method not in ("tensor", "symint", *VALUELESS):
            self.text.fail(at, f"the reader has no method {method!r}", name=method)
        return method, call

    def _storages(self, calls: list[ast.stmt]) -> dict[str, ast.Call]:
        """The calls that create storages, by the name of the storage."""
        found: dict[str, ast.Call] = {}
        for at in calls:
            target = at.targets[0] if isinstance(at, ast.Assign) else None
            call = at.value if isinstance(at, ast.Assign) else None
            if isinstance(target, ast.Name) and isinstance(call, ast.Call) and dotted(call.func) == "reader.storage":
                found[target.id] = call
        return found

    def _tensor(self, name: str, at: ast.Call, storages: Mapping[str, ast.Call], wholes: dict[str, Tensor]) -> Tensor:
        buffer = at.args[0].id if at.args and isinstance(at.args[0], ast.Name) else ""
        if buffer not in storages or not 2 <= len(at.args) <= 3:
            self.text.fail(at, "expected a line such as `reader.tensor(buf0, (4, 4))`", name=buffer)
        words = {word.arg: word.value for word in at.keywords}
        size = self._sizes(at, at.args[1])
        strides = self._sizes(at, at.args[2]) if len(at.args) == 3 else contiguous_strides(size)
        dtype = self.values.read(words["dtype"], {}) if "dtype" in words else torch.float32
        offset = self.types.size(at, words["storage_offset"]) if "storage_offset" in words else 0
        if not isinstance(dtype, torch.dtype):
            self.text.fail(at, f"{name} has no dtype", name="dtype")
        if buffer not in wholes:
            wholes[buffer] = self._whole(name, storages[buffer], dtype)
        whole = wholes[buffer]
        if all(isinstance(n, int) for n in [*whole.shape, *size, *strides, offset]) and 0 not in size:
            needed = offset + 1 + sum((n - 1) * step for n, step in zip(size, strides, strict=False))
            found = whole.numel() * whole.dtype.itemsize // dtype.itemsize
            if needed > found:
                self.text.fail(at, f"{name} needs {needed} elements of its storage, which has {found}", name=buffer)
        try:
            with self.types.mode, torch.no_grad(), quiet_fake_kernels():
                typed = whole if whole.dtype == dtype else whole.view(dtype)
                return torch.as_strided(typed, size, strides, offset)
        except (ArithmeticError, RuntimeError, ValueError, TypeError) as error:
            self.text.fail(at, f"{name} does not fit its storage: {first_line(error)}", name=buffer)

    def _sizes(self, at: ast.Call, sizes: ast.expr) -> list[Any]:
        if not isinstance(sizes, ast.Tuple):
            self.text.fail(at, "the sizes and strides of a tensor are tuples")
        found = [self.types.size(at, size) for size in sizes.elts]
        if any(n is None for n in found):
            self.text.fail(at, "a size is not a supported expression")
        return found

    def _whole(self, name: str, at: ast.Call, dtype: torch.dtype) -> Tensor:
        """A whole storage as a one-dimensional tensor."""
        words = {word.arg: word.value for word in at.keywords}
        device = self.values.read(words["device"], {}) if "device" in words else torch.device("cpu")
        num_bytes = self.types.size(at, at.args[1]) if len(at.args) == 2 else None
        if not isinstance(device, torch.device) or num_bytes is None:
            self.text.fail(at, "expected a line such as `buf0 = reader.storage(None, 256, device=device(type='cuda'))`")
        return self.types.tensor(at, name, dtype, [num_bytes // dtype.itemsize], [1], device)

    def _symint(self, name: str, at: ast.Call) -> Any:
        expression = next((word.value for word in at.keywords if word.arg == "expr"), None)
        if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
            return self.types.expression(at, expression.value)
        number = self.types.size(at, at.args[0]) if len(at.args) == 1 else None
        if number is None:
            self.text.fail(at, "expected a line such as `reader.symint(8, expr='s77')`")
        return self.types.new_number(name) if self.are_placeholders else number

    # Constants.

    def constants(self, made: ast.ClassDef) -> dict[str, Tensor | UnknownGraph]:
        """Fake tensors for the constants that `__init__` makes, and its nested graphs; it ignores other attributes."""
        initial = next((s for s in made.body if isinstance(s, ast.FunctionDef) and s.name == "__init__"), None)
        found: dict[str, Tensor | UnknownGraph] = {}
        for at in initial.body if initial is not None else ():
            path, value = self._attribute(at)
            if not path or value is None:
                continue
            held = UnknownGraph() if _is_graph(value) else self._constant(path, value)
            if held is not None:
                found[path] = held
        return found

    def _attribute(self, at: ast.stmt) -> tuple[str, ast.expr | None]:
        if isinstance(at, ast.Assign) and (dotted(at.targets[0]) or "").startswith("self."):
            return str(dotted(at.targets[0])).removeprefix("self."), at.value
        call = at.value if isinstance(at, ast.Expr) else None
        if isinstance(call, ast.Call) and dotted(call.func) == "self.register_buffer" and len(call.args) == 2:
            name = call.args[0].value if isinstance(call.args[0], ast.Constant) else None
            return (name, call.args[1]) if isinstance(name, str) and name.isidentifier() else ("", None)
        return "", None

    def _constant(self, path: str, at: ast.expr, device: str = "cpu") -> Tensor | None:
        """A fake tensor for `tensor([1., 2.])`, `torch.randn([4], dtype=torch.float32).to("cuda")` and the like."""
        if isinstance(at, ast.Call) and isinstance(at.func, ast.Attribute) and at.func.attr in ("to", "cuda"):
            place = at.args[0] if at.args else ast.Constant("cuda")
            return self._constant(path, at.func.value, str(self.values.read(place, {})))
        if isinstance(at, ast.Call) and dotted(at.func) == "torch.nn.Parameter" and at.args:
            return self._constant(path, at.args[0], device)
        kind = dotted(at.func) if isinstance(at, ast.Call) else None
        if not isinstance(at, ast.Call) or kind not in ("tensor", "torch.randn", "torch.randint") or not at.args:
            return None
        words = {word.arg: self.values.read(word.value, {}) for word in at.keywords if word.arg is not None}
        size, dtype = _nested_size(at.args[0])
        if kind != "tensor" or "size" in words:
            size, dtype = words.get("size") or self.values.read(at.args[0], {}), torch.float32
        dtype = words.get("dtype", dtype)
        is_type = isinstance(dtype, torch.dtype) and isinstance(size, list | tuple)
        if not is_type or not all(type(extent) is int for extent in size):
            self.text.fail(at, f"the constant {path} has no type", name=path)
        try:
            place = torch.device(words.get("device", device))
        except (RuntimeError, TypeError):
            self.text.fail(at, f"the constant {path} has no device", name=path)
        return self.types.tensor(at, path, dtype, size, contiguous_strides(size), place)

    # Groups.

    def group_sizes(self, body: list[ast.stmt]) -> dict[str, int]:
        """The sizes of the groups that the script sets up."""
        calls = [node for at in body if isinstance(at, ast.If) for node in ast.walk(at) if isinstance(node, ast.Call)]
        sizes: dict[str, int] = {}
        for call in calls:
            if dotted(call.func) == "setup_fake_process_groups" and len(call.args) == 1:
                groups = self.values.read(call.args[0], {})
                for name, facts in groups.items() if isinstance(groups, dict) else ():
                    size = facts.get("size") if isinstance(facts, dict) else None
                    if isinstance(size, int) and size > 0:
                        sizes[str(name)] = size
        return sizes


def _is_graph(at: ast.expr) -> bool:
    """Whether an expression stands for a nested graph: a lambda, or a class without arguments such as `<lambda>()`."""
    is_made = isinstance(at, ast.Call) and isinstance(at.func, ast.Name) and not at.args and not at.keywords
    return isinstance(at, ast.Lambda) or is_made


def _nested_size(at: ast.expr) -> tuple[list[int], torch.dtype]:
    """The sizes of nested lists of numbers, and the dtype that torch gives them."""
    size: list[int] = []
    while isinstance(at, ast.List):
        size.append(len(at.elts))
        if not at.elts:
            return size, torch.float32
        at = at.elts[0]
    at = at.operand if isinstance(at, ast.UnaryOp) else at
    kinds: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, complex: torch.complex64}
    value: Any = at.value if isinstance(at, ast.Constant) else None
    return size, kinds.get(type(value), torch.float32)
