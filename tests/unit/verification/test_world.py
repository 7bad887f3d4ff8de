"""Real ranks: what they carry to other processes and back, and what happens when one fails, hangs or dies."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.verification.communication import module_of, run, run_real
from tests.versions import needs_transfers
from weft.compat import storage_key
from weft.errors import VerificationError
from weft.graph.groups import read_groups
from weft.graph.listings.text import parse
from weft.verification.comparison import compare, example_inputs
from weft.verification.real_ranks.messages import pack, unpack
from weft.verification.real_ranks.world import RealRanks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]

REDUCE = """
    def graph(x: f32[2]):
        a = all_reduce(x, 'sum', 'dp')
        w = wait(a)
        return [w]"""


def test_tensors_that_share_a_storage_share_one_on_the_other_side():
    whole = torch.arange(6, dtype=torch.bfloat16)
    value = {"x": [whole.reshape(2, 3).t(), whole[1::2]], "n": (1, None, "s", 2.5), "e": torch.empty(0)}
    copy = unpack(pack(value))
    assert copy["x"][0].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert (copy["x"][0].stride(), copy["x"][1].storage_offset()) == ((1, 3), 1)
    assert storage_key(copy["x"][0]) == storage_key(copy["x"][1]) != storage_key(whole)
    assert copy["n"] == (1, None, "s", 2.5)
    assert copy["e"].shape == (0,)


def test_what_cannot_be_sent_is_refused():
    with pytest.raises(VerificationError) as caught:
        pack([object()])
    assert str(caught.value).splitlines()[0] == "real ranks: a object cannot be sent to another process"
    with pytest.raises(VerificationError):
        pack(torch.empty(2, device="meta"))


def test_a_large_constant_and_mutated_inputs_come_back(ranks: RealRanks):
    listing = """
group('dp', size=2)
tensor('weight', f32[100])
def graph(x: f32[100], y: f32[50](offset=50, base='x')):
    c = attribute('weight')
    m = mul_(c, 2)
    a = all_reduce_(y, 'sum', 'dp')
    w = wait(a)
    s = add(x, m)
    return [s, None, [w]]
"""
    module = parse(listing, {"weight": torch.arange(100.0)})
    virtual, real = run(module), run_real(ranks, module)
    assert compare(virtual, real, num_terms=2).bitwise
    assert real[0].constants["weight"].tolist() == (torch.arange(100.0) * 2).tolist()
    assert storage_key(real[1].inputs[0]) == storage_key(real[1].inputs[1])
    assert module.weight.tolist() == torch.arange(100.0).tolist()


def test_two_of_four_ranks_run_a_job_and_groups_of_one_name_are_told_apart_by_their_ranks(ranks: RealRanks):
    for num_ranks in (2, 4, 2):
        module = module_of(REDUCE, f"group('dp', size={num_ranks})\n")
        results = ranks.run(module, [[torch.full((2,), 10.0**r)] for r in range(num_ranks)], read_groups(module))
        assert [result.outputs[0][0].item() for result in results] == [
            sum(10.0**r for r in range(num_ranks))
        ] * num_ranks


def test_more_ranks_than_the_world_has_are_refused(ranks: RealRanks):
    module = module_of(REDUCE)
    with pytest.raises(VerificationError) as caught:
        ranks.run(module, [[torch.ones(2)]] * 5, read_groups(module))
    what = "real ranks: inputs were given for 5 ranks, but the world has 4"
    assert str(caught.value) == f"{what}\nuse fewer ranks or a larger world"


@pytest.mark.parametrize(
    "text",
    [
        """
        def graph(x: f32[65536]):
            a = all_gather(x, 2, 'dp')
            f = fill_.Scalar(x, 9.0)
            w = wait(a)
            return [w]""",
        """
        def graph(x: f32[65536]):
            a = all_reduce(x, 'sum', 'dp')
            f = fill_.Scalar(a, 9.0)
            w = wait(a)
            return [w]""",
    ],
)
def test_a_write_to_a_buffer_in_flight_corrupts_it_on_real_ranks_in_some_of_many_runs(ranks: RealRanks, text: str):
    racing = module_of(text)
    sound = module_of("\n".join(line for line in text.splitlines() if "fill_" not in line))
    inputs = example_inputs(sound, 2, integers=True)
    expected = [result.outputs[0] for result in ranks.run(sound, inputs, read_groups(sound))]
    results = ranks.run_repeatedly(racing, inputs, read_groups(racing), repeat=10)
    corrupted = [not torch.equal(run[r].outputs[0], expected[r]) for run in results for r in range(2)]
    assert any(corrupted)
    with pytest.raises(VerificationError, match=r"f writes (x, which a still reads|a before its wait) \(rank 0\)"):
        run(racing, inputs=inputs)


def test_runs_are_repeated_from_the_same_inputs(ranks: RealRanks):
    module = module_of(REDUCE.replace("all_reduce(", "all_reduce_("))
    results = ranks.run_repeatedly(module, [[torch.ones(2)], [torch.ones(2)]], read_groups(module), repeat=3)
    assert [[result.outputs[0].tolist() for result in run] for run in results] == [[[2.0, 2.0]] * 2] * 3


@pytest.mark.slow
def test_an_exception_comes_back_with_its_rank_and_node_and_the_next_run_starts_a_new_world():
    module = module_of("""
        def graph(x: f32[2], i: i64[1]):
            y = index(x, [i])
            a = all_reduce(y, 'sum', 'dp')
            w = wait(a)
            return [w]""")
    world = RealRanks(2)
    with pytest.raises(VerificationError) as caught:
        world.run(module, [[torch.ones(2), torch.tensor([5 * rank])] for rank in range(2)], read_groups(module))
    assert str(caught.value) == (
        "real ranks: y failed with IndexError: index 5 is out of bounds for dimension 0 with size 2 (rank 1)\n"
        "    y: f32[1] = index(x, [i])"
    )
    results = world.run(module, [[torch.ones(2), torch.tensor([rank])] for rank in range(2)], read_groups(module))
    assert results[0].outputs[0].tolist() == [2.0]
    pids, folder = parts_of(world)
    del world, caught  # nobody closed it; the exception holds its frames
    gc.collect()
    assert remains(pids, folder) == []


@pytest.fixture(scope="module")
def pair() -> Iterator[RealRanks]:
    """Two ranks for the tests that end them: the next test finds a new world."""
    with RealRanks(2) as world:
        yield world


@pytest.fixture
def short(pair: RealRanks) -> Iterator[RealRanks]:
    """The same ranks with a short timeout."""
    before = pair.timeout_s
    yield pair
    pair.timeout_s = before


@needs_transfers
def test_a_hang_ends_at_the_timeout_and_says_where_each_rank_stood(short: RealRanks):
    lonely = module_of(REDUCE)
    absent = module_of("""
        def graph(x: f32[2]):
            r = recv(x, 0, 3, 'dp')
            v = wait(r)
            return [v]""")
    short.run(lonely, [[torch.ones(2)]] * 2, read_groups(lonely))
    short.timeout_s = 3
    started = time.monotonic()
    with pytest.raises(VerificationError) as caught:
        short.run([lonely, absent], [[torch.ones(2)]] * 2, [read_groups(lonely), read_groups(absent)])
    assert time.monotonic() - started < 60
    assert str(caught.value) == (
        "real ranks: no answer in 3 s\n"
        "    rank 0 was at w: w: f32[2] = wait(a)\n"
        "    rank 1 was at v: v: f32[2] = wait(r)\n"
        "run the same graphs on the virtual cluster, which shows what each rank waits for"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("dying", "number"), [(1, signal.SIGABRT), (0, signal.SIGKILL)])
def test_a_rank_that_dies_in_a_run_is_the_one_that_is_named(pair: RealRanks, dying: int, number: signal.Signals):
    """The other rank waits for it, and reports the connection that it lost."""
    reduces = module_of(REDUCE)
    receives = module_of(f"""
        def graph(x: f32[2]):
            r = recv(x, {1 - dying}, 3, 'dp')
            v = wait(r)
            return [v]""")
    modules = [receives, reduces] if dying == 0 else [reduces, receives]
    pair.run(reduces, [[torch.ones(2)]] * 2, read_groups(reduces))
    pids, folder = parts_of(pair)
    threading.Thread(target=kill_at, args=(pair, dying, "v", number)).start()
    with pytest.raises(VerificationError) as caught:
        pair.run(modules, [[torch.ones(2)]] * 2, [read_groups(module) for module in modules])
    assert remains(pids, folder) == []
    lines = str(caught.value).splitlines()
    assert lines[:2] == [
        f"real ranks: rank {dying} was killed by {number.name} at v",
        "    v: f32[2] = wait(r)",
    ]
    assert ("    Fatal Python error: Aborted" in lines) == (number == signal.SIGABRT)
    assert pair.run(reduces, [[torch.ones(2)]] * 2, read_groups(reduces))[0].outputs[0].tolist() == [2.0, 2.0]


@pytest.mark.slow
def test_a_rank_that_dies_between_two_runs_is_named_by_the_next(pair: RealRanks):
    module = module_of(REDUCE)
    inputs = [[torch.ones(2)]] * 2
    pair.run(module, inputs, read_groups(module))
    pids, _ = parts_of(pair)
    os.kill(pids[1], signal.SIGKILL)
    os.waitid(os.P_PID, pids[1], os.WEXITED | os.WNOWAIT)
    with pytest.raises(VerificationError) as caught:
        pair.run(module, inputs, read_groups(module))
    assert str(caught.value) == "real ranks: rank 1 was killed by SIGKILL before its first node"
    assert pair.run(module, inputs, read_groups(module))[0].outputs[0].tolist() == [2.0, 2.0]


def kill_at(world: RealRanks, rank: int, name: str, number: signal.Signals) -> None:
    """Send a signal to a rank once it stands at a node."""
    assert world._world is not None
    progress, process = world._world.progress, world._world.processes[rank]
    while progress.read(rank) != name:
        time.sleep(0.01)
    process.send_signal(number)


def parts_of(world: RealRanks) -> tuple[list[int], Path]:
    """The processes and the folder of a running world."""
    assert world._world is not None
    return [process.pid for process in world._world.processes], world._world.folder


def remains(pids: list[int], folder: Path) -> list[object]:
    """What is left of a world."""
    return [*(pid for pid in pids if Path(f"/proc/{pid}").exists()), *([folder] if folder.exists() else [])]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """An interrupt raises KeyboardInterrupt, even where a shell that runs this in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_every_process(pair: RealRanks):
    lonely, absent = module_of(REDUCE), module_of("def graph(x: f32[2]):\n    return [x]")
    pair.run(lonely, [[torch.ones(2)]] * 2, read_groups(lonely))
    pids, folder = parts_of(pair)
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        pair.run([lonely, absent], [[torch.ones(2)]] * 2, read_groups(lonely))
    assert remains(pids, folder) == []


SCRIPT = """
import torch
from tests.unit.verification.communication import module_of
from tests.unit.verification.test_world import REDUCE, parts_of
from weft.graph.groups import read_groups
from weft.verification.real_ranks.world import RealRanks

world = RealRanks(2, timeout_s=300)
one, none = module_of(REDUCE), module_of("def graph(x: f32[2]):\\n    return [x]")
world.run(one, [[torch.ones(2)]] * 2, read_groups(one))
pids, folder = parts_of(world)
print(folder, *pids, flush=True)
world.run([one, none], [[torch.ones(2)]] * 2, read_groups(one))
"""


@pytest.mark.slow
def test_nothing_outlives_a_caller_that_is_killed():
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")])}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, env=environment) as caller:
        name, *numbers = caller.stdout.readline().decode().split()  # type: ignore[union-attr]
        pids, folder = [int(number) for number in numbers], Path(name)
        time.sleep(0.5)  # it hangs now
        assert len(remains(pids, folder)) == 3
        caller.kill()
    deadline = time.monotonic() + 20
    while remains(pids, folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert remains(pids, folder) == []


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc")
def test_a_group_runs_its_collectives_in_one_thread():
    """Two of them corrupt the heap (tests/distributed/gloo_race.py)."""
    module = module_of(REDUCE)
    with RealRanks(2) as world:
        world.run(module, [[torch.ones(2)]] * 2, read_groups(module))
        pids, _ = parts_of(world)
        for pid in pids:
            names = [path.read_text().strip() for path in Path(f"/proc/{pid}/task").glob("*/comm")]
            assert names.count("pt_gloo_runloop") == 2, "one for the group of all ranks, one for dp"


def test_an_unused_world_never_starts():
    with RealRanks(2) as world:
        assert world._world is None
    world.close()
