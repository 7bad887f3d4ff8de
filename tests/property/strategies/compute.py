"""Steps of a random listing that compute, view, copy and write."""

from __future__ import annotations

from tests.property.strategies.builder import DTYPES, Builder


class Compute(Builder):
    """Steps without communication."""

    def pointwise(self) -> None:
        if value := self.pick():
            op = self.rng.choice(["relu({})", "neg({})", "sigmoid({})", "mul({}, 0.5)", "add({}, 1.0)"])
            self.emit(self.like(value), op.format(value.name))

    def binary(self) -> None:
        if (a := self.pick()) and (b := self.pick(shape=a.shape, dtype=a.dtype)):
            result = self.new(a.shape, a.dtype, contiguous=a.contiguous and b.contiguous)
            self.emit(result, f"{self.rng.choice(['add', 'mul', 'sub'])}({a.name}, {b.name})")

    def matmul(self) -> None:
        a = self.pick()
        if (
            a
            and len(a.shape) == 2
            and (b := self.pick(dtype=a.dtype))
            and len(b.shape) == 2
            and b.shape[0] == a.shape[1]
        ):
            product = self.emit(self.new((a.shape[0], b.shape[1]), a.dtype), f"mm({a.name}, {b.name})")
            self.emit(self.new(product.shape, a.dtype), f"sigmoid({product.name})")

    def cast(self) -> None:
        if value := self.pick():
            dtype = self.rng.choice(DTYPES)
            self.emit(self.like(value, dtype), f"_to_copy({value.name}, dtype={dtype})")

    def draw(self) -> None:
        if value := self.pick():
            self.emit(self.like(value), f"rand_like({value.name})")

    def concatenate(self) -> None:
        if (a := self.pick()) and a.shape and a.shape[0] <= 16 and (b := self.pick(shape=a.shape, dtype=a.dtype)):
            self.emit(self.new((2 * a.shape[0], *a.shape[1:]), a.dtype), f"cat([{a.name}, {b.name}])")

    # Views and copies.

    def view(self) -> None:
        value = self.pick(contiguous=True)
        if value and value.shape:
            numel = value.shape[0] * (value.shape[1] if len(value.shape) == 2 else 1)
            shape = self.rng.choice([(numel,), (numel // 2, 2), (2, numel // 2)]) if numel % 2 == 0 else (numel,)
            op = self.rng.choice(["view", "reshape", "_unsafe_view"])
            self.emit(self.new(shape, value.dtype, value.storages), f"{op}({value.name}, {list(shape)})")

    def transpose(self) -> None:
        value = self.pick(contiguous=True)
        if value and len(value.shape) == 2:
            turned = self.new(value.shape[::-1], value.dtype, value.storages, contiguous=False)
            self.emit(turned, f"t({value.name})")

    def copy(self) -> None:
        if value := self.pick():
            op = self.rng.choice(["clone({}, memory_format=memory_format.contiguous_format)", "contiguous({})"])
            storages = value.storages if op.startswith("contiguous") else None
            self.emit(self.new(value.shape, value.dtype, storages), op.format(value.name))

    def slice(self) -> None:
        value = self.pick()
        if value and value.shape and value.shape[0] % 2 == 0:
            half = value.shape[0] // 2
            start = self.rng.choice([0, half])
            part = self.new((half, *value.shape[1:]), value.dtype, value.storages, value.contiguous)
            self.emit(part, f"slice({value.name}, 0, {start}, {start + half})")

    def split(self) -> None:
        value = self.pick()
        if value and value.shape and value.shape[0] % 2 == 0:
            half = (value.shape[0] // 2, *value.shape[1:])
            self.counter += 1
            name = f"n{self.counter}"
            self.lines.append(f"    {name} = split({value.name}, {half[0]})")
            for item in self.rng.sample([0, 1], self.rng.choice([1, 2])):
                self.emit(self.new(half, value.dtype, value.storages, value.contiguous), f"{name}[{item}]")

    # Writes.

    def write(self) -> None:
        target = self.pick()
        if target is None or target.storages & self.unwritable:
            return
        source = self.pick(shape=target.shape, dtype=target.dtype) or target
        op = self.rng.choice(["mul_({0}, 0.5)", "add_({0}, {1})", "copy_({0}, {1})", "zero_({0})"])
        if source.storages & target.storages and source is not target:
            op = "mul_({0}, 0.5)"  # overlapping source and target are not defined
        written = self.new(target.shape, target.dtype, target.storages, target.contiguous)
        self.emit(written, op.format(target.name, source.name))
