"""Check the private and version-dependent names that Weft uses against the torch that is installed.

    python tools/check_torch.py [--json]

Reads `weft/compat` as text, looks every torch name in them up, and lists the schemas of the collectives. Exit status
1: a name that Weft cannot do without is missing. Run it with the interpreter of each torch that you care about.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

SOURCE = Path(__file__).parents[1] / "src" / "weft"
OPTIONAL = {"isend", "irecv", "batch_p2p_ops", "wait_tensors"}
"""Operators that some versions do not have; Weft then has no name for them."""


@dataclass(frozen=True)
class Finding:
    name: str
    where: str
    found: str
    """What is there: a schema, `yes`, or `missing`."""
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


def check_names() -> list[Finding]:
    files = sorted((SOURCE / "compat").glob("*.py"))
    findings: dict[str, Finding] = {}
    for path in files:
        for name, line, guarded in names_in(path):
            found = "yes" if look_up(name) else "missing"
            findings.setdefault(name, Finding(name, f"compat/{path.name}:{line}", found, not guarded))
    return [findings[name] for name in sorted(findings)]


def check_operators() -> list[Finding]:
    from weft.compat import FUNCTIONAL, find_op, schema_of
    from weft.graph.ops import ROWS, WAITS

    findings = []
    for row in [row for row, _, _ in ROWS] + [row for row, _ in WAITS]:
        op = find_op(FUNCTIONAL, row, "default")
        schema = "missing" if op is None else str(schema_of(op)).partition("::")[2]
        findings.append(Finding(f"{FUNCTIONAL}.{row}", "graph/ops.py", schema, row not in OPTIONAL))
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    findings = check_names()
    broken = [finding for finding in findings if finding.needed and finding.found == "missing"]
    if not broken:
        findings += check_operators()
        broken = [finding for finding in findings if finding.needed and finding.found == "missing"]
    if options.json:
        print(json.dumps({"torch": torch.__version__, "findings": [asdict(f) for f in findings]}, indent=1))
    else:
        print(f"torch {torch.__version__}: {len(findings)} names, {len(broken)} needed ones missing")
        for finding in findings:
            if finding.found != "yes":
                need = "" if finding.needed else "  (optional)"
                print(f"  {finding.name}  {finding.where}: {finding.found}{need}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
