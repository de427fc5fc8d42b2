"""Where the host time of one forward call goes, and what other ways of allocating and launching would take.

    python -m tests.benchmark.host_profile [--tokens 1024] [--json FILE]

Needs a GPU. Everything is enqueued behind a sleeping kernel, so that no call waits for the device; times are
microseconds of the CPU, the median and the minimum over rounds of many calls.
"""

import argparse
import contextlib
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cuda.tile as ct
import tilegym
import torch
from cuda.tile._cext import launch as launch_directly
from rich.console import Console
from rich.table import Table

from tilegym_mamba2 import registry, validate
from tilegym_mamba2.backends.cutile import forward as cutile
from tilegym_mamba2.backends.cutile import launch as launcher
from tilegym_mamba2.backends.cutile.packed import pack
from tilegym_mamba2.bench import environment, timing
from tilegym_mamba2.forms import form_of
from tilegym_mamba2.spec import SPECS

OP = "mamba2_chunk_forward"
# A stream holds about 1024 kernels that have not started: 200 calls of 4 stay below.
CALLS, ROUNDS = 200, 9
# 50 ms at 2 GHz.
SLEEP_CYCLES = 100_000_000

Row = tuple[str, str, float, float]


def host_us(call: Callable[[], Any]) -> tuple[float, float]:
    """Median and minimum over the rounds, of the time per call."""
    call()
    samples = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        asleep = torch.cuda.Event()
        asleep.record()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        elapsed = time.perf_counter() - start
        if asleep.query():
            raise RuntimeError(
                f"{CALLS} calls took {elapsed:.2f} s, longer than the kernel before them slept"
            )
        samples.append(elapsed / CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(samples), min(samples)


def recorded(call: Callable[[], Any]) -> list[Any]:
    """The launches of a call, which are not run."""
    launches: list[Any] = []
    with launching_by(lambda items, *rest: launches.extend(items)):
        call()
    return launches


@contextlib.contextmanager
def launching_by(run_plan: Callable[..., None]) -> Iterator[None]:
    """Within it the forward gives its launches to `run_plan`."""
    before, cutile.run_plan = cutile.run_plan, run_plan
    try:
        yield
    finally:
        cutile.run_plan = before


def breakdown(inputs: dict[str, Any]) -> list[Row]:
    tensors = [inputs[name] for name in ("x", "a", "b", "c", "d", "dt", "init_state")]
    size = inputs["chunk_size"]
    call = lambda: tilegym.ops.mamba2_chunk_forward(**inputs)  # noqa: E731
    launches = recorded(call)
    device = inputs["x"].device
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    parts = {
        "whole call": call,
        "whole call, backend named": lambda: tilegym.ops.mamba2_chunk_forward(**inputs, backend="cutile"),
        "validate": lambda: validate.validate_forward(*tensors, size),
        "resolve": lambda: registry.resolve(OP, None, tuple(tensors)),
        "backend's function": lambda: cutile.mamba2_chunk_forward(*tensors, size),
        "plan key and look-up": lambda: cutile._plan_of(form_of(*tensors), *tensors),
    }
    rows = [("parts", name, *host_us(part)) for name, part in parts.items()]
    with launching_by(lambda *rest: None):
        rows.append(("parts", "whole call without launches", *host_us(call)))
    rows.append(("parts", "stream handle", *host_us(lambda: torch._C._cuda_getCurrentRawStream(0))))
    rows.append(("parts", "current device", *host_us(torch.cuda.current_device)))
    packed = pack(launches, [launcher.signature_of(item) for item in launches], device, True)
    for item, ready in zip(launches, packed, strict=True):
        name = f"{item.kernel._pyfunc.__name__}, {len(item.args)} arguments"
        rows.append(
            (
                "parts",
                f"ct.launch of {name}",
                *host_us(lambda i=item: ct.launch(stream, i.grid, i.kernel, i.args)),
            )
        )
        rows.append(
            (
                "parts",
                f"packed launch of {name}",
                *host_us(lambda i=item, r=ready: launcher.repeat(i, r, stream)),
            )
        )
    return rows


def launching(inputs: dict[str, Any]) -> list[Row]:
    launches = recorded(lambda: tilegym.ops.mamba2_chunk_forward(**inputs))
    first = min(launches, key=lambda item: len(item.args))
    kernel, args = first.kernel, first.args
    device = inputs["x"].device
    stream, handle = torch.cuda.current_stream(), torch._C._cuda_getCurrentRawStream(device.index)
    tensors = [torch.zeros(16, device=device) for _ in range(10)]
    grid = first.grid
    ways = {
        "torch.cuda.current_stream()": torch.cuda.current_stream,
        "torch.cuda.current_stream(device)": lambda: torch.cuda.current_stream(device),
        "torch._C._cuda_getCurrentRawStream": lambda: torch._C._cuda_getCurrentRawStream(device.index),
        "ct.launch, Stream object": lambda: ct.launch(stream, grid, kernel, args),
        "ct.launch, handle": lambda: ct.launch(handle, grid, kernel, args),
        "cuda.tile's own launch, handle": lambda: launch_directly(handle, grid, kernel, args),
        "ct.launch, 2 arrays": lambda: ct.launch(handle, (1,), _touch_2, (*tensors[:2], 16)),
        "ct.launch, 10 arrays": lambda: ct.launch(handle, (1,), _touch_10, (*tensors, 16)),
        "ct.launch, 10 arrays, 2 distinct": lambda: ct.launch(
            handle, (1,), _touch_10, (*tensors[:2] * 5, 16)
        ),
    }
    return [("launching", name, *host_us(way)) for name, way in ways.items()]


@ct.kernel
def _touch_2(a, b, L: ct.Constant[int]):
    ct.store(a, (0,), ct.load(b, (0,), (L,)))


@ct.kernel
def _touch_10(a, b, c, d, e, f, g, h, i, j, L: ct.Constant[int]):
    ct.store(a, (0,), ct.load(b, (0,), (L,)))


def allocating(inputs: dict[str, Any]) -> list[Row]:
    x, device = inputs["x"], inputs["x"].device
    batch, tokens, heads, head_size = x.shape
    state_size = inputs["b"].shape[3]
    shapes = [
        (4, batch, heads, 20, 64),
        (batch, heads, 8, head_size, state_size),
        (batch, heads, 8),
    ]
    kinds: dict[str, Any] = {"dtype": torch.float32, "device": device}
    forms = [torch.empty(1, **kinds).expand(shape) for shape in shapes]
    places, start = [], 0
    for shape, form in zip(shapes, forms, strict=True):
        places.append((shape, torch.empty(shape, device="meta").stride(), start))
        start += -(-form.numel() // 64) * 64
    total = start

    def cut() -> list[torch.Tensor]:
        whole = torch.empty(total, **kinds)
        return [torch.as_strided(whole, *place) for place in places]

    def split() -> list[torch.Tensor]:
        pieces = torch.empty(total, **kinds).split_with_sizes(sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, padded, strict=True)]

    # Views need whole shapes: the padding goes to the first dimension of a flat last piece.
    sizes = [form.numel() for form in forms]
    sizes[-1] += total - sum(sizes)
    padded = [*shapes[:2], (sizes[-1],)]
    state = inputs["init_state"]
    ways = {
        "3 × torch.empty": lambda: [torch.empty(shape, **kinds) for shape in shapes],
        "3 × empty_like of a form": lambda: [torch.empty_like(form) for form in forms],
        "3 × empty_strided": lambda: [torch.empty_strided(*place[:2], **kinds) for place in places],
        "3 × x.new_empty": lambda: [x.new_empty(shape, dtype=torch.float32) for shape in shapes],
        "1 torch.empty + 3 × as_strided": cut,
        "1 torch.empty + split + 3 × view": split,
        "torch.empty": lambda: torch.empty(shapes[0], **kinds),
        "empty_like of a form": lambda: torch.empty_like(forms[0]),
        "unsqueeze": lambda: state.unsqueeze(2),
        "as_strided": lambda: torch.as_strided(state, (1,), (1,)),
        "index [:, :, 0]": lambda: state[:, :, 0],
    }
    return [("allocating", name, *host_us(way)) for name, way in ways.items()]


def show(rows: Sequence[Row], env: dict[str, Any]) -> None:
    table = Table("", "what", "median, µs", "minimum, µs", title=f"{env['device']}, torch {env['torch']}")
    group = ""
    for row_group, name, median, least in rows:
        table.add_row(row_group if row_group != group else "", name, f"{median:.2f}", f"{least:.2f}")
        group = row_group
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Where the host time of one forward call goes.")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("host_profile needs a GPU")
    spec = replace(SPECS["published"], num_tokens=options.tokens)
    inputs = spec.get_sample_inputs(with_reference=False, with_backward=False, device="cuda")
    gc.disable()
    rows = breakdown(inputs) + launching(inputs) + allocating(inputs)
    env = environment.describe(inputs["x"].device)
    show(rows, env)
    call = lambda: tilegym.ops.mamba2_chunk_forward(**inputs)  # noqa: E731
    eager, graph = timing.eager_median(call), timing.graph_median(call)
    Console().print(f"device: eager {eager.median:.1f} µs, graph {graph.median:.1f} µs")
    if options.json:
        names = ("group", "what", "median_us", "min_us")
        result = {
            "environment": env,
            "spec": spec.id,
            "rows": [dict(zip(names, r, strict=True)) for r in rows],
        }
        result |= {"eager_us": eager.median, "graph_us": graph.median}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
