"""Where each node of a traced step comes from: its module, its line, and whether it is forward or backward.

Contract: every node that an operator makes while a `Recorder` is active carries `nn_module_stack` (torch's own form:
path to path and class, outermost first), `stack_trace` (the lines outside of torch) and `partitioner_tag`
(`is_forward`, `is_backward`, `is_optimizer`). A backward node has the module and the line of the operator whose
gradient it computes. Lines of modules that set `__tracebackhide__` are left out, as in tracebacks of tests.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import sys
from bisect import bisect_right
from collections.abc import Generator, Iterable
from pathlib import Path
from traceback import walk_tb
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import Node, traceback
from torch.utils.checkpoint import CheckpointPolicy

from weft import compat
from weft.compat import OpOverload, backward_sequence, forward_sequence, intercept

FORWARD, BACKWARD, OPTIMIZER = "is_forward", "is_backward", "is_optimizer"
CAPTURE = str(Path(__file__).with_name("capture.py"))
HIDDEN = (str(Path(torch.__file__).parent), str(Path(compat.__file__)), __file__, contextlib.__file__, "<")
POLICY_KEY = "weft.policy"
"""Key in the `custom` metadata of a node: its policy of selective checkpointing, or None."""
ModuleStack = dict[str, tuple[str, type]]


class Origin(NamedTuple):
    """The origin that all nodes of one operator share."""

    modules: ModuleStack
    trace: str


def region_of(node: Node) -> str:
    """The layer that the node comes from, which is the outermost numbered module; else the outermost module."""
    paths: list[str] = list(node.meta.get("nn_module_stack", ()))
    return next(filter(_is_numbered, paths), paths[1] if len(paths) > 1 else "")


def in_layer(node: Node) -> bool:
    """Whether the region of the node is a layer."""
    return _is_numbered(region_of(node))


def _is_numbered(path: str) -> bool:
    return path.rpartition(".")[2].isdigit()


def policy_of(node: Node) -> CheckpointPolicy | None:
    """The policy of selective checkpointing for a node of a trace; None outside of checkpointed modules."""
    # Since 2.13 a node is marked when it is made; before, only the annotation has the policy of its operator.
    found: CheckpointPolicy | None = node.meta.get("recompute", node.meta.get("custom", {}).get(POLICY_KEY))
    return found


class Recorder:
    """Notes origins while operators run."""

    def __init__(self) -> None:
        self.phase = FORWARD
        self._stack: list[ModuleStack] = [{}]
        self._numbers: list[int] = []
        self._origins: list[Origin] = []

    @contextlib.contextmanager
    def record(self, model: nn.Module | None = None) -> Generator[None]:
        """Write the origin of each operator that runs inside into the nodes that tracing makes of it."""
        modules = dict(model.named_modules()) if model is not None else {}
        handles = [handle for path, module in modules.items() for handle in self._watch(path, module)]
        try:
            with traceback.preserve_node_meta(), intercept(self._note):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _watch(self, path: str, module: nn.Module) -> Iterable[Any]:
        kind: type = type(module)

        def enter(_module: nn.Module, _args: Any) -> None:
            self._stack.append(self._stack[-1] | {path: (path, kind)})

        def leave(_module: nn.Module, _args: Any, _result: Any) -> None:
            if len(self._stack) > 1:
                self._stack.pop()

        # These hooks run first before the module and last after it, so that its own hooks count as part of it.
        yield module.register_forward_pre_hook(enter, prepend=True)
        yield module.register_forward_hook(leave, always_call=True)

    def _note(self, _op: OpOverload) -> None:
        number = backward_sequence()
        if number is not None:
            phase, origin = BACKWARD, self._origin_of(number)
        else:
            phase, origin = self.phase, Origin(self._stack[-1], source_lines())
            self._remember(forward_sequence(), origin)
        meta = traceback.get_current_meta()
        meta["nn_module_stack"], meta["stack_trace"] = origin
        meta["partitioner_tag"] = phase
        # Taken at once: before 2.13 the mark of one operator stays for later ones; since then, nodes are marked later.
        meta["custom"] = meta.get("custom", {}) | {POLICY_KEY: meta.pop("recompute", None)}

    def _remember(self, number: int, origin: Origin) -> None:
        """The first operator after a new number is the one that got it; those that follow have no gradient."""
        if not self._numbers or number > self._numbers[-1]:
            self._numbers.append(number)
            self._origins.append(origin)

    def _origin_of(self, number: int) -> Origin:
        """Of the operator with this number, else of the last one before it."""
        place = bisect_right(self._numbers, number) - 1
        return self._origins[place] if place >= 0 else Origin({}, "")


def source_lines() -> str:
    """The lines of the step that is running, outermost first: from the call by `capture` on, without those of torch."""
    frame = sys._getframe(1)
    places: list[tuple[CodeType, int]] = []
    while frame is not None and frame.f_code.co_filename != CAPTURE:
        if not _is_hidden(frame.f_code) and "__tracebackhide__" not in frame.f_globals:
            places.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return _text(tuple(places))


def failing_line(error: BaseException) -> list[str]:
    """The innermost line of the step on the way to an error, as errors show it; none if only torch was running."""
    steps = [(s.f_code, number) for s, number in walk_tb(error.__traceback__)]
    shown = [(code, number) for code, number in steps if not _is_hidden(code) and code.co_filename != CAPTURE]
    if not shown:
        return []
    code, number = shown[-1]
    source = linecache.getline(code.co_filename, number).strip()
    return [f"{Path(code.co_filename).name}:{number} in {code.co_name}: {source}"]


@functools.lru_cache(maxsize=1 << 14)
def _is_hidden(code: CodeType) -> bool:
    return code.co_filename.startswith(HIDDEN)


@functools.lru_cache(maxsize=1 << 16)
def _text(places: tuple[tuple[CodeType, int], ...]) -> str:
    lines: list[str] = []
    for code, number in reversed(places):
        lines.append(f'  File "{code.co_filename}", line {number}, in {code.co_name}')
        source = linecache.getline(code.co_filename, number).strip()
        lines += [f"    {source}"] if source else []
    return "\n".join(lines)
