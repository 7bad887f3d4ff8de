"""Steps of a random listing that communicate."""

from __future__ import annotations

from tests.property.strategies.builder import Builder


class Collectives(Builder):
    """Launches of every kind, waits, and collectives that others can replace."""

    def all_gather(self) -> None:
        if value := self.sendable():
            group, size = self.group()
            result = self.new((value.shape[0] * size, *value.shape[1:]), value.dtype)
            if self.rng.random() < 0.2:
                self.counter += 1
                out = f"n{self.counter}"
                shape = list(result.shape)
                self.lines.append(f"    {out} = empty.memory_format({shape}, dtype={value.dtype})")
                call = f"all_gather_out({value.name}, {size}, {group!r}, out={out})"
            else:
                call = f"all_gather({value.name}, {size}, {group!r})"
            self.fly(f"    {result.name} = {call}", [value], [result])

    def reduce_scatter(self) -> None:
        value = self.sendable()
        group, size = self.group()
        if value and value.shape[0] % size == 0:
            result = self.new((value.shape[0] // size, *value.shape[1:]), value.dtype)
            op = self.rng.choice(["sum", "avg", "max"])
            self.fly(f"    {result.name} = reduce_scatter({value.name}, {op!r}, {size}, {group!r})", [value], [result])

    def all_reduce(self) -> None:
        value = self.sendable()
        if value is None:
            return
        group, _ = self.group()
        op = self.rng.choice(["sum", "avg", "max", "min"])
        if self.rng.random() < 0.3 and not value.storages & self.unwritable:
            result = self.new(value.shape, value.dtype, value.storages)
            self.fly(f"    {result.name} = all_reduce_({value.name}, {op!r}, {group!r})", [value], [result])
        else:
            result = self.new(value.shape, value.dtype)
            keywords = f"reduce_op={op!r}, group_name={group!r}" if self.rng.random() < 0.2 else f"{op!r}, {group!r}"
            self.fly(f"    {result.name} = all_reduce({value.name}, {keywords})", [value], [result])

    def broadcast(self) -> None:
        if value := self.sendable():
            group, size = self.group()
            result = self.new(value.shape, value.dtype)
            source = self.rng.randrange(size)
            self.fly(f"    {result.name} = broadcast({value.name}, {source}, {group!r})", [value], [result])

    def all_to_all(self) -> None:
        value = self.sendable()
        group, size = self.group()
        if value and value.shape[0] % size == 0:
            result = self.new(value.shape, value.dtype)
            splits = [value.shape[0] // size] * size
            self.fly(f"    {result.name} = all_to_all({value.name}, {splits}, {splits}, {group!r})", [value], [result])

    def coalesced(self) -> None:
        first = self.sendable()
        second = self.pick(contiguous=True, dtype=first.dtype) if first else None
        if not first or not second or not second.shape or second.shape[0] > 64:
            return
        group, size = self.group()
        self.counter += 1
        name = f"n{self.counter}"
        if self.rng.random() < 0.5:
            call = f"all_reduce_coalesced([{first.name}, {second.name}], 'sum', {group!r})"
            shapes = [first.shape, second.shape]
        else:
            call = f"all_gather_coalesced([{first.name}, {second.name}], {size}, {group!r})"
            shapes = [(v.shape[0] * size, *v.shape[1:]) for v in (first, second)]
        results = [self.new(shape, first.dtype) for shape in shapes]
        self.lines.append(f"    {name} = {call}")
        for item, result in enumerate(results):
            sent = (first, second)[item]
            self.fly(f"    {result.name} = {name}[{item}]", [sent], [result])

    def wait(self) -> None:
        if not self.flights:
            return
        flight = self.flights.pop(0 if self.rng.random() < 0.5 else self.rng.randrange(len(self.flights)))
        for result in flight.pending:
            source = result
            if self.rng.random() < 0.1 and result.shape:
                numel = result.shape[0] * (result.shape[1] if len(result.shape) == 2 else 1)
                source = self.new((numel,), result.dtype, result.storages)
                self.lines.append(f"    {source.name} = view({result.name}, [{numel}])")
            done = self.new(source.shape, source.dtype, result.storages)
            self.emit(done, f"wait({source.name})")
            self.waited.append(source)

    def wait_again(self) -> None:
        if self.waited:
            source = self.rng.choice(self.waited)
            if not source.storages & self.unreadable:
                self.emit(self.new(source.shape, source.dtype, source.storages), f"wait({source.name})")

    def gather_again(self) -> None:
        """The same collective once more, as FSDP does in backward."""
        launches = [line for line in self.lines if "= all_gather(" in line]
        if not launches:
            return
        text = self.rng.choice(launches[-4:]).partition(" = ")[2]
        source = next(v for v in self.values if f"({v.name}," in text)
        if source.storages & self.unreadable:
            return
        size = int(text.split(", ")[1])
        result = self.new((source.shape[0] * size, *source.shape[1:]), source.dtype)
        self.fly(f"    {result.name} = {text}", [source], [result])

    # Collectives that others can replace.

    def scatter_and_gather(self) -> None:
        """A reduction that is scattered and gathered again, maybe over another group, maybe with another user."""
        value = self.sendable()
        (group, size), (again, again_size) = self.group(), self.group()
        again, again_size = (group, size) if self.rng.random() < 0.8 else (again, again_size)
        if not value or value.shape[0] % size:
            return
        part = self.new((value.shape[0] // size, *value.shape[1:]), value.dtype)
        self.lines.append(f"    {part.name} = reduce_scatter({value.name}, 'sum', {size}, {group!r})")
        done = self.new(part.shape, value.dtype, part.storages)
        self.lines.append(f"    {done.name} = wait({part.name})")
        whole = self.new((part.shape[0] * again_size, *part.shape[1:]), value.dtype)
        self.lines.append(f"    {whole.name} = all_gather({done.name}, {again_size}, {again!r})")
        self.emit(self.new(whole.shape, value.dtype, whole.storages), f"wait({whole.name})")
        if self.rng.random() < 0.3:
            self.values.append(done)

    def reduce_and_scatter(self) -> None:
        """A sum over one group that is scattered over another, maybe padded or moved between, maybe used elsewhere."""
        value = self.sendable()
        (group, _), (over, size) = self.group(), self.group()
        if not value or not value.shape[0]:
            return
        first, second = (self.rng.choice(["sum", "sum", "avg", "max"]) for _ in range(2))
        launch = self.new(value.shape, value.dtype)
        self.lines.append(f"    {launch.name} = all_reduce({value.name}, {first!r}, {group!r})")
        whole = self.new(value.shape, value.dtype, launch.storages)
        self.lines.append(f"    {whole.name} = wait({launch.name})")
        if self.rng.random() < 0.2:
            self.values.append(whole)
        sent = whole
        if len(value.shape) == 2 and self.rng.random() < 0.3:
            turned = self.new(value.shape[::-1], value.dtype, launch.storages)
            self.lines.append(f"    {turned.name} = t({whole.name})")
            sent = self.new(turned.shape, value.dtype)
            self.lines.append(f"    {sent.name} = clone({turned.name}, memory_format=memory_format.contiguous_format)")
        missing = -sent.shape[0] % size
        if missing or self.rng.random() < 0.2:
            padded = self.new((sent.shape[0] + missing, *sent.shape[1:]), value.dtype)
            pad = [*[0] * (2 * len(sent.shape) - 1), missing]
            number = self.rng.choice([0.0, 0.0, 0.0, 1.0])
            self.lines.append(f"    {padded.name} = constant_pad_nd({sent.name}, {pad}, {number})")
            sent = padded
        part = self.new((sent.shape[0] // size, *sent.shape[1:]), value.dtype)
        self.lines.append(f"    {part.name} = reduce_scatter({sent.name}, {second!r}, {size}, {over!r})")
        self.emit(self.new(part.shape, value.dtype, part.storages), f"wait({part.name})")

    def reduce_in_turn(self) -> None:
        """Sums over several groups in turn; something else may use a sum in between."""
        value = self.sendable()
        if not value:
            return
        first = self.rng.choice(["sum", "avg", "max"])
        for _ in range(self.rng.randint(2, 3)):
            reduce_op = self.rng.choice([first, first, "sum"])
            launch = self.new(value.shape, value.dtype)
            self.lines.append(f"    {launch.name} = all_reduce({value.name}, {reduce_op!r}, {self.group()[0]!r})")
            value = self.new(value.shape, value.dtype, launch.storages)
            self.lines.append(f"    {value.name} = wait({launch.name})")
            if self.rng.random() < 0.1:
                self.values.append(value)
        self.values.append(value)

    def gram(self) -> None:
        """A gathered tensor, pointwise operators on it, and its product with itself or with data."""
        value = self.sendable()
        if not value or len(value.shape) != 2 or value.shape[0] > 16:
            return
        group, size = self.group()
        launch = self.new((value.shape[0] * size, value.shape[1]), value.dtype)
        self.lines.append(f"    {launch.name} = all_gather({value.name}, {size}, {group!r})")
        whole = self.emit(self.new(launch.shape, value.dtype, launch.storages), f"wait({launch.name})")
        for op in self.rng.choices(["sigmoid({})", "mul({}, 0.5)", "neg({})"], k=self.rng.randint(0, 2)):
            whole = self.emit(self.like(whole), op.format(whole.name))
        turned = self.new(whole.shape[::-1], value.dtype, whole.storages, contiguous=False)
        self.lines.append(f"    {turned.name} = t({whole.name})")
        factor = self.pick(dtype=value.dtype, contiguous=True) if self.rng.random() < 0.3 else whole
        if factor and len(factor.shape) == 2 and factor.shape[0] == whole.shape[0]:
            product = self.new((whole.shape[1], factor.shape[1]), value.dtype)
            self.lines.append(f"    {product.name} = mm({turned.name}, {factor.name})")
            self.emit(self.new(product.shape, value.dtype), f"sigmoid({product.name})")
        if self.rng.random() < 0.5:
            self.emit(self.new((), value.dtype), f"sum({whole.name})")
