"""The training steps of the planner's benchmarks: graph, cluster, and the cache of captured graphs.

    from scenarios import SCENARIOS, capture
    scenario = SCENARIOS["fsdp-x8-nvlink"]
    module, cluster = capture(scenario, layers=4), scenario.cluster()

A capture takes seconds to minutes, so each graph is kept under `.benchmarks/graphs`. The key is the scenario and a
digest of the zoo and of torch's version, so a changed zoo is captured again. Run as a command, this module fills the
folder:

    python benchmarks/scenarios.py --layers 4 32 [--parts joint] [--scenarios ddp-x8-nvlink,...]
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.fx import GraphModule

import weft
from weft.frontends import archive
from weft.frontends.capture import Part

HERE = Path(__file__).parent
GRAPHS = HERE.parent / ".benchmarks" / "graphs"
SOURCES = "zoo/**/*.py"
"""Files that the digest covers, relative to the package. Delete the folder if capture itself changes."""


@dataclass(frozen=True)
class Scenario:
    """A model, how it is spread, and the wire between nodes."""

    name: str
    parallel: str
    mesh: tuple[tuple[str, int], ...]
    wire: str
    """The name of a file in `clusters`. Groups of up to eight consecutive ranks stay on NVLink."""
    batch: int = 1
    """Sequences per data-parallel rank."""
    model: str = "llama-8b"
    reduce: str = "f32"
    """The dtype in which gradients are scattered or summed."""

    @property
    def layers(self) -> int:
        """Those that the peer's figures are for."""
        return 16 if self.parallel == "ddp" else 32

    def cluster(self, with_overlap_costs: bool = False) -> weft.Cluster:
        """The machine, on request with launch gap and overlap slowdown."""
        return weft.Cluster.load(
            HERE / "clusters" / f"{self.wire}{'-overlap' if with_overlap_costs else ''}.toml",
        )


REDUCE = {"f32": torch.float32, "bf16": torch.bfloat16}


def _scenario(
    name: str, parallel: str, wire: str, batch: int, model: str = "llama-8b", reduce: str = "f32", **mesh: int
) -> Scenario:
    return Scenario(name, parallel, tuple(mesh.items()), wire, batch, model, reduce)


_ALL = (
    # The six of the peer's figures.
    _scenario("ddp-x8-nvlink", "ddp", "infiniband", 1, dp=8),
    _scenario("ddp-x512-ib", "ddp", "infiniband", 4, dp=512),
    _scenario("fsdp-x8-nvlink", "fsdp", "infiniband", 1, dp=8),
    _scenario("fsdp-x512-ib", "fsdp", "infiniband", 4, dp=512),
    _scenario("tp-x8-nvlink", "tp", "infiniband", 1, tp=8),
    _scenario("fsdp-x64-tp-x8", "fsdp-tp", "infiniband", 4, dp=64, tp=8),
    # Other sizes and wires.
    _scenario("ddp-x64-ib", "ddp", "infiniband", 1, dp=64),
    _scenario("fsdp-x64-ib", "fsdp", "infiniband", 1, dp=64),
    _scenario("fsdp-x8-tp-x8", "fsdp-tp", "infiniband", 1, dp=8, tp=8),
    _scenario("hsdp-x64", "hsdp", "infiniband", 1, replicate=8, shard=8),
    _scenario("hsdp-x512", "hsdp", "infiniband", 4, replicate=64, shard=8),
    _scenario("moe-x8", "ep-fsdp", "infiniband", 1, "moe-8x7b", dp=1, ep=8),
    _scenario("moe-x64", "ep-fsdp", "infiniband", 1, "moe-8x7b", dp=8, ep=8),
    _scenario("moe-x512", "ep-fsdp", "infiniband", 4, "moe-8x7b", dp=64, ep=8),
    # Gradients scattered in bf16: half of the bytes behind each product.
    _scenario("fsdp-x8-nvlink-bf16", "fsdp", "infiniband", 1, reduce="bf16", dp=8),
    _scenario("fsdp-x512-ib-bf16", "fsdp", "infiniband", 4, reduce="bf16", dp=512),
    _scenario("fsdp-x64-tp-x8-bf16", "fsdp-tp", "infiniband", 4, reduce="bf16", dp=64, tp=8),
    # A slow wire.
    _scenario("ddp-x64-ethernet", "ddp", "ethernet", 4, dp=64),
    _scenario("fsdp-x64-ethernet", "fsdp", "ethernet", 4, dp=64),
    _scenario("fsdp-x512-ethernet", "fsdp", "ethernet", 4, dp=512),
    _scenario("fsdp-x64-tp-x8-ethernet", "fsdp-tp", "ethernet", 4, dp=64, tp=8),
    _scenario("hsdp-x64-ethernet", "hsdp", "ethernet", 4, replicate=8, shard=8),
    _scenario("moe-x64-ethernet", "ep-fsdp", "ethernet", 1, "moe-8x7b", dp=8, ep=8),
)
SCENARIOS = {scenario.name: scenario for scenario in _ALL}
BASELINE = tuple(SCENARIOS)[:6]
"""Those that the peer's figures exist for."""
PREPARED = (*BASELINE, "hsdp-x64", "moe-x64")


def capture(scenario: Scenario, layers: int, part: Part = "joint") -> GraphModule:
    """The graph of a scenario: from the folder of graphs, else captured and kept there."""
    path = path_of(scenario, layers, part)
    if not path.exists():
        _keep(scenario, layers, part, path)
    return archive.load(path)


def _keep(scenario: Scenario, layers: int, part: Part, path: Path) -> None:
    module = weft.zoo.load(
        scenario.model,
        parallel=scenario.parallel,
        mesh=dict(scenario.mesh),
        layers=layers,
        part=part,
        batch=scenario.batch,
        reduce_dtype=REDUCE[scenario.reduce],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    archive.save(module, path)


def path_of(scenario: Scenario, layers: int, part: Part = "joint") -> Path:
    """Where the graph of a scenario is kept. The wire is no part of it: scenarios that differ in it alone share it."""
    mesh = "-".join(f"{axis}{size}" for axis, size in scenario.mesh)
    reduce = "" if scenario.reduce == "f32" else f"-{scenario.reduce}"
    what = f"{scenario.model}-{scenario.parallel}-{mesh}-b{scenario.batch}{reduce}-l{layers}-{part}"
    return GRAPHS / f"{what}-{_sources_digest()}.weft"


@functools.cache
def _sources_digest() -> str:
    root = Path(weft.__file__).parent
    found = hashlib.sha256(str(torch.__version__).encode())
    for path in sorted(root.glob(SOURCES)):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", default=",".join(PREPARED), help="names, separated by commas; all for all")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--parts", default="joint")
    options = parser.parse_args()
    names = list(SCENARIOS) if options.scenarios == "all" else options.scenarios.split(",")
    for layers in options.layers:
        for part in options.parts.split(","):
            for name in names:
                start = time.perf_counter()
                module = capture(SCENARIOS[name], layers, part)
                seconds = time.perf_counter() - start
                print(f"{name:24} {layers:>4} {part:9} {len(module.graph.nodes):>7} nodes {seconds:6.1f} s", flush=True)


if __name__ == "__main__":
    main()
