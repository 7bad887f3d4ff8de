"""One run of the scheduler on programs by hand. Times are nanoseconds, and can be added in the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.unit.simulation.programs import Op, compute, launch, program, view, wait
from weft.scheduling.job_tables import JobTables
from weft.scheduling.jobs import Emitter, jobs_of
from weft.scheduling.scheduler import Knobs, Merging, schedule
from weft.simulation.program import OpKind, Program
from weft.simulation.simulator import check_order

OUTPUT = view("output")
ALL = 1000
"""Thousandths: all of it."""
NO_FILLERS = Knobs(filler=0, lookahead=ALL)


@dataclass(frozen=True)
class AsOne:
    """All launches of a queue may be one; a bucket takes a latency and the bytes of its members."""

    durations: Sequence[int]
    least: int
    queues: Sequence[int] = ()
    """The queue of each launch; by default there is one queue."""

    def latency(self, launch: int) -> int:
        return self.least

    def key(self, launch: int) -> int:
        return self.queues[launch] if self.queues else 0

    def duration(self, launches: Sequence[int]) -> int:
        return self.least + sum(self.durations[launch] - self.least for launch in launches)


def scheduled(source: Program, knobs: Knobs, merging: Merging | None = None) -> list[str]:
    """The names of all operations as the scheduler orders them, without the output; members of a bucket with a +."""
    jobs = jobs_of(source)
    made = schedule(JobTables(jobs), knobs, merging)
    order = Emitter(jobs).order(made.events)
    check_order(source, order)
    later = {jobs.ops[member][0] for bucket in made.buckets for member in bucket[1:]}
    return [("+" if op in later else "") + source.names[op] for op in order[:-1]]


def ordered(*ops: Op, knobs: Knobs, given: str = "", kept: str = "") -> str:
    return " ".join(scheduled(program(*ops, OUTPUT, given=given, kept=kept), knobs))


FILLED = (
    compute("a", 10),
    launch("g", 100, needs="a"),
    wait("g"),
    compute("b", 300, "wait_g"),
    compute("c", 10, "b"),
    launch("h", 10, needs="c"),
    wait("h"),
    compute("d", 300, "wait_h"),
)


# Fillers.


def test_a_filler_runs_while_the_next_job_would_stand_still():
    filler = compute("f", 90, "a")
    found = ordered(*FILLED, filler, knobs=Knobs(hold=ALL))
    assert found == "a g f wait_g b c h wait_h d"


def test_of_two_fillers_the_one_that_fits_the_stall_is_taken():
    """A stall of 100: the filler of 400 would lengthen the step by 300, the one of 90 by nothing."""
    found = ordered(*FILLED, compute("long", 400, "a"), compute("short", 90, "a"), knobs=Knobs(hold=ALL))
    assert found.startswith("a g short ")


def test_of_two_fillers_that_fit_the_longer_one_is_taken():
    found = ordered(*FILLED, compute("short", 20, "a"), compute("long", 90, "a"), knobs=Knobs(hold=ALL))
    assert found.startswith("a g long ")


def test_a_filler_that_is_not_to_be_held_back_runs_in_its_place():
    ops = (compute("a", 10), compute("f", 90, "a"), *FILLED[1:])
    assert ordered(*ops, knobs=Knobs(hold=0)).startswith("a g f ")
    assert ordered(*FILLED[:5], compute("f", 90, "a"), *FILLED[5:], knobs=Knobs(hold=0)).index(" f ") < 10


def test_a_job_a_little_ahead_runs_while_the_next_one_would_stand_still():
    """`e` is no filler, since a long path follows it."""
    ahead = (compute("e", 90, "a"), launch("k", 10, needs="e"), wait("k"), compute("z", 900, "wait_k wait_h"))
    found = ordered(*FILLED, *ahead, knobs=Knobs(hold=ALL, window=40))
    assert found.startswith("a g e ")


def test_a_job_outside_the_window_does_not():
    ahead = (compute("e", 90, "a"), launch("k", 10, needs="e"), wait("k"), compute("z", 900, "wait_k wait_h"))
    found = ordered(*FILLED, *ahead, knobs=Knobs(hold=ALL, window=2))
    assert found.startswith("a g wait_g b ")


# Launches.


def gathers(*durations: int, first: int = 10) -> list[Op]:
    """Gathers `g0`, `g1`, ... that are ready at once, and computes `c0`, `c1`, ... of 100 that need them in turn."""
    made: list[Op] = [launch(f"g{k}", ns) for k, ns in enumerate(durations)]
    last = "start"
    made.append(compute("start", first))
    for k in range(len(durations)):
        made += [wait(f"g{k}"), compute(f"c{k}", 100, f"wait_g{k} {last}")]
        last = f"c{k}"
    return made


def test_gathers_go_by_their_first_use():
    """In the graph the one that is needed last is launched first."""
    ops = gathers(10, 10, 10)
    found = ordered(*reversed(ops[:3]), *ops[3:], knobs=NO_FILLERS).split()
    assert [name for name in found if name.startswith("g")] == ["g0", "g1", "g2"]


def test_a_gather_is_launched_no_earlier_than_its_lookahead():
    """Of 310 of compute: 330 thousandths are 102 before its use, that is beside the job before it."""
    found = ordered(*gathers(10, 10, 10), knobs=replace(NO_FILLERS, lookahead=330))
    assert found == "g0 start g1 wait_g0 c0 wait_g1 g2 c1 wait_g2 c2"


def reduction(ns: int, gather: int) -> list[Op]:
    """A reduction that nothing needs, and behind it a gather that is needed 100 later."""
    return [
        compute("a", 10),
        launch("r", ns, needs="a"),
        launch("g", gather, needs="a"),
        compute("b", 100, "a"),
        wait("g"),
        compute("c", 100, "b wait_g"),
        launch("s", 10, needs="c"),
        wait("s"),
        compute("d", 500, "wait_s"),
    ]


def test_a_reduction_overtakes_a_gather_that_still_comes_in_time():
    """40 and 50 are over before the 100 of `b` are."""
    found = ordered(*reduction(40, 50), knobs=NO_FILLERS).split()
    assert found.index("r") < found.index("g") < found.index("b")


def test_a_reduction_waits_for_a_gather_that_would_come_late():
    """80 and 50 are not."""
    found = ordered(*reduction(80, 50), knobs=NO_FILLERS).split()
    assert found.index("g") < found.index("r")


def test_a_launch_is_committed_only_when_its_queue_would_run_empty():
    """`g1` is ready from the beginning, `g2` later but needed first: it goes before `g1`, as `g0` holds the queue."""
    ops = [
        launch("g0", 100),
        launch("g1", 50),
        compute("a", 50),
        launch("g2", 50, needs="a"),
        compute("b", 150, "a"),
        wait("g2"),
        compute("c", 200, "wait_g2 b"),
        wait("g0 g1"),
        compute("d", 500, "wait_g0_g1 c"),
    ]
    found = [name for name in ordered(*ops, knobs=NO_FILLERS).split() if name.startswith("g")]
    assert found == ["g0", "g2", "g1"]


def two_casts() -> list[Op]:
    """The casts of two shards, which both stand at the beginning of the graph, their gathers and uses."""
    return [
        compute("cast0", 1),
        compute("cast1", 1),
        launch("g0", 90, needs="cast0"),
        launch("g1", 90, needs="cast1"),
        compute("a", 100),
        wait("g0"),
        compute("b", 100, "wait_g0 a"),
        wait("g1"),
        compute("c", 100, "wait_g1 b"),
    ]


def test_what_prepares_a_gather_runs_right_before_it():
    assert ordered(*two_casts(), knobs=replace(NO_FILLERS, lookahead=400)) == "cast0 g0 a cast1 g1 wait_g0 b wait_g1 c"


def test_what_prepares_a_gather_may_be_needed_behind_its_use_too():
    """An optimizer writes to the shards at the end, so it must come behind their casts."""
    ops = [*two_casts(), compute("update", 100, "c cast0 cast1")]
    found = ordered(*ops, knobs=replace(NO_FILLERS, lookahead=300))
    assert found == "cast0 g0 a cast1 g1 wait_g0 b wait_g1 c update"


def test_what_is_needed_before_the_use_of_a_launch_does_not_prepare_it():
    """`x` is short beside the sum of a gradient that needs it, but what goes on needs it as well."""
    ops = [
        compute("x", 10),
        compute("grad", 10, "x"),
        launch("r", 400, needs="grad"),
        compute("b", 100, "x"),
        compute("c", 100, "b"),
    ]
    assert ordered(*ops, knobs=NO_FILLERS).startswith("x ")


def test_a_fused_region_is_kept_whole():
    """A launch that stands between its parts, and a wait, go before or behind it."""
    ops = [
        launch("g", 20),
        compute("a", 5, kernel="k"),
        wait("g"),
        launch("h", 20, needs="wait_g"),
        compute("b", 5, "a", kernel="k"),
        compute("c", 300, "b"),
        wait("h"),
        compute("d", 300, "c wait_h"),
    ]
    found = ordered(*ops, knobs=NO_FILLERS).split()
    assert found.index("b") == found.index("a") + 1


# Memory.


def gradients(num: int) -> list[Op]:
    """Layers of 100 each with a gradient of 64 bytes that is reduced to 8 in 50."""
    made: list[Op] = []
    last = ""
    for k in range(num):
        made += [
            compute(f"a{k}", 100, last, makes={f"y{k}": 8}),
            compute(f"w{k}", 100, f"a{k}", makes={f"d{k}": 64}, uses=(f"y{k}",)),
            launch(f"r{k}", 50, needs=f"w{k}", makes={f"s{k}": 8}, uses=(f"d{k}",)),
        ]
        last = f"a{k}"
    return [*made, *(wait(f"r{k}") for k in range(num))]


def test_a_wait_that_frees_memory_stands_behind_the_first_job_that_ends_after_the_collective():
    """`r0` ends at 250, and surely a quarter of itself and of the time so far later: 362 at 400, when two jobs are done
    behind its launch. All others are waited for later, and none but the last ones at the end."""
    found = ordered(*gradients(4), knobs=NO_FILLERS, kept="s0 s1 s2 s3").split()
    between = [found[found.index(f"r{k}") + 1 : found.index(f"wait_r{k}")] for k in range(4)]
    behind = [len([name for name in names if name[0] in "aw" and "_" not in name]) for names in between]
    assert behind[0] == 2, found
    assert behind[1] > 2, found


def test_a_wait_that_frees_nothing_stands_before_the_first_job_that_needs_it():
    ops = [
        launch("g", 10, makes={"gathered": 64}, uses=("shard",)),
        wait("g"),
        compute("a", 100, makes={"x": 8}),
        compute("b", 100, "a", makes={"y": 8}, uses=("x",)),
        compute("c", 100, "b wait_g", uses=("gathered", "y")),
    ]
    assert ordered(*ops, knobs=NO_FILLERS, given="shard") == "g a b wait_g c"


def test_a_gather_for_which_there_is_no_room_is_put_off():
    """Each gather brings 64 bytes: under a budget of 80 the second goes when the first is used up."""
    ops = [
        launch("g0", 50, makes={"w0": 64}),
        launch("g1", 50, makes={"w1": 64}),
        wait("g0"),
        compute("a", 100, "wait_g0", makes={"x": 8}, uses=("w0",)),
        wait("g1"),
        compute("b", 100, "wait_g1 a", uses=("x", "w1")),
    ]
    assert ordered(*ops, knobs=NO_FILLERS) == "g0 g1 wait_g0 a wait_g1 b"
    assert ordered(*ops, knobs=replace(NO_FILLERS, budget_bytes=80)) == "g0 wait_g0 a g1 wait_g1 b"


def test_a_smaller_gather_goes_where_there_is_no_room_for_the_one_before_it():
    """`a` takes 60 while it runs: of 80 there is room for `w1` beside it, and not for `w0`, which is used first."""
    ops = [
        compute("a", 100, makes={"x": 60}),
        launch("g0", 50, makes={"w0": 64}),
        wait("g0"),
        compute("b", 100, "wait_g0 a", uses=("w0",)),
        launch("g1", 50, makes={"w1": 8}),
        wait("g1"),
        compute("c", 100, "wait_g1 b", uses=("w1",)),
    ]
    assert ordered(*ops, knobs=NO_FILLERS) == "g0 g1 a wait_g0 b wait_g1 c"
    assert ordered(*ops, knobs=replace(NO_FILLERS, budget_bytes=80)) == "g1 a g0 wait_g0 b wait_g1 c"


def test_room_is_kept_for_the_filler_that_runs_next():
    """The filler takes 60 while it runs: `h` would go off before it, and holds 30 until `d`."""
    ops = [
        compute("a", 10),
        launch("g", 100, needs="a"),
        wait("g"),
        compute("b", 300, "wait_g"),
        compute("c", 300, "b"),
        launch("h", 10, makes={"w": 30}),
        wait("h"),
        compute("d", 300, "c wait_h", uses=("w",)),
        compute("f", 200, "a", makes={"x": 60}),
    ]
    knobs = Knobs(hold=ALL, lookahead=ALL)
    ample, tight = [ordered(*ops, knobs=replace(knobs, budget_bytes=budget)).split() for budget in (90, 80)]
    assert ample.index("h") < ample.index("f")
    assert tight.index("h") > tight.index("f")


def test_reductions_that_wait_for_their_queue_are_sent_where_memory_is_short():
    """A long gather keeps the queue busy, so gradients pile up; with room for two, the stream waits for them."""
    gather = [launch("g", 3000, makes={"w": 8}), wait("g"), compute("last", 100, "wait_g a5", uses=("w",))]
    source = program(*gradients(6), *gather, OUTPUT, kept=" ".join(f"s{k}" for k in range(6)))
    shape = JobTables(jobs_of(source))
    held = {budget: schedule(shape, replace(NO_FILLERS, budget_bytes=budget)).in_use_bytes for budget in (1000, 220)}
    assert held[1000] > 220 >= held[220]


# Buckets.


def test_only_launches_that_wait_beside_each_other_become_one():
    """`r0` finds an empty queue and goes alone; `r1` and `r2` wait behind it; `r3` comes when they have gone."""
    ops = [
        compute("a0", 10),
        launch("r0", 150, needs="a0"),
        compute("a1", 60, "a0"),
        launch("r1", 60, needs="a1"),
        compute("a2", 60, "a1"),
        launch("r2", 60, needs="a2"),
        compute("a3", 400, "a2"),
        launch("r3", 60, needs="a3"),
        compute("a4", 200, "a3"),
    ]
    source = program(*ops, OUTPUT)
    merging = AsOne(jobs_of(source).duration, least=20)
    found = scheduled(source, Knobs(bucket=ALL), merging)
    assert [name for name in found if "r" in name] == ["r0", "r1", "+r2", "r3"]


def test_a_bucket_takes_no_longer_than_it_may():
    """Two of 60 with a latency of 20 take 100, five latencies."""
    ops = [
        compute("a", 10),
        launch("r0", 150, needs="a"),
        launch("r1", 60, needs="a"),
        launch("r2", 60, needs="a"),
        compute("b", 1050, "a"),
    ]
    source = program(*ops, OUTPUT)
    merging = AsOne(jobs_of(source).duration, least=20)
    both, apart = [scheduled(source, Knobs(bucket=latencies), merging) for latencies in (5, 4)]
    assert "+r2" in both
    assert "+r2" not in apart


def reductions(num: int) -> Program:
    """Layers of 100, each with a reduction of 60."""
    made: list[Op] = []
    for k in range(num):
        made += [compute(f"a{k}", 100, f"a{k - 1}" if k else ""), launch(f"r{k}", 60, needs=f"a{k}")]
    return program(*made, compute("end", 100, f"a{num - 1}"), OUTPUT)


def test_reductions_are_held_back_until_a_bucket_of_them_is_filled():
    """Without its latency of 20 each brings 40: four of them make eight latencies, the last two go as none follows."""
    source = reductions(6)
    merging = AsOne(jobs_of(source).duration, least=20)
    found = scheduled(source, Knobs(bucket=ALL, fill=8), merging)
    assert [name for name in found if name != "end"] == [
        "a0",
        "a1",
        "a2",
        "a3",
        "r0",
        "+r1",
        "+r2",
        "+r3",
        "a4",
        "a5",
        "r4",
        "+r5",
    ]
    alone = scheduled(source, Knobs(bucket=ALL), merging)
    assert not any("+" in name for name in alone)


def test_a_reduction_that_something_waits_for_takes_those_along_that_are_held_back():
    source = program(
        compute("a", 100),
        launch("r0", 60, needs="a"),
        launch("r1", 60, needs="a"),
        wait("r0"),
        compute("b", 1000, "wait_r0"),
        launch("r2", 60, needs="b"),
        OUTPUT,
    )
    merging = AsOne(jobs_of(source).duration, least=20)
    found = scheduled(source, Knobs(bucket=ALL, fill=ALL, filler=ALL), merging)
    assert found == ["a", "r0", "+r1", "wait_r0", "b", "r2"]


def test_without_a_bucket_nothing_is_merged():
    source = program(*(launch(f"r{k}", 60) for k in range(3)), compute("a", 10), OUTPUT)
    merging = AsOne(jobs_of(source).duration, least=20)
    assert not any("+" in name for name in scheduled(source, Knobs(bucket=0), merging))


def test_gathers_merge_only_as_long_as_the_first_use_of_them_is_not_late():
    """Both take 60, as one 100: with 70 of compute before the first use they stay apart, with 150 they become one."""
    for first, is_one in ((70, False), (150, True)):
        source = program(*gathers(60, 60, first=first), OUTPUT)
        merging = AsOne(jobs_of(source).duration, least=20)
        found = scheduled(source, replace(NO_FILLERS, bucket=ALL), merging)
        assert ("+g1" in found) is is_one, found


def test_gathers_merge_only_as_long_as_there_is_room_for_all_of_them():
    """Each brings 40 bytes: there is room for every one of them, and not for all at once."""
    made = [replace(op, makes={f"w{op.name[1]}": 40}) if op.kind is OpKind.LAUNCH else op for op in gathers(60, 60, 60)]
    made = [replace(op, uses=(f"w{op.name[1]}",)) if op.name.startswith("c") else op for op in made]
    start = replace(made[3], duration_ns=300)
    source = program(start, made[0], *made[4:6], made[1], *made[6:8], made[2], *made[8:], OUTPUT)
    shape, merging = JobTables(jobs_of(source)), AsOne(jobs_of(source).duration, least=20)
    ample, tight = [
        schedule(shape, replace(NO_FILLERS, bucket=ALL, budget_bytes=budget), merging) for budget in (1000, 90)
    ]
    assert [len(bucket) for bucket in ample.buckets] == [3]
    assert tight.in_use_bytes <= 90


# Late launches.


def training_step(num: int, rest: Sequence[Op] = (), needed: str = "") -> list[Op]:
    """Layers of 100, each with a cast of 10 and a reduction of 60, and an optimizer that needs all reductions.

    In index order every cast is followed by its reduction, and all waits come before the optimizer.
    """
    made: list[Op] = []
    for k in range(num):
        cast, reduction = compute(f"c{k}", 10, f"a{k}"), launch(f"r{k}", 60, needs=f"c{k}")
        made += [compute(f"a{k}", 100, f"a{k - 1}" if k else ""), cast, reduction]
    waits = [wait(f"r{k}") for k in range(num)]
    needs = needed or " ".join(each.name for each in waits)
    return [*made, *waits, *rest, compute("norm", 100, needs), compute("m", 90, "norm"), compute("p", 90, "norm")]


def late(*ops: Op, **facts: object) -> list[str]:
    """The names of the late launches."""
    source = replace(program(*ops, OUTPUT), **facts)
    tables = JobTables(jobs_of(source))
    return [source.names[tables.jobs.ops[job][0]] for job in range(tables.size) if tables.is_late[job]]


def test_reductions_that_only_the_optimizer_needs_are_late():
    assert late(*training_step(3)) == ["r0", "r1", "r2"]


def test_nothing_is_late_without_an_optimizer():
    assert late(*training_step(3)[:-3]) == []


def test_a_gather_of_a_parameter_and_a_collective_of_an_activation_are_not_late():
    layer = [launch("g", 60), wait("g"), compute("x", 100, "wait_g"), launch("h", 60, "tp", "x"), wait("h")]
    backward = training_step(3)
    backward[0] = replace(backward[0], needs=("wait_h",))
    assert late(*layer, *backward) == ["r0", "r1", "r2"]


def test_a_tiny_all_reduce_after_the_reductions_does_not_end_the_backward_pass():
    """The norm of all gradients, as clipping needs it: its latency is nearly all of its time."""
    waits = " ".join(f"wait_r{k}" for k in range(3))
    clip = [compute("squares", 10, waits), launch("total", 21, needs="squares"), wait("total")]
    ops = training_step(3, clip, f"{waits} wait_total")
    latency = [20 if op.kind is OpKind.LAUNCH else 0 for op in (*ops, OUTPUT)]
    assert late(*ops, latency_ns=tuple(latency)) == ["r0", "r1", "r2", "total"]
    assert late(*ops) == []


def test_a_late_launch_goes_as_soon_as_its_queue_is_free_if_it_may_go_at_once():
    knobs = Knobs(lookahead=0, hold=0)
    held = ordered(*training_step(3), knobs=knobs).split()
    assert held.index("r0") > held.index("a2")
    free = ordered(*training_step(3), knobs=replace(knobs, at_once=True)).split()
    assert free.index("r0") < free.index("a1")
    assert free.index("r1") < free.index("a2")


def test_late_launches_that_one_job_needs_go_together():
    """Before its use none is launched: the look-ahead is 0."""
    source = program(*training_step(4), OUTPUT)
    merging = AsOne(jobs_of(source).duration, least=20)
    knobs = Knobs(lookahead=0, hold=ALL, bucket=ALL)
    assert "r0 r1 r2 r3 wait_r0" in " ".join(scheduled(source, knobs, merging))
    assert "r0 +r1 +r2 +r3 wait_r0" in " ".join(scheduled(source, replace(knobs, together=True), merging))


def test_late_launches_go_together_after_all_fillers_that_they_need():
    """The casts of the first two reductions are held back as fillers until the optimizer needs them."""
    source = program(*training_step(6), OUTPUT)
    merging = AsOne(jobs_of(source).duration, least=20)
    knobs = Knobs(lookahead=0, hold=ALL, bucket=ALL, filler=300)
    assert "c5 r2 r3 c0 r0 c1 r1 r4 r5 wait_r0" in " ".join(scheduled(source, knobs, merging))
    found = scheduled(source, replace(knobs, together=True), merging)
    assert "c5 r2 r3 c0 c1 r0 +r1 +r4 +r5 wait_r0" in " ".join(found)


def test_late_launches_on_two_levels_go_together_level_by_level():
    """Reductions inside a node, and all-reduces of what they give between nodes."""
    ops = training_step(3)
    first = next(k for k, op in enumerate(ops) if op.kind is OpKind.WAIT)
    levels = [op for k in range(3) for op in (wait(f"r{k}"), launch(f"s{k}", 60, "outer", f"wait_r{k}"), wait(f"s{k}"))]
    needs = tuple(f"wait_s{k}" for k in range(3))
    source = program(*ops[:first], *levels, replace(ops[-3], needs=needs), *ops[-2:], OUTPUT)
    jobs = jobs_of(source)
    merging = AsOne(jobs.duration, 20, jobs.queue)
    found = scheduled(source, Knobs(lookahead=0, hold=ALL, bucket=ALL, together=True), merging)
    assert [name for name in found if name.strip("+")[0] in "rs"] == ["r0", "+r1", "+r2", "s0", "+s1", "+s2"]
