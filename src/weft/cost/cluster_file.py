"""Read clusters: TOML files, and presets made of a device file and a name such as `h100-8x8`.

    name = "two-boxes"
    num_nodes = 2
    ranks_per_node = 8

    [[levels]]                  # innermost first
    name = "nvlink"
    spans = "node"              # "node", "cluster", or a number of consecutive ranks
    latency = "8.4 us"
    hop = "3.4 us"              # for each step around a ring; default 0
    bandwidth = "370 GB/s"      # that one rank sends; or "2960 Gbit/s"
    by_ranks = { 2 = "270 GB/s" }       # of groups of at most this many ranks, where they differ
    rails = false               # true: gathers, scatters and all-reduces use the links of all ranks of a block at once
    min_saturating_bytes = 0    # fewer bytes than this never saturate the level

    [levels.all_reduce]         # for kinds of collectives that differ; missing values are as above
    bandwidth = "480 GB/s"

    [levels.symmetric]          # copies through symmetric memory; leave it out if the ranks cannot share memory
    latency = "5 us"            # a barrier between the ranks
    hop = "7 us"                # one copy
    bandwidth = "332 GB/s"
    sm_share = 0.0              # share of the multiprocessors that the copies occupy; 0: copy engines make them
    slowdown = 0.1              # share by which products of a fused operator slow while its copies run; default 0

    [device]                    # the device of every rank; everything is optional
    name = "H100 SXM"
    peak_tflops = { bf16 = 989.0, f32 = 67.0 }
    memory = "80 GB"
    memory_bandwidth = "3350 GB/s"
    launch_gap = "2 us"         # between two kernels; default 0
    overlap_slowdown = 0.2      # share by which compute slows while a collective runs; default 0
    collective_slowdown = 0.1   # share by which collectives slow while compute runs; default 0
    matmul_efficiency = 0.7     # the share of the peak that large products reach
    fuses = false               # no compiler fuses chains of pointwise operators; default true
    memory_efficiency = 0.9     # the share of the memory bandwidth that long kernels reach; default 1
    kernel_us = 1.1             # time that each kernel takes to start and finish; default 0
    product_overhead_terms = 150    # a product of k terms takes as long as k + 150 at the full rate; default 0
    power_headroom = 0.4        # products speed up by 0.4 x the share of time that other kernels take; default 0
    num_multiprocessors = 132   # small products occupy only some of them; default: unknown

    [device.attention.cudnn]    # rates of attention kernels; the first is the default; none: priced as products
    forward = { tflops = 690.0, half_positions = 500, half_blocks = 180, narrow = 0.73 }
    backward = { tflops = 590.0, half_positions = 980, half_blocks = 125, narrow = 0.8 }

    [device.host]               # what the host takes to issue work, for predictions of eager and compiled steps
    operator_us = 10.0          # one operator of eager execution
    view_us = 3.0
    policy_us = 14.0            # in addition for each of them under a checkpointing policy, which is Python; default: 0
    launch_us = 8.0             # one kernel of a compiled graph
    collective_us = 30.0
    optimizer_us = 1.0          # one operator for one tensor of an optimizer over lists of tensors

    [device.host_memory]        # pinned host memory for offloaded values; without it, nothing is offloaded
    bandwidth = "55 GB/s"       # of copies, in each direction
    latency = "10 us"           # of one copy; default 0
    limit = "100 GB"            # for each rank

    [[tables]]                  # measured times take precedence over all of the above
    kind = "all_gather"
    num_ranks = 8
    input_bytes = [4096, 4194304]        # bytes that one rank passes in
    us = [30.0, 120.0]
    level = "nvlink"            # where it was measured; optional

Older files have the unit in the key: `bandwidth_gbps = 370.0` (1e9 bytes per second), `latency_us`, `memory_bytes`.
They load with a warning. A file may name a preset and state only what differs; it finds levels by their names:

    base = "h100-16x8"
    name = "ours"

    [[levels]]
    name = "infiniband"
    bandwidth = "25 GB/s"
    rails = true

Presets also have a section `[nccl]`: the parameters of a GPU in NCCL's own cost model (`communication.py`).

Contract: a file is data, nothing in it is executed. One ClusterError lists all faults of a file with their paths.
"""

from __future__ import annotations

import functools
import itertools
import re
import tomllib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from weft.cost.communication import Nccl
from weft.cost.device import MATMUL_EFFICIENCY, Device, HostMemory
from weft.cost.kernels import AttentionKernel, AttentionRate, HostTimes
from weft.cost.levels import Level, Link, Transport
from weft.cost.measured_table import Table
from weft.cost.stated_quantities import converted, without_units
from weft.errors import ClusterError, ClusterWarning, compose, nearest
from weft.graph.ops import Kind
from weft.quantities import size_text

MAX_BYTES = 1 << 20
PRESET = re.compile(r"([a-z0-9]{1,40}(?:-(?:[a-z][a-z0-9]{0,40}|\d{1,4}w))?)-(?:(\d{1,6})x)?(\d{1,6})")
PRESET_NODES = (1, 8, 32)
"""Numbers of nodes that a list of presets shows; any other is accepted, too."""

Count = Annotated[int, Field(ge=1, le=1_000_000)]
Name = Annotated[str, Field(min_length=1, max_length=80, pattern=r"^[\w.-]*$")]
Microseconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
"""At most eleven days: longer times overflow when multiplied by numbers of ranks and bytes."""
Gbps = Annotated[float, Field(ge=1e-6, le=1e12, allow_inf_nan=False)]
"""At least a thousand bytes per second: slower rates round to zero in the integers of the model."""
Tflops = Annotated[float, Field(ge=1e-6, le=1e12, allow_inf_nan=False)]
"""At least a million operations per second, for the same reason."""
ByNodes = Annotated[list[Gbps], Field(min_length=3, max_length=3)]
ByRanks = dict[Annotated[str, Field(pattern=r"^[1-9]\d{0,6}$")], Gbps]
"""Bandwidths by number of ranks; TOML has no numbers as keys."""
KindName = Literal[
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "send",
    "recv",
    "batch_p2p",
    "barrier",
]

EXPECTED = {
    "name": "expected up to 80 letters, digits, dots and dashes",
    "spans": "expected 'node', 'cluster' or a number of ranks",
}
SHOWN = 80
"""Characters of a wrong value that an error shows."""


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class OverrideTable(_Table):
    """The link of a kind of collective that differs from the rest."""

    latency_us: Microseconds | None = None
    hop_us: Microseconds | None = None
    bandwidth_gbps: Gbps | None = None
    by_ranks: ByRanks | None = None


class SymmetricTable(OverrideTable):
    """Copies through symmetric memory; the level gives the missing values."""

    sm_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    slowdown: Annotated[float, Field(ge=0, le=10)] = 0.0


class LevelTable(_Table):
    """One level."""

    name: Name
    spans: Literal["node", "cluster"] | Count
    wire: Literal["nvlink", "pci", "network"] | None = None
    rails: bool = False
    min_saturating_bytes: Annotated[int, Field(ge=0)] = 0
    latency_us: Microseconds
    hop_us: Microseconds = 0.0
    bandwidth_gbps: Gbps
    by_ranks: ByRanks = {}
    all_gather: OverrideTable | None = None
    reduce_scatter: OverrideTable | None = None
    all_reduce: OverrideTable | None = None
    all_to_all: OverrideTable | None = None
    broadcast: OverrideTable | None = None
    send: OverrideTable | None = None
    recv: OverrideTable | None = None
    batch_p2p: OverrideTable | None = None
    barrier: OverrideTable | None = None
    symmetric: SymmetricTable | None = None


class PeakTable(_Table):
    """Dense peaks of a device by dtype."""

    bf16: Tflops | None = None
    f16: Tflops | None = None
    f32: Tflops | None = None
    tf32: Tflops | None = None
    f64: Tflops | None = None
    fp8: Tflops | None = None
    int8: Tflops | None = None


class AttentionRateTable(_Table):
    """The rate of an attention kernel in one direction."""

    tflops: Tflops
    half_positions: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    half_blocks: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    narrow: Annotated[float, Field(gt=0, le=1)] = 1.0


class AttentionTable(_Table):
    """An attention kernel."""

    forward: AttentionRateTable
    backward: AttentionRateTable


class HostTable(_Table):
    """Times that the host takes to issue work."""

    operator_us: Microseconds = 0.0
    view_us: Microseconds = 0.0
    policy_us: Microseconds = 0.0
    launch_us: Microseconds = 0.0
    collective_us: Microseconds = 0.0
    optimizer_us: Microseconds = 0.0


class HostMemoryTable(_Table):
    """Pinned host memory for offloaded values, and the link to it."""

    bandwidth_gbps: Gbps
    latency_us: Microseconds = 0.0
    limit_bytes: Annotated[int, Field(ge=0)]


class DeviceTable(_Table):
    """The device of every rank."""

    name: Annotated[str, Field(max_length=80)] = ""
    peak_tflops: PeakTable = PeakTable()
    memory_gbps: Gbps | None = None
    memory_bytes: Annotated[int, Field(ge=1)] | None = None
    launch_gap_us: Microseconds = 0.0
    overlap_slowdown: Annotated[float, Field(ge=0, le=10)] = 0.0
    collective_slowdown: Annotated[float, Field(ge=0, le=10)] = 0.0
    matmul_efficiency: Annotated[float, Field(gt=0, le=1)] = MATMUL_EFFICIENCY
    fuses: bool = True
    memory_efficiency: Annotated[float, Field(gt=0, le=1)] = 1.0
    kernel_us: Microseconds = 0.0
    product_overhead_terms: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    num_multiprocessors: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    power_headroom: Annotated[float, Field(ge=0, le=1)] = 0.0
    attention: dict[Name, AttentionTable] = {}
    host: HostTable | None = None
    host_memory: HostMemoryTable | None = None
    shared: bool = False
    """The ranks of a node share one device; each gets an equal part of peaks, bandwidth and memory."""


class NcclTable(_Table):
    """Parameters of a GPU in NCCL's cost model."""

    num_channels: Count
    ll_gbps: ByNodes
    ring_ll128_gbps: ByNodes
    tree_ll128_gbps: ByNodes
    tree_simple_gbps: ByNodes
    network_share: Annotated[list[Annotated[float, Field(gt=0, le=1)]], Field(min_length=2, max_length=2)] = [1.0, 1.0]
    network_large_bytes: Annotated[int, Field(ge=0)] = 0
    nvls_gbps: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    nvls_us: Microseconds = 0.0
    nvls_tree_gbps: Annotated[list[Annotated[float, Field(ge=0, le=1e12)]], Field(min_length=2, max_length=2)] = [
        0.0,
        0.0,
    ]
    nvls_tree_hop_us: Microseconds = 0.0


class MeasuredTable(_Table):
    """Measured times of one kind of collective for one number of ranks."""

    kind: KindName
    num_ranks: Annotated[int, Field(ge=2, le=1_000_000)]
    input_bytes: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    us: Annotated[list[Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]], Field(min_length=1)]
    level: Name | None = None


class ClusterTable(_Table):
    """A whole file."""

    name: Name
    num_nodes: Count
    ranks_per_node: Count
    levels: list[LevelTable]
    device: DeviceTable = DeviceTable()
    nccl: NcclTable | None = None
    tables: list[MeasuredTable] = []


_TABLES: Mapping[tuple[str, int], type[_Table]] = {
    ("levels", 3): LevelTable,
    ("levels", 4): OverrideTable,
    ("device", 2): DeviceTable,
    ("device", 3): PeakTable,
    ("device", 4): AttentionTable,
    ("device", 5): AttentionRateTable,
    ("nccl", 2): NcclTable,
    ("tables", 3): MeasuredTable,
}
"""The table that a key belongs to, by the first part and the length of its path; else the whole file."""


class ClusterFields(NamedTuple):
    """The fields of a `Cluster`, as a file or a preset describes them."""

    name: str
    num_nodes: int
    ranks_per_node: int
    levels: tuple[Level, ...]
    device: Device
    nccl: Nccl | None
    tables: tuple[Table, ...]


def load(name_or_path: str | Path) -> ClusterFields:
    """A preset by its name, or the cluster of a file."""
    path = file_of(name_or_path)
    return _preset(str(name_or_path)) if path is None else read(str(name_or_path), _content(path))


def file_of(name_or_path: str | Path) -> Path | None:
    """The file that describes the cluster; None for a preset.

    A Path, a text with a slash, or a name that ends in `.toml` is a file; so is an existing file that is not a preset.
    """
    text = str(name_or_path)
    is_path = isinstance(name_or_path, Path) or "/" in text or "\\" in text or text.endswith(".toml")
    return Path(name_or_path) if is_path or (PRESET.fullmatch(text) is None and Path(text).exists()) else None


def larger(name: str, ranks_per_node: int, num_ranks: int) -> str:
    """The name of a preset with at least `num_ranks` ranks, of the same device if possible."""
    device, size = name.rpartition("-")[0], ranks_per_node
    for larger_name in (f"{device}-{-(-num_ranks // size)}x{size}", f"{device}-1x{num_ranks}"):
        try:
            return _preset(larger_name).name
        except ClusterError:
            continue
    return f"another cluster such as h100-{-(-num_ranks // 8)}x8"


def read(who: str, content: bytes) -> ClusterFields:
    """The cluster that a file's content describes; errors name it `who`."""
    given = _parse(who, content)
    table, faults = converted(given)
    has_units = "base" in given or any("bandwidth" in level for level in _tables(given.get("levels")))
    if "base" in table:
        table = _with_base(who, table)
    made = _build(who, table, faults)
    _check_rates(who, given, made)
    notes = [*_check_between_nodes(who, table, must_state=has_units), *implausible(made)]
    if old := without_units(given):
        place, line = old[0]
        count = "a number has its unit" if len(old) == 1 else f"{len(old)} numbers have their units"
        notes.append(f"{count} only in the key, such as {place}; write {line}")
    for note in notes:
        warnings.warn(f"cluster {who}: {note}", ClusterWarning, stacklevel=3)
    return made


def _check_rates(who: str, given: Mapping[str, Any], made: ClusterFields) -> None:
    """Refuse a number of 1e9 bytes per second that no network reaches: it probably counts bits."""
    levels = _tables(given.get("levels"))
    places = {level["name"]: k for k, level in enumerate(levels) if "bandwidth_gbps" in level}
    faults: list[str] = []
    for level in made.levels:
        gbps = level.link.bandwidth_gbps
        if level.name in places and _is_network(level, made) and gbps > NETWORK_GBPS:
            faults.append(
                f"levels[{places[level.name]}].bandwidth_gbps: {gbps:g} counts 1e9 bytes per second, more than any "
                f'network adapter sends; if {gbps:g} Gbit/s are meant, write bandwidth = "{gbps:g} Gbit/s"'
            )
    if faults:
        raise _refused(who, faults)


def _is_network(level: Level, cluster: ClusterFields) -> bool:
    return level.num_ranks > cluster.ranks_per_node and level.wire != "nvlink"


def _tables(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _with_base(who: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """The table of a preset with the values of this one in place of its own."""
    base = table["base"]
    if not isinstance(base, str):
        raise _refused(who, [f"base: expected the name of a preset such as 'h100-8x8', found {base!r}"])
    merged = preset_table(base)
    levels: list[dict[str, Any]] = merged["levels"]
    names = [level["name"] for level in levels]
    given: Any = table.get("levels", [])
    for k, level in enumerate(given if isinstance(given, list) else []):
        name = level.get("name") if isinstance(level, dict) else None
        if name not in names:
            what = f"levels[{k}].name: {base} has no level called {name!r}; use one of {', '.join(names)}"
            raise _refused(who, [what])
        levels[names.index(name)] = _merged(levels[names.index(name)], level)
    rest = {key: value for key, value in table.items() if key not in ("base", "levels")}
    return _merged(merged, rest)


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The second table over the first; tables inside are merged alike, but `by_ranks`, which is one value."""
    made = dict(first)
    for key, value in second.items():
        inner = made.get(key)
        if isinstance(inner, dict) and isinstance(value, dict) and key != "by_ranks":
            made[key] = _merged(cast(dict[str, Any], inner), cast(dict[str, Any], value))
        else:
            made[key] = value
    return made


def _check_between_nodes(who: str, table: Mapping[str, Any], *, must_state: bool) -> list[str]:
    """Refuse a level between nodes of several ranks that does not say whose bandwidth it states; or a note on it."""
    notes: list[str] = []
    size = table["ranks_per_node"]
    for k, level in enumerate(table["levels"]):
        is_inside = level["spans"] == "node" or (isinstance(level["spans"], int) and level["spans"] <= size)
        if is_inside or size == 1 or table["num_nodes"] == 1 or "rails" in level:
            continue
        what = (
            f"levels[{k}].rails: state it. true: each of the {size} ranks of a node has this "
            "bandwidth to other nodes, and a collective uses all of them; false: one of them at a time"
        )
        if must_state or (size >= MANY_RANKS and level["bandwidth_gbps"] >= SHARED_GBPS):
            raise _refused(who, [what])
        notes.append(f"{what}; it counts as false")
    return notes


NETWORK_GBPS = 100.0
"""More than one rank sends over any network that is sold: 800 Gbit/s are 100e9 bytes."""
NODE_GBPS = 5.0
"""Less than GPUs of one node reach through any bus: four lanes of the third PCIe generation."""
SHARED_GBPS = 25.0
"""Nodes of many ranks with adapters of 200 Gbit/s have several of them: DGX A100 and H100 have one for each GPU."""
MANY_RANKS = 4
"""Fewer ranks of a node may well share an adapter."""


def implausible(cluster: ClusterFields) -> list[str]:
    """Values that are probably meant in another unit, as sentences."""
    found: list[str] = []
    size = cluster.ranks_per_node
    for level in cluster.levels:
        gbps = level.link.bandwidth_gbps
        if level.num_ranks > size >= MANY_RANKS and not level.rails and SHARED_GBPS <= gbps <= NETWORK_GBPS:
            found.append(
                f"the {size} ranks of a node share one adapter of {gbps:g} GB/s on {level.name} (rails = false), which "
                f"leaves {gbps / size:g} GB/s for each if all send; if each rank has an adapter of its own, write "
                "rails = true"
            )
        if _is_network(level, cluster) and gbps > NETWORK_GBPS:
            found.append(
                f"{level.name} carries {gbps:g} GB/s for each rank between nodes, more than 800 Gbit/s; "
                f'if {gbps:g} Gbit/s are meant, write bandwidth = "{gbps:g} Gbit/s"'
            )
        if level.num_ranks <= size and gbps < NODE_GBPS and not cluster.tables:
            found.append(f"{level.name} carries only {gbps:g} GB/s for each rank within a node")
    return found


def presets() -> list[str]:
    """Presets to show in a list."""
    return [name for names in _presets().values() for name in names]


def _presets() -> dict[str, list[str]]:
    """Preset names by device: several numbers of nodes, or of ranks if the device file has no links between nodes."""
    found: dict[str, list[str]] = {}
    for device, content in _devices().items():
        table = _device_table(device, content)
        full = table["ranks_per_node"]
        if any(level["spans"] == "cluster" for level in table["levels"]):
            found[device] = [f"{device}-{nodes}x{full}" for nodes in PRESET_NODES]
        else:
            sizes = {measured["num_ranks"] for measured in table.get("tables", [])} | {full}
            found[device] = [f"{device}-1x{size}" for size in sorted(sizes)]
    return found


def _listed() -> str:
    """One name for each device, for errors."""
    return ", ".join(names[min(1, len(names) - 1)] for names in _presets().values())


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
        do = f"give a TOML file, or a preset: {_listed()}, with any number of nodes"
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ClusterError(compose(f"cluster {path}", f"it cannot be read: {why}", do=do)) from None
    if len(content) > MAX_BYTES:
        raise ClusterError(
            compose(f"cluster {path}", f"it is larger than {size_text(MAX_BYTES)}, too large for a cluster")
        )
    return content


def _parse(who: str, content: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, or a number with thousands of digits
        raise ClusterError(compose(f"cluster {who}", f"it is not valid TOML: {error}")) from None


def _devices() -> dict[str, bytes]:
    """Contents of the device files, by name."""
    files = sorted(resources.files("weft.cost").joinpath("clusters").iterdir(), key=lambda file: file.name)
    return {file.name.removesuffix(".toml"): file.read_bytes() for file in files if file.name.endswith(".toml")}


def _device_table(device: str, content: bytes) -> dict[str, Any]:
    """The table of a device file with the model's keys; tests check that these files have no faults."""
    return converted(_parse(device, content))[0]


@functools.lru_cache(maxsize=16)
def _preset(name: str) -> ClusterFields:
    return _build(repr(name), preset_table(name))


def preset_table(name: str) -> dict[str, Any]:
    """The cluster DEVICE-NODESxRANKS as its file describes it; NODES defaults to 1."""
    devices, found = _devices(), PRESET.fullmatch(name)
    if found is None or found[1] not in devices:
        known = [*presets(), *(f"{device}-8" for device in devices)]
        do = "\n".join(filter(None, [nearest(name, known), f"presets: {_listed()}, with any number of nodes"]))
        raise ClusterError(compose("cluster", f"no cluster is called {name!r}", do=do))
    device, num_nodes, ranks_per_node = found[1], int(found[2] or 1), int(found[3])
    table = _device_table(device, devices[device])
    if ranks_per_node > table["ranks_per_node"]:
        what = f"it asks for {ranks_per_node} ranks per node, but a node of {device} has {table['ranks_per_node']}"
        raise ClusterError(compose(f"cluster {name!r}", what, do=f"write {device}-NODESx{table['ranks_per_node']}"))
    title = f"{device}-{num_nodes}x{ranks_per_node}"
    return {**table, "name": title, "num_nodes": num_nodes, "ranks_per_node": ranks_per_node}


def _build(who: str, table: Mapping[str, Any], faults: Sequence[str] = ()) -> ClusterFields:
    """The cluster of a table; `faults` were found in it already."""
    try:
        made = ClusterTable.model_validate(table)
    except ValidationError as error:
        more = [_fault(each) for each in error.errors(include_url=False)]
        raise _refused(who, dict.fromkeys([*more, *faults])) from None
    if faults:
        raise _refused(who, faults)
    num_ranks = {"node": made.ranks_per_node, "cluster": made.num_nodes * made.ranks_per_node}
    sizes = [level.spans if isinstance(level.spans, int) else num_ranks[level.spans] for level in made.levels]
    if faults := [*_wrong_sizes(sizes, num_ranks["cluster"]), *_wrong_tables(made)]:
        raise _refused(who, faults)
    levels = [_level(level, size) for level, size in zip(made.levels, sizes, strict=True)]
    # With a single node, the links between nodes join nothing.
    used = tuple(level for i, level in enumerate(levels) if i == 0 or level.num_ranks > sizes[i - 1])
    nccl = Nccl(**_tuples(made.nccl.model_dump())) if made.nccl is not None else None
    tables = tuple(_measured(table) for table in made.tables)
    device = _device(made.device, made.ranks_per_node if made.device.shared else 1)
    return ClusterFields(made.name, made.num_nodes, made.ranks_per_node, used, device, nccl, tables)


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _device(table: DeviceTable, num_sharing: int) -> Device:
    peaks = sorted(table.peak_tflops.model_dump(exclude_none=True).items())
    return Device(
        table.name,
        tuple((dtype, peak / num_sharing) for dtype, peak in peaks),
        None if table.memory_gbps is None else table.memory_gbps / num_sharing,
        None if table.memory_bytes is None else table.memory_bytes // num_sharing,
        table.launch_gap_us,
        table.overlap_slowdown,
        table.collective_slowdown,
        table.matmul_efficiency,
        table.fuses,
        table.memory_efficiency,
        table.kernel_us,
        table.product_overhead_terms,
        table.num_multiprocessors,
        tuple(_attention(name, each, num_sharing) for name, each in table.attention.items()),
        power_headroom=table.power_headroom,
        host=None if table.host is None else HostTimes(**table.host.model_dump()),
        host_memory=None if table.host_memory is None else HostMemory(**table.host_memory.model_dump()),
    )


def _attention(name: str, table: AttentionTable, num_sharing: int) -> AttentionKernel:
    forward, backward = (
        AttentionRate(rate.tflops / num_sharing, rate.half_positions, rate.half_blocks, rate.narrow)
        for rate in (table.forward, table.backward)
    )
    return AttentionKernel(name, forward, backward)


def _measured(table: MeasuredTable) -> Table:
    kind = Kind(table.kind)
    times = table.num_ranks if kind is Kind.ALL_GATHER else 1  # tables count the bytes of the full tensor
    points = ((size * times, us) for size, us in zip(table.input_bytes, table.us, strict=True))
    return Table(kind, table.num_ranks, tuple(points), table.level or "")


def _wrong_tables(made: ClusterTable) -> list[str]:
    faults: list[str] = []
    known = [level.name for level in made.levels]
    seen: dict[tuple[str, int, str | None], int] = {}
    for i, table in enumerate(made.tables):
        if len(table.us) != len(table.input_bytes):
            faults.append(f"tables[{i}].us: expected {len(table.input_bytes)} times, found {len(table.us)}")
        if any(later <= size for size, later in itertools.pairwise(table.input_bytes)):
            faults.append(f"tables[{i}].input_bytes: expected sizes in ascending order")
        if table.level is not None and table.level not in known:
            faults.append(f"tables[{i}].level: no level is called {table.level!r}; use one of {', '.join(known)}")
        first = seen.setdefault((table.kind, table.num_ranks, table.level), i)
        if first != i:
            faults.append(f"tables[{i}]: tables[{first}] has the same kind, num_ranks and level")
    return faults


def _level(table: LevelTable, num_ranks: int) -> Level:
    link = Link(table.latency_us, table.hop_us, table.bandwidth_gbps, _by_ranks(table.by_ranks))
    tables: dict[Kind, OverrideTable | None] = {kind: getattr(table, kind.value) for kind in Kind}
    overrides = tuple((kind, _override(link, found)) for kind, found in tables.items() if found is not None)
    shared = table.symmetric
    symmetric = Transport(_override(link, shared), shared.sm_share, shared.slowdown) if shared is not None else None
    wire, least = table.wire or "", table.min_saturating_bytes
    return Level(table.name, num_ranks, link, overrides, wire, table.rails, least, symmetric)


def _override(link: Link, table: OverrideTable) -> Link:
    return Link(
        link.latency_us if table.latency_us is None else table.latency_us,
        link.hop_us if table.hop_us is None else table.hop_us,
        link.bandwidth_gbps if table.bandwidth_gbps is None else table.bandwidth_gbps,
        link.by_ranks if table.by_ranks is None else _by_ranks(table.by_ranks),
    )


def _by_ranks(table: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((int(limit), gbps) for limit, gbps in table.items()))


def _wrong_sizes(sizes: list[int], num_ranks: int) -> list[str]:
    if not sizes:
        return ["levels: expected at least one, found none"]
    faults = [
        f"levels[{i}].spans: {size} ranks are not a multiple of the {inner} that levels[{i - 1}] spans"
        for i, (inner, size) in enumerate(itertools.pairwise(sizes), 1)
        if size % inner
    ]
    if sizes[-1] != num_ranks:
        last = len(sizes) - 1
        faults.append(f"levels[{last}].spans: the last level spans {sizes[-1]} ranks, the cluster has {num_ranks}")
    return faults


def _refused(who: str, faults: Iterable[str]) -> ClusterError:
    return ClusterError(compose(f"cluster {who}", "it is not a valid cluster", where=list(faults)))


def _fault(error: Any) -> str:
    """One fault, as `path: expected X, found Y`."""
    place = list(error["loc"])
    if "spans" in place:  # the next part only says which of its two types was tried
        place = place[: place.index("spans") + 1]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
    name, kind = str(place[-1]), error["type"]
    if kind == "missing":
        return f"{path}: it is missing"
    if kind == "extra_forbidden":
        table = _TABLES.get((str(place[0]), len(place)), ClusterTable)
        known = (SymmetricTable if "symmetric" in place[:-1] else table).model_fields
        return f"{path}: no key is called {name!r}; {nearest(name, known) or 'use one of ' + ', '.join(known)}"
    what = EXPECTED.get(name, str(error["msg"]).replace("Input should be", "expected"))
    found = repr(error["input"])
    return f"{path}: {what}, found {found if len(found) <= SHOWN else found[:SHOWN] + ' ...'}"
