"""Advice: which layouts are listed, that pruning is sound, and that the ranking does not depend on the workers."""

from __future__ import annotations

import math
import os
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.advice import own_models
from weft.advice import advisor, models
from weft.advice.advisor import advise, option_of
from weft.advice.evaluation import PlannedLayout, Probe, Question, Refused, plan_layout, probe
from weft.advice.layout import TrainingLayout
from weft.advice.layouts import layouts_of
from weft.advice.models import TrainedModel, ZooModel
from weft.advice.ranking import Advice, Ranked, why_longer
from weft.cost.cluster import Cluster
from weft.errors import CaptureError, ClusterError, MemoryLimitError, RefusedError, ReportError
from weft.prediction.error_bars import ErrorBar

SMALL = ZooModel("llama-debug", (("num_layers", 3), ("dim", 1024), ("ffn_dim", 4096), ("sequence", 512)))
"""Layers large enough that compute, latency and bandwidth all matter; three of them, so that probes continue lines."""
EXPERTS = ZooModel("moe-debug", (("num_layers", 3), ("dim", 512), ("ffn_dim", 1024), ("sequence", 512)))
FSDP = TrainingLayout("fsdp", (("dp", 8),))


def all_of(model: TrainedModel, name: str, num_samples: int) -> list[Question]:
    cluster = Cluster.load(name)
    return [
        Question(model, layout, cluster, num_samples, None, num_samples // layout.num_data_ranks)
        for layout in layouts_of(model, cluster)
        if num_samples % layout.num_data_ranks == 0
    ]


@pytest.mark.parametrize(("changes", "option"), [({}, "h100-4x8"), ({"num_nodes": 3}, None), ({"name": "ours"}, None)])
def test_an_object_is_named_only_if_its_name_loads_it(changes: dict[str, Any], option: str | None):
    assert option_of(replace(Cluster.load("h100-4x8"), **changes)) == option


def test_layouts_cover_every_mesh_of_a_cluster():
    shapes = dict.fromkeys(layout.shape for layout in layouts_of(SMALL, Cluster.load("h100-4x8")))
    hybrid = ["HSDP 4 x 8", "HSDP 2 x 16"]
    tensor = ["FSDP x TP 16 x 2", "FSDP x TP 8 x 4"]  # four heads for keys and values do not split over eight ranks
    copies = [["HSDP x TP 4 x 4 x 2", "HSDP x TP 2 x 8 x 2"], ["HSDP x TP 4 x 2 x 4", "HSDP x TP 2 x 4 x 4"]]
    both = [shape for one, more in zip(tensor, copies, strict=True) for shape in (one, *more)]
    assert list(shapes) == ["DDP 32", "FSDP 32", *hybrid, *both]


def test_shards_divide_the_ranks_of_any_number_of_nodes():
    cluster = replace(Cluster.load("h100-4x8"), num_nodes=3)
    layouts = layouts_of(SMALL, cluster)
    assert {layout.shape for layout in layouts if layout.parallel == "hsdp"} == {"HSDP 3 x 8"}
    assert {math.prod(size for _, size in layout.mesh) for layout in layouts} == {24}


def test_experts_are_divided_where_their_number_allows():
    shapes = dict.fromkeys(layout.shape for layout in layouts_of(EXPERTS, Cluster.load("h100-8")))
    assert [shape for shape in shapes if "EP" in shape] == ["FSDP x EP 4 x 2", "FSDP x EP 2 x 4"]


def test_one_rank_has_no_layout():
    with pytest.raises(RefusedError, match="no layout divides"):
        advise(SMALL, replace(Cluster.load("h100-8"), num_nodes=1, ranks_per_node=1), 512)


EVERY = 1 if os.environ.get("WEFT_FUZZ") == "full" else 8
"""Of the layouts of a space, every eighth is planned in full; all of them with WEFT_FUZZ=full."""
SPACES = [(SMALL, "h100-8", 16), (SMALL, "ethernet-h100-2x8", 64), (SMALL, "a100-2x8", 32), (EXPERTS, "h100-8", 16)]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("model", "cluster", "num_samples"), SPACES)
def test_no_bound_is_above_the_step_that_full_planning_finds(model: TrainedModel, cluster: str, num_samples: int):
    for question in all_of(model, cluster, num_samples)[::EVERY]:
        probed, planned = probe(question), plan_layout(question)
        assert probed.error is None
        assert isinstance(planned, PlannedLayout)
        assert probed.bound_us <= planned.step_us, question.layout.text


def test_the_bound_of_a_probe_holds_for_all_layers():
    question = Question(SMALL, FSDP, Cluster.load("h100-8"), 16, None, 2)
    probed, planned = probe(question), plan_layout(question)
    assert isinstance(planned, PlannedLayout)
    assert 0.5 * planned.step_us < probed.bound_us <= planned.step_us
    assert probed.estimate_us == pytest.approx(planned.step_us, rel=0.2)


class Answered:
    """Evaluates each layout once, for advice with bounds and without."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_bounds = True
        self.probes: dict[TrainingLayout, Probe] = {}
        self.plans: dict[TrainingLayout, PlannedLayout | Refused] = {}
        monkeypatch.setattr(advisor, "probe", self.probe)
        monkeypatch.setattr(advisor, "plan_layout", self.plan)

    def probe(self, question: Question) -> Probe:
        if question.layout not in self.probes:
            self.probes[question.layout] = probe(question)
        found = self.probes[question.layout]
        return found if self.has_bounds else replace(found, bound_us=0.0)

    def plan(self, question: Question) -> PlannedLayout | Refused:
        if question.layout not in self.plans:
            self.plans[question.layout] = plan_layout(question)
        return self.plans[question.layout]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("cluster", "num_samples", "limit_bytes"),
    [("h100-1x2", 8, None), pytest.param("h100-2x2", 1024, 3 << 30, marks=pytest.mark.long)],
)
def test_pruning_finds_what_planning_every_layout_finds(
    cluster: str, num_samples: int, limit_bytes: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(models, "CHECKPOINTS", ("none", "full"))
    answered = Answered(monkeypatch)
    model = f"{own_models.__name__}:mlp_decoder"
    pruned = advise(model, cluster, num_samples * 512, memory_limit_bytes=limit_bytes)
    num_planned = len(answered.plans)
    answered.has_bounds = False
    whole = advise(model, cluster, num_samples * 512, memory_limit_bytes=limit_bytes)
    assert num_planned < len(answered.plans)
    assert whole.best == pruned.best
    assert {each.layout for each in pruned.ranked} < {each.layout for each in whole.ranked}
    assert any(each.num_microbatches > 1 for each in whole.ranked) is (limit_bytes is not None)
    for each in whole.ranked:
        assert answered.probes[each.layout].bound_us <= each.found.step_us, each.layout.text


PLANNED = PlannedLayout(
    microbatch=1,
    step_us=1.0,
    compute_us=1.0,
    optimizer_us=0.5,
    exposed_us=0.0,
    exposed_by_group={},
    peak_bytes=1 << 30,
    mfu=0.5,
    runtime="fsdp2",
    runtime_us=2.0,
    step_error=ErrorBar(0.1, "made up"),
    peak_error=ErrorBar(0.1, "made up"),
)


class Made:
    """Figures by layout in place of captured graphs: a bound and a step in microseconds, or None if nothing fits."""

    def __init__(
        self, figures: dict[TrainingLayout, tuple[float, float] | None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.figures = figures
        self.refused: set[TrainingLayout] = set()
        self.planned: list[TrainingLayout] = []
        monkeypatch.setattr(advisor, "_with_microbatches", lambda questions, *_: questions)
        monkeypatch.setattr(advisor, "probe", self.probe)
        monkeypatch.setattr(advisor, "plan_layout", self.plan)

    def probe(self, question: Question) -> Probe:
        found = self.figures[question.layout]
        if found is None:
            return Probe(1, 0.0, 0.0, "", 100 << 30, "does not fit")
        return Probe(1, sum(found) / 2, found[0], "compute", 1 << 30)

    def plan(self, question: Question) -> PlannedLayout | Refused:
        self.planned.append(question.layout)
        found = self.figures[question.layout]
        assert found is not None
        return Refused("no order fits", 99) if question.layout in self.refused else replace(PLANNED, step_us=found[1])


class Sleepy(ThreadPoolExecutor):
    """Finishes calls in a random order."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def run() -> Any:
            time.sleep(random.random() / 500)
            return fn(*args, **kwargs)

        return super().submit(run)


@pytest.mark.parametrize("seed", range(20))
def test_pruning_keeps_the_fastest_whatever_the_order_of_the_answers(seed: int, monkeypatch: pytest.MonkeyPatch):
    generator = random.Random(seed)
    cluster = Cluster.load("h100-4x8")
    figures: dict[TrainingLayout, tuple[float, float] | None] = {}
    for layout in layouts_of(SMALL, cluster):
        step = generator.uniform(100, 200)
        figures[layout] = (step * generator.uniform(0.5, 1), step) if generator.random() < 0.9 else None
    made = Made(figures, monkeypatch)
    made.refused = {layout for layout in figures if generator.random() < 0.2}
    serial = advise(SMALL, cluster, 64 * 512)
    num_planned = len(made.planned)
    fitting = {layout: found for layout, found in figures.items() if layout not in made.refused}
    steps = {layout: found[1] for layout, found in fitting.items() if found is not None}
    assert serial.best.layout == min(steps, key=lambda layout: steps[layout])
    best = min(steps.values())
    reached = {layout for layout, found in fitting.items() if found is not None and found[0] <= best}
    assert {each.layout for each in serial.ranked} == reached
    assert num_planned < len(figures)
    with Sleepy(4) as pool:
        assert advise(SMALL, cluster, 64 * 512, executor=pool, workers=4) == serial


def made_ranked(**figures: float) -> Ranked:
    return Ranked(FSDP, 1, 0.0, 0.0, replace(PLANNED, **figures))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("figures", "part", "is_close"),
    [
        ({"step_us": 1.05, "exposed_us": 0.05, "exposed_by_group": {"dp": 0.05}}, "exposed communication", True),
        ({"step_us": 1.2, "compute_us": 1.2}, "more compute", False),
        ({"step_us": 1.2, "compute_us": 1.2, "optimizer_us": 0.65}, "most of it in the optimizer", False),
    ],
)
def test_the_reason_names_the_longer_part_and_whether_it_is_too_close_to_call(
    figures: dict[str, Any], part: str, is_close: bool
):
    text = why_longer(made_ranked(), made_ranked(**figures))
    assert part in text
    assert ("Too close to call" in text) is is_close


def test_a_layout_whose_bound_is_above_the_best_step_is_not_planned(monkeypatch: pytest.MonkeyPatch):
    cluster = Cluster.load("h100-4x8")
    layouts = layouts_of(SMALL, cluster)
    made = Made(
        {layout: (90.0 + 20 * number, 100.0 + 20 * number) for number, layout in enumerate(layouts)}, monkeypatch
    )
    parts: list[tuple[int, int]] = []
    found = advise(SMALL, cluster, 64 * 512, told=lambda _, done, total: parts.append((done, total)))
    assert made.planned == layouts[:1]
    assert len(found.left_out) == len(layouts) - 1
    assert parts == [(done, 2 * len(layouts)) for done in range(1, 2 * len(layouts) + 1)]
    assert found.left_out[0].reason == "its compute alone takes 110 us"


def test_if_nothing_fits_the_error_names_the_least_peak(monkeypatch: pytest.MonkeyPatch):
    cluster = Cluster.load("h100-4x8")
    Made(dict.fromkeys(layouts_of(SMALL, cluster)), monkeypatch)
    with pytest.raises(MemoryLimitError) as error:
        advise(SMALL, cluster, 64 * 512, memory_limit_bytes=80 << 30)
    assert str(error.value).startswith("advise: no layout fits into 80.0 GiB; the least is 100 GiB: DDP 32")
    assert error.value.least_bytes == 100 << 30


class Dying(Executor):
    """Loses every second call, as a pool does whose worker is killed."""

    count = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.count += 1
        if self.count % 2:
            future.set_result(fn(*args, **kwargs))
        else:
            future.set_exception(OSError("the worker died"))
        return future


def test_the_advice_survives_workers_that_die(monkeypatch: pytest.MonkeyPatch):
    cluster = Cluster.load("h100-4x8")
    Made({layout: (90.0, 100.0 + number) for number, layout in enumerate(layouts_of(SMALL, cluster))}, monkeypatch)
    assert advise(SMALL, cluster, 64 * 512, executor=Dying(), workers=2) == advise(SMALL, cluster, 64 * 512)


@pytest.mark.parametrize(
    ("model", "cluster", "tokens", "error", "found"),
    [
        ("zoo:llama-9b", "h100-8", 4096, CaptureError, "no model is called 'llama-9b'"),
        ("zoo:vision-debug", "h100-8", 4096, CaptureError, "takes no tokens"),
        ("no_such_package.models:make", "h100-8", 4096, CaptureError, "'no_such_package.models' cannot be imported"),
        ("json:lodas", "h100-8", 4096, CaptureError, "did you mean 'loads'"),
        ("zoo:llama-debug", "h100-9000x", 4096, ClusterError, "h100-9000x"),
        ("zoo:llama-debug", "h100-8", 33, ReportError, "33 tokens are not a whole number of sequences of 32"),
        ("zoo:llama-debug", "h100-8", "4M", ReportError, "batch_tokens"),
        ("zoo:llama-debug", "h100-8", 32, RefusedError, "no layout divides 1 sequences among 8 ranks"),
    ],
)
def test_bad_input_is_an_error_with_advice(model: str, cluster: str, tokens: Any, error: type[Exception], found: str):
    with pytest.raises(error, match=re.escape(found)):
        advise(model, cluster, tokens)


LIMIT = 3 << 30
"""Bytes of one rank: enough for some of the layouts."""


def advise_on_two_ranks(**options: Any) -> Advice:
    return advise(SMALL, "h100-1x2", 4 * 512, memory_limit_bytes=LIMIT, **options)


@pytest.fixture(scope="module")
def advice() -> Advice:
    return advise_on_two_ranks()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_ranking_is_stable_over_repetition_and_workers(advice: Advice):
    assert advise_on_two_ranks(workers=2) == advice


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_layouts_are_ordered_as_torchtitan_published_them():
    """8b on 8 H100, sequences of 8192: FSDP 8 beats FSDP 4 x TP 2; less recomputation and fewer gathers are faster."""
    cluster, model = Cluster.load("h100-500w-1x8"), ZooModel("llama-8b", (("sequence", 8192),))
    whole, split = (("dp", 8),), (("dp", 4), ("tp", 2))
    layouts = {
        "fsdp, never resharded": TrainingLayout("fsdp", whole, "never", "selective"),
        "fsdp": TrainingLayout("fsdp", whole, "always", "selective"),
        "fsdp, all recomputed": TrainingLayout("fsdp", whole, "always", "full"),
        "fsdp x tp": TrainingLayout("fsdp-tp", split, "always", "selective"),
        "fsdp x tp, all recomputed": TrainingLayout("fsdp-tp", split, "always", "full"),
    }
    rates: dict[str, float] = {}
    for name, layout in layouts.items():
        found = probe(Question(model, layout, cluster, layout.num_data_ranks, None))
        assert found.error is None
        rates[name] = layout.num_data_ranks / found.estimate_us
    assert rates["fsdp, never resharded"] > rates["fsdp"] > rates["fsdp, all recomputed"]
    assert rates["fsdp x tp"] > rates["fsdp x tp, all recomputed"]
    assert rates["fsdp"] > rates["fsdp x tp"]
    assert rates["fsdp, all recomputed"] > rates["fsdp x tp, all recomputed"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_ranked_layout_is_within_the_memory_limit(advice: Advice):
    assert all(each.found.peak_bytes <= LIMIT for each in advice.ranked)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_on_256_gpus_replicas_and_one_large_group_are_too_close_to_call_for_the_1b_decoder():
    """HSDP exposes less communication, but each of its ranks updates 1/8 of the parameters, not 1/256."""
    cluster = Cluster.load("h100-32x8")
    layouts = TrainingLayout("hsdp", (("replicate", 32), ("shard", 8))), TrainingLayout("fsdp", (("dp", 256),))
    ranked: list[Ranked] = []
    for layout in layouts:
        found = plan_layout(Question(ZooModel("llama-1b"), layout, cluster, 256, 80 << 30))
        assert isinstance(found, PlannedLayout)
        ranked.append(Ranked(layout, 1, 0.0, 0.0, found))
    replicated, whole = ranked
    assert replicated.found.exposed_us < whole.found.exposed_us
    assert replicated.found.optimizer_us > 20 * whole.found.optimizer_us
    assert whole.found.step_us == pytest.approx(replicated.found.step_us, rel=0.02)
    best, second = sorted(ranked, key=lambda each: each.found.step_us)
    assert "Too close to call" in why_longer(best, second)
    runtime_us = [each.found.runtime_us or 0.0 for each in ranked]
    assert runtime_us[0] < runtime_us[1]
