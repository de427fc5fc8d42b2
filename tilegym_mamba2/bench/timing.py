"""How long a call takes, measured the same way for every backend.

All times are microseconds. On a GPU a call has three times: *graph* (its device work alone, from
replays of a CUDA graph that holds many calls), *eager* (one call on an idle GPU, launch gaps
included) and *host* (what the CPU pays per call while the GPU is busy). On a CPU there is the wall
clock only.
"""

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

Call = Callable[[], Any]
Lane = Call | Sequence[Call]  # several callables: the same call on several input sets, in turn

MIN_REPLAY_US = 2000.0  # a replay this long hides the few microseconds that starting it costs
MAX_CALLS = 50
MIN_SAMPLES = 20
MAX_SAMPLES = 200
SETTLED_SPREAD = 0.01


class TimingResult(NamedTuple):
    """Times of one call in microseconds, and how many samples they come from."""

    median: float
    p20: float
    p80: float
    min: float
    n: int


def summarise(samples: Sequence[float]) -> TimingResult:
    """Median, 20th and 80th percentile and minimum of `samples` (at least one)."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return TimingResult(
        median=statistics.median(ordered),
        p20=ordered[round(0.2 * last)],
        p80=ordered[round(0.8 * last)],
        min=ordered[0],
        n=len(ordered),
    )


@contextlib.contextmanager
def _no_gc() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def interleaved(
    samplers: Mapping[str, Callable[[], float]],
    *,
    seconds: float = 0.5,
    min_samples: int = MIN_SAMPLES,
    max_samples: int = MAX_SAMPLES,
) -> dict[str, TimingResult]:
    """Sample every lane in turn until each has settled, so that clock drift meets all of them alike.

    A sampler runs its call once or more and returns microseconds per call. A lane leaves the round
    when it has `min_samples` and either its 20-80 % spread is under 1 % of the median, or it has used
    `seconds`, or it has `max_samples`; one whose single sample is long leaves after 4 x `seconds`,
    with three samples at least.
    """
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    spent = dict.fromkeys(samplers, 0.0)
    active = list(samplers)
    with _no_gc():
        while active:
            for name in active:
                start = time.perf_counter()
                samples[name].append(samplers[name]())
                spent[name] += time.perf_counter() - start
            active = [n for n in active if not _done(samples[n], spent[n], seconds, min_samples, max_samples)]
            active = active[1:] + active[:1]  # no lane always runs behind the same neighbour
    return {name: summarise(values) for name, values in samples.items()}


def _done(values: list[float], spent: float, seconds: float, min_samples: int, max_samples: int) -> bool:
    if len(values) >= max_samples:
        return True
    if len(values) < min_samples:
        return spent > 4 * seconds and len(values) >= 3
    if spent > seconds:
        return True
    now = summarise(values)
    return now.p80 - now.p20 <= SETTLED_SPREAD * now.median


def _as_sequence(lane: Lane) -> list[Call]:
    return [lane] if callable(lane) else list(lane)


# --- CPU -----------------------------------------------------------------------------------------


def _wall_sampler(lane: Lane) -> Callable[[], float]:
    calls = _as_sequence(lane)
    turn = 0

    def sample() -> float:
        nonlocal turn
        call = calls[turn % len(calls)]
        turn += 1
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6

    return sample


def wall_medians(lanes: Mapping[str, Lane], *, seconds: float = 0.5) -> dict[str, TimingResult]:
    """Wall-clock time of each lane's call, lanes taken in turn. For work that is done when it returns."""
    for lane in lanes.values():
        _as_sequence(lane)[0]()
    return interleaved({name: _wall_sampler(lane) for name, lane in lanes.items()}, seconds=seconds)


def wall_median(fn: Call, *, seconds: float = 0.5) -> TimingResult:
    """Wall-clock time of `fn()`, after one warm-up call."""
    return wall_medians({"": fn}, seconds=seconds)[""]


# --- GPU -----------------------------------------------------------------------------------------


def _elapsed_us(run: Call) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def _warm_up(calls: Sequence[Call], seconds: float = 0.05) -> float:
    """Run every call once and the first for a while; returns microseconds of one call."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    once = _elapsed_us(calls[0])
    repeats = max(3, min(200, int(seconds * 1e6 / max(once, 1.0))))
    return _elapsed_us(lambda: [calls[0]() for _ in range(repeats)]) / repeats


def calls_per_replay(call_us: float, input_sets: int = 1) -> int:
    """Calls in one graph: at least 2 ms of work, at most 50 calls, every input set equally often."""
    wanted = max(1, min(MAX_CALLS, math.ceil(MIN_REPLAY_US / max(call_us, 1e-3))))
    return max(input_sets, wanted // input_sets * input_sets)


def capture(lane: Lane, calls: int | None = None) -> tuple[torch.cuda.CUDAGraph, int]:
    """Capture `calls` calls of `lane` in one CUDA graph, their outputs in the graph's own pool.

    Raises whatever the call raises when it cannot be captured (a host synchronisation, a first compile).
    """
    functions = _as_sequence(lane)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call_us = _warm_up(functions)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    calls = calls or calls_per_replay(call_us, len(functions))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            functions[i % len(functions)]()
    return graph, calls


def graph_medians(
    lanes: Mapping[str, Lane], *, seconds: float = 0.5
) -> tuple[dict[str, TimingResult], dict[str, str]]:
    """Device time of each lane's call from graph replays, lanes taken in turn.

    Returns the results, and for lanes that cannot be captured the reason.
    """
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    refused: dict[str, str] = {}
    for name, lane in lanes.items():
        try:
            graphs[name] = capture(lane)
        except Exception as error:
            torch.cuda.synchronize()  # raises here when the device is lost, not only the capture
            refused[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    samplers = {
        name: (lambda graph=graph, calls=calls: _elapsed_us(graph.replay) / calls)
        for name, (graph, calls) in graphs.items()
    }
    for sampler in samplers.values():
        for _ in range(3):
            sampler()
    results = interleaved(samplers, seconds=seconds)
    for graph, _ in graphs.values():
        graph.reset()
    return results, refused


def graph_median(fn: Lane, *, seconds: float = 0.5) -> TimingResult:
    """Device time of one call of `fn` from graph replays. Raises RuntimeError when it cannot be captured."""
    results, refused = graph_medians({"": fn}, seconds=seconds)
    if refused:
        raise RuntimeError(f"cannot be captured in a CUDA graph: {refused['']}")
    return results[""]


def eager_median(fn: Lane, *, seconds: float = 0.3) -> TimingResult:
    """Time of an ordinary call on an idle GPU, between events around it: launch gaps count."""
    calls = _as_sequence(fn)
    _warm_up(calls)
    turn = 0

    def sample() -> float:
        nonlocal turn
        call = calls[turn % len(calls)]
        turn += 1
        torch.cuda.synchronize()
        return _elapsed_us(call)

    return interleaved({"": sample}, seconds=seconds)[""]


def host_time(fn: Call, *, calls: int = 20, rounds: int = 7) -> TimingResult:
    """CPU time of one call while the GPU is busy, so that no call waits for another.

    A sleeping kernel occupies the stream, `calls` calls are enqueued behind it, and the wall clock
    is read before it ends; a round in which it ended too early is repeated with fewer calls behind a
    longer sleep. Raises RuntimeError when that never helps: the call synchronises.
    """
    call_us = _warm_up([fn])
    if call_us > 2000.0:  # the queue drains after every round: keep that under 20 ms
        calls = max(5, calls // 2)
    probe = 2_000_000
    torch.cuda._sleep(probe)
    cycles_per_us = probe / _elapsed_us(lambda: torch.cuda._sleep(probe))
    torch.cuda.synchronize()
    start = time.perf_counter()
    fn()
    sleep_us = max(3000.0, 3 * calls * (time.perf_counter() - start) * 1e6)
    samples: list[float] = []
    short = 0
    with _no_gc():
        while len(samples) < rounds and short < 6:
            torch.cuda.synchronize()
            torch.cuda._sleep(int(sleep_us * cycles_per_us))
            asleep = torch.cuda.Event()
            asleep.record()
            start = time.perf_counter()
            for _ in range(calls):
                fn()
            elapsed = (time.perf_counter() - start) * 1e6
            if not asleep.query():
                samples.append(elapsed / calls)
                continue
            # the sleep was too short, or so many launches filled the queue and waited for its end
            short += 1
            sleep_us = min(2 * sleep_us, 5e5)
            calls = max(2, calls // 2)
    torch.cuda.synchronize()
    if not samples:
        raise RuntimeError("no host time: the call waits for the GPU")
    return summarise(samples)


def first_call(fn: Call) -> tuple[float, Any]:
    """Seconds of the very first call, compiling and searching included, and what it returned."""
    _synchronize()
    start = time.perf_counter()
    result = fn()
    _synchronize()
    return time.perf_counter() - start, result


def peak_memory(fn: Call) -> tuple[int, int]:
    """Bytes that one call adds at its peak, and how many of them are not its outputs."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = fn()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del outputs
    # what the call left allocated once its outputs are gone is a cache of its own, not an output
    kept = torch.cuda.memory_allocated() - before
    again = fn()
    outputs_only = torch.cuda.memory_allocated() - before - kept
    del again
    return peak, peak - outputs_only


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
