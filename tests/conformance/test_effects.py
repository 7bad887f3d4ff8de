"""Weft's beliefs about operators, compared with what the operators of this torch do when they run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.exceptions import REVIEWED
from tests.conformance.observe import misjudged, observe
from tests.conformance.samples import operators

ROOT = Path(__file__).parents[2]
SEED = 7


@dataclass(frozen=True)
class Sweep:
    """What was seen of each operator, by its name."""

    found: dict[str, dict[str, Any]]

    @property
    def called(self) -> dict[str, dict[str, Any]]:
        return {name: line for name, line in self.found.items() if line.get("calls")}

    @property
    def misjudged(self) -> set[tuple[str, str]]:
        return {(name, what) for name, line in self.found.items() for what in line.get("wrong", ())}

    def __str__(self) -> str:
        missing = Counter(name.partition("::")[0] for name in self.found.keys() - self.called.keys())
        without = ", ".join(f"{namespace} {num}" for namespace, num in sorted(missing.items()))
        return f"operators: {len(self.called)} of {len(self.found)} called; not coverable here: {without}"


def sweep(folder: Path, every: int, seed: int) -> Sweep:
    out = folder / "seen.jsonl"
    command = [sys.executable, "-m", "tests.conformance.sweep", f"--every={every}", f"--seed={seed}", f"--out={out}"]
    subprocess.run(command, check=True, cwd=ROOT)
    found: dict[str, dict[str, Any]] = {}
    for line in map(json.loads, out.read_text().splitlines()):
        found.setdefault(line["op"], {}).update(line)
    return Sweep(found)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    return sweep(tmp_path_factory.mktemp("effects"), every=1, seed=0)


@pytest.mark.slow
def test_no_operator_of_a_sample_does_more_than_weft_believes(tmp_path: Path):
    seen = sweep(tmp_path, every=80, seed=SEED)
    assert len(seen.called) > 20, str(seen)
    assert seen.misjudged <= REVIEWED.keys()


@pytest.mark.long
@pytest.mark.timeout(1800)  # the sweep itself: four minutes of one core
def test_no_operator_does_more_than_weft_believes(everything: Sweep):
    print(everything)
    assert len(everything.called) > 2200, str(everything)
    assert everything.misjudged == REVIEWED.keys()


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape)


HIDDEN: dict[str, tuple[tuple[Any, ...], set[str]]] = {
    "aten.native_batch_norm.default": (
        (torch.rand(2, 3), None, None, ones(3), ones(3), True, 0.1, 1e-5),
        {"running_mean", "running_var"},
    ),
    "aten.batch_norm.default": (
        (torch.rand(2, 3), None, None, ones(3), ones(3), True, 0.1, 1e-5, False),
        {"running_mean", "running_var"},
    ),
    "aten.instance_norm.default": (
        (torch.rand(2, 3, 4), None, None, ones(3), ones(3), True, 0.1, 1e-5, False),
        {"running_mean", "running_var"},
    ),
    "aten.batch_norm_update_stats.default": (
        (torch.rand(2, 3), ones(3), ones(3), 0.1),
        {"running_mean", "running_var"},
    ),
    "inductor.resize_storage_bytes_.default": ((ones(4), 64), {"variable"}),
    "fsdp.all_gather_copy_in.default": (([ones(2), ones(2)], torch.zeros(8), [2, 2], 4, 1), {"all_gather_output"}),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_write_that_the_schema_hides_is_seen_and_believed(name: str):
    operators()
    namespace, packet, overload = name.split(".")
    op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    args, written = HIDDEN[name]
    seen = observe(op, args, {})
    declared = {a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert seen.written == written
    assert not written & declared
    assert list(misjudged(op, seen)) == []


def test_the_covariance_of_one_weighted_observation_writes_what_it_is_given():
    op = torch.ops.aten.cov.default
    seen = observe(op, (torch.rand(1),), {"aweights": torch.rand(1)})
    assert seen.written == {"self"}
    assert list(misjudged(op, seen)) == []
