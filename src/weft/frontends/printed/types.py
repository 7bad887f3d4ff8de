"""Types in printed graphs: `"f32[s77, 16][16, 1]cuda:0"` and `"Sym(s77)"`, read as fake values or compared with them.

Contract: sizes are numbers, or expressions in torch's symbols, which are evaluated without running the text. A symbol
with a known hint is backed, any other is unbacked. A symbol that first appears in an operator's result stands for the
size that the operator computed here.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.compat import expression_of, fake_tensor, hint_of, new_fake_mode, new_symbol, storage_key
from weft.errors import ReadError, compose
from weft.frontends.printed.text import PrintedText
from weft.graph import metadata
from weft.graph.listings.literals import FUNCTIONS, MAX_BITS, NUMBERS, dotted
from weft.graph.listings.types import DTYPES, TypeText

TENSOR = re.compile(r"(?:(?:Parameter|Buffer)\()?(\w+)\[([^\]]*)\](?:\[([^\]]*)\])?([a-z_]*(?::\d+)?)\)?")
NUMBER = re.compile(r"Sym\((.*)\)")
UNBACKED = ("u", "zuf")
"""How torch begins the names of sizes that are known only at run time."""
SYMBOL = re.compile(r"[a-z]{1,4}\d{1,9}")
# Printed graphs spell this dtype differently from listings.
PRINTED_DTYPES = {**DTYPES, **({"f4e2m1fnx2": DTYPES["f4e2m1fn_x2"]} if "f4e2m1fn_x2" in DTYPES else {})}
PRINTED_FUNCTIONS = {
    **FUNCTIONS,
    "PythonMod": lambda a, b: a % b,
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "Identity": lambda a: a,
}


@dataclass(frozen=True)
class TensorType:
    """The printed type of a tensor; sizes are numbers or expressions."""

    dtype: torch.dtype
    size: tuple[Any, ...]
    strides: tuple[Any, ...] | None
    device: torch.device | None


@dataclass(frozen=True)
class NumberType:
    """The printed type of a symbolic number; None for conditions and for lists of expressions."""

    number: int | ast.expr | None


class PrintedTypes:
    """Reads the types of one text; holds its symbols and its fake mode."""

    def __init__(self, text: PrintedText, hints: Mapping[str, int]) -> None:
        for name, hint in hints.items():
            if type(hint) is not int:
                raise ReadError(compose("hints", f"{hint!r} is not a size for {name}", do="give hints={'s0': 8}"))
        self.text, self.hints = text, hints
        self.mode = new_fake_mode()
        self.numbers: dict[str, Any] = {}
        self._known: dict[str, TensorType | NumberType] = {}

    # Reading.

    def written(self, at: ast.expr) -> TensorType | NumberType:
        """The type in an annotation."""
        if not isinstance(at, ast.Constant) or not isinstance(at.value, str):
            self.text.fail(at, 'expected a type such as "f32[2, 4][4, 1]cpu"', "print the graph with its types")
        if at.value not in self._known:
            self._known[at.value] = self._read(at, at.value)
        return self._known[at.value]

    def _read(self, at: ast.expr, text: str) -> TensorType | NumberType:
        number = NUMBER.fullmatch(text)
        if number is not None:
            found = self._expressions(at, number[1])
            is_read = len(found) == 1 and not isinstance(found[0], ast.Compare | ast.BoolOp)
            return NumberType(found[0] if is_read else None)
        tensor = TENSOR.fullmatch(text)
        if tensor is None:
            what = f"{text[:80]!r} is not a type"
            do = "give a graph of plain tensors, as AOTAutograd (aot_*) and Inductor (*_post_grad_graph) print them"
            self.text.fail(at, what, do, text)
        dtype, size, strides, device = tensor.groups()
        if dtype not in PRINTED_DTYPES:
            self.text.fail(at, f"no dtype is called {dtype!r}", name=dtype)
        return TensorType(
            PRINTED_DTYPES[dtype],
            self._expressions(at, size),
            None if strides is None else self._expressions(at, strides),
            self._device(at, device) if device else None,
        )

    def expression(self, at: ast.AST, text: str) -> Any:
        """The value of an expression given as text."""
        found = self._expressions(at, text)
        number = self.size(at, found[0]) if len(found) == 1 else None
        if number is None:
            self.text.fail(at, f"{text[:80]!r} is not a supported expression", name=text)
        return number

    def _expressions(self, at: ast.AST, text: str) -> tuple[Any, ...]:
        if not text.strip():
            return ()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(f"({text},)", mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            tree = None
        if not isinstance(tree, ast.Tuple):
            self.text.fail(at, f"{text[:80]!r} is not a list of sizes", name=text)
        return tuple(item.value if is_number(item) else item for item in tree.elts)  # type: ignore[attr-defined]

    def _device(self, at: ast.expr, text: str) -> torch.device:
        try:
            return torch.device(text)
        except RuntimeError:
            self.text.fail(at, f"{text!r} is not a device", name=text)

    def size(self, at: ast.AST, expression: Any) -> Any:
        """The value of an expression; None if it calls a function that is not supported."""
        if isinstance(expression, int):
            if expression.bit_length() > MAX_BITS:
                self.text.fail(at, "a size has more than 64 bits")
            return expression
        if isinstance(expression, ast.Constant):
            if is_number(expression):
                return self.size(at, expression.value)
        elif isinstance(expression, ast.Name):
            return self.symbol(at, expression.id)
        elif isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.USub):
            inner = self.size(at, expression.operand)
            return None if inner is None else -inner
        elif isinstance(expression, ast.BinOp):
            return self._operation(at, expression)
        elif isinstance(expression, ast.Call) and isinstance(expression.func, ast.Name) and not expression.keywords:
            values = [self.size(at, argument) for argument in expression.args]
            function = PRINTED_FUNCTIONS.get(str(dotted(expression.func)))
            return None if function is None or any(v is None for v in values) else self._apply(at, function, values)
        self.text.fail(at, "a size is a number or an expression in symbols such as s0")

    def _operation(self, at: ast.AST, expression: ast.BinOp) -> Any:
        left, right = self.size(at, expression.left), self.size(at, expression.right)
        function = NUMBERS.get(type(expression.op))
        return None if function is None or left is None or right is None else self._apply(at, function, [left, right])

    def _apply(self, at: ast.AST, function: Any, values: Sequence[Any]) -> Any:
        try:
            return self.size(at, result) if isinstance(result := function(*values), int) else result
        except (ArithmeticError, TypeError, ValueError, RuntimeError) as error:
            self.text.fail(at, f"the size cannot be computed: {first_line(error)}")

    def symbol(self, at: ast.AST, name: str) -> Any:
        """The symbolic number of that name."""
        if name not in self.numbers:
            if not SYMBOL.fullmatch(name):
                self.text.fail(at, f"{name!r} is not a size symbol such as s0", name=name)
            hint = self.hints.get(name)
            # torch specialises sizes 0 and 1 to constants, so they cannot back a symbol
            is_size = hint is not None and 1 < hint < 1 << 62
            self.numbers[name] = new_symbol(self.mode.shape_env, name, hint if is_size else None)  # type: ignore[arg-type]
        return self.numbers[name]

    def new_number(self, name: str) -> Any:
        """A number that is known only at run time."""
        return new_symbol(self.mode.shape_env, name, None)  # type: ignore[arg-type]

    # Values.

    def value(self, at: ast.AST, written: TensorType | NumberType, name: str) -> Any:
        """A fake value of a printed type."""
        if isinstance(written, NumberType):
            number = None if written.number is None else self.size(at, written.number)
            if number is None:
                self.text.fail(at, f"the number {name} is not a supported expression", name=name)
            return number
        size = [self.size(at, n) for n in written.size]
        strides = metadata.contiguous_strides(size) if written.strides is None else written.strides
        return self.tensor(at, name, written.dtype, size, [self.size(at, n) for n in strides], written.device)

    def tensor(
        self,
        at: ast.AST,
        name: str,
        dtype: torch.dtype,
        size: Sequence[Any],
        strides: Sequence[Any],
        device: torch.device | None,
    ) -> Tensor:
        """A fake tensor; fails at this place of the text if no tensor can have this type."""
        if any(n is None for n in [*size, *strides]):
            self.text.fail(at, f"a size of {name} is not a supported expression", name=name)
        try:
            return fake_tensor(self.mode, size, strides, dtype, device or torch.device("cpu"))
        except (ArithmeticError, RuntimeError, ValueError, TypeError) as error:
            self.text.fail(at, f"{name} is not a possible tensor: {first_line(error)}", name=name)

    def reconcile(
        self, at: ast.AST, name: str, written: TensorType | NumberType, computed: Any, inputs: Sequence[Any]
    ) -> Any:
        """The value of a node, from its computed value and its printed type; raises if they contradict each other.

        A new tensor on an accelerator keeps its printed strides: the kernels of that device choose them, and this
        machine may lack those kernels.
        """
        if isinstance(written, NumberType):
            self._compare_numbers(at, name, written, computed)
            return computed
        if not isinstance(computed, Tensor):
            self.text.fail(
                at, f"the text says that {name} is a tensor, its operator returns {type(computed).__name__}", name=name
            )
        size = [self._unify(at, n, found) for n, found in zip(written.size, computed.shape, strict=False)]
        wrong_device = written.device is not None and not same_device(written.device, computed.device)
        if written.dtype != computed.dtype or len(written.size) != computed.dim() or wrong_device:
            self._contradict(at, name, computed)
        if any(map(differ, size, computed.shape)):
            self._contradict(at, name, computed)
        if written.strides is None:
            return computed
        strides = [self._unify(at, n, found) for n, found in zip(written.strides, computed.stride(), strict=False)]
        if len(written.strides) == computed.dim() and not any(map(differ, strides, computed.stride())):
            return computed
        is_view = storage_key(computed) in {storage_key(value) for value in inputs if isinstance(value, Tensor)}
        if is_view or computed.device.type in ("cpu", "meta") or len(strides) != computed.dim():
            self._contradict(at, name, computed)
        return self.tensor(at, name, computed.dtype, computed.shape, strides, computed.device)

    def _unify(self, at: ast.AST, expression: Any, found: Any) -> Any:
        """The printed size; a symbol that appears here for the first time is bound to the computed size."""
        if isinstance(expression, ast.Name) and isinstance(found, torch.SymInt) and SYMBOL.fullmatch(expression.id):
            is_made_here = expression.id.startswith("u") or expression.id not in self.hints
            if is_made_here and expression.id not in self.numbers:
                self.numbers[expression.id] = found
        return self.size(at, expression)

    def _compare_numbers(self, at: ast.AST, name: str, written: NumberType, computed: Any) -> None:
        if not isinstance(computed, int | float | torch.SymInt | torch.SymFloat | torch.SymBool):
            self.text.fail(
                at, f"the text says that {name} is a number, its operator returns {type(computed).__name__}", name=name
            )
        if isinstance(computed, torch.SymInt) and written.number is not None:
            number = self._unify(at, written.number, computed)
            if differ(number, computed):
                self.text.fail(at, f"the text says that {name} is {number}, its operator returns {computed}", name=name)

    def _contradict(self, at: ast.AST, name: str, computed: Tensor) -> None:
        found = TypeText(torch.device("cpu")).of_input(computed, {}, "")
        do = "print the graph again: it was edited, or printed with another version of the operator"
        self.text.fail(at, f"the operator of {name} returns {found}, not the printed type", do, name)


def is_number(at: ast.AST) -> bool:
    """Whether an expression is a whole number."""
    return isinstance(at, ast.Constant) and type(at.value) is int


def differ(first: Any, second: Any) -> bool:
    """Whether two sizes are known to differ."""
    if first is None or second is None:
        return False
    if isinstance(first, int) and isinstance(second, int):
        return first != second
    if isinstance(first, torch.SymInt) and isinstance(second, torch.SymInt):
        are_equal = expression_of(first) == expression_of(second)
        if are_equal:
            return False
    hints = hint_of(first), hint_of(second)
    return hints[0] is not None and hints[1] is not None and hints[0] != hints[1]


def same_device(first: torch.device, second: torch.device) -> bool:
    """Whether two devices may be the same; a device without an index matches any of its kind."""
    indices = {device.index for device in (first, second) if str(device) != device.type}
    return first.type == second.type and len(indices) < 2


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
