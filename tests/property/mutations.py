"""Texts and bytes made wrong on purpose: what the readers of files from elsewhere must survive."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

TOKEN = re.compile(r"[A-Za-z_][\w.]*|\d+|'[^'\n]*'|\"[^\"\n]*\"|[^\w\s]")
LINE_TYPE = re.compile(r"^( +\w+): .*? = ", re.MULTILINE)

HOSTILE = (
    "__import__('os').system('touch {canary}')",
    "(lambda: __import__('os').system('touch {canary}'))()",
    "[__import__('os').system('touch {canary}') for _ in [0]]",
    "(y := __import__('os').system('touch {canary}'))",
    "f\"{{__import__('os').system('touch {canary}')}}\"",
    "open('{canary}', 'w')",
    'exec(\'open("{canary}", "w")\')',
    "getattr(__builtins__, 'open')('{canary}', 'w')",
    "().__class__.__base__.__subclasses__()",
    "self.__class__.__mro__[1]",
    "self.__init__.__globals__",
    "torch.load('{canary}')",
    "torch.ops.load_library('{canary}')",
    "torch.ops.aten.from_file.default('{canary}', True, 4)",
    "torch.ops.aten.save.default(1, '{canary}')",
    "torch.ops.aten.manual_seed.default(1)",
    "torch.ops.aten.set_grad_enabled.default(True)",
    "torch.ops.prim.rpc_sync.default(1, 2)",
    "torch.ops.prim.Print.default(1)",
    "torch.ops.__class__.default(1)",
    "torch.manual_seed(3)",
    "from_file('{canary}', True, 4)",
    "manual_seed(3)",
    "prim.tolist.default(x)",
    "attribute('{canary}')",
    "operator.attrgetter('a')(x)",
    "*[1, 2]",
    "**{{'a': 1}}",
    "(yield)",
    "await x",
    "lambda x: x",
    "not x",
    "x if x else x",
    "{{1, 2}}",
    "...",
    "b'bytes'",
    "1j",
    "NaN",
    "'\\r'",
    '"\\r\\n\\")\\rimport os\\ros.getcwd()\\r(\\""',
)
NUMBERS = (
    "0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "65537",
    "9999999999",
    str(2**31),
    str(2**63 - 1),
    str(2**63),
    "9" * 30,
    "9" * 5000,
    "0x" + "f" * 3000,
    "1e999",
    "1.5",
    "9**9**9**9",
    "s0",
    "u0",
    "s77",
)
CHARACTERS = "\0\r\n\t\x0b\x1a \"'\\()[]{}:;,.#=*-+<>@!~`$%^&|é\u2028\ufeff0aZ"


def mutate(text: str, rng: Random, canary: str) -> str:
    """The text with one to three changes."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        text = rng.choice(MUTATIONS)(text, rng, canary)
    return text


def untyped(text: str, rng: Random) -> str:
    """The text without the types of its lines, half of the time: what is mutated then meets the operators."""
    return LINE_TYPE.sub(r"\1 = ", text) if rng.random() < 0.5 else text


def mutate_bytes(data: bytes, rng: Random) -> bytes:
    """The bytes with one to three changes."""
    for _ in range(rng.randint(1, 3)):
        data = rng.choice(BYTE_MUTATIONS)(data, rng)
    return data


def _lines(text: str, rng: Random, change: Callable[[list[str], int, int], None]) -> str:
    lines = text.split("\n")
    change(lines, rng.randrange(len(lines)), rng.randrange(len(lines)))
    return "\n".join(lines)


def delete_line(text: str, rng: Random, _canary: str) -> str:
    return _lines(text, rng, lambda lines, i, _: lines.pop(i) and None)


def duplicate_line(text: str, rng: Random, _canary: str) -> str:
    return _lines(text, rng, lambda lines, i, j: lines.insert(j, lines[i]))


def swap_lines(text: str, rng: Random, _canary: str) -> str:
    def swap(lines: list[str], i: int, j: int) -> None:
        lines[i], lines[j] = lines[j], lines[i]

    return _lines(text, rng, swap)


def indent_line(text: str, rng: Random, _canary: str) -> str:
    space = rng.choice([" ", "    ", "\t", "\t\t", ""])
    return _lines(text, rng, lambda lines, i, _: lines.__setitem__(i, space + lines[i].lstrip()))


def truncate(text: str, rng: Random, _canary: str) -> str:
    return text[: rng.randrange(len(text) + 1)]


def delete_chunk(text: str, rng: Random, _canary: str) -> str:
    start = rng.randrange(len(text) + 1)
    return text[:start] + text[start + rng.randint(1, 200) :]


def replace_character(text: str, rng: Random, _canary: str) -> str:
    place = rng.randrange(len(text) + 1)
    return text[:place] + rng.choice(CHARACTERS) + text[place + rng.randint(0, 1) :]


def _at_token(text: str, rng: Random, choose: Callable[[str], bool], new: Callable[[list[str]], str]) -> str:
    found = list(TOKEN.finditer(text))
    fitting = [match for match in found if choose(match[0])]
    if not fitting:
        return text
    match = rng.choice(fitting)
    return text[: match.start()] + new([each[0] for each in found]) + text[match.end() :]


def replace_token(text: str, rng: Random, _canary: str) -> str:
    return _at_token(text, rng, lambda token: token.strip() != "", rng.choice)


def replace_name(text: str, rng: Random, _canary: str) -> str:
    def is_name(token: str) -> bool:
        return token[0].isalpha() or token[0] == "_"

    return _at_token(text, rng, is_name, lambda tokens: rng.choice([token for token in tokens if is_name(token)]))


def replace_number(text: str, rng: Random, _canary: str) -> str:
    return _at_token(text, rng, str.isdigit, lambda _: rng.choice(NUMBERS))


def insert_hostile(text: str, rng: Random, canary: str) -> str:
    code = rng.choice(HOSTILE).format(canary=canary)
    return _at_token(text, rng, lambda token: token[0].isalnum() or token[0] in "'\"", lambda _: code)


def replace_right_side(text: str, rng: Random, canary: str) -> str:
    code = rng.choice(HOSTILE).format(canary=canary)

    def change(lines: list[str], i: int, _j: int) -> None:
        head, found, _ = lines[i].partition("=")
        lines[i] = f"{head}= {code}" if found else f"{lines[i]}{code}"

    return _lines(text, rng, change)


def nest_deeply(text: str, rng: Random, _canary: str) -> str:
    depth = rng.choice([50, 150, 900, 3000, 20000])
    left, middle, right = rng.choice(
        [("(", "x", ")"), ("[", "", "]"), ("-", "1", ""), ("s0+", "s0", ""), ("{1: ", "2", "}"), ("x.", "x", "")]
    )
    deep = left * depth + middle + right * depth
    return _at_token(text, rng, lambda token: token[0].isalnum(), lambda _: deep)


def lengthen(text: str, rng: Random, _canary: str) -> str:
    return _at_token(text, rng, lambda token: token[0].isalnum(), lambda _: rng.choice("a9_") * 100_000)


MUTATIONS: tuple[Callable[[str, Random, str], str], ...] = (
    *(delete_line, duplicate_line, swap_lines, indent_line, truncate, delete_chunk, replace_character),
    *(replace_token, replace_token, replace_name, replace_name, replace_number, replace_number, replace_number),
    *(insert_hostile, insert_hostile, replace_right_side, nest_deeply, lengthen),
)


def flip_byte(data: bytes, rng: Random) -> bytes:
    place = rng.randrange(len(data)) if data else 0
    return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :] if data else data


def cut(data: bytes, rng: Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def delete_bytes(data: bytes, rng: Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.randint(1, 64) :]


def repeat_bytes(data: bytes, rng: Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start : start + rng.randint(1, 200)] * 2 + data[start + 1 :]


def fill_bytes(data: bytes, rng: Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    length = rng.randint(1, 8)
    return data[:start] + bytes([rng.choice([0, 255])]) * length + data[start + length :]


BYTE_MUTATIONS: tuple[Callable[[bytes, Random], bytes], ...] = (
    *(flip_byte, flip_byte, cut, delete_bytes, repeat_bytes, fill_bytes),
)
