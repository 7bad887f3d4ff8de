"""Look at every operator of torch; run as a program so that an operator that ends the process ends only its part.

    python -m tests.conformance.sweep --out FILE

Contract: one line of JSON for each operator: what was seen over all calls, and what of it Weft does not believe.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import types
import unittest
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload

from tests.conformance.observe import Seen, misjudged, observe, reads_on_host
from tests.conformance.samples import Call, Recorder, bound_call, made_calls, operators, run_info
from weft.graph.operator_effects import profile

SECONDS = 20
"""Limit for one operator; one that hangs is left."""
MAX_CALLS = 16
"""Enough calls of one operator: torch's samples repeat themselves."""
# They end the process, reach outside of it, or wait for other processes: never called.
NEVER = (
    "c10d",
    "_c10d_functional",
    "c10d_functional",
    "_c10d_functional_autograd",
    "symm_mem",
    "streams",
    "_test",
    "static_runtime",
    "_dtensor",
    "debugprims",
    "onnx_symbolic",
    "profiler",
)


class Findings:
    """What was seen of each operator."""

    def __init__(self) -> None:
        self.calls: dict[OpOverload, int] = {}
        self.wrong: dict[OpOverload, dict[str, None]] = {}
        self.facts: dict[OpOverload, dict[str, None]] = {}
        self.known: dict[str, list[Call]] = {}

    def look(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Call an operator once more, and note what it did."""
        if not isinstance(op, OpOverload) or op.namespace in NEVER or self.calls.get(op, 0) >= MAX_CALLS:
            return
        with torch.no_grad():
            try:
                call = bound_call(op, args, kwargs)
                seen = observe(op, args, kwargs)
            except Exception:  # the sample itself says whether it was right
                return
            self.note(op, seen)
            self.known.setdefault(_packet(op), []).append(call)
            numbers = any(str(r.type) != "Tensor" for r in op._schema.returns)
            if numbers and reads_on_host(op, args, kwargs):
                self.wrong.setdefault(op, {})["reads data on the host"] = None

    def know(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Remember arguments that an operator may take; they are tried later, where a crash ends a child only."""
        self.known.setdefault(_packet(op), []).append(bound_call(op, args, kwargs))

    def note(self, op: OpOverload, seen: Seen) -> None:
        """Add what a call did."""
        self.calls[op] = self.calls.get(op, 0) + 1
        self.wrong.setdefault(op, {}).update(dict.fromkeys(misjudged(op, seen)))
        facts = [*(f"writes {n}" for n in sorted(seen.written)), *(f"shares {n}" for n in sorted(seen.shared))]
        self.facts.setdefault(op, {}).update(dict.fromkeys([*facts, *(["draws"] if seen.drew else [])]))


def sweep_samples(findings: Findings, infos: Sequence[Any], num_samples: int) -> None:
    """Torch's own samples."""
    recorder = Recorder(findings.look)
    for info in infos:
        with _Limit():
            run_info(info, recorder, findings.know, num_samples)


def sample_infos() -> list[Any]:
    """Torch's descriptions of its operators, and of their references in Python."""
    if "expecttest" not in sys.modules:  # torch's samples import it for tests of their own
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    from torch.testing._internal.common_methods_invocations import op_db, python_ref_db

    return [*op_db, *python_ref_db]


def sweep_schemas(findings: Findings, chosen: Sequence[OpOverload], seed: int, out: Path) -> None:
    """Arguments made from schemas. A child process goes on where an operator ended the one before.

    An operator may also harm the memory of its process without ending it. So whatever looks wrong is looked at once
    more, each operator in a process of its own.
    """
    left = list(chosen)
    while left:
        is_done = _in_child(findings, left, seed, out)
        begun = {line["op"] for line in _lines(out) if "begun" in line}
        left = [] if is_done else [op for op in left if op.name() not in begun]
    suspects = {line["op"] for line in _lines(out) if line.get("wrong") and line["op"] not in findings.calls}
    for op in [op for op in chosen if op.name() in suspects and op not in findings.calls]:
        _in_child(findings, [op], seed, out)


def _in_child(findings: Findings, chosen: Sequence[OpOverload], seed: int, out: Path) -> bool:
    """Look at operators in a child process; whether it got to the end."""
    child = os.fork()
    if not child:
        with out.open("a") as lines:
            for op in chosen:
                lines.write(json.dumps({"op": op.name(), "begun": True}) + "\n")
                lines.flush()
                with _Limit():
                    _try(findings, op, seed)
                lines.write(json.dumps(_line(findings, op)) + "\n")
                lines.flush()
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def _lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def _try(findings: Findings, op: OpOverload, seed: int) -> None:
    known = findings.known.get(_packet(op), [])[:12]
    done = findings.calls.get(op, 0)
    try:
        for call in made_calls(op, known, seed):
            findings.look(op, *call)
            if findings.calls.get(op, 0) >= done + 4:
                return
    except NotImplementedError:
        return


def _packet(op: OpOverload) -> str:
    return op.name().partition(".")[0].removesuffix("_")


class _TooLongError(BaseException):
    """Not an `Exception`, which those who call operators catch."""


class _Limit:
    def __enter__(self) -> None:
        def stop(*_: object) -> None:
            raise _TooLongError

        signal.signal(signal.SIGALRM, stop)
        signal.alarm(SECONDS)

    def __exit__(self, kind: Any, *_: object) -> bool:
        signal.alarm(0)
        return kind is not None and issubclass(kind, _TooLongError)


def _line(findings: Findings, op: OpOverload) -> dict[str, Any]:
    return {
        "op": op.name(),
        "calls": findings.calls.get(op, 0),
        "wrong": list(findings.wrong.get(op, {})),
        "facts": list(findings.facts.get(op, {})),
        "opaque": profile(op).opaque,
    }


def main() -> None:
    """Write what was seen."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1, help="look at every n-th operator only")
    parser.add_argument("--samples", type=int, default=3, help="samples of torch for one operator and dtype")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    findings = Findings()
    start = options.seed % options.every
    sweep_samples(findings, sample_infos()[start :: options.every], options.samples)
    with options.out.open("a") as lines:
        for op in sorted(findings.calls, key=lambda op: op.name()):
            lines.write(json.dumps(_line(findings, op)) + "\n")
    chosen = [op for op in operators()[start :: options.every] if op.namespace not in NEVER]
    sweep_schemas(findings, chosen, options.seed, options.out)


if __name__ == "__main__":
    main()
