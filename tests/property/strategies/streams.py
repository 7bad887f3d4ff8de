"""Random tensor-parallel listings: collectives beside products."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from random import Random


@dataclass
class Streams:
    """Writes random tensor-parallel programs: gathers, products of what was gathered, scatters of products."""

    rng: Random
    num_ranks: int
    inputs: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    counter: int = 0

    def name(self) -> str:
        self.counter += 1
        return f"n{self.counter}"

    def line(self, text: str) -> str:
        name = self.name()
        self.lines.append(f"{name} = {text}")
        return name

    def input(self, *shape: int) -> str:
        name = f"i{len(self.inputs)}"
        self.inputs.append(f"{name}: f32{list(shape)}")
        return name

    def gather(self, source: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """Gather along a random dim, written in a random way; sometimes the parts are taken in a wrong order."""
        rng, ranks = self.rng, self.num_ranks
        launch = self.line(f"all_gather({source}, {ranks}, 'tp')")
        dim = rng.randrange(len(shape))
        whole = tuple(n * ranks if d == dim else n for d, n in enumerate(shape))
        waited = self.line(f"wait({launch})")
        if rng.random() < 0.15:
            self.results.append(rng.choice([launch, waited]))
        if dim == 0 and rng.random() < 0.7:
            return waited, whole
        if rng.random() < 0.5:
            seen = self.line(f"view({waited}, {[ranks, *shape]})")
            order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)]
            turned = self.line(f"permute({seen}, {order})")
            return self.line(f"reshape({turned}, {list(whole)})"), whole
        if rng.random() < 0.5:
            split = self.line(f"split({waited}, {shape[0]})")
            parts = [self.line(f"{split}[{k}]") for k in range(ranks)]
        else:
            parts = [self.line(f"slice({waited}, 0, {k * shape[0]}, {(k + 1) * shape[0]})") for k in range(ranks)]
        if rng.random() < 0.15:
            rng.shuffle(parts)
        if rng.random() < 0.1:
            parts[0] = parts[1]
        return self.line(f"cat([{', '.join(parts)}], {dim})"), whole

    def between(self, source: str, shape: tuple[int, ...]) -> str:
        """A few operators that work by rows."""
        for _ in range(self.rng.choice((0, 0, 1, 2))):
            match self.rng.randrange(6):
                case 0:
                    source = self.line(f"mul({source}, 2.0)")
                case 1:
                    source = self.line(f"add({source}, {self.input(*shape)})")
                case 2:
                    source = self.line(f"mul({source}, {self.input(shape[-1])})")
                case 3:
                    source = self.line(f"relu({source})")
                case 4:
                    source = self.line(f"mul({source}, {self.input(*shape[:-1], 1)})")
                case _:
                    wide = self.line(f"_to_copy({source}, dtype=f64)")
                    source = self.line(f"_to_copy({wide}, dtype=f32)")
        if self.rng.random() < 0.1:
            self.results.append(source)
        return source

    def product(self, source: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """A product of the rows of a tensor with a new weight."""
        rng, inner, columns = self.rng, shape[-1], self.rng.choice((2, 4, 8))
        out = (*shape[:-1], columns)
        if len(shape) == 3 and rng.random() < 0.3:
            return self.line(f"bmm({source}, {self.input(shape[0], inner, columns)})"), out
        if rng.random() < 0.3:
            bias = rng.choice(["None", self.input(columns)])
            return self.line(f"linear({source}, {self.input(columns, inner)}, {bias})"), out
        rows = prod(shape[:-1])
        flat = self.line(f"{rng.choice(['reshape', 'view'])}({self._contiguous(source)}, {[rows, inner]})")
        weight = self.input(inner, columns)
        if rng.random() < 0.3:
            bias = self.input(*rng.choice([(columns,), (1, columns), (rows, columns)]))
            made = self.line(f"addmm({bias}, {flat}, {weight})")
        else:
            made = self.line(f"mm({flat}, {weight})")
        if rng.random() < 0.1:
            self.lines.append(f"{self.name()} = neg_({weight})")
        if rng.random() < 0.1:
            self.results.append(made)
        return self.line(f"view({made}, {list(out)})"), out

    def _contiguous(self, source: str) -> str:
        return self.line(f"clone({source}, memory_format=memory_format.contiguous_format)")

    def reduced(self, shape: tuple[int, ...]) -> None:
        """A product of which every rank needs the sum, maybe with another user, and a product of that."""
        made, size = self.product(self.between(self.input(*shape), shape), shape)
        sent = self._contiguous(self.between(made, size))
        kind = self.rng.choice(("sum", "sum", "max"))
        whole = self.line(f"wait({self.line(f'all_reduce({sent}, {kind!r}, ' + repr('tp') + ')')})")
        self.results.append(self.product(self.between(whole, size), size)[0])
        if self.rng.random() < 0.3:
            self.results.append(self.rng.choice([made, whole]))

    def scatter(self, source: str, shape: tuple[int, ...]) -> str:
        """Scatter along a random dim that splits."""
        rng, ranks = self.rng, self.num_ranks
        dims = [d for d, n in enumerate(shape) if n % ranks == 0]
        if not dims:
            return source
        dim = rng.choice(dims)
        part = shape[dim] // ranks
        if dim:
            split = self.line(f"split({source}, {part}, {dim})")
            parts = [self.line(f"{split}[{k}]") for k in range(ranks)]
            if rng.random() < 0.1:
                rng.shuffle(parts)
            source = self.line(f"cat([{', '.join(parts)}])")
        # No maxima: of 0.0 and -0.0, which a product may be either of, they take whichever comes first.
        sent, reduce_op = self._contiguous(source), rng.choice(["sum", "avg"])
        launch = self.line(f"reduce_scatter({sent}, '{reduce_op}', {ranks}, 'tp')")
        return self.line(f"wait({launch})")


def random_streams(rng: Random) -> str:
    """A program of gathers and scatters beside products."""
    made = Streams(rng, rng.choice((2, 4)))
    for _ in range(rng.randint(1, 2)):
        shape = rng.choice([(4, 4), (8, 4), (2, 4, 4), (4, 2, 4), (1, 4, 8), (3, 4, 4)])
        source = made.input(*shape)
        gathered, whole = made.gather(source, shape)
        ends: list[tuple[str, tuple[int, ...]]] = []
        for _ in range(rng.randint(1, 3)):
            ends.append(made.product(made.between(gathered, whole), whole))
        for end, size in ends:
            hidden, size = made.product(made.between(end, size), size) if rng.random() < 0.6 else (end, size)
            made.results.append(made.scatter(made.between(hidden, size), size) if rng.random() < 0.8 else hidden)
        if rng.random() < 0.2:
            made.lines.append(f"{made.name()} = neg_({source})")
    if rng.random() < 0.6:
        made.reduced(rng.choice([(8, 4), (4, 2, 4), (1, 8, 4), (6, 4)]))
    head = f"group('tp', size={made.num_ranks})\n\ndef graph({', '.join(made.inputs)}):\n"
    return head + "".join(
        f"    {line}\n" for line in [*made.lines, f"return [{', '.join(dict.fromkeys(made.results))}]"]
    )
