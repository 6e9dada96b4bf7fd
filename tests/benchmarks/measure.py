"""What every benchmark shares: a result, two clocks, taking turns, true peak memory."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch


@dataclass(frozen=True)
class Result:
    """One number: median and the range seen, the least value wanted, and what it was made from."""

    name: str
    value: float
    low: float
    high: float
    unit: str
    wanted: str = ""  # in words, empty where nothing is asked
    met: bool | None = None
    detail: dict[str, Any] = field(default_factory=dict)


Seconds = tuple[float, float]  # wall, CPU


def clock(run: Callable[[], object]) -> Seconds:
    """Wall and CPU seconds of one call; CPU time sums all threads of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def take_turns(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[Seconds]]:
    """(wall, CPU) seconds of every call, by name: each round calls every run once, in order.

    What is compared within a round shares whatever the machine is doing at that moment.
    """
    times: dict[str, list[Seconds]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(clock(run))
    return times


def ratios(
    name: str, plain: list[Seconds], fast: list[Seconds], at_least: float | None = None
) -> list[Result]:
    """Plain time over fast time, round by round, in wall and in CPU time.

    Value: median of the ratios; range: the smallest and the largest. `at_least` is asked of wall
    time.
    """
    results = []
    for i, kind in enumerate(("wall", "cpu")):
        slow, quick = [t[i] for t in plain], [t[i] for t in fast]
        quotients = [s / q for s, q in zip(slow, quick, strict=True)]
        asked = at_least is not None and kind == "wall"
        results.append(
            Result(
                f"{name}, {kind} time, plain / fast",
                median(quotients),
                min(quotients),
                max(quotients),
                "x",
                f">= {at_least:g}" if asked else "",
                median(quotients) >= at_least if asked else None,
                {
                    "plain_median_s": median(slow),
                    "fast_median_s": median(quick),
                    "plain_s": slow,
                    "fast_s": quick,
                },
            )
        )
    return results


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes of CPU tensors alive at once during `run`, over what was alive before it.

    Adds up every allocation and release that torch's CPU allocator reports to the profiler, in
    order of time: tensors kept for backward count until they are freed, short-lived ones inside an
    operator count too. Not seen: scratch space of MKL and oneDNN, which they allocate themselves.
    """
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak
