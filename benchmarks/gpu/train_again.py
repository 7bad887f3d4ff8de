"""Predict the rows of a file of `train.py` again, without a GPU, after the model of time has changed.

Contract: graphs are captured again and planned on the cluster that the file holds, as in the run. A stored device
without kernel constants is replaced by the part of the machine's preset that each rank has.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule
from train_predict import EXECUTIONS, GRAPHS, executed, part_of, predictions, preset_of

import weft
from weft import zoo
from weft.cost.cluster import Cluster
from weft.frontends.min_cut import Partition
from weft.prediction.error_bars import RESIDUALS, StepKind, is_host_bound, write_residuals

RECORDED = "ranks on one GPU"
"""The name of this set among the recorded residuals."""
VOCABULARY = 8192
"""Of files that do not state it."""


def model_shape(parallel: str, ranks: int, shape: Mapping[str, int], sequence: int, vocabulary: int) -> dict[str, int]:
    """The model and the `batch` of each rank; `tokens` of the given shape are those of all ranks."""
    found = dict(shape)
    tokens = found.pop("tokens") // {"tp": 1, "fsdp-tp": max(ranks // 2, 1)}.get(parallel, ranks)
    sequence = min(sequence, tokens)
    found |= {"num_kv_heads": found["num_heads"], "sequence": sequence, "vocabulary": vocabulary}
    return found | {"batch": max(1, tokens // sequence)}


@dataclass(frozen=True)
class StoredJob:
    """The graphs of one parallelism and number of ranks, captured without a GPU."""

    parallel: str
    ranks: int
    shape: Mapping[str, int]
    """The model, with `batch`."""
    reduce: str
    stored: Cluster
    """The cluster that the run planned on."""
    described: Cluster
    """The cluster to predict on."""

    def captured(self, partition: Partition, part: Any = "joint") -> GraphModule:
        """A graph of the step."""
        shape: dict[str, Any] = dict(self.shape)
        is_mesh = self.parallel == "fsdp-tp"
        return zoo.load(
            "llama-debug",
            self.parallel,
            None if is_mesh else self.ranks,
            part=part,
            layers=shape.pop("num_layers"),
            batch=shape.pop("batch"),
            mesh={"dp": self.ranks // 2, "tp": 2} if is_mesh else None,
            partition=partition,
            reduce_dtype=torch.bfloat16 if self.reduce == "bf16" else torch.float32,
            **shape,
        )

    @cached_property
    def joint(self) -> GraphModule:
        return self.captured("autograd")

    def predicted(self, name: str) -> dict[str, Any] | None:
        """The prediction for a variant; None if what it executes is not known."""
        if name not in EXECUTIONS:
            return None
        execution = EXECUTIONS[name]
        if name in GRAPHS:
            planned = weft.optimize(self.joint, self.stored.running("eager"), pipeline=GRAPHS[name])
            return predictions(planned.module, self.described, execution)
        if name.startswith("weft"):
            device = replace(self.stored.device, fuses=execution != "eager")
            halves = [self.captured("min-cut", part) for part in ("forward", "backward")]
            planned = [weft.optimize(half, replace(self.stored, device=device)).module for half in halves]
            return predictions(planned, self.described, execution)
        module = executed(
            name, self.parallel, lambda partition: self.joint if partition == "autograd" else self.captured(partition)
        )
        return None if module is None else predictions(module, self.described, execution)


def cluster_of(found: dict[str, Any], parallel: str, ranks: int, what: str) -> Cluster | None:
    """The cluster that a job was planned on: that of the job, else one of as many ranks; None without one."""
    clusters: dict[str, Any] = {key: each for key, each in found["clusters"].items() if "toml" in each}
    label = f"{parallel}:{ranks}:{what}"
    names = [key for key in clusters if key == label] or [key for key in clusters if clusters[key]["ranks"] == ranks]
    name = next((key for key in names if what in key), names[0] if names else None)
    return None if name is None else Cluster.read(name, clusters[name]["toml"].encode())


def stored_job(found: dict[str, Any], parallel: str, ranks: int, what: str) -> StoredJob | None:
    """A job of a file; None if its cluster was not measured."""
    cluster = cluster_of(found, parallel, ranks, what)
    if cluster is None:
        return None
    shapes = found["shapes"]
    shape = shapes.get(parallel) or shapes["all"]
    model = model_shape(parallel, ranks, shape, found["sequence"], found.get("vocabulary", VOCABULARY))
    described, preset = cluster, preset_of(found["machine"])
    if not cluster.device.kernel_us and preset is not None:
        slowdowns = {name: getattr(cluster.device, name) for name in ("overlap_slowdown", "collective_slowdown")}
        described = replace(cluster, device=replace(part_of(preset, ranks), **slowdowns))
    return StoredJob(parallel, ranks, model, found["reduce"], cluster, described)


AGAIN = {
    "predicted_ms": "again_ms",
    "predicted_exposed_ms": "again_exposed_ms",
    "predicted_host_ms": "again_host_ms",
}
"""Where a row keeps what is predicted again; what the run itself predicted stays."""


def predict_again(found: dict[str, Any], patterns: Sequence[str]) -> None:
    """Print measured and predicted times of the rows of the chosen jobs, and keep them in the rows."""
    jobs: dict[tuple[str, int, str], StoredJob | None] = {}
    for row in found["rows"]:
        name, what = row["variant"], "graph" if row["variant"] in GRAPHS else "step"
        key = row["parallel"], row["ranks"], "cudagraphs" if "cudagraphs" in name else what
        label = ":".join(map(str, key))
        if "step_ms" not in row or not any(fnmatch.fnmatch(label, pattern) for pattern in patterns):
            continue
        if key not in jobs:
            jobs[key] = stored_job(found, *key)
        job = jobs[key]
        told = job.predicted(name) if job is not None else None
        row |= {key: round(told[of], 3) for of, key in AGAIN.items()} if told is not None else {}
        print(f"{row['parallel']:8} {row['ranks']} {name:31} {_compared(row, told)}", flush=True)


def record(files: Iterable[tuple[str, dict[str, Any]]], path: Path = RESIDUALS) -> None:
    """Write the errors of all rows that were predicted again to the file that error bars come from."""
    made: list[dict[str, Any]] = []
    for name, found in files:
        device = preset_of(found["machine"])
        for row in found["rows"]:
            if device is None or "again_ms" not in row:
                continue
            kind = StepKind(
                device.name,
                row["parallel"],
                EXECUTIONS[row["variant"]],
                is_host_bound(row["again_host_ms"], row["again_ms"]),
            )
            label = f"{name}:{row['parallel']}:{row['ranks']}:{row['variant']}"
            error = round(row["again_ms"] / row["step_ms"] - 1, 4)
            made.append({"set": RECORDED, "row": label, **asdict(kind), "step": error})
    write_residuals(path, RECORDED, made)


def _compared(row: dict[str, Any], told: dict[str, Any] | None) -> str:
    parts = f"measured {row['step_ms']:7.1f} ms"
    if told is None:
        return f"{parts}, not predicted"
    off = (told["predicted_ms"] / row["step_ms"] - 1) * 100
    return (
        f"{parts}, predicted {told['predicted_ms']:7.1f} ms, {off:+5.1f} %; compute "
        f"{row.get('compute_ms') or 0:6.1f} and {told['predicted_compute_ms']:6.1f}, exposed "
        f"{row.get('exposed_ms') or 0:6.1f} and {told['predicted_exposed_ms']:6.1f}"
    )
