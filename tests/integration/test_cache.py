"""What Inductor takes from its cache is still reported, and nothing is taken that another option would have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import weft
from tests.integration.functions import gather_and_multiply, gather_and_multiply_arguments, multiply
from tests.tiers import quick_first
from weft.frontends.options import Options
from weft.frontends.run_report import RunReport
from weft.frontends.session import SESSION

OWN = {"backend": "h100-3x8", "hook": "h100-4x8"}
"""Clusters that no other test names, so that nothing is in the cache for them."""


def run(mesh: DeviceMesh, how: str, **options: Any) -> tuple[RunReport, dict[str, int]]:
    """Compile as a new process would; the report, and Inductor's counters."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    SESSION.reset()
    if how == "backend":
        named = {f"weft.{name}": value for name, value in options.items()}
        function = torch.compile(gather_and_multiply, backend="weft", options=named)
    else:
        hook = weft.inductor_pass(**options)
        function = torch.compile(gather_and_multiply, options={"post_grad_custom_post_pass": hook})
    function(*gather_and_multiply_arguments(mesh.get_group().group_name))
    return SESSION.report(), dict(torch._dynamo.utils.counters["inductor"])


@pytest.mark.needs_cpp
@pytest.mark.parametrize("how", ["backend", "hook"])
def test_a_compilation_from_the_cache_is_reported_as_the_first_one_was(mesh: DeviceMesh, tmp_path: Path, how: str):
    first, counters = run(mesh, how, report=str(tmp_path), cluster=OWN[how])
    assert counters["fxgraph_cache_miss"] == 1
    again, counters = run(mesh, how, report=str(tmp_path), cluster=OWN[how])
    assert counters["fxgraph_cache_hit"] == 1
    assert "weft" not in torch._dynamo.utils.counters  # the pass was not called
    (entry,), (cached,) = first.entries, again.entries
    assert (entry.from_cache, cached.from_cache) == (False, True)
    assert cached.report == entry.report
    assert [*cached.report["applied"], *cached.report["declined"]] != []
    assert str(again).splitlines()[1].endswith("from cache")


@pytest.mark.slow
@pytest.mark.needs_cpp
def test_behind_a_cached_graph_with_collectives_one_without_is_a_micro_step(mesh: DeviceMesh, tmp_path: Path):
    for _ in range(2):
        run(mesh, "backend", report=str(tmp_path), cluster="h100-5x8")
    assert [entry.from_cache for entry in SESSION.report().entries] == [True]
    torch.compile(multiply, backend="weft_eager")(torch.ones(2, 2))
    assert SESSION.report().messages == ()


@pytest.mark.needs_cpp
def test_nothing_is_said_of_collectives_behind_a_cached_graph_of_another_frame(mesh: DeviceMesh, tmp_path: Path):
    run(mesh, "backend", report=str(tmp_path), cluster="h100-6x8")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    SESSION.reset()

    def renamed(left: Tensor, part: Tensor, group: str) -> Tensor:  # other code for Dynamo, the same graph for Inductor
        return gather_and_multiply(left, part, group)

    named = {"weft.report": str(tmp_path), "weft.cluster": "h100-6x8"}
    arguments = gather_and_multiply_arguments(mesh.get_group().group_name)
    torch.compile(renamed, backend="weft", options=named)(*arguments)
    assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] == 1
    assert SESSION.report().entries == ()
    torch.compile(multiply, backend="weft_eager")(torch.ones(2, 2))
    assert SESSION.report().messages == ()


@pytest.mark.needs_cpp
@pytest.mark.parametrize(
    "changed", quick_first([{"cluster": "h100-8x8"}, {"pipeline": "sink-waits"}, {"effort": "fast"}])
)
def test_another_option_or_cluster_misses_the_cache(mesh: DeviceMesh, tmp_path: Path, changed: dict[str, Any]):
    run(mesh, "backend", report=str(tmp_path), cluster="h100-8")
    report, counters = run(mesh, "backend", **{"report": str(tmp_path), "cluster": "h100-8", **changed})
    assert counters.get("fxgraph_cache_hit", 0) == 0
    assert [entry.from_cache for entry in report.entries] == [False]


# The identity, which the caches go by.

BASE = Options(cluster="h100-8")


@pytest.mark.parametrize(
    "options",
    [
        Options(cluster="h100-8x8"),
        Options(cluster="h100-8", pipeline="sink-waits"),
        Options(cluster="h100-8", pipeline="remove-dead-code,dedupe-collectives,hoist-launches{max-in-flight-bytes=1}"),
        Options(cluster="h100-8", memory_limit_bytes=1),
        Options(cluster="h100-8", effort="best"),
        Options(cluster="h100-8", strict=True),
        Options(cluster="h100-8", verify="off"),
        Options(cluster="h100-8", groups={"tp": 8}),
    ],
)
def test_every_option_is_part_of_the_identity(options: Options):
    assert options.identity != BASE.identity


def test_the_same_pipeline_in_other_words_is_the_same(tmp_path: Path):
    spelled = Options(cluster="h100-8", pipeline=str(weft.Pipeline.parse("auto")), report=tmp_path)
    assert spelled.identity == BASE.identity


@pytest.mark.parametrize("name", ["weft.version.VERSION", "torch.__version__"])
def test_versions_are_part_of_the_identity(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(name, "0.0.0")
    assert Options(cluster="h100-8").identity != BASE.identity


def test_what_is_in_the_file_of_a_cluster_is_part_of_the_identity(tmp_path: Path):
    file = tmp_path / "ours.toml"
    text = (
        "name = 'ours'\nnum_nodes = 1\nranks_per_node = 8\n"
        "[[levels]]\nname = 'wire'\nspans = 'node'\nlatency = '8 us'\nbandwidth = '100 GB/s'\n"
    )
    file.write_text(text)
    before = Options(cluster=str(file)).identity
    file.write_text(text.replace("8 us", "9 us"))
    assert Options(cluster=str(file)).identity != before
