"""Run a pipeline on a source: shared by `weft optimize`, its `--bisect`, and `weft explain`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli import usage

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from weft.api import Result
    from weft.cost.cluster import Cluster
    from weft.passes.pipeline import Pipeline


def optimize_source(
    source: str,
    cluster: str | None,
    pipeline: str,
    verify: usage.Witness,
    strict: bool,
    files: tuple[Path | None, ...],
    check: Callable[[GraphModule], object] | None = None,
    tokens: int | None = None,
    assume: str | None = None,
    memory_limit: str | None = None,
    effort: usage.Effort = usage.Effort.DEFAULT,
) -> tuple[GraphModule, Result]:
    """The original graph and the result. Cheap checks come first: the files, then the graph."""
    usage.check_files(files, (source, cluster))
    module, passes, described, limit = read_all(source, cluster, pipeline, memory_limit)
    from weft.api import optimize as run

    if check is not None:
        check(module)
    with usage.progress(f"optimizing {len(module.graph.nodes)} nodes"):
        done = run(
            module,
            described,
            pipeline=passes,
            memory_limit_bytes=limit,
            effort=effort.value,
            strict=strict,
            verify=verify.value,
            tokens_per_step=tokens,
            sizes=usage.sizes_of(assume),
        )
    return module, done


def read_all(
    source: str, cluster: str | None, pipeline: str, memory_limit: str | None
) -> tuple[GraphModule, Pipeline, Cluster | None, int | None]:
    """The graph, the pipeline, the cluster and the limit; the graph is read last because it takes longest."""
    limit = usage.parse_optional_size(memory_limit, "--memory-limit")
    with usage.progress("importing torch"):
        from weft.cli.source import load_source
        from weft.cost.cluster import Cluster
        from weft.passes.pipeline import Pipeline

    passes = Pipeline.parse(pipeline)
    described = Cluster.load(cluster) if cluster is not None else None
    with usage.progress(f"reading {source}"):
        return load_source(source), passes, described, limit


def plan_file(plan: Path | None) -> Path | None:
    """The file that must be writable for a plan; None without a plan, or if a folder names the file."""
    return None if plan is not None and plan.is_dir() else plan


def save_plan(module: GraphModule, result: Result, plan: Path | None) -> None:
    """Write the plan for a graph if a file or a folder is given."""
    if plan is not None and plan.is_dir():
        from weft.passes.pipeline import identity_of
        from weft.plan.folder import PlanFolder

        PlanFolder(plan).record(result.plan, identity_of(module)[1])
    elif plan is not None:
        usage.write(result.plan.to_json() + "\n", plan)
