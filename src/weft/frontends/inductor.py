"""Weft inside Inductor: the hook that rewrites graphs, and the pass that keeps their order down to the generated code.

    torch.compile(model, options={"post_grad_custom_post_pass": weft.inductor_pass(cluster="h100-8")})

Contract: the graph that Inductor hands over is edited in place. A hook that the user has set already is called first,
never replaced. `uuid` identifies all that could change the result, so Inductor's caches are right to rely on it. The
graph also fixes the order of collectives, waits and the matmuls between them: Inductor's scheduler keeps it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from torch.fx import Graph, GraphModule

from weft.compat import compilers as compat
from weft.errors import PipelineError, compose
from weft.frontends.options import Options, make_options
from weft.frontends.session import NOT_CALLED, SESSION
from weft.graph.collective import collectives
from weft.graph.cuda_graphs import why_not_captured
from weft.graph.origins import path_of

Hook = Callable[..., Any]
MAX_TOLD = 5
"""Number of nodes that a warning about CUDA graphs names."""
FORMER_NAMES = {"report_dir": "report", "agreement_dir": "agreement"}
"""Keywords of `inductor_pass` in 0.1, which scripts may still give, and the options that they mean."""


class KeepOrder:
    """A pass of Inductor's scheduler that keeps all but generated loops in order. The user's pass is called first."""

    def __init__(self, chain: Hook | None = None, *, loops_too: bool = False) -> None:
        self.chain, self.loops_too = chain, loops_too

    def __call__(self, nodes: Sequence[Any]) -> Sequence[Any]:
        nodes = self.chain(nodes) if self.chain else nodes
        SESSION.order_together(lambda: compat.keep_kernel_order(nodes, self.loops_too))
        return nodes

    def uuid(self) -> str | None:
        """The identity of this pass for Inductor's caches; None if the user's pass has none."""
        return _joined(f"keep order {self.loops_too}", [self.chain] if self.chain else [])


class InductorPass:
    """A hook for Inductor's `post_grad_custom_post_pass`."""

    def __init__(
        self, options: Options, chain: Sequence[Hook] = (), *, is_cut: bool = False, inputs: tuple[str, ...] = ()
    ) -> None:
        """`is_cut` says that Weft cuts joint graphs for the memory limit before this pass sees the parts.

        `inputs` are the paths of the parameters that Dynamo passes to AOTAutograd, as in `INPUTS_KEY`.
        """
        self.options, self.is_cut, self.inputs = options, is_cut, inputs
        self.chain = tuple(hook for hook in chain if not isinstance(hook, InductorPass))

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return self  # torch copies its settings to look at them; the pass holds nothing that could change

    @property
    def folder(self) -> Path:
        """The folder of the reports: next to Inductor's caches, so that they live as long as the cached results."""
        report = self.options.report
        return Path(report) if report is not None else Path(compat.inductor_cache_folder()) / "weft"

    def uuid(self) -> str | None:
        """The identity of this pass for Inductor's caches; None, which disables them, if a hook of the user has none.

        It is also None while plans are recorded: a graph from a cache never reaches the pass.
        """
        if self.options.record is not None:
            return None
        identity = None
        with SESSION.contained("an identity for Inductor's caches", self.options.strict):
            if not compat.settings_of("inductor").use_post_grad_passes:
                SESSION.say(NOT_CALLED)
            identity = _joined(self.options.identity, self.chain)
            if identity is not None:
                SESSION.note_look_up(identity, self.folder, self.options)
        return identity

    def __call__(self, graph: Graph) -> None:
        """Rewrite a post-grad graph in place."""
        for hook in self.chain:
            compat.call_inductor_pass(hook, graph, compat.compilation()[1] == "inference")
        module = graph.owning_module
        if not isinstance(module, GraphModule):
            raise PipelineError(compose("inductor pass", "the graph has no module", do="make a GraphModule of it"))
        identity, folder = "", None
        with SESSION.contained("a place for reports", self.options.strict):
            _name_rivals()
            identity = _joined(self.options.identity, self.chain) or self.options.identity
            folder = self.folder

        def keep_order() -> None:
            if any(True for _ in collectives(graph)):
                _keep_order()

        is_woven = SESSION.weave(
            module,
            self.options,
            identity,
            folder,
            is_cut=self.is_cut,
            inputs=self.inputs,
            finish=keep_order,
        )
        if not is_woven:
            compat.release_inductor_settings()
        with SESSION.contained("a look for obstacles to CUDA graphs", self.options.strict):
            _name_uncaptured(graph)


def inductor_pass(
    cluster: str | None = None, *, chain: Hook | Sequence[Hook] | None = None, **options: Any
) -> InductorPass:
    """A hook for Inductor's `post_grad_custom_post_pass` that optimizes every graph.

    `options` are Weft's options of `torch.compile` without their prefix. `chain` is called first; by default it is the
    hook that is set now.
    """
    given = {FORMER_NAMES.get(name, name): value for name, value in options.items()}
    given |= {} if cluster is None else {"cluster": cluster}
    hooks = hooks_in(chain) or hooks_in(compat.settings_of("inductor").post_grad_custom_post_pass)
    return InductorPass(make_options(given), hooks)


def hooks_in(setting: Any) -> tuple[Hook, ...]:
    """The hooks that a setting of Inductor holds: none, one, or several."""
    if setting is None:
        return ()
    return tuple(setting) if isinstance(setting, list | tuple) else (setting,)


def _keep_order() -> None:
    """Tell Inductor to keep the order of the graph it is compiling, unless the `weft` backend has done so."""
    config = compat.settings_of("inductor")
    wanted: dict[str, Any] = {name: False for name in compat.OVERLAP_SETTINGS if getattr(config, name, False)}
    now = getattr(config, compat.SCHEDULER_PASS)
    if not isinstance(now, KeepOrder):
        wanted[compat.SCHEDULER_PASS] = KeepOrder(now)
    if wanted and not compat.hold_inductor_settings(wanted):
        do = "compile with torch.compile, preferably with backend='weft'"
        SESSION.say(f"Inductor may change the order that Weft gave a graph; {do}")


def _name_uncaptured(graph: Graph) -> None:
    """If Inductor makes CUDA graphs, warn of nodes that it cannot put into one."""
    if not getattr(compat.settings_of("inductor"), "triton.cudagraphs", False):
        return
    found = list(why_not_captured(graph))
    told = [
        f"{node.name}{f' [{path}]' if (path := path_of(node.meta)) else ''}: {why}" for node, why in found[:MAX_TOLD]
    ]
    if len(found) > MAX_TOLD:
        told.append(f"{len(found) - MAX_TOLD} more")
    if told:
        what = "a graph does not fit into one CUDA graph; Inductor splits it there, or runs it without"
        SESSION.say("\n".join([what, *(f"    {line}" for line in told)]))


def _name_rivals() -> None:
    """Warn about settings of Inductor that move collectives before or after Weft."""
    for name in compat.RIVAL_SETTINGS:
        if getattr(compat.settings_of("inductor"), name, False):
            do = f"set torch._inductor.config.{name} = False to leave it to Weft"
            SESSION.say(f"Inductor moves collectives itself; {do}")


def _joined(identity: str, chain: Sequence[Hook]) -> str | None:
    """One identity for a pass and the hooks it calls; None if a hook has none, which disables caching."""
    parts = [identity]
    for hook in chain:
        uuid = getattr(hook, "uuid", None)
        found = uuid() if callable(uuid) else None
        if found is None:
            return None
        parts.append(repr(found))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32] if chain else identity


compat.register_inductor_pass(InductorPass)
compat.register_inductor_pass(KeepOrder, scheduler=True)
