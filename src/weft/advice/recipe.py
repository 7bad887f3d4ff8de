"""Recipe: the options of torchtitan that choose a layout, and the lines for a script."""

from __future__ import annotations

import json

from weft.advice.ranking import Advice, Ranked


def recipe_lines(advice: Advice, chosen: Ranked) -> list[str]:
    """Both kinds of lines, each under a heading."""
    return [
        "options of torchtitan 0.3:",
        *(f"    {line}" for line in titan_lines(advice, chosen)),
        "",
        "script:",
        *(f"    {line}" for line in script_lines(advice, chosen)),
    ]


def titan_lines(advice: Advice, chosen: Ranked) -> list[str]:
    """The options of torchtitan's command line that choose the layout; the subcommand for checkpoints comes last."""
    layout, sizes = chosen.layout, dict(chosen.layout.mesh)
    strategy = layout.strategy
    replicas = sizes[strategy.replicate[0]] if strategy.replicate else 1
    degrees = {
        "data_parallel_replicate_degree": replicas,
        "data_parallel_shard_degree": layout.num_shards,
        "tensor_parallel_degree": layout.num_tensor_ranks,
    }
    degrees |= {"expert_parallel_degree": sizes[strategy.expert]} if strategy.expert is not None else {}
    return [
        f"--training.local_batch_size={chosen.found.microbatch}",
        f"--training.global_batch_size={advice.num_tokens // advice.tokens_per_sample}",
        f"--training.seq_len={advice.tokens_per_sample}",
        *(f"--parallelism.{name}={degree}" for name, degree in degrees.items()),
        *([f"--parallelism.fsdp_reshard_after_forward={layout.reshard}"] if strategy.shard else []),
        f"activation_checkpoint:{layout.checkpoint}",
    ]


def script_lines(advice: Advice, chosen: Ranked) -> list[str]:
    """A mesh and, where Weft has a function for it, the call that parallelises the model over it."""
    layout, compiled = chosen.layout, 'backend="weft"'
    if advice.cluster_option is not None:
        compiled += f', options={{"weft.cluster": {json.dumps(advice.cluster_option)}}}'
    accumulated = (
        f"# accumulate {chosen.num_microbatches} microbatches of {chosen.found.microbatch} sequences on each rank"
    )
    lines = [accumulated] if chosen.num_microbatches > 1 else []
    if advice.cluster_option is None:
        lines.append(f'# add options={{"weft.cluster": ...}} with a file that describes {advice.cluster}')
    if layout.checkpoint != "none":
        lines.append(f"# checkpoint each block: {layout.checkpoint}, as torchtitan does")
    if layout.parallel == "ddp":
        call = f"# torch.compile({compiled}) on a function that calls loss.backward()"
        return ["model = weft.ddp(model)", *lines, call]
    sizes, names = ", ".join(str(size) for _, size in layout.mesh), ", ".join(f'"{axis}"' for axis, _ in layout.mesh)
    comma = "," if len(layout.mesh) == 1 else ""
    mesh = f'mesh = init_device_mesh("cuda", ({sizes}{comma}), mesh_dim_names=({names}{comma}))'
    if layout.parallel in ("fsdp", "hsdp"):
        options = "param_dtype=torch.bfloat16, reduce_dtype=torch.float32"
        again = layout.reshard == "always"
        divide = f"model = weft.simple_fsdp(model, mesh, {options}, reshard_after_forward={again})"
    else:
        divide = "# split the model over the mesh with DTensor, as torchtitan's parallelize function does"
    return [mesh, *lines, divide, f"model = torch.compile(model, {compiled})"]
