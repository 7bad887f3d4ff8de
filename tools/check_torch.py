"""Check the private and version-dependent torch names that Weft uses against the installed torch or a wheel.

    python tools/check_torch.py [--json] [--wheel torch-2.14.1-....whl]

Reads `weft/compat` as text, looks every torch name in it up, and lists the schemas of the collectives. Exit status 1: a
required name is missing. Run it with the interpreter of each torch version of interest. A wheel is only read, so it
shows less: no names that are created at run time.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.torch_wheel import Wheel

SOURCE = Path(__file__).parents[1] / "src" / "weft"
OPTIONAL = {"isend", "irecv", "batch_p2p_ops", "wait_tensors"}
"""Operators that some versions lack; Weft has no name for them there."""
INDUCTOR_SETTINGS = ("post_grad_custom_post_pass", "reorder_for_peak_memory", "use_post_grad_passes")


@dataclass(frozen=True)
class Finding:
    name: str
    where: str
    found: str
    """The result: a schema, `yes`, `missing`, or `unreadable` in a wheel."""
    needed: bool


def names_in(path: Path) -> Iterator[tuple[str, int, bool]]:
    """Torch names with a private part: (dotted name, line, whether the code does without it)."""
    tree = ast.parse(path.read_text())
    guarded = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.Try) or (isinstance(node, ast.With) and "suppress" in ast.unparse(node.items[0]))
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno, node in guarded
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch."):
                    yield alias.name, node.lineno, node in guarded
        elif isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if dotted.startswith("torch._") and dotted.replace(".", "").replace("_", "").isalnum():
                yield dotted, node.lineno, node in guarded
        elif isinstance(node, ast.FunctionDef):
            yield from _names_through_imports(node, guarded)


def _names_through_imports(function: ast.FunctionDef, guarded: set[ast.AST]) -> Iterator[tuple[str, int, bool]]:
    """Attributes of names that a function imports: `home.CustomGraphPass`."""
    origins = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch"
        for alias in node.names
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in origins:
            yield f"{origins[node.value.id]}.{node.attr}", node.lineno, node in guarded


def look_up(name: str) -> bool:
    """Whether the installed torch has a dotted name."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def look_up_installed(name: str) -> str:
    return "yes" if look_up(name) else "missing"


def check_names(look: Callable[[str], str] = look_up_installed) -> list[Finding]:
    findings: dict[str, Finding] = {}
    for path in sorted((SOURCE / "compat").glob("*.py")):
        for name, line, guarded in names_in(path):
            findings.setdefault(name, Finding(name, f"compat/{path.name}:{line}", look(name), not guarded))
    return [findings[name] for name in sorted(findings)]


def check_settings(look: Callable[[str], str] = look_up_installed) -> list[Finding]:
    """Settings of the compilers, which are named by strings."""
    from weft.compat.compilers import OVERLAP_SETTINGS, RIVAL_SETTINGS, SCHEDULER_PASS

    needed = [f"torch._inductor.config.{name}" for name in (SCHEDULER_PASS, *INDUCTOR_SETTINGS)]
    optional = [f"torch._inductor.config.{name}" for name in (*OVERLAP_SETTINGS, *RIVAL_SETTINGS)]
    needed.append("torch._dynamo.config.optimize_ddp")
    return [Finding(name, "frontends", look(name), name in needed) for name in needed + optional]


def schema_installed(row: str) -> str:
    from weft.compat import FUNCTIONAL, find_op, schema_of

    op = find_op(FUNCTIONAL, row, "default")
    return "missing" if op is None else str(schema_of(op)).partition("::")[2]


def operators() -> list[str]:
    from weft.graph.ops import ROWS, WAITS

    return [row for row, _, _ in ROWS] + [row for row, _ in WAITS]


def check_operators(schema: Callable[[str], str] = schema_installed) -> list[Finding]:
    from weft.compat import FUNCTIONAL

    return [Finding(f"{FUNCTIONAL}.{row}", "graph/ops.py", schema(row), row not in OPTIONAL) for row in operators()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--wheel", type=Path, help="read this wheel instead of the installed torch")
    options = parser.parse_args()
    if options.wheel:
        wheel = Wheel(options.wheel)
        version, schemas = wheel.version, wheel.schemas(operators())
        findings = [*check_names(wheel.look_up), *check_settings(wheel.look_up)]
        findings += check_operators(lambda row: schemas.get(row, "missing"))
    else:
        version, findings = torch.__version__, check_names()
        if not any(finding.needed and finding.found == "missing" for finding in findings):
            findings += check_settings() + check_operators()  # these import Weft, which needs all those names
    broken = [finding for finding in findings if finding.needed and finding.found == "missing"]
    if options.json:
        print(json.dumps({"torch": version, "findings": [asdict(f) for f in findings]}, indent=1))
    else:
        print(f"torch {version}: {len(findings)} names, {len(broken)} needed ones missing")
        for finding in findings:
            if finding.found != "yes":
                need = "" if finding.needed else "  (optional)"
                print(f"  {finding.name}  {finding.where}: {finding.found}{need}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
