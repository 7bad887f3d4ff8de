"""`weft simulate --as`: a captured step as a runtime executes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import Result

Weft = Callable[..., Result]
STEP = "tests/graphs/llama-debug-fsdp.txt"


def record(weft: Weft, *arguments: str) -> dict[str, Any]:
    done = weft("simulate", str(Path(__file__).parents[3] / STEP), "--cluster", "h100-8", "--json", *arguments)
    assert done.exit_code == 0
    return json.loads(done.stdout)


def test_the_record_names_the_runtime_and_notes_missing_modules(weft: Weft):
    captured, fsdp2 = record(weft), record(weft, "--as", "fsdp2")
    assert (captured["runtime"], fsdp2["runtime"]) == ("synchronous", "fsdp2")
    assert len(set(fsdp2["notes"]).difference(captured["notes"])) == 1
    assert fsdp2["step_us"] < captured["step_us"]
    assert record(weft, "--as", "synchronous") == captured


def test_the_table_says_what_was_emulated(weft: Weft):
    done = weft("simulate", str(Path(__file__).parents[3] / STEP), "--cluster", "h100-8", "--as", "ddp")
    assert done.stdout.startswith("as DDP: ")


def test_an_unknown_runtime_is_a_mistake_of_usage(weft: Weft):
    done = weft("simulate", str(Path(__file__).parents[3] / STEP), "--as", "fsdp")
    assert done.exit_code == 2
    assert "fsdp2" in done.stderr
