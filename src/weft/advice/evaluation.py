"""Evaluation: the step, the memory and a lower bound of one layout; worker processes run these functions.

A layout is evaluated in two ways. `probe` captures and plans the model with few layers, such as one and two, and
continues every figure along a straight line to all layers. `plan_layout` captures and plans the whole model; only its
figures are ranked.

Contract: the bound of a probe holds for the step of `plan_layout`. It is the sum of all compute of a rank, or of all
transfers of a link without the latency that merging could save. Equal layers add equal terms, so the line through two
numbers of layers gives the sum of all layers; a model without such numbers is probed with all layers. Passes may remove
work, so the bound takes the smaller of the sums before and after planning.

A step has one or more microbatches. Each reduces its gradients and adds them to those of the microbatches before it;
the optimizer follows the last one. Under DDP only the last one reduces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from weft.advice.layout import TrainingLayout
from weft.advice.models import TrainedModel
from weft.advice.sketch import Lane, sketch_of
from weft.compat import input_nodes
from weft.cost.cluster import Cluster
from weft.cost.execution import is_optimizer
from weft.errors import MemoryLimitError, WeftError
from weft.graph import ops
from weft.graph.assumed_sizes import bytes_of
from weft.graph.dag import collector_paused
from weft.graph.groups import read_groups
from weft.graph.versions import analyses_kept, dag_of
from weft.passes.pipeline import Pipeline
from weft.passes.presets import recognise
from weft.prediction.error_bars import ErrorBar
from weft.prediction.memory import outside_of
from weft.prediction.prediction import STRAGGLER_SIGMA, Prediction, predict_modules, waiting_share
from weft.quantities import size_text
from weft.report.baseline import FITTING
from weft.scheduling.search import Effort
from weft.simulation.build import program_of
from weft.simulation.program import OpKind
from weft.simulation.simulator import simulate
from weft.simulation.timeline import NS_PER_US

COMPUTE = "compute"
NUM_TRANSFERS = 3
"""Transfers of one gradient when it is added to a sum: two are read, one is written."""


@dataclass(frozen=True)
class Question:
    """A question to a worker: one layout of one model on one cluster."""

    model: TrainedModel
    layout: TrainingLayout
    cluster: Cluster
    num_samples: int
    """Sequences of a step, of all ranks."""
    limit_bytes: int | None
    """Memory that one rank may use; None: unlimited."""
    microbatch: int = 1
    """Sequences that one rank takes at once."""

    @property
    def samples_per_rank(self) -> int:
        return self.num_samples // self.layout.num_data_ranks

    @property
    def num_microbatches(self) -> int:
        return self.samples_per_rank // self.microbatch

    @property
    def waiting(self) -> float:
        """The factor by which a step is longer because ranks wait for the slowest."""
        return 1 + waiting_share(self.cluster.num_ranks, STRAGGLER_SIGMA)


@dataclass(frozen=True)
class MicrobatchFigures:
    """The step of one microbatch and the optimizer, as one graph."""

    step_us: float
    exposed_us: float
    optimizer_us: float
    """Of the optimizer's kernels, undisturbed."""
    adding_us: float
    """To add the gradients to those of the microbatches before."""

    def whole_us(self, count: int, layout: TrainingLayout) -> float:
        """The time of a step of `count` microbatches, on a rank of average speed."""
        hidden = self.exposed_us if layout.reduces_last else 0.0
        return self.step_us + (count - 1) * (self.step_us - hidden - self.optimizer_us + self.adding_us)

    def whole_bound_us(self, count: int, layout: TrainingLayout, busy_us: Mapping[str, float]) -> float:
        """A lower bound on that time; `busy_us` is the least time for which each resource is busy."""
        bound = max(busy_us.values(), default=0.0)
        before = busy_us.get(COMPUTE, 0.0) if layout.reduces_last else bound
        return bound + (count - 1) * (max(before - self.optimizer_us, 0.0) + self.adding_us)


@dataclass(frozen=True)
class Probe:
    """A layout measured with few layers."""

    microbatch: int
    estimate_us: float
    """Of the whole step; orders the layouts."""
    bound_us: float
    """A lower bound on the whole step."""
    bound_by: str
    """The resource that is busy for so long: `compute`, or the name of a link."""
    peak_bytes: int
    """In the captured order, which frees each value after its last use; with the memory outside of the allocator."""
    error: str | None = None
    """The reason why the layout cannot be used."""


@dataclass(frozen=True)
class PlannedLayout:
    """A layout planned in full. All times are for the whole step."""

    microbatch: int
    step_us: float
    """With the time that ranks wait for the slowest."""
    compute_us: float
    optimizer_us: float
    """Of the optimizer's kernels, undisturbed; part of the compute."""
    exposed_us: float
    exposed_by_group: dict[str, float]
    peak_bytes: int
    """Reserved by the allocator, and outside of it."""
    mfu: float | None
    runtime: str | None
    """The runtime that would run this layout without Weft."""
    runtime_us: float | None
    """The step with that runtime."""
    step_error: ErrorBar
    peak_error: ErrorBar
    notes: tuple[str, ...] = ()
    lanes: tuple[Lane, ...] = ()
    """The planned step of one microbatch and the optimizer, for the page."""


@dataclass(frozen=True)
class Refused:
    """A layout that could not be planned."""

    error: str
    least_bytes: int | None = None
    """The smallest peak that was found, if it does not fit."""


def peak_of_microbatch(question: Question) -> int:
    """The peak of a microbatch in the captured order, continued from few layers to all."""
    modules = [_capture(question, number) for number in question.model.few_layers or (None,)]
    peaks = [_simulate(module, question).timeline.peak_bytes for module in modules]
    return round(_continued(peaks, question.model))


def probe(question: Question) -> Probe:
    """Measure a layout with few layers, for the largest microbatch that fits, from the given one downwards."""
    least = 0
    for microbatch in reversed(divisors(question.samples_per_rank)):
        if microbatch > question.microbatch:
            continue
        try:
            found = _probe(replace(question, microbatch=microbatch))
        except WeftError as error:
            return Probe(microbatch, 0.0, 0.0, "", 0, str(error))
        if found.error is None:
            return found
        least = found.peak_bytes
    return Probe(1, 0.0, 0.0, "", least, why_not_fit(least, question.limit_bytes))


def _probe(question: Question) -> Probe:
    count = question.num_microbatches
    modules = [_capture(question, number) for number in question.model.few_layers or (None,)]
    captured = [_simulate(module, question) for module in modules]
    peaks = [each.timeline.peak_bytes + each.held_bytes(count) for each in captured]
    peak = round(_continued(peaks, question.model))
    error = why_not_fit(peak, question.limit_bytes)
    if error is not None:
        return Probe(question.microbatch, 0.0, 0.0, "", peak, error)
    planned = [_simulate(_plan(module, question.cluster, None, "fast"), question) for module in modules]
    figures = [_figures(*pair, question.cluster) for pair in zip(captured, planned, strict=True)]
    whole = _all_layers(figures, question.model)
    busy_us = _least_busy_us(captured, planned, question.model)
    bound_us = whole.whole_bound_us(count, question.layout, busy_us) * question.waiting
    return Probe(
        question.microbatch,
        max(whole.whole_us(count, question.layout) * question.waiting, bound_us),
        bound_us,
        max(busy_us, key=lambda name: busy_us[name], default=""),
        peak,
    )


def plan_layout(question: Question) -> PlannedLayout | Refused:
    """Capture and plan the whole model, for the largest microbatch that fits, from the given one downwards."""
    answer: PlannedLayout | Refused | None = None
    for microbatch in reversed(divisors(question.samples_per_rank)):
        if microbatch > question.microbatch:
            continue
        try:
            with collector_paused(), analyses_kept():
                answer = _plan_layout(replace(question, microbatch=microbatch))
        except WeftError as error:
            return Refused(str(error))
        if isinstance(answer, PlannedLayout):
            return answer
    return answer or Refused(f"a rank has {question.samples_per_rank} sequences")


def _plan_layout(question: Question) -> PlannedLayout | Refused:
    count, layout, cluster = question.num_microbatches, question.layout, question.cluster
    module = _capture(question, None)
    captured = _simulate(module, question)
    held = captured.held_bytes(count)
    try:
        limit = None if question.limit_bytes is None else question.limit_bytes - held
        after = _plan(module, cluster, limit, "default")
    except MemoryLimitError as error:
        needed = error.least_bytes + held
        return Refused(why_not_fit(needed, question.limit_bytes) or str(error), needed)
    found = predict_modules([after], cluster)
    peak = found.memory.reserved_bytes + held
    too_large = why_not_fit(peak, question.limit_bytes)
    if too_large is not None:
        return Refused(too_large, peak)
    planned = _simulate(after, question)
    figures = _figures(captured, planned, cluster)
    step_us = figures.whole_us(count, layout) * question.waiting
    num_reduced = 1 if layout.reduces_last else count
    runtime = FITTING.get(recognise(captured.dag, read_groups(module)))
    usual = predict_modules([module], cluster, runtime=runtime) if runtime is not None else None
    return PlannedLayout(
        microbatch=question.microbatch,
        step_us=step_us,
        compute_us=planned.timeline.compute_us * count - figures.optimizer_us * (count - 1),
        optimizer_us=figures.optimizer_us,
        exposed_us=planned.timeline.exposed_us * num_reduced,
        exposed_by_group={name: us * num_reduced for name, us in planned.exposed_by_group().items()},
        peak_bytes=peak,
        mfu=found.mfu * found.step_us * count / step_us if found.mfu is not None else None,
        runtime=runtime,
        runtime_us=_as_runtime(usual, figures, count, layout) * question.waiting if usual is not None else None,
        step_error=found.step_error,
        peak_error=found.peak_error,
        notes=found.notes,
        lanes=sketch_of(planned.timeline, planned.program),
    )


def why_not_fit(num_bytes: int, limit_bytes: int | None) -> str | None:
    """A reason if a layout needs more memory than one rank may use."""
    if limit_bytes is None or num_bytes <= limit_bytes:
        return None
    return f"needs {size_text(num_bytes)} of memory, {size_text(limit_bytes)} may be used"


def divisors(number: int) -> list[int]:
    """All divisors, in order."""
    return [each for each in range(1, number + 1) if number % each == 0]


def _as_runtime(usual: Prediction, planned: MicrobatchFigures, count: int, layout: TrainingLayout) -> float:
    """The whole step with another runtime, on a rank of average speed."""
    figures = replace(planned, step_us=usual.simulated_us, exposed_us=usual.exposed_us)
    return figures.whole_us(count, layout)


def _capture(question: Question, num_layers: int | None) -> GraphModule:
    return question.model.capture(question.layout, question.microbatch, num_layers)


def _simulate(module: GraphModule, question: Question) -> _Simulated:
    with collector_paused():
        return _Simulated(module, question.cluster)


def _continued(values: Sequence[float], model: TrainedModel) -> float:
    """The value for all layers, on the line through the values for few."""
    if model.few_layers is None:
        return values[0]
    few, more = model.few_layers
    return values[1] + (model.num_layers - more) / (more - few) * (values[1] - values[0])


def _all_layers(figures: Sequence[MicrobatchFigures], model: TrainedModel) -> MicrobatchFigures:
    """The figures for all layers."""
    return MicrobatchFigures(
        _continued([each.step_us for each in figures], model),
        _continued([each.exposed_us for each in figures], model),
        _continued([each.optimizer_us for each in figures], model),
        _continued([each.adding_us for each in figures], model),
    )


def _least_busy_us(
    captured: Sequence[_Simulated], planned: Sequence[_Simulated], model: TrainedModel
) -> dict[str, float]:
    """For how long each resource is busy at least with all layers: before or after planning, whichever is less."""
    before, after = ([each.busy_ns() for each in graphs] for graphs in (captured, planned))
    return {
        name: min(_continued([busy[name] for busy in graphs], model) for graphs in (before, after)) / NS_PER_US
        for name in after[-1]
    }


def _plan(module: GraphModule, cluster: Cluster, limit_bytes: int | None, effort: Effort) -> GraphModule:
    """The graph after the planner. It keeps the limit, but leaves the choice of checkpoints to the layout."""
    with collector_paused(), analyses_kept():
        pipeline = Pipeline.parse("auto").without(["decide-memory"])
        return pipeline.run(module, cluster=cluster, memory_limit_bytes=limit_bytes, effort=effort).module


class _Simulated:
    """A graph on a cluster, in its own order."""

    def __init__(self, module: GraphModule, cluster: Cluster) -> None:
        self.dag = dag_of(module.graph)
        self.program = program_of(self.dag, read_groups(module), cluster)
        self.timeline = simulate(self.program)

    def held_bytes(self, num_microbatches: int) -> int:
        """Memory next to the graph's own: what torch's allocator does not count, and the sum of gradients."""
        return sum(outside_of(self.program).values()) + (self.gradient_bytes if num_microbatches > 1 else 0)

    @property
    def gradient_bytes(self) -> int:
        """Size of all tensors that the optimizer reads and the rest of the step made."""
        read = {source for node in self.dag.nodes if is_optimizer(node) for source in input_nodes(node)}
        made = (source for source in read if source.op == "call_function" and not is_optimizer(source))
        return sum(bytes_of(ops.value_of(source)) or 0 for source in made)

    @property
    def optimizer_us(self) -> float:
        found = (self.program.duration_ns[i] for i, node in enumerate(self.dag.nodes) if is_optimizer(node))
        return sum(found) / NS_PER_US

    def busy_ns(self) -> Counter[str]:
        """The least busy time of the compute stream and of each link, in any order and with any merging."""
        program, busy = self.program, Counter[str]()
        for op, kind in enumerate(program.kinds):
            if kind is OpKind.COMPUTE:
                busy[COMPUTE] += program.duration_ns[op]
            if kind is OpKind.LAUNCH:
                latency = program.latency_ns[op] if program.latency_ns else 0
                busy[program.links[program.queues[program.queue[op]].link]] += program.duration_ns[op] - latency
        return busy

    def exposed_by_group(self) -> dict[str, float]:
        """Time during which the compute stream was blocked by the collectives of each group."""
        found = Counter[str]()
        for span in self.timeline.collectives:
            found[self.program.queues[span.queue].group] += span.exposed_ns
        return {group: exposed_ns / NS_PER_US for group, exposed_ns in found.items()}


def _figures(captured: _Simulated, planned: _Simulated, cluster: Cluster) -> MicrobatchFigures:
    adding_ns = cluster.device.traffic_ns(NUM_TRANSFERS * captured.gradient_bytes)
    return MicrobatchFigures(
        step_us=planned.timeline.step_us,
        exposed_us=planned.timeline.exposed_us,
        optimizer_us=planned.optimizer_us,
        adding_us=(adding_ns or 0) / NS_PER_US,
    )
