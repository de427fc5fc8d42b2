"""Speed, growth and memory of the torch backend on the CPU.

    python tests/benchmark/bench_torch_backend.py [--quick] [--section NAME] [--output FILE.json]

Prints three tables, writes them as JSON, and exits with 1 when a limit below is broken. Times are CPU
seconds on one thread, the shortest of several, because other processes hardly lengthen them; wall times on
all threads stand beside them.

- speed: at B 1, T 2048, H 16, P 64, G 1, N 128, float32, at least 5 times faster than the scan inside
  transformers' torch path for Mamba-2;
- growth: T doubled from 4096 on takes at most 2.2 times as long;
- memory: at B 1, T 16384, H 32, P 64, N 128, float32, no_grad, less than 1 GiB beside the inputs, for every
  chunk_size from 1 to 256 (those with the same blocking are run once). The output, 128 MiB, counts.
"""

import argparse
import ctypes
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tilegym_mamba2.backends.torch import chunked, recurrent
from tilegym_mamba2.spec import SPECS, Mamba2ProblemSpec

RESULTS = Path(__file__).parent / "results" / "torch_backend_cpu.json"
MIN_SPEEDUP, MAX_GROWTH, MAX_MIB = 5.0, 2.2, 1024.0
MAX_ERROR = 1e-5
# A whole layer of these sizes, projections and convolution included, as measured when the limit was set.
LAYER_SECONDS_CITED = 8.6


def sizes(**fields: Any) -> Mamba2ProblemSpec:
    """Mamba-2 370M's layer (H 32, P 64, G 1, N 128) in float32, with some fields changed."""
    return replace(SPECS["mamba2-370m-8k"], dtype=torch.float32, **fields)


Clock = Callable[[], float]


def seconds(fn: Callable[[], object], repeats: int) -> dict[str, float]:
    """Shortest of `repeats` calls: CPU seconds on one thread, and wall seconds on all."""
    return shortest(lambda clock: {"": elapsed(fn, clock)}, repeats)


def elapsed(fn: Callable[[], object], clock: Clock) -> float:
    start = clock()
    fn()
    return clock() - start


def shortest(measure: Callable[[Clock], dict[str, float]], repeats: int) -> dict[str, float]:
    """The minimum of every time that `measure` returns, by both clocks, after one call not counted."""
    measure(time.perf_counter)
    threads = torch.get_num_threads()
    wall = [measure(time.perf_counter) for _ in range(repeats)]
    torch.set_num_threads(1)
    cpu = [measure(time.process_time) for _ in range(repeats)]
    torch.set_num_threads(threads)
    return {
        f"{name}{unit}": round(min(row[name] for row in rows), 5)
        for unit, rows in (("cpu_s", cpu), ("wall_s", wall))
        for name in rows[0]
    }


def relative_error(got: torch.Tensor, ref: torch.Tensor) -> float:
    return ((got.double() - ref.double()).norm() / ref.double().norm()).item()


def transformers_scan(chunk_size: int, repeats: int) -> dict[str, Any]:
    """Time a Mamba2Mixer and, by hooks on its activation and its norm, the scan between them."""
    try:
        from transformers import Mamba2Config
        from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
    except ImportError as missing:
        return {"skipped": f"transformers is not installed: {missing}"}
    import transformers

    spec = sizes(num_tokens=2048, num_heads=16)
    inner = spec.num_heads * spec.head_size
    config = Mamba2Config(
        num_heads=spec.num_heads,
        head_dim=spec.head_size,
        hidden_size=inner // 2,
        state_size=spec.state_size,
        n_groups=spec.num_groups,
        chunk_size=chunk_size,
    )
    torch.manual_seed(0)
    mixer = Mamba2Mixer(config, layer_idx=0)
    with torch.no_grad():
        mixer.A_log.copy_(torch.arange(1, spec.num_heads + 1).log())
        mixer.dt_bias.fill_(-3.0)
        mixer.D.fill_(1.0)
    seen: dict[str, Any] = {}

    def before_scan(_module: object, _args: object, activated: torch.Tensor) -> None:
        seen["xbc"], seen["start"] = activated, seen["clock"]()

    def after_scan(_module: object, args: tuple[torch.Tensor, ...]) -> None:
        seen["scan"], seen["y"] = seen["clock"]() - seen["start"], args[0]

    mixer.in_proj.register_forward_hook(lambda _module, _args, projected: seen.update(projected=projected))
    mixer.act.register_forward_hook(before_scan)
    mixer.norm.register_forward_pre_hook(after_scan)
    hidden = torch.randn(1, spec.num_tokens, inner // 2)

    def measure(clock: Clock) -> dict[str, float]:
        seen["clock"] = clock
        layer = elapsed(lambda: mixer(hidden), clock)
        return {"layer_": layer, "scan_": seen["scan"]}

    with torch.no_grad():
        times = shortest(measure, repeats)
        x, b, c = seen["xbc"].split([inner, spec.state_size, spec.state_size], dim=-1)
        dt = torch.nn.functional.softplus(seen["projected"][..., -spec.num_heads :] + mixer.dt_bias)
        ours, _ = chunked.mamba2_chunk_forward(
            x.unflatten(2, (spec.num_heads, spec.head_size)),
            -mixer.A_log.exp(),
            b[:, :, None],
            c[:, :, None],
            mixer.D,
            dt,
            None,
        )
    return {
        "version": transformers.__version__,
        **times,
        "same_output_to": relative_error(seen["y"].view_as(ours), ours),
    }


def speed(quick: bool) -> dict[str, Any]:
    repeats = 3 if quick else 9
    ours = {}
    for chunk_size in (1, 16, 64, 128, 256):
        spec = sizes(num_tokens=2048, num_heads=16, chunk_size=chunk_size)
        p = spec.get_sample_inputs(with_reference=True, with_backward=True)
        arguments = [p[name] for name in ("x", "a", "b", "c", "d", "dt", "init_state")]
        gradients = [p["dout"], p["dfinal_state"]]
        out, final_state = chunked.mamba2_chunk_forward(*arguments, chunk_size)
        grads = chunked.mamba2_chunk_backward(*arguments, *gradients, chunk_size)
        references = [p[f"d{name}"] for name in ("x", "a", "b", "c", "d", "dt", "init_state")]
        ours[chunk_size] = {
            "error_out": relative_error(out, p["out"]),
            "error_final_state": relative_error(final_state, p["final_state"]),
            "error_gradients": max(relative_error(*pair) for pair in zip(grads, references, strict=True)),
            "forward": seconds(
                lambda a=arguments, k=chunk_size: chunked.mamba2_chunk_forward(*a, k), repeats
            ),
            "backward": seconds(
                lambda a=arguments, g=gradients, k=chunk_size: chunked.mamba2_chunk_backward(*a, *g, k),
                repeats,
            ),
        }
    loop = seconds(lambda: recurrent.mamba2_chunk_forward(*arguments), 1)
    theirs = {k: transformers_scan(k, 1 if quick else 2) for k in (64, 256)}
    slowest = max(row["forward"]["cpu_s"] for row in ours.values())
    measured = [row["scan_cpu_s"] for row in theirs.values() if "scan_cpu_s" in row]
    return {
        "spec": spec.id,
        "chunked": ours,
        "token_loop": loop,
        "transformers": theirs,
        "layer_s_cited": LAYER_SECONDS_CITED,
        "speedup_of_slowest_over_fastest_scan": round(min(measured) / slowest, 1) if measured else None,
        "ok": all(row[key] < MAX_ERROR for row in ours.values() for key in row if key.startswith("error"))
        and (not measured or min(measured) / slowest >= MIN_SPEEDUP),
    }


def growth(quick: bool) -> dict[str, Any]:
    lengths = (4096, 8192, 16384) if quick else (4096, 8192, 16384, 32768, 65536, 131072, 262144)
    problems = {
        T: sizes(num_tokens=T, num_heads=8, chunk_size=64).get_sample_inputs(
            with_reference=False, with_backward=False
        )
        for T in lengths
    }

    def every_length(clock: Clock) -> dict[str, float]:
        # Round by round, so that a busy moment of the machine meets all lengths.
        return {
            f"{T} ": elapsed(lambda p=p: chunked.mamba2_chunk_forward(**p), clock)
            for T, p in problems.items()
        }

    times = shortest(every_length, 5)
    rows: dict[str, Any] = {
        str(T): {unit: times[f"{T} {unit}"] for unit in ("cpu_s", "wall_s")} for T in lengths
    }
    for T in lengths[1:]:
        rows[str(T)]["over_half_the_tokens"] = round(rows[str(T)]["cpu_s"] / rows[str(T // 2)]["cpu_s"], 2)
    ratios = [row["over_half_the_tokens"] for row in rows.values() if "over_half_the_tokens" in row]
    return {"heads": 8, "forward": rows, "largest": max(ratios), "ok": max(ratios) <= MAX_GROWTH}


def extra_mib(fn: Callable[[], object]) -> float:
    """Peak resident memory while `fn` runs, less what was resident before (Linux with glibc)."""
    # Memory that was freed but not given back would serve `fn` without being counted.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    fn()
    return (resident("VmHWM") - before) / 1024


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def memory(quick: bool) -> dict[str, Any]:
    if not os.access("/proc/self/clear_refs", os.W_OK) or not hasattr(ctypes.CDLL(None), "malloc_trim"):
        return {"skipped": "peak memory is read from /proc/self, on Linux with glibc", "ok": True}
    spec = sizes(num_tokens=16384)
    p = spec.get_sample_inputs(with_reference=False, with_backward=True)
    gradients = {name: p.pop(name) for name in ("dout", "dfinal_state")}
    del p["chunk_size"]
    distinct = list({chunked._blocking(p["x"], p["b"], k): k for k in range(1, 257)}.values())
    rows = {}
    for chunk_size in distinct[:: 16 if quick else 1]:
        rows[chunk_size] = round(
            extra_mib(lambda k=chunk_size: chunked.mamba2_chunk_forward(**p, chunk_size=k)), 1
        )
    backward = {
        k: round(extra_mib(lambda k=k: chunked.mamba2_chunk_backward(**p, **gradients, chunk_size=k)), 1)
        for k in (1, 64, 256)
    }
    return {
        "spec": spec.id,
        "forward_mib": rows,
        "largest_forward_mib": max(rows.values()),
        "backward_mib": backward,
        "ok": max(rows.values()) < MAX_MIB,
    }


def machine() -> dict[str, Any]:
    names = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "cpu": names[0].split(":")[1].strip() if names else platform.processor(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if os.path.exists(path) else []


def show(report: dict[str, Any]) -> None:
    table = report["speed"]
    print(" · ".join(f"{key} {value}" for key, value in table["machine"].items()))
    print(f"\nspeed, {table['spec']}, forward (backward): CPU ms on one thread")
    for chunk_size, row in table["chunked"].items():
        forward, backward = (1e3 * row[key]["cpu_s"] for key in ("forward", "backward"))
        print(
            f"  chunked, chunk_size {chunk_size:>3}: {forward:8.1f} ({backward:.1f}), "
            f"wall {1e3 * row['forward']['wall_s']:.1f}, out to {row['error_out']:.1e}"
        )
    print(f"  token loop:              {1e3 * table['token_loop']['cpu_s']:8.1f}")
    for chunk_size, row in table["transformers"].items():
        if "skipped" in row:
            print(f"  transformers: {row['skipped']}; a layer took {table['layer_s_cited']} s elsewhere")
        else:
            print(
                f"  transformers {row['version']}, chunk {chunk_size}: scan {1e3 * row['scan_cpu_s']:8.1f}, "
                f"layer {1e3 * row['layer_cpu_s']:.1f}, same output to {row['same_output_to']:.1e}"
            )
    print(f"  our slowest is {table['speedup_of_slowest_over_fastest_scan']} times as fast as their fastest")
    table = report["growth"]
    print(f"\ngrowth, H {table['heads']}: CPU ms on one thread by T, and times the half")
    for T, row in table["forward"].items():
        print(f"  {T:>7}: {1e3 * row['cpu_s']:9.1f}  {row.get('over_half_the_tokens', '')}")
    table = report["memory"]
    if "skipped" in table:
        print(f"\nmemory: {table['skipped']}")
    else:
        print(f"\nmemory, {table['spec']}: forward at most {table['largest_forward_mib']} MiB over")
        print(f"  {len(table['forward_mib'])} chunk sizes; backward {table['backward_mib']}")
    print("\n" + "  ".join(f"{name} {'ok' if report[name]['ok'] else 'BROKEN'}" for name in SECTIONS))


SECTIONS = {"memory": memory, "growth": growth, "speed": speed}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats, lengths and chunk sizes")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write the JSON")
    parser.add_argument(
        "--section", choices=SECTIONS, help="measure only this; the rest stays as in the JSON"
    )
    options = parser.parse_args()
    report = json.loads(options.output.read_text()) if options.section else {}
    with torch.no_grad():
        for name in [options.section] if options.section else SECTIONS:
            report[name] = {"machine": machine(), "quick": options.quick} | SECTIONS[name](options.quick)
    # As JSON has it, with names for keys, whether measured now or read.
    report = json.loads(json.dumps(report))
    show(report)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(report[name]["ok"] for name in SECTIONS) else 1


if __name__ == "__main__":
    sys.exit(main())
