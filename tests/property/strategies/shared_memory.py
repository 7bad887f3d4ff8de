"""Random listings whose inputs and constants share memory."""

from __future__ import annotations

from random import Random


def random_aliased(rng: Random) -> str:
    """A listing whose inputs and constants share memory, with reads, writes and launches of them.

    No part of a memory is written while it is in flight. Where the listing says that its inputs may share memory, all
    inputs and constants count as one memory.
    """
    may_share = rng.random() < 0.3
    held = [round(rng.uniform(-2, 2), 2) for _ in range(12)]
    head = ["group('dp', size=2)", *(["inputs('may share memory')"] if may_share else [])]
    starts = [rng.randint(0, 8) for _ in range(rng.randint(2, 4))]
    memories: dict[str, str] = {}
    inputs: list[str] = []
    lines: list[str] = []
    for k, start in enumerate(starts):
        extras = [f"offset={start}"] * (start > 0) + ["base='c0'"] * (k > 0)
        placed = f"({', '.join(extras)})" if extras else ""
        head.append(f"tensor('c{k}', f32[4]{placed}, {held[start : start + 4]})")
        lines.append(f"c{k} = attribute('c{k}')")
        memories[f"c{k}"] = "constants"
    for k in range(rng.randint(2, 4)):
        place = rng.choice(["own", "inputs", "constants"])
        offset = rng.choice(starts) if place == "constants" else rng.randint(0, 4)
        words = {"own": "", "inputs": f"offset={offset}, base='x0'", "constants": f"offset={offset}, constant='c0'"}
        is_first = k == 0 or place == "own" or (place == "inputs" and memories["x0"] == "constants")
        inputs.append(f"x{k}: f32[4]" if is_first else f"x{k}: f32[4]({words[place]})")
        memories[f"x{k}"] = f"x{k}" if is_first else {"inputs": "x0", "constants": "constants"}[place]
    if may_share:
        memories = dict.fromkeys(memories, "any")
    shared, fresh = list(memories), ["v"]
    lines.append("v = neg(x0)")
    flights: list[tuple[str, str, bool]] = []

    def land(flight: tuple[str, str, bool]) -> None:
        flights.remove(flight)
        name, _, is_gather = flight
        lines.append(f"{name}_w = wait({name})")
        lines.extend([f"{name}_s = slice({name}_w, 0, 2, 6)"] if is_gather else [])
        fresh.append(f"{name}_s" if is_gather else f"{name}_w")

    for k in range(rng.randint(6, 24)):
        step = rng.choice(["write", "write", "read", "read", "launch", "launch", "wait", "compute"])
        name = rng.choice(shared)
        if step == "write":
            for flight in [flight for flight in flights if flight[1] == memories[name]]:
                land(flight)
            right = [f"add_({name}, {rng.choice(fresh)})", f"copy_({name}, {rng.choice(fresh)})", f"mul_({name}, 0.5)"]
            lines.append(f"n{k} = {rng.choice(right)}")
        elif step == "read":
            lines.append(f"n{k} = add({name}, {rng.choice([*fresh, *shared])})")
            fresh.append(f"n{k}")
        elif step == "launch":
            is_gather = rng.random() < 0.5
            sent = rng.choice([name, name, rng.choice(fresh)])
            lines.append(
                f"n{k} = all_gather({sent}, 2, 'dp')" if is_gather else f"n{k} = all_reduce({sent}, 'sum', 'dp')"
            )
            flights.append((f"n{k}", memories.get(sent, ""), is_gather))
        elif step == "wait" and flights:
            land(rng.choice(flights))
        else:
            lines.append(f"n{k} = relu({rng.choice(fresh)})")
            fresh.append(f"n{k}")
    for flight in list(flights):
        land(flight)
    results = rng.sample(fresh, min(len(fresh), 4)) + [name for name in shared if rng.random() < 0.2]
    body = "".join(f"    {line}\n" for line in lines)
    return "\n".join(head) + f"\n\ndef graph({', '.join(inputs)}):\n{body}    return [{', '.join(results)}]\n"
