"""Archives: a graph module in one file, to be read on another machine.

A zip file without compression that holds

    listing.txt         the graph, as `weft.listing` writes it
    constants.json      the types of its constants
    constants/*.bin     the memory of the constants, little-endian; constants that share memory share a file
    provenance.json     the origin of each node: stack trace, modules and other metadata
    facts.json          versions, run-time names of groups, the module's own description, checksums of the other files

Contract: the same module gives the same bytes. Loading checks every name, size and checksum before use, and
executes nothing. A faulty file raises a ReadError.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, RootModel, ValidationError
from torch import Tensor
from torch.fx import GraphModule

from weft.compat import FakeTensor, with_bits
from weft.errors import GraphError, ReadError, ReportError, compose
from weft.files import whole_file
from weft.graph import ops
from weft.graph.about import ABOUT_KEY
from weft.graph.aliasing import constants_of_inputs, placed, span_bytes
from weft.graph.edit import IN_POLICY_KEY, MEMBERS_KEY
from weft.graph.groups import read_groups
from weft.graph.listings.text import parse, render
from weft.graph.listings.types import DTYPE_NAMES, DTYPES
from weft.graph.marks import module_stack
from weft.version import VERSION

FORMAT = 1
LISTING, CONSTANTS, PROVENANCE, FACTS = "listing.txt", "constants.json", "provenance.json", "facts.json"
TEXTS = (LISTING, CONSTANTS, PROVENANCE, FACTS)
DATA = re.compile(r"constants/\d{4,6}\.bin")
MAX_TEXT_BYTES = 1 << 28
ALIGNMENT = 16
"""Alignment of shared memory in a file, in bytes: the size of the largest element."""
EPOCH = (1980, 1, 1, 0, 0, 0)
"""The timestamp of every file in an archive, so that equal modules give equal bytes."""


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


AnyModel = TypeVar("AnyModel", bound=BaseModel)


class _Constant(_Model):
    dtype: str
    size: list[int]
    strides: list[int]
    is_parameter: bool
    data: str | None
    """The file that holds its memory; None for a constant without values."""
    sha256: str | None
    base: str | None = None
    """The constant whose memory contains this one, and which has the file."""
    start: int = 0
    """Offset in that memory, in bytes."""


class _Origin(_Model):
    trace: int | None = None
    modules: int | None = None
    tag: str | None = None
    members: list[str] | None = None
    policy: bool | None = None


class _Provenance(_Model):
    traces: list[str]
    modules: list[list[tuple[str, str, str]]]
    """Module stacks, each a list of key, path and class."""
    nodes: dict[str, _Origin]


class _Constants(RootModel[dict[str, _Constant]]):
    model_config = ConfigDict(strict=True)


class _Facts(_Model):
    format: int
    weft: str
    torch: str
    groups: dict[str, str]
    about: Any
    sha256: dict[str, str]


# Saving.


def save(module: GraphModule, path: str | Path) -> None:
    """Write a module to an archive."""
    path = Path(path)
    if sys.byteorder != "little":
        raise GraphError(compose("archive", "archives are little-endian, this machine is not"))
    files: dict[str, bytes] = {LISTING: render(module).encode()}
    constants = _stored(module, files)
    shown = {name: constant.model_dump(exclude_defaults=False) for name, constant in constants.items()}
    for name, constant in constants.items():
        if constant.base is None and not constant.start:  # archives without shared memory omit these fields
            del shown[name]["base"], shown[name]["start"]
    files[CONSTANTS] = _json(shown)
    files[PROVENANCE] = _json(_provenance(module).model_dump(exclude_none=True))
    facts = _Facts(
        format=FORMAT,
        weft=VERSION,
        torch=str(torch.__version__),
        groups=dict(read_groups(module).runtime),
        about=module.meta.get(ABOUT_KEY),
        sha256={name: hashlib.sha256(files[name]).hexdigest() for name in (LISTING, CONSTANTS, PROVENANCE)},
    )
    files[FACTS] = _json(facts.model_dump())
    try:
        with whole_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name in sorted(files):
                archive.writestr(zipfile.ZipInfo(name, EPOCH), files[name])
    except OSError as error:
        raise ReportError(compose(str(path), f"it cannot be written: {error.strerror or error}")) from error


def _json(value: Any) -> bytes:
    try:
        return (json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        what = f"meta[{ABOUT_KEY!r}] cannot be written as JSON: {error}"
        raise GraphError(compose("archive", what, do="keep strings, numbers, lists and dicts in it")) from None


def _modules(module: GraphModule, path: str = "") -> Iterator[tuple[str, GraphModule]]:
    """The module and the modules nested in it, each with its path, which ends with a slash."""
    yield path, module
    for node in module.graph.nodes:
        nested = ops.attribute(module, str(node.target)) if node.op == "get_attr" else None
        if isinstance(nested, GraphModule):
            yield from _modules(nested, f"{path}{node.target}/")


def _constants(module: GraphModule) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for _, inner in _modules(module):
        for node in inner.graph.nodes:
            value = ops.attribute(inner, str(node.target)) if node.op == "get_attr" else None
            if isinstance(value, Tensor) and found.setdefault(str(node.target), value) is not value:
                what = f"two constants of nested graphs are called {node.target!r}"
                raise GraphError(compose("archive", what, do="rename one of them"))
    return found


def _stored(module: GraphModule, files: dict[str, bytes]) -> dict[str, _Constant]:
    """The types of a module's constants; adds their memory to `files`."""
    constants = _constants(module)
    where = placed(module, constants)
    lowest: dict[str, int] = {}
    ends: dict[str, int] = {}
    for name, value in constants.items():
        if value.dtype not in DTYPE_NAMES or value.layout != torch.strided:
            what = f"constant {name!r} is a {value.layout} tensor of {value.dtype}, which archives do not support"
            raise GraphError(compose("archive", what, do="make it a graph input"))
        if name in where:
            base, start = where[name].base, where[name].start
            if start % value.element_size():
                what = f"constant {name!r} begins {start} bytes after {base!r}, between two of its elements"
                raise GraphError(compose("archive", what, do="make it a copy, or a graph input"))
            lowest[base] = min(lowest.get(base, start), start)
            ends[base] = max(ends.get(base, 0), start + span_bytes(value.shape, value.stride(), value.dtype))
    inputs = set(constants_of_inputs(module).values())
    lowest = {base: 0 if base in inputs else start - start % ALIGNMENT for base, start in lowest.items()}
    memory: dict[str, bytearray] = {}
    found: dict[str, _Constant] = {}
    for name, value in constants.items():
        base = where[name].base if name in where else name
        start = where[name].start - lowest[base] if name in where else 0
        size, strides = list(map(int, value.shape)), list(map(int, value.stride()))
        num_bytes = span_bytes(size, strides, value.dtype)
        if not isinstance(value, FakeTensor) and value.device.type != "meta":
            raw = with_bits(value.detach(), conj=False, neg=False)
            row = raw.as_strided([num_bytes // value.element_size()], [1]).cpu().contiguous()
            whole = memory.setdefault(base, bytearray(ends[base] - lowest[base] if name in where else num_bytes))
            whole[start : start + num_bytes] = row.view(torch.uint8).numpy().tobytes()
        found[name] = _Constant(
            dtype=DTYPE_NAMES[value.dtype],
            size=size,
            strides=strides,
            is_parameter=isinstance(value, torch.nn.Parameter),
            data=None,
            sha256=None,
            base=base if base != name else None,
            start=start,
        )
    for number, name in enumerate(constants):
        if name in memory:
            data, content = f"constants/{number:04}.bin", bytes(memory[name])
            files[data] = content
            update = {"data": data, "sha256": hashlib.sha256(content).hexdigest()}
            found[name] = found[name].model_copy(update=update)
    return found


def _provenance(module: GraphModule) -> _Provenance:
    traces: dict[str, int] = {}
    modules: dict[tuple[tuple[str, str, str], ...], int] = {}
    nodes: dict[str, _Origin] = {}
    for path, inner in _modules(module):
        for node in inner.graph.nodes:
            meta = node.meta
            trace, stack, tag = meta.get("stack_trace"), module_stack(node), meta.get("partitioner_tag")
            origin = _Origin(
                trace=traces.setdefault(trace, len(traces)) if trace else None,
                modules=modules.setdefault(stack, len(modules)) if stack else None,
                tag=tag if isinstance(tag, str) else None,
                members=list(meta[MEMBERS_KEY]) if MEMBERS_KEY in meta else None,
                policy=True if meta.get(IN_POLICY_KEY) else None,
            )
            if origin != _Origin():
                nodes[path + node.name] = origin
    return _Provenance(traces=list(traces), modules=[list(stack) for stack in modules], nodes=nodes)


# Loading.


def load(path: str | Path) -> GraphModule:
    """The module in an archive."""
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            return _Loader(path, archive).load()
    except (OSError, EOFError, zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, ValueError) as error:
        do = "give a file that weft has saved"
        raise ReadError(compose(str(path), f"it is not an archive: {error or type(error).__name__}", do=do)) from None


class _Loader:
    """Reads one archive."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self.path, self.archive = path, archive
        self.members: dict[str, zipfile.ZipInfo] = {}

    def load(self) -> GraphModule:
        self._check_members()
        facts = self._model(_Facts, FACTS, self._text(FACTS))
        if facts.format != FORMAT:
            raise self._error(FACTS, f"it has format {facts.format}, expected {FORMAT}", "use a newer Weft")
        texts = {name: self._checked(name, facts) for name in (LISTING, CONSTANTS, PROVENANCE)}
        constants = self._constants(texts[CONSTANTS])
        module = parse(texts[LISTING].decode(), constants)
        unused = set(constants) - set(_constants(module))
        if unused:
            raise self._error(CONSTANTS, f"{min(unused)!r} is not a constant of the listing")
        self._restore(module, self._model(_Provenance, PROVENANCE, texts[PROVENANCE]))
        if facts.about is not None:
            module.meta[ABOUT_KEY] = facts.about
        return module

    def _error(self, name: str, what: str, do: str = "the file is damaged: save it again") -> ReadError:
        return ReadError(compose(f"{self.path}!{name}", what, do=do))

    def _check_members(self) -> None:
        total = self.path.stat().st_size
        for info in self.archive.infolist():
            is_text = info.filename in TEXTS
            if not is_text and not DATA.fullmatch(info.filename):
                raise self._error(
                    info.filename[:80], "archives do not have such a file", "give a file that weft has saved"
                )
            if info.filename in self.members:
                raise self._error(info.filename, "the archive has it twice")
            if info.file_size > (MAX_TEXT_BYTES if is_text else total):
                raise self._error(info.filename, f"it has {info.file_size} bytes, which is too many")
            if info.flag_bits & 1 or (not is_text and info.compress_type != zipfile.ZIP_STORED):
                raise self._error(info.filename, "it is encrypted or compressed")
            self.members[info.filename] = info
        missing = [name for name in TEXTS if name not in self.members]
        if missing:
            raise self._error(missing[0], "it is missing", "give a file that weft has saved")

    def _text(self, name: str) -> bytes:
        info = self.members[name]
        with self.archive.open(info) as file:
            content = file.read(info.file_size + 1)
        if len(content) != info.file_size:
            raise self._error(name, f"it has {len(content)} bytes, expected {info.file_size}")
        return content

    def _checked(self, name: str, facts: _Facts) -> bytes:
        content = self._text(name)
        if hashlib.sha256(content).hexdigest() != facts.sha256.get(name):
            raise self._error(name, "its checksum is not the one in facts.json")
        return content

    def _model(self, kind: type[AnyModel], name: str, content: bytes) -> AnyModel:
        try:
            return kind.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise self._error(name, f"{place}: {first['msg']}" if place else first["msg"]) from None

    def _constants(self, content: bytes) -> dict[str, Tensor]:
        constants = self._model(_Constants, CONSTANTS, content).root
        used = [constant.data for constant in constants.values() if constant.data is not None]
        unused = sorted(name for name in self.members if name not in TEXTS and name not in used)
        if unused or len(set(used)) < len(used):
            raise self._error(CONSTANTS, "it must name each file of constants exactly once")
        ends: dict[str, int] = {}
        for name, constant in constants.items():
            base = name if constant.base is None else constant.base
            ends[base] = max(ends.get(base, 0), self._end(name, constant))
            if constant.base is not None and (base not in constants or constants[base].base is not None):
                raise self._error(
                    CONSTANTS, f"constant {name!r} is in the memory of {base[:80]!r}, which has no memory of its own"
                )
            if constant.base is not None and (constant.data is not None or constant.sha256 is not None):
                raise self._error(
                    CONSTANTS, f"constant {name!r} has its own file, but is in the memory of {base[:80]!r}"
                )
        memory = {name: self._memory(constants[name], end) for name, end in ends.items()}
        return {
            name: self._constant(name, constant, memory[constant.base or name]) for name, constant in constants.items()
        }

    def _end(self, name: str, constant: _Constant) -> int:
        """Offset of a constant's end in its memory, in bytes."""
        size, strides = constant.size, constant.strides
        if constant.dtype not in DTYPES or len(size) != len(strides) or min([0, *size, *strides]) < 0:
            raise self._error(CONSTANTS, f"constant {name!r} has an impossible type")
        dtype = DTYPES[constant.dtype]
        if constant.start < 0 or constant.start % dtype.itemsize:
            raise self._error(
                CONSTANTS,
                f"constant {name!r} begins at byte {constant.start}, which is not a multiple of its element size",
            )
        return constant.start + span_bytes(size, strides, dtype)

    def _constant(self, name: str, constant: _Constant, memory: Tensor) -> Tensor:
        dtype = DTYPES[constant.dtype]
        try:
            value = torch.empty(0, dtype=dtype, device=memory.device)
            value.set_(memory.untyped_storage(), constant.start // dtype.itemsize, constant.size, constant.strides)
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            raise self._error(CONSTANTS, f"constant {name!r}: {str(error).splitlines()[0]}") from None
        is_real = dtype.is_floating_point or dtype.is_complex
        return torch.nn.Parameter(value, requires_grad=is_real) if constant.is_parameter else value

    def _memory(self, constant: _Constant, num_bytes: int) -> Tensor:
        """The memory of a constant, which may contain other constants."""
        if constant.data is None:
            try:
                return torch.empty(num_bytes, dtype=torch.uint8, device="meta")
            except (RuntimeError, TypeError, OverflowError) as error:
                raise self._error(CONSTANTS, str(error).splitlines()[0]) from None
        name = constant.data
        if name not in self.members or self.members[name].file_size != num_bytes:
            found = self.members[name].file_size if name in self.members else 0
            raise self._error(name, f"it has {found} bytes, its type needs {num_bytes}")
        content = self._text(name)
        if hashlib.sha256(content).hexdigest() != constant.sha256:
            raise self._error(name, "its checksum is not the one in constants.json")
        return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)

    def _restore(self, module: GraphModule, provenance: _Provenance) -> None:
        """Restore the origin of each node."""
        nodes = {path + node.name: node for path, inner in _modules(module) for node in inner.graph.nodes}
        for name, origin in provenance.nodes.items():
            if name not in nodes:
                raise self._error(PROVENANCE, f"{name[:80]!r} is not a node of the listing")
            meta = nodes[name].meta
            if origin.trace is not None:
                meta["stack_trace"] = self._item(provenance.traces, origin.trace)
            if origin.modules is not None:
                stack = self._item(provenance.modules, origin.modules)
                meta["nn_module_stack"] = {key: (path, kind) for key, path, kind in stack}
            if origin.tag is not None:
                meta["partitioner_tag"] = origin.tag
            if origin.members is not None:
                meta[MEMBERS_KEY] = tuple(origin.members)
            if origin.policy:
                meta[IN_POLICY_KEY] = True

    def _item(self, items: list[Any], number: int) -> Any:
        if not 0 <= number < len(items):
            raise self._error(PROVENANCE, f"entry {number} does not exist, it has {len(items)}")
        return items[number]
