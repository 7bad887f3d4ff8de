"""Steps of a random listing that rewrites look for."""

from __future__ import annotations

from tests.golden import operators  # noqa: F401  (listings name them)
from tests.property.strategies.builder import DTYPES, Builder


class Rewrites(Builder):
    """Sites of rewrites, and near misses."""

    def arithmetic(self) -> None:
        """Arithmetic that does nothing, or nearly."""
        if value := self.pick():
            ops = ["mul({}, 1.0)", "div({}, 1)", "add({}, 0.0)", "sub({}, 0.0)", "add({}, -0.0)", "mul({}, 0)"]
            self.emit(self.like(value), self.rng.choice([*ops, "abs({})", "relu({})", "neg({})"]).format(value.name))

    def cast_back(self) -> None:
        """A cast and one back, or on."""
        if value := self.pick():
            dtype = self.rng.choice(DTYPES)
            wide = self.emit(self.like(value, dtype), f"_to_copy({value.name}, dtype={dtype})")
            self.disturb(value, wide)
            back = self.rng.choice([value.dtype, *DTYPES])
            self.emit(self.like(wide, back), f"_to_copy({wide.name}, dtype={back})")

    def view_back(self) -> None:
        """A view and its inverse, or another view."""
        value = self.pick(contiguous=True)
        if value and len(value.shape) == 2:
            rows, columns = value.shape
            flat = self.new((rows * columns,), value.dtype, value.storages)
            self.emit(flat, f"view({value.name}, [{rows * columns}])")
            shape = self.rng.choice([(rows, columns), (columns, rows)])
            self.emit(self.new(shape, value.dtype, value.storages), f"reshape({flat.name}, {list(shape)})")

    def turn_back(self) -> None:
        """A permutation, and once more."""
        value = self.pick(contiguous=True)
        if value and len(value.shape) == 2:
            turned = self.new(value.shape[::-1], value.dtype, value.storages, contiguous=False)
            self.emit(turned, f"permute({value.name}, [1, 0])")
            self.emit(self.new(value.shape, value.dtype, value.storages), f"t({turned.name})")

    def biased(self) -> None:
        """A matmul with something added to it: a row, a whole tensor, another matmul."""
        a = self.pick()
        if not a or len(a.shape) != 2:
            return
        b = self.pick(dtype=a.dtype)
        if not b or len(b.shape) != 2 or b.shape[0] != a.shape[1]:
            return
        product = self.emit(self.new((a.shape[0], b.shape[1]), a.dtype), f"mm({a.name}, {b.name})")
        self.disturb(a, b, product)
        bias = self.pick(shape=self.rng.choice([product.shape, product.shape[1:]]), dtype=a.dtype) or product
        names = self.rng.sample([product.name, bias.name], 2)
        total = self.emit(self.new(product.shape, a.dtype), f"add({names[0]}, {names[1]})")
        self.emit(self.new(product.shape, a.dtype), f"sigmoid({total.name})")

    def summed(self) -> None:
        """The sum of two matmuls, and an addmm."""
        a, b = self.pick(), self.pick()
        fits = a and b and a.dtype == b.dtype and len(a.shape) == len(b.shape) == 2 and a.shape[1] == b.shape[0]
        if a and b and fits:
            shape = (a.shape[0], b.shape[1])
            other = self.pick(shape=a.shape, dtype=a.dtype) or a
            first = self.emit(self.new(shape, a.dtype), f"mm({a.name}, {b.name})")
            self.disturb(a, b, other)
            second = self.emit(self.new(shape, a.dtype), f"mm({other.name}, {b.name})")
            total = self.emit(self.new(shape, a.dtype), f"add({first.name}, {second.name})")
            both = self.emit(self.new(shape, a.dtype), f"addmm({total.name}, {a.name}, {b.name})")
            self.emit(self.new(shape, a.dtype), f"sigmoid({both.name})")

    def join_again(self) -> None:
        """Pieces of a tensor, put together in order or not."""
        value = self.pick()
        if not value or not value.shape or value.shape[0] % 2:
            return
        half = (value.shape[0] // 2, *value.shape[1:])
        self.counter += 1
        name = f"n{self.counter}"
        self.lines.append(f"    {name} = split({value.name}, {half[0]})")
        parts = [self.new(half, value.dtype, value.storages, value.contiguous) for _ in range(2)]
        a, b = (self.emit(part, f"{name}[{k}]") for k, part in enumerate(parts))
        self.disturb(a, b, value)
        pieces = self.rng.choice([(a, b), (a, b), (b, a), (a, a), (a, b, a)])
        shape = (half[0] * len(pieces), *half[1:])
        if shape[0] <= 32:
            self.emit(self.new(shape, value.dtype), f"cat([{', '.join(p.name for p in pieces)}])")

    def cut_again(self) -> None:
        """Tensors put together, and cut again where they meet or not."""
        if (a := self.pick()) and a.shape and a.shape[0] <= 8 and (b := self.pick(shape=a.shape, dtype=a.dtype)):
            rows = a.shape[0]
            whole = self.emit(self.new((2 * rows, *a.shape[1:]), a.dtype), f"cat([{a.name}, {b.name}])")
            self.disturb(a, b, whole)
            start = self.rng.choice([0, rows, rows // 2])
            part = self.new(a.shape, a.dtype, whole.storages)
            self.emit(part, f"slice({whole.name}, 0, {start}, {start + rows})")
            self.emit(self.like(part), f"relu({part.name})")
            if rows <= 4:
                self.emit(self.new((3 * rows, *a.shape[1:]), a.dtype), f"cat([{whole.name}, {a.name}])")

    def reduce_twice(self) -> None:
        """The largest of each row, and of all."""
        value = self.pick()
        if value and len(value.shape) == 2:
            rows = self.emit(self.new((value.shape[0],), value.dtype), f"amax({value.name}, [1])")
            self.disturb(value, rows)
            self.emit(self.new((), value.dtype), f"amax({value.name})")

    def count_up(self) -> None:
        """The running sum of a constant."""
        size, dtype = self.rng.choice([4, 8]), self.rng.choice(DTYPES)
        ones = self.emit(self.new((size,), dtype), f"full([{size}], {self.rng.choice([1, 2, 0.5])}, dtype={dtype})")
        self.disturb(ones)
        self.emit(self.new((size,), dtype), f"cumsum({ones.name}, 0)")

    # Writes in place, and operations that can be batched.

    def put(self) -> None:
        """A tensor with a part replaced, maybe copied back."""
        value = self.pick(contiguous=True)
        if not value or not value.shape or value.shape[0] % 2:
            return
        half = value.shape[0] // 2
        part = self.pick(shape=(half, *value.shape[1:]), dtype=value.dtype)
        if part is None:
            part = self.emit(self.new((half, *value.shape[1:]), value.dtype), f"slice({value.name}, 0, 0, {half})")
            part.storages = value.storages
        start = self.rng.choice([0, half])
        put = self.emit(self.like(value), f"slice_scatter({value.name}, {part.name}, 0, {start}, {start + half})")
        if self.rng.random() < 0.3 and not value.storages & self.unwritable:
            back = self.new(value.shape, value.dtype, value.storages, value.contiguous)
            self.emit(back, f"copy_({value.name}, {put.name})")

    def towers(self) -> None:
        """Several products of one shape or with one input, and activations behind them."""
        factors = [v for v in self.values if len(v.shape) == 2 and not v.storages & self.unreadable and v.contiguous]
        for _ in range(self.rng.randint(2, 4) if factors else 0):
            a = self.rng.choice(factors)
            fits = [b for b in factors if b.shape[0] == a.shape[1] and b.dtype == a.dtype]
            if fits:
                product = self.emit(self.new((a.shape[0], (b := self.rng.choice(fits)).shape[1]), a.dtype), "")
                self.lines[-1] = f"    {product.name} = mm({a.name}, {b.name})"
                self.emit(self.new(product.shape, a.dtype), f"sigmoid({product.name})")

    def viewed_cat(self) -> None:
        """Views of tensors, laid side by side."""
        value = self.pick(contiguous=True)
        other = self.pick(shape=value.shape, dtype=value.dtype, contiguous=True) if value else None
        if not value or not other or len(value.shape) != 2 or value.shape[1] % 2 or value.shape[0] > 16:
            return
        rows, columns = value.shape
        shape = self.rng.choice([(rows, 2, columns // 2), (rows, 2, columns // 2), (rows * 2, columns // 2)])
        views = [self.new(shape, value.dtype, v.storages) for v in (value, other)]
        for view, source in zip(views, (value, other), strict=True):
            self.lines.append(f"    {view.name} = view({source.name}, {list(shape)})")
        whole = self.new((2 * shape[0], *shape[1:]), value.dtype)
        self.lines.append(f"    {whole.name} = cat([{views[0].name}, {views[1].name}])")
        flat = self.new((2 * rows * columns,), value.dtype, whole.storages)
        self.emit(flat, f"view({whole.name}, [{2 * rows * columns}])")

    def add_rows(self) -> None:
        """Many rows added to few."""
        value = self.pick(contiguous=True)
        if not value or len(value.shape) != 2:
            return
        count, index, row = (self.new((), value.dtype) for _ in range(3))
        self.lines.append(f"    {count.name} = arange.default(32)")
        self.lines.append(f"    {index.name} = remainder.Scalar({count.name}, {value.shape[0]})")
        self.lines.append(f"    {row.name} = slice({value.name}, 0, 0, 1)")
        self.emit(self.like(value), f"index_put({value.name}, [{index.name}], {row.name}, True)")

    # Operators in functional wrappers, and rounds.

    def functionalized(self) -> None:
        """An operator that writes what it is given, in a wrapper that copies that first."""
        value = self.pick(contiguous=True)
        other = self.pick(shape=value.shape, dtype=value.dtype) if value and value.shape else None
        if not value or not other:
            return
        kind = f"{value.dtype}[{', '.join(map(str, value.shape))}]"
        name = self.new((), value.dtype).name
        match self.rng.randrange(3):
            case 0:
                call = f"auto_functionalized(operator('weft_test.bump_.default'), x={value.name}, y={other.name})"
                types, items = f"(None, {kind})", [1]
            case 1:
                third = self.pick(shape=value.shape, dtype=value.dtype, contiguous=True) or value
                given = f"x={value.name}, z={third.name}, y={other.name}"
                call = f"auto_functionalized(operator('weft_test.exchange_.default'), {given})"
                types, items = f"({kind}, {kind}, {kind})", [0, 1, 2]
            case _:
                half = value.shape[0] // 2
                shape = (half, *value.shape[1:])
                part = self.new(shape, value.dtype, other.storages, other.contiguous)
                self.emit(part, f"slice({other.name}, 0, 0, {half})")
                bounds = f"_x_slice_dim=0, _x_slice_start={half}, _x_slice_end={2 * half}"
                given = f"y={part.name}, _x_base_index=0, {bounds}, _all_bases=[{value.name}]"
                call = f"auto_functionalized_v2(operator('weft_test.bump_.default'), {given})"
                types, items = f"(None, {kind})", [1]
        self.lines.append(f"    {name}: {types} = higher_order.{call}")
        taken = [self.emit(self.new(value.shape, value.dtype), f"{name}[{k}]") for k in items]
        if self.rng.random() < 0.4 and not value.storages & self.unwritable:
            back = self.new(value.shape, value.dtype, value.storages, value.contiguous)
            self.emit(back, f"copy_({value.name}, {taken[-1 if len(items) == 1 else 1].name})")

    def scanned(self) -> None:
        """A scan or a map over the rows of a tensor."""
        value = self.pick(contiguous=True)
        if not value or len(value.shape) != 2:
            return
        carried = self.pick(shape=value.shape[1:], dtype=value.dtype, contiguous=True)
        row, rows = f"{value.dtype}[{value.shape[1]}]", f"{value.dtype}[{value.shape[0]}, {value.shape[1]}]"
        body, found = (self.new((), value.dtype).name for _ in range(2))
        inputs, known = ("h", "x") if carried else ("x",), ["x", *(["h"] if carried else [])]
        lines: list[str] = []
        for k in range(self.rng.randint(1, 4)):
            op = self.rng.choice(["add({}, {})", "mul({}, {})", "neg({})", "sigmoid({})", "rand_like({})", "clone({})"])
            lines.append(f"        y{k} = {op.format(*(self.rng.choice(known) for _ in range(2)))}")
            known.append(f"y{k}")
        made = known[2 if carried else 1 :]  # what a round returns shares no memory with what it is given
        results = [self.rng.choice(made), made[-1]] if carried else [made[-1]]
        self.lines.append(f"    def {body}({', '.join(f'{name}: {row}' for name in inputs)}):")
        self.lines += [*lines, f"        return [{', '.join(results)}]", f"    {body} = attribute('{body}')"]
        call = (
            f"scan({body}, [{carried.name}], [{value.name}], [])"
            if carried
            else f"map_impl({body}, [{value.name}], [])"
        )
        types = f"({row}, {rows})" if carried else f"({rows},)"
        self.lines.append(f"    {found}: {types} = higher_order.{call}")
        if carried:
            self.emit(self.new(value.shape[1:], value.dtype), f"{found}[0]")
        self.emit(self.new(value.shape, value.dtype), f"{found}[{1 if carried else 0}]")
