"""Searches the forward's configurations on the user's GPU and keeps the winners in the user's table.

`cuda.tile.tune.exhaustive_search` is not used. It tunes one kernel at a time, while a configuration here is
that of three kernels whose sizes depend on each other; it empties the L2 cache before every run, while these
kernels hand each other their results through it; and it compiles candidates one after another, which is
nearly all of a search's time. Here they compile in parallel, each worker a process of its own that leaves the
binary in cuda-tile's cache on disk (so that a candidate which crashes takes no other with it), then every
candidate is checked against the default's result, and whole forwards are timed: all briefly, the best few at
length and in turn.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import timing
from .measure import _one_line
from .pool import run_in_processes

FORWARD_OP = "mamba2_chunk_forward"
FINALISTS = 4
# A gain smaller than what two measurements of the same configuration differ by is not a gain.
LEAST_GAIN = 0.01
ARGUMENTS = ("x", "a", "b", "c", "d", "dt", "init_state", "chunk_size")


@dataclasses.dataclass
class TuneResult:
    """What one search found. Times are graph medians of a whole forward, microseconds."""

    spec: str
    key: str
    source: str
    before_us: float
    after_us: float
    config: Any
    changed: bool
    tried: int
    failed: list[tuple[Any, str]]
    seconds: float

    @property
    def gain(self) -> float:
        """The share of the time before that is saved; 0 where nothing was measurably faster."""
        return 1.0 - self.after_us / self.before_us if self.changed else 0.0


def default_workers() -> int:
    return max(1, min(8, (os.cpu_count() or 2) - 1))


def problem_key(tuning: Any, inputs: Mapping[str, Any]) -> str:
    """The tuning key of a problem, from those inputs that `tuning.problem_key` asks for."""
    import inspect

    wanted = inspect.signature(tuning.problem_key).parameters
    return tuning.problem_key(**{k: v for k, v in inputs.items() if k in wanted})


def search(
    name: str,
    spec: Any,
    *,
    device: torch.device,
    tuning: Any,
    op: Callable[..., Any],
    workers: int | None = None,
    limit_seconds: float = 170.0,
    on_step: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> TuneResult:
    """Search the configurations for one spec; writes nothing.

    Args:
        tuning: the module with `candidates`, `lookup`, `override` and `problem_key`.
        op: the forward, called with the arguments in `ARGUMENTS`' order.
        workers: processes that compile; 0 compiles in this one, one after another.
        limit_seconds: no new candidate is compiled after two thirds of it.
        on_step: told the stage ("compile", "check and time", "finals") and how far it is.

    Raises:
        RuntimeError: when not even the configuration in use runs.
    """
    start = time.monotonic()
    inputs = spec.get_sample_inputs(with_reference=False, with_backward=False, device=device)
    key = problem_key(tuning, inputs)
    current, source = tuning.lookup(key)
    others = [c for c in tuning.candidates(key) if c != current]
    candidates = [current, *others]

    failed: dict[int, str] = {}
    workers = default_workers() if workers is None else workers
    if workers and device.type == "cuda" and _disk_cache():
        torch.cuda.empty_cache()
        jobs = run_in_processes(
            compile_runner,
            (spec, str(device)),
            candidates,
            workers=workers,
            deadline=start + limit_seconds * 2 / 3,
        )
        for done, (index, reason) in enumerate(jobs, 1):
            on_step("compile", done, len(candidates))
            # the one in use is run below in any case: its failure is an error, not a candidate less
            if reason and index:
                failed[index] = reason

    def call(index: int) -> Callable[[], Any]:
        arguments = tuple(inputs[k] for k in ARGUMENTS)

        def run() -> Any:
            with tuning.override(candidates[index]):
                return op(*arguments)

        return run

    allowed = _allowed(spec)
    expected = [t.double() for t in call(0)()]
    quick: dict[int, float] = {}
    for index in range(len(candidates)):
        on_step("check and time", index + 1, len(candidates))
        if index in failed:
            continue
        try:
            _compare(call(index)(), expected, allowed)
            quick[index] = _time({index: call(index)}, device, seconds=0.06)[index]
        except Exception as error:
            if index == 0:
                raise RuntimeError(f"the configuration in use fails: {_one_line(error)}") from error
            failed[index] = _one_line(error)
            if device.type == "cuda":
                torch.cuda.synchronize()  # raises when the device is lost: then nothing below is worth having

    del expected
    finalists = sorted(quick, key=quick.get)[:FINALISTS]
    finalists = [0, *(i for i in finalists if i)]
    on_step("finals", 0, 1)
    final = _time({i: call(i) for i in finalists}, device, seconds=0.4)
    on_step("finals", 1, 1)
    best = min(final, key=final.get)
    changed = best != 0 and final[best] <= (1 - LEAST_GAIN) * final[0]
    winner = best if changed else 0
    return TuneResult(
        spec=name,
        key=key,
        source=source,
        before_us=final[0],
        after_us=final[winner],
        config=candidates[winner],
        changed=changed,
        tried=len(quick),
        failed=[(candidates[i], reason) for i, reason in sorted(failed.items())],
        seconds=time.monotonic() - start,
    )


def save(tuning: Any, arch: str, result: TuneResult, device_name: str) -> None:
    """Put the winner in the user's table (the one in use too: then it is known to be measured here)."""
    entry = {
        "config": dataclasses.asdict(result.config),
        "median_us": round(result.after_us, 2),
        "device": device_name,
    }
    tuning.save_user_entries(arch, {result.key: entry})


def compile_runner(spec: Any, device: str) -> Callable[[Any], None]:
    """In a worker process: a function that compiles a configuration by running it once."""
    import tilegym_mamba2
    from tilegym_mamba2.backends.cutile import tuning

    torch.cuda.set_device(torch.device(device))
    inputs = spec.get_sample_inputs(with_reference=False, with_backward=False, device=torch.device(device))
    arguments = tuple(inputs[k] for k in ARGUMENTS)

    def run(config: Any) -> None:
        with tuning.override(config):
            tilegym_mamba2.mamba2_chunk_forward(*arguments, backend="cutile")
        torch.cuda.synchronize()

    return run


def _disk_cache() -> bool:
    """Whether cuda-tile keeps binaries on disk: without that, workers would compile for themselves only."""
    return os.environ.get("CUDA_TILE_CACHE_DIR", "on").strip().lower() not in ("", "0", "off", "none")


def _allowed(spec: Any) -> tuple[float, ...]:
    """How far a candidate may be from the default: twice what each may be from float64."""
    from tilegym_mamba2 import registry
    from tilegym_mamba2.budgets import budget_for

    entry = registry.ops()[FORWARD_OP]
    large = torch.ones(4096)
    return tuple(
        2 * budget_for(entry, name, spec.dtype, spec.decay, large) for name in ("out", "final_state")
    )


def _compare(results: Any, expected: list[torch.Tensor], allowed: tuple[float, ...]) -> None:
    from tilegym_mamba2.budgets import relative_error

    for name, got, ref, most in zip(("out", "final_state"), results, expected, allowed, strict=True):
        error = relative_error(got, ref)
        if not error <= most:
            raise ValueError(f"wrong {name}: {error:.2g} from the default's, {most:.2g} allowed")


def _time(calls: Mapping[int, Callable[[], Any]], device: torch.device, seconds: float) -> dict[int, float]:
    lanes = {str(i): call for i, call in calls.items()}
    if device.type != "cuda":
        times = timing.wall_medians(lanes, seconds=seconds)
    else:
        times, refused = timing.graph_medians(lanes, seconds=seconds)
        if refused:
            raise RuntimeError(f"cannot be captured: {next(iter(refused.values()))}")
    return {i: times[str(i)].median for i in calls}
