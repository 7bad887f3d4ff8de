"""What the reader says of text that is no listing; and that it never runs any of it."""

from __future__ import annotations

import ast
from contextlib import suppress
from pathlib import Path

import pytest

import weft
from weft.errors import ListingError


def fault(text: str) -> str:
    """The message for a listing."""
    with pytest.raises(ListingError) as error:
        weft.parse(text)
    return str(error.value)


def line(right: str, parameters: str = "x: f32[2, 4]") -> str:
    """A listing with one line whose right side is given."""
    return f"group('dp', size=2)\n\ndef graph({parameters}):\n    r = {right}\n    return [r]\n"


try:
    DIVISION = str(1 // 0)
except ZeroDivisionError as error:
    DIVISION = str(error)  # Python's own words, which change between versions

MESSAGES = {
    "a wrong type": (
        "def graph(x: f32[2, 4]):\n    r: f32[4, 4] = relu(x)\n    return [r]\n",
        "listing line 2: r is f32[2, 4] according to its operator, but the listing says f32[4, 4]\n"
        "    r: f32[4, 4] = relu(x)\n"
        "    ^\n"
        "correct the type, or leave it out",
    ),
    "a wrong dtype": (
        "def graph(x: f32[2, 4]):\n    r: bf16[2, 4] = relu(x)\n    return [r]\n",
        "listing line 2: r is f32[2, 4] according to its operator, but the listing says bf16[2, 4]\n"
        "    r: bf16[2, 4] = relu(x)\n"
        "    ^\n"
        "correct the type, or leave it out",
    ),
    "a wrong type of one of several results": (
        "def graph(x: f32[4]):\n    s: [f32[2], f32[1]] = split(x, 2)\n    return s\n",
        "listing line 2: s is [f32[2], f32[2]] according to its operator, but the listing says [f32[2], f32[1]]\n"
        "    s: [f32[2], f32[1]] = split(x, 2)\n"
        "    ^\n"
        "correct the type, or leave it out",
    ),
    "an unknown operator": (
        line("rellu(x)"),
        "listing line 4: no operator is called 'rellu'\n    r = rellu(x)\n        ^^^^^\ndid you mean 'relu'?",
    ),
    "an unknown collective": (
        line("all_gathr(x, 2, 'dp')"),
        "listing line 4: no operator is called 'all_gathr'\n"
        "    r = all_gathr(x, 2, 'dp')\n"
        "        ^^^^^^^^^\n"
        "did you mean 'all_gather'?",
    ),
    "an operator like no other": (
        line("qqqqzzzz(x)"),
        "listing line 4: no operator is called 'qqqqzzzz'\n    r = qqqqzzzz(x)\n        ^^^^^^^^",
    ),
    "an unknown overload": (
        line("add.Tensr(x, x)"),
        "listing line 4: no operator is called 'add.Tensr'\n    r = add.Tensr(x, x)\n        ^^^^^^^^^\n"
        "did you mean 'addr'?",
    ),
    "an undefined name": (
        line("relu(xx)"),
        "listing line 4: 'xx' is not defined\n    r = relu(xx)\n             ^^\ndid you mean 'x'?",
    ),
    "a name that a later line defines": (
        "def graph(x: f32[2]):\n    a = relu(late)\n    late = relu(x)\n    return [a]\n",
        "listing line 2: 'late' is not defined\n    a = relu(late)\n             ^^^^",
    ),
    "an undefined output": (
        "def graph(x: f32[2]):\n    return [y]\n",
        "listing line 2: 'y' is not defined\n    return [y]\n            ^",
    ),
    "an unknown dtype": (
        "def graph(x: f33[2]):\n    return [x]\n",
        "listing line 1: no dtype is called 'f33'\n"
        "    def graph(x: f33[2]):\n"
        "                 ^^^\n"
        "did you mean 'f32'?",
    ),
    "a type without a shape": (
        "def graph(x: f32):\n    return [x]\n",
        "listing line 1: expected a type such as f32[2, 4]\n    def graph(x: f32):\n    ^\nthe empty shape is f32[()]",
    ),
    "an undeclared symbol": (
        "def graph(x: f32[s0]):\n    return [x]\n",
        "listing line 1: 's0' is not a size\n"
        "    def graph(x: f32[s0]):\n"
        "                     ^^\n"
        "declare it: symbol('s0', hint=8)",
    ),
    "a syntax error": (
        "def graph(x: f32[2]):\n    r = relu(x\n    return [r]\n",
        "listing line 2: '(' was never closed\n    r = relu(x\n    ^",
    ),
    "no graph": ("group('dp', size=2)\n", "listing: it has no `def graph(...)`\nwrite the graph as a function"),
    "empty text": ("", "listing: it has no `def graph(...)`\nwrite the graph as a function"),
    "a function of another name": (
        "def forward(x: f32[2]):\n    return [x]\n",
        "listing line 1: expected a declaration or `def graph(...)`\n"
        "    def forward(x: f32[2]):\n"
        "    ^\n"
        "print weft.listing of a graph to see one",
    ),
    "two graphs": (
        "def graph(x: f32[2]):\n    return [x]\ndef graph(x: f32[2]):\n    return [x]\n",
        "listing line 3: expected a declaration or `def graph(...)`\n"
        "    def graph(x: f32[2]):\n"
        "    ^\n"
        "print weft.listing of a graph to see one",
    ),
    "a missing return": (
        "def graph(x: f32[2]):\n    r = relu(x)\n",
        "listing line 1: graph returns nothing\n    def graph(x: f32[2]):\n        ^^^^^\nend it with `return [...]`",
    ),
    "a return in the middle": (
        "def graph(x: f32[2]):\n    return [x]\n    r = relu(x)\n    return [r]\n",
        "listing line 2: expected a line such as `r: f32[4] = relu(x)`\n    return [x]\n    ^",
    ),
    "a name defined twice": (
        "def graph(x: f32[2]):\n    r = relu(x)\n    r = relu(r)\n    return [r]\n",
        "listing line 3: r is defined twice\n    r = relu(r)\n    ^\nevery line defines a new name",
    ),
    "an input defined twice": (
        "def graph(x: f32[2]):\n    x = relu(x)\n    return [x]\n",
        "listing line 2: x is defined twice\n    x = relu(x)\n    ^\nevery line defines a new name",
    ),
    "a name that no node can have": (
        "def graph(x: f32[2]):\n    all = relu(x)\n    return [all]\n",
        "listing line 2: 'all' cannot be the name of a node\n    all = relu(x)\n    ^^^\ncall it all_0",
    ),
    "an unknown declaration": (
        "grup('dp', size=2)\ndef graph(x: f32[2]):\n    return [x]\n",
        "listing line 1: no declaration is called 'grup'\n    grup('dp', size=2)\n    ^^^^\ndid you mean 'group'?",
    ),
    "a declaration without a name": (
        "group(2)\ndef graph(x: f32[2]):\n    return [x]\n",
        "listing line 1: group takes a name first\n    group(2)\n    ^^^^^",
    ),
    "tokens that are no number": (
        "tokens_per_step('many')\ndef graph(x: f32[2]):\n    return [x]\n",
        "listing line 1: tokens_per_step takes a whole number of at least 1\n    tokens_per_step('many')\n"
        "    ^^^^^^^^^^^^^^^\nwrite tokens_per_step(65536)",
    ),
    "a declaration behind the graph": (
        "def graph(x: f32[2]):\n    return [x]\ngroup('dp', size=2)\n",
        "listing line 3: expected a declaration or `def graph(...)`\n"
        "    group('dp', size=2)\n"
        "    ^\n"
        "print weft.listing of a graph to see one",
    ),
    "a group without a size": (
        "group('dp')\ndef graph(x: f32[2]):\n    return [x]\n",
        "listing line 1: group 'dp' needs a size of at least 1\n"
        "    group('dp')\n"
        "           ^^\n"
        "write group('dp', size=8)",
    ),
    "a group of no ranks": (
        "group('dp', size=0)\ndef graph(x: f32[2]):\n    return [x]\n",
        "listing line 1: group 'dp' needs a size of at least 1\n"
        "    group('dp', size=0)\n"
        "           ^^\n"
        "write group('dp', size=8)",
    ),
    "a group of ranks that are no lists": (
        "group('dp', ranks=[0, 1])\ndef graph(x: f32[2]):\n    return [x]\n",
        "listing line 1: ranks are lists of numbers, one list per group\n"
        "    group('dp', ranks=[0, 1])\n"
        "                ^^^^^",
    ),
    "a hint that is no number": (
        "symbol('s0', hint='eight')\ndef graph(x: f32[s0]):\n    return [x]\n",
        "listing line 1: the hint of s0 is not a whole number\n    symbol('s0', hint='eight')\n                 ^^^^",
    ),
    "a device that does not exist": (
        "device('gpu!')\ndef graph(x: f32[2]):\n    return [x]\n",
        "listing line 1: 'gpu!' is not a device\n    device('gpu!')\n            ^^^^\nwrite device('cuda')",
    ),
    "a constant without a type": (
        "tensor('c')\ndef graph(x: f32[2]):\n    return [x]\n",
        "listing line 1: constant 'c' needs a type\n"
        "    tensor('c')\n"
        "            ^\n"
        "write tensor('c', f32[2], [1.0, 2.0])",
    ),
    "a constant whose values do not fit": (
        "tensor('bias', f32[2], [1.0, 2.0, 3.0])\ndef graph(x: f32[2]):\n    return [x]\n",
        "listing line 1: the values of 'bias' do not fit its type: shape '[2]' is invalid for input of size 3\n"
        "    tensor('bias', f32[2], [1.0, 2.0, 3.0])\n"
        "            ^^^^",
    ),
    "a constant that was not declared": (
        "def graph(x: f32[2]):\n    c = attribute('c')\n    return [c]\n",
        "listing line 2: nothing is called 'c'\n"
        "    c = attribute('c')\n"
        "        ^^^^^^^^^\n"
        "declare it: tensor('c', f32[2], [1.0, 2.0])",
    ),
    "a call that its operator refuses": (
        line("mm(x, x)"),
        "listing line 4: mm: a and b must have same reduction dim, but got [2, 4] X [2, 4].\n    r = mm(x, x)\n    ^",
    ),
    "a collective with too few arguments": (
        line("all_gather(x)"),
        "listing line 4: all_gather: takes (input, group_size, group_name), got 1 arguments\n"
        "    r = all_gather(x)\n"
        "    ^",
    ),
    "a collective of what is no tensor": (
        line("all_gather(3, 2, 'dp')"),
        "listing line 4: all_gather: takes tensors, got int\n    r = all_gather(3, 2, 'dp')\n    ^",
    ),
    "a scatter of rows that do not split": (
        line("reduce_scatter(x, 'sum', 3, 'dp')"),
        "listing line 4: reduce_scatter: dim 0 of size 2 does not split over 3 ranks\n"
        "    r = reduce_scatter(x, 'sum', 3, 'dp')\n"
        "    ^",
    ),
    "a gather of a number": (
        line("all_gather(x, 2, 'dp')", "x: f32[()]"),
        "listing line 4: all_gather: all_gather takes tensors with at least one dim, got one with none\n"
        "    r = all_gather(x, 2, 'dp')\n"
        "    ^",
    ),
    "an item that is not there": (
        "def graph(x: f32[4]):\n    s = split(x, 2)\n    r = s[2]\n    return [r]\n",
        "listing line 3: operator.getitem: list index out of range\n    r = s[2]\n    ^",
    ),
    "an assignment of a literal": (
        line("3"),
        "listing line 4: the right side of a line is a call or an item\n    r = 3\n    ^",
    ),
    "a statement": (
        "def graph(x: f32[2]):\n    if x:\n        pass\n    return [x]\n",
        "listing line 2: expected a line such as `r: f32[4] = relu(x)`\n    if x:\n    ^",
    ),
    "two targets": (
        "def graph(x: f32[2]):\n    a = b = relu(x)\n    return [a]\n",
        "listing line 2: expected a line such as `r: f32[4] = relu(x)`\n    a = b = relu(x)\n    ^",
    ),
    "inputs with defaults": (
        "def graph(x: f32[2] = 3):\n    return [x]\n",
        "listing line 1: inputs are plain names with types\n    def graph(x: f32[2] = 3):\n        ^^^^^",
    ),
    "a variable number of inputs": (
        "def graph(*x: f32[2]):\n    return [x]\n",
        "listing line 1: inputs are plain names with types\n    def graph(*x: f32[2]):\n        ^^^^^",
    ),
    "a tensor of a negative size": (
        "def graph(x: f32[-2]):\n    return [x]\n",
        "listing line 1: no tensor has this type: Trying to create tensor with negative dimension -2: [-2]\n"
        "    def graph(x: f32[-2]):\n"
        "    ^",
    ),
    "strides of another rank": (
        "def graph(x: f32[2, 2](strides=(1,))):\n    return [x]\n",
        "listing line 1: no tensor has this type: "
        "dimensionality of sizes (2) must match dimensionality of strides (1)\n"
        "    def graph(x: f32[2, 2](strides=(1,))):\n"
        "    ^",
    ),
    "a size divided by zero": (
        "def graph(x: f32[2 // 0]):\n    return [x]\n",
        f"listing line 1: not a size: {DIVISION}\n    def graph(x: f32[2 // 0]):\n    ^",
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_each_fault_is_told_with_its_line_and_what_to_do(case: str):
    text, message = MESSAGES[case]
    assert fault(text) == message


def test_types_may_be_left_out():
    module = weft.parse("def graph(x: f32[2, 4]):\n    r = relu(x)\n    return [r]\n")
    assert weft.listing(module) == "def graph(x: f32[2, 4]):\n    r: f32[2, 4] = relu(x)\n    return [r]\n"


def test_comments_docstrings_and_other_layout_are_read():
    text = '"""A graph."""\n# a comment\ndef graph(\n    x: f32[2,4],\n):\n    r: f32[2,4] = relu(x)  # why\n'
    text += "    return [r]\n"
    assert weft.listing(weft.parse(text)) == "def graph(x: f32[2, 4]):\n    r: f32[2, 4] = relu(x)\n    return [r]\n"


@pytest.mark.parametrize(
    "text",
    [
        line("relu(x, **{'inplace': True})"),
        "def graph(x: f32[2]):\n    return {**{'b': x}, 'a': x}\n",
        "@compile\ndef graph(x: f32[2]):\n    return [x]\n",
        "def graph(x: f32[2]) -> f32[2]:\n    return [x]\n",
        "group('dp', size=2, colour=3)\ndef graph(x: f32[2]):\n    return [x]\n",
        "group('dp', 4, size=2)\ndef graph(x: f32[2]):\n    return [x]\n",
        "group('dp', **{'size': 2}, size=2)\ndef graph(x: f32[2]):\n    return [x]\n",
        "symbol('s0', hnt=3)\ndef graph(x: f32[s0]):\n    return [x]\n",
        "tensor('c', f32[1], [1.0], [2.0])\ndef graph(x: f32[2]):\n    return [x]\n",
        "def graph(x: f32[2, 2](stride=(1, 2))):\n    return [x]\n",
        "def graph(x: f32[2](base='nobody')):\n    return [x]\n",
        "def graph(x: f32[2](device='gpu!')):\n    return [x]\n",
        "def graph(x: f32[2](4)):\n    return [x]\n",
        "async def graph(x: f32[2]):\n    return [x]\n",
        "def graph(x: f32[2]):\n    def graph(y: f32[2]) -> f32[2]:\n        return [y]\n    return [x]\n",
    ],
)
def test_what_has_no_meaning_in_a_listing_is_refused_and_not_dropped(text: str):
    assert fault(text).startswith("listing line ")


# The text is never run.


SYSTEM = "__import__('os').system('touch {file}')"
ATTEMPTS = [
    "__import__('os').system('touch {file}')",
    "(lambda: __import__('os').system('touch {file}'))()",
    "[__import__('os').system('touch {file}') for _ in [0]]",
    "relu(*[__import__('os').system('touch {file}')])",
    "relu(x, **{{'a': __import__('os').system('touch {file}')}})",
    "relu(f\"{{__import__('os').system('touch {file}')}}\")",
    "relu(x if __import__('os').system('touch {file}') else x)",
    "relu((y := __import__('os').system('touch {file}')))",
    "relu(x and __import__('os').system('touch {file}'))",
    "relu(x < __import__('os').system('touch {file}'))",
    "relu(x).__class__.__base__.__subclasses__()",
    "relu(x.__class__)",
    "relu(memory_format.__class__)",
    "relu(layout.load('{file}'))",
    "x.__class__.__mro__[1]",
    "x[__import__('os').system('touch {file}')]",
    "operator.attrgetter('__class__')(x)",
    "operator.methodcaller('numpy')(x)",
    "torch.load('{file}')",
    "os.system('touch {file}')",
    "eval('1')",
    "exec('1')",
    "open('{file}', 'w')",
    "print(x)",
    "getattr(x, 'data')",
    "relu(operator('os.system'))",
    "relu(device(open('{file}', 'w')))",
    "relu(symbolic(__import__('os').system('touch {file}')))",
    "relu(slice(__import__('os').system('touch {file}'), 0, 0))",
    "from_file('{file}', True, 4)",
    "from_file.default('{file}', True, 4)",
    "await relu(x)",
    "(yield x)",
]


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_no_part_of_the_text_is_run(attempt: str, tmp_path: Path):
    file = tmp_path / "made"
    text = line(attempt.format(file=file))
    ast.parse(text)  # it is Python: what keeps it from running is the reader
    with suppress(ListingError):
        weft.parse(text)
    assert not file.exists()


@pytest.mark.parametrize(
    "text",
    [
        f"{SYSTEM}\ndef graph(x: f32[2]):\n    return [x]\n",
        f"group({SYSTEM}, size=2)\ndef graph(x: f32[2]):\n    return [x]\n",
        f"group('dp', size={SYSTEM})\ndef graph(x: f32[2]):\n    return [x]\n",
        f"symbol('s0', hint={SYSTEM})\ndef graph(x: f32[2]):\n    return [x]\n",
        f"device({SYSTEM})\ndef graph(x: f32[2]):\n    return [x]\n",
        f"tensor('c', f32[1], [{SYSTEM}])\ndef graph(x: f32[2]):\n    return [x]\n",
        f"tensor('c', {SYSTEM}, [1.0])\ndef graph(x: f32[2]):\n    return [x]\n",
        f"def graph(x: {SYSTEM}):\n    return [x]\n",
        f"def graph(x: f32[{SYSTEM}]):\n    return [x]\n",
        f"def graph(x: f32[2](offset={SYSTEM})):\n    return [x]\n",
        f"def graph(x: f32[2](base={SYSTEM})):\n    return [x]\n",
        f"def graph(x: f32[2] = {SYSTEM}):\n    return [x]\n",
        f"@{SYSTEM}\ndef graph(x: f32[2]):\n    return [x]\n",
        f"def graph(x: f32[2]) -> {SYSTEM}:\n    return [x]\n",
        f"def graph(x: f32[2]):\n    return [{SYSTEM}]\n",
        f"def graph(x: f32[2]):\n    r: {SYSTEM} = relu(x)\n    return [r]\n",
        f"def graph(x: f32[2]):\n    {SYSTEM}\n    return [x]\n",
        f"def graph(x: f32[2]):\n    assert {SYSTEM}\n    return [x]\n",
        "import os\nos.system('touch {file}')\ndef graph(x: f32[2]):\n    return [x]\n",
        "def graph(x: f32[2]):\n    import os\n    return [x]\n",
        f"class C:\n    y = {SYSTEM}\ndef graph(x: f32[2]):\n    return [x]\n",
    ],
)
def test_no_other_place_of_the_text_is_run_either(text: str, tmp_path: Path):
    file = tmp_path / "made"
    text = text.format(file=file)
    ast.parse(text)
    with suppress(ListingError):
        weft.parse(text)
    assert not file.exists()


def test_a_file_is_not_opened_by_an_operator(tmp_path: Path):
    file = tmp_path / "data"
    file.write_bytes(bytes(16))
    message = fault(f"def graph():\n    r = from_file('{file}', True, 4)\n    return [r]\n")
    assert message.startswith("listing line 2: from_file: the operator reaches outside the graph\n")


def test_a_higher_order_operator_is_named_and_not_called():
    module = weft.parse(
        "def graph(x: f32[4]):\n    r: f32[4] = higher_order.run_and_save_rng_state(x)\n    return [r]\n"
    )
    assert "r: f32[4] = higher_order.run_and_save_rng_state(x)" in weft.listing(module)


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]):
    fault("def graph(x: f32[2]):\n    r = _print('hello')\n    return [r]\n")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "text",
    [
        "def graph(x: f32[2]):\n    r = relu(" + "[" * 5000 + "]" * 5000 + ")\n    return [r]\n",
        "def graph(x: f32[2]):\n    r = relu(" + "-" * 5000 + "1)\n    return [r]\n",
        "def graph(x: f32[2]):\n    r = relu("
        + "(" * 150
        + "x"
        + ")" * 150
        + ")\n    return "
        + "[" * 150
        + "]" * 150
        + "\n",
        "symbol('s0', hint=2)\ndef graph(x: f32[" + "+".join(["s0"] * 20000) + "]):\n    return [x]\n",
        "def graph(x: f32[2]):\n" + "".join(f"{' ' * k}def g{k}():\n" for k in range(1, 99)) + " " * 99 + "return []\n",
    ],
    ids=["lists", "signs", "parentheses", "sums", "functions"],
)
def test_deep_nesting_is_read_or_a_fault_of_the_listing(text: str):
    with suppress(ListingError):
        weft.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        line("mul(x, " + "9" * 5000 + ")"),
        line("mul(x, 0x" + "f" * 100_000 + ")"),
        line("view(x, [" + "9" * 30 + "])"),
        "def graph(x: f32[" + "9" * 30 + "]):\n    return [x]\n",
        "def graph(x: f32[" + "9" * 4000 + "]):\n    return [x]\n",
        "def graph(x: f32[9**9**9**9]):\n    return [x]\n",
        "def graph(x: f32[2](offset=" + "9" * 30 + ")):\n    return [x]\n",
        "group('dp', size=" + "9" * 5000 + ")\ndef graph(x: f32[2]):\n    return [x]\n",
        line("full([99999999999, 99999999999], 1.0)"),
    ],
)
def test_huge_numbers_are_a_fault_of_the_listing(text: str):
    assert fault(text).startswith("listing")


def test_a_large_tensor_takes_no_memory():
    module = weft.parse("def graph(x: f32[1000000, 1000000]):\n    r = relu(x)\n    return [r]\n")
    assert "r: f32[1000000, 1000000] = relu(x)" in weft.listing(module)


def test_null_characters_and_wrong_encodings_are_a_fault_of_the_listing():
    assert fault("def graph(x: f32[2]):\0\n    return [x]\n").startswith("listing")
