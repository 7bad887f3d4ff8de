"""Advisor: measures every layout with few layers, then plans the promising ones in full.

    1. captures of one and two layers say how memory grows with the microbatch
    2. every layout is probed: the largest microbatch that fits, an estimate of its step, and a lower bound
    3. layouts are planned in full, the shortest estimate first, unless the bound is above the best step so far

Contract: the advice is the same for any number of workers. A layout whose bound is not above the best step is always
planned, because the best step only becomes shorter. One that was planned before a shorter step was known, and whose
bound is above that step, counts as left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

from weft.advice.evaluation import (
    COMPUTE,
    PlannedLayout,
    Probe,
    Question,
    Refused,
    divisors,
    peak_of_microbatch,
    plan_layout,
    probe,
)
from weft.advice.layout import TrainingLayout
from weft.advice.layouts import layouts_of
from weft.advice.models import TrainedModel, model_of
from weft.advice.ranking import Advice, LeftOut, Ranked
from weft.arguments import check_cluster, check_type
from weft.cost.cluster import Cluster
from weft.cost.cluster_file import file_of
from weft.errors import ClusterError, MemoryLimitError, RefusedError, ReportError, compose
from weft.process import left_as_it_was
from weft.quantities import count_text, duration_text, size_text
from weft.report.workers import answers, executor_for

NEAR = 1.1
"""A probe begins with the largest microbatch whose estimated peak is below this multiple of the limit. The probe itself
measures the peak, and goes down from there."""
STATE_BYTES = 16
"""Of one parameter: weight, gradient and two moments of AdamW, all f32."""
GATHERED_BYTES = 2
"""Of one gathered weight, in bf16."""

Told = Callable[[str, int, int], object]


@left_as_it_was()
def advise(
    model: str | TrainedModel,
    cluster: str | Path | Cluster,
    batch_tokens: int,
    *,
    memory_limit_bytes: int | None = None,
    executor: Executor | None = None,
    workers: int = 1,
    told: Told = lambda *_: None,
) -> Advice:
    """Rank the layouts of a model for training steps of `batch_tokens` tokens on all ranks of a cluster.

    `model` is a model of the zoo such as `zoo:llama-8b`, or `package.module:function`, which is imported and called:
    `function(batch)` returns a function that makes the model, and the inputs of a batch of that size (`advice.md`).
    `cluster` is a preset, a TOML file or a `Cluster`. `memory_limit_bytes` is the memory of one rank; None: that of the
    device. The work runs on the executor, such as that of a dask client. Without one it runs in a pool of spawned
    processes, or in this process for one worker. At most `workers` layouts are in work at once. After each part of the
    work `told` gets a line, the number of finished parts, and that of all parts.

    Raises `CaptureError` if there is no such model, `ReportError` if the tokens are not whole sequences,
    `MemoryLimitError` if no layout fits; its text names the smallest peak.
    """
    check_cluster("advise", cluster)
    check_type("advise", "batch_tokens", batch_tokens, int, "a whole number", error=ReportError)
    described = cluster if isinstance(cluster, Cluster) else Cluster.load(cluster)
    trained = model_of(model) if isinstance(model, str) else model
    limit = described.device.memory_bytes if memory_limit_bytes is None else memory_limit_bytes
    return _advise(trained, described, option_of(cluster), batch_tokens, limit, executor, workers, told)


def option_of(cluster: str | Path | Cluster) -> str | None:
    """The value of the option `weft.cluster` that names the cluster from any folder; None if nothing does."""
    if isinstance(cluster, str | Path):
        path = file_of(cluster)
        return str(cluster) if path is None else str(path.absolute())
    try:
        return cluster.name if cluster == Cluster.load(cluster.name) else None
    except ClusterError:
        return None


def _advise(
    model: TrainedModel,
    cluster: Cluster,
    cluster_option: str | None,
    num_tokens: int,
    limit: int | None,
    executor: Executor | None,
    workers: int,
    told: Told,
) -> Advice:
    num_samples = _num_samples(model, num_tokens)
    questions: list[Question] = []
    left_out: list[LeftOut] = []
    for layout in layouts_of(model, cluster):
        if num_samples % layout.num_data_ranks:
            reason = f"{num_samples} sequences do not divide among {layout.num_data_ranks} ranks"
            left_out.append(LeftOut(layout, reason))
        else:
            questions.append(Question(model, layout, cluster, num_samples, limit))
    if not questions:
        what = f"no layout divides {num_samples} sequences among {cluster.num_ranks} ranks"
        raise RefusedError(compose("advise", what, do=f"use a multiple of {cluster.num_ranks} sequences"))
    work = _FinishedParts(told, 2 * len(questions))  # a layout is probed, and planned or left out
    with executor_for(executor, workers) as pool:
        questions = _with_microbatches(questions, pool, workers, work)
        probes: dict[TrainingLayout, Probe] = {}
        for question, found in answers(pool, workers, probe, questions):
            probes[question.layout] = found
            work.finish(f"probed {question.layout.text}", 1 if found.error is None else 2)
        left_out += [
            LeftOut(layout, found.error, peak_bytes=found.peak_bytes or None)
            for layout, found in ((each.layout, probes[each.layout]) for each in questions)
            if found.error is not None
        ]
        usable = [
            replace(each, microbatch=probes[each.layout].microbatch)
            for each in questions
            if probes[each.layout].error is None
        ]
        usable.sort(key=lambda each: probes[each.layout].estimate_us)  # stable: equal ones stay in their order
        planned: dict[TrainingLayout, PlannedLayout | Refused] = {}

        def best_us() -> float:
            steps = [each.step_us for each in planned.values() if isinstance(each, PlannedLayout)]
            return min(steps, default=float("inf"))

        def is_promising(question: Question) -> bool:
            if probes[question.layout].bound_us <= best_us():
                return True
            work.finish(f"left out {question.layout.text}")
            return False

        for question, answer in answers(pool, workers, plan_layout, usable, is_promising):
            planned[question.layout] = answer
            work.finish(f"planned {question.layout.text}")
    ranked: list[Ranked] = []
    for question in usable:
        probed, answer = probes[question.layout], planned.get(question.layout)
        if answer is None or probed.bound_us > best_us():
            busy = "its compute" if probed.bound_by == COMPUTE else f"what it sends over {probed.bound_by}"
            reason = f"{busy} alone takes {duration_text(probed.bound_us)}"
            left_out.append(LeftOut(question.layout, reason, bound_us=probed.bound_us))
        elif isinstance(answer, Refused):
            left_out.append(LeftOut(question.layout, answer.error, peak_bytes=answer.least_bytes))
        else:
            ranked.append(_ranked(question, answer, num_tokens))
    if not ranked:
        raise _nothing_fits(left_out, limit)
    ranked.sort(key=lambda each: each.found.step_us)
    notes = dict.fromkeys(note for each in ranked for note in each.found.notes)
    return Advice(
        model.title,
        cluster.name,
        cluster_option,
        cluster.num_ranks,
        num_tokens,
        model.tokens_per_sample,
        limit,
        tuple(ranked),
        tuple(left_out),
        tuple(notes),
    )


def _num_samples(model: TrainedModel, num_tokens: int) -> int:
    num_samples, rest = divmod(num_tokens, model.tokens_per_sample)
    if rest or num_samples < 1:
        what = f"{count_text(num_tokens)} tokens are not a whole number of sequences of {model.tokens_per_sample}"
        raise ReportError(compose("advise", what, do=f"use a multiple of {model.tokens_per_sample}"))
    return num_samples


class _FinishedParts:
    """How many parts of the work are finished."""

    def __init__(self, told: Told, total: int) -> None:
        self.told, self.done, self.total = told, 0, total

    def finish(self, text: str, count: int = 1) -> None:
        self.done += count
        self.told(text, self.done, self.total)


def _with_microbatches(
    questions: Sequence[Question], executor: Executor, workers: int, work: _FinishedParts
) -> list[Question]:
    """The questions, each with the microbatch with which its probe begins.

    The activations of a microbatch do not depend on the axes of data, so one layout of each degree of tensor
    parallelism and each kind of checkpointing is measured, with one sequence and with two. The peak of the others
    differs by their state and by the weights that they keep gathered.
    """
    if questions[0].limit_bytes is None:
        return [replace(each, microbatch=each.samples_per_rank) for each in questions]
    bases: dict[tuple[int, str], Question] = {}
    for each in questions:
        key = each.layout.num_tensor_ranks, each.layout.checkpoint
        known = bases.get(key)
        if known is None or each.layout.num_shards > known.layout.num_shards:
            bases[key] = each
    asked = [replace(each, microbatch=size) for each in bases.values() for size in (1, 2)]
    work.total += len(asked)
    peaks: dict[tuple[TrainingLayout, int], int] = {}
    for each, peak in answers(executor, workers, peak_of_microbatch, asked):
        peaks[each.layout, each.microbatch] = peak
        work.finish(f"measured the memory of {each.layout.text}")
    found: list[Question] = []
    for each in questions:
        base = bases[each.layout.num_tensor_ranks, each.layout.checkpoint].layout
        one, two = peaks[base, 1], peaks[base, 2]
        one += _state_bytes(each.model, each.layout) - _state_bytes(each.model, base)
        sizes = [
            size
            for size in divisors(each.samples_per_rank)
            if one + (size - 1) * (two - peaks[base, 1]) <= NEAR * (each.limit_bytes or 0)
        ]
        found.append(replace(each, microbatch=max(sizes, default=1)))
    return found


def _state_bytes(model: TrainedModel, layout: TrainingLayout) -> float:
    """Memory of the parameters and of everything that is stored with them, on one rank."""
    kept = GATHERED_BYTES if layout.reshard == "never" and layout.strategy.shard else 0
    return model.num_parameters / layout.num_tensor_ranks * (STATE_BYTES / layout.num_shards + kept)


def _ranked(question: Question, found: PlannedLayout, num_tokens: int) -> Ranked:
    num_ranks = question.cluster.num_ranks
    rate = num_tokens / num_ranks / found.step_us * 1e6
    num_microbatches = question.samples_per_rank // found.microbatch
    return Ranked(question.layout, num_microbatches, rate, 1e9 / rate / 3600, found)


def _nothing_fits(left_out: Sequence[LeftOut], limit_bytes: int | None) -> RefusedError:
    sized = [each for each in left_out if each.peak_bytes is not None]
    if not sized:
        where = [f"{each.layout.text}: {each.reason}" for each in left_out]
        return RefusedError(compose("advise", "no layout can be used", where=where))
    least = min(sized, key=lambda each: each.peak_bytes or 0)
    needed = least.peak_bytes or 0
    what = f"no layout fits into {size_text(limit_bytes or 0)}; the least is {size_text(needed)}: {least.layout.text}"
    return MemoryLimitError(compose("advise", what, do="use more ranks, or a smaller model"), needed)
