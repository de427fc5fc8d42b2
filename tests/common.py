"""What tests and benchmarks share: a clock with the interface of the publication's snippet."""

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

SECONDS = 0.5
MIN_CALLS, MAX_CALLS = 5, 100


def benchmark(fn: Callable[[], Any], use_cupti: bool = True) -> dict[str, dict[str, float]]:
    """Time a forward call.

    On a GPU, `use_cupti` sums the device time of a call's kernels and copies, as CUPTI reports it through
    torch.profiler; otherwise CUDA events around the call are read, launch gaps included. Without a GPU it is
    wall clock. Runs for about half a second after three warm-up calls.

    Returns:
        {"forward": {"median", "min", "max", "p20", "p80"}} in milliseconds per call.
    """
    for _ in range(3):
        fn()
    calls = _number_of_calls(fn)
    if not torch.cuda.is_available():
        times = _wall_times(fn, calls)
    else:
        times = _kernel_times(fn, calls) if use_cupti else _event_times(fn, calls)
    ordered = sorted(times)
    last = len(ordered) - 1
    summary = {"median": statistics.median(ordered), "min": ordered[0], "max": ordered[-1]}
    return {"forward": summary | {"p20": ordered[round(0.2 * last)], "p80": ordered[round(0.8 * last)]}}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _number_of_calls(fn: Callable[[], Any]) -> int:
    _synchronize()
    start = time.perf_counter()
    fn()
    _synchronize()
    return max(MIN_CALLS, min(MAX_CALLS, int(SECONDS / (time.perf_counter() - start))))


def _wall_times(fn: Callable[[], Any], calls: int) -> list[float]:
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        fn()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _event_times(fn: Callable[[], Any], calls: int) -> list[float]:
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    for start, end in pairs:
        start.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def _kernel_times(fn: Callable[[], Any], calls: int) -> list[float]:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            fn()
        torch.cuda.synchronize()
    work = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    work.sort(key=lambda event: event.time_range.start)
    per_call, rest = divmod(len(work), calls)
    if per_call == 0 or rest:
        warnings.warn(f"CUPTI saw {len(work)} kernels in {calls} equal calls; timing by events", stacklevel=3)
        return _event_times(fn, calls)
    durations = [event.time_range.elapsed_us() / 1e3 for event in work]
    return [sum(durations[i : i + per_call]) for i in range(0, len(durations), per_call)]
