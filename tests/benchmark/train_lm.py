"""Trains a small Mamba-2 language model by one backend and again by another, and compares the losses.

    python tests/benchmark/train_lm.py [--steps 200] [--json FILE.json] [--plot FILE.png]
    python tests/benchmark/train_lm.py --from FILE.json [--plot FILE.png]

The model predicts the next byte of this repository's own text. Both runs begin with the same parameters and
see the same batches; only the backend of `mamba2_chunk_scan` differs, forward and backward. Parameters,
optimiser and norms are float32, products and the scan's x, b, c follow autocast to `--dtype`. Deterministic
algorithms are on, and the first steps of each run are repeated to see that the losses are the same bits.
Without a GPU the kernels are interpreted, which asks for small sizes.

Exits with 1 when a limit is broken: after the warm-up of 20 steps the losses of the two runs differ by at
most 0.02; the mean of the last 20 lies at least 1 nat below that of the first 20; the peak memory of a step
does not grow.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tilegym_mamba2 import interpreter, mamba2_chunk_scan

ROOT = Path(__file__).resolve().parents[2]
TEXT = ("*.md", "*.toml", "tilegym_mamba2/**/*.py", "tests/**/*.py", "tests/**/*.md")
# The learning rate rises over these steps, and the losses of both runs are compared after them.
WARM_UP = 20
AVERAGED = 20
MAX_DIFFERENCE, MIN_GAIN = 0.02, 1.0
PEAK_STEPS = (10, 60)
# The allocator may hand out a block that is somewhat larger than asked for: torch's own backend moves up and
# down by 1.5 MiB from step to step.
MEMORY_SLACK = 2**22
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Settings:
    """Sizes and schedule of a run. `dim` is the residual stream's width; the scan works on twice that."""

    steps: int = 200
    batch: int = 8
    tokens: int = 1024
    dim: int = 256
    layers: int = 4
    head_size: int = 64
    state_size: int = 128
    groups: int = 1
    conv_width: int = 4
    dtype: str = "bf16"
    rate: float = 1e-3
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0


class Block(nn.Module):
    """One Mamba-2 layer: projection, short causal convolution, scan, gated norm, projection."""

    def __init__(self, settings: Settings, backend: str) -> None:
        super().__init__()
        self.settings, self.backend = settings, backend
        inner = 2 * settings.dim
        self.heads = inner // settings.head_size
        grouped = settings.groups * settings.state_size
        self.widths = (inner, inner, grouped, grouped, self.heads)
        channels = inner + 2 * grouped
        self.norm = nn.RMSNorm(settings.dim, eps=1e-5)
        self.in_proj = nn.Linear(settings.dim, sum(self.widths), bias=False)
        self.conv_weight = nn.Parameter(torch.empty(settings.conv_width, channels).uniform_(-0.5, 0.5))
        self.conv_bias = nn.Parameter(torch.zeros(channels))
        # dt begins log-uniform in 1e-3…0.1: the inverse of softplus there.
        dt = torch.exp(torch.rand(self.heads) * math.log(100.0) + math.log(1e-3))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.a_log = nn.Parameter(torch.empty(self.heads).uniform_(1.0, 16.0).log())
        self.d = nn.Parameter(torch.ones(self.heads))
        self.gated_norm = nn.RMSNorm(inner, eps=1e-5)
        self.out_proj = nn.Linear(inner, settings.dim, bias=False)
        with torch.no_grad():
            self.out_proj.weight /= math.sqrt(2 * settings.layers)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        settings = self.settings
        inner, _, grouped, _, heads = self.widths
        z, xbc, dt = self.in_proj(self.norm(stream)).split((inner, inner + 2 * grouped, heads), dim=-1)
        x, b, c = F.silu(self._convolve(xbc)).split((inner, grouped, grouped), dim=-1)
        out, _ = mamba2_chunk_scan(
            x.unflatten(-1, (heads, settings.head_size)),
            F.softplus(dt.float() + self.dt_bias),
            -self.a_log.exp(),
            b.unflatten(-1, (settings.groups, settings.state_size)),
            c.unflatten(-1, (settings.groups, settings.state_size)),
            d=self.d,
            backend=self.backend,
        )
        out = self.gated_norm(out.flatten(2).float() * F.silu(z.float()))
        return stream + self.out_proj(out)

    def _convolve(self, values: torch.Tensor) -> torch.Tensor:
        """Causal, channel by channel, as shifted products: the same bits in every run."""
        width, tokens = self.settings.conv_width, values.shape[1]
        padded = F.pad(values.float(), (0, 0, width - 1, 0))
        return self.conv_bias + sum(padded[:, k : k + tokens] * self.conv_weight[k] for k in range(width))


class LanguageModel(nn.Module):
    """Bytes (B, T) to logits (B, T, 256)."""

    def __init__(self, settings: Settings, backend: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, settings.dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(settings, backend) for _ in range(settings.layers)))
        self.norm = nn.RMSNorm(settings.dim, eps=1e-5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(self.norm(self.blocks(self.embedding(tokens))), self.embedding.weight)


@dataclass
class Run:
    """What one training run gave: the loss of every step in nats a byte, and what the steps cost."""

    losses: list[float]
    # Without the first steps, which compile; None for a run that is too short.
    step_ms: float | None
    seconds: float
    # The most memory allocated at any time during each step; none on a CPU.
    peak_bytes: list[int]


def corpus() -> bytes:
    """This repository's own text, its files in the order of their paths."""
    paths = {path for pattern in TEXT for path in ROOT.glob(pattern)}
    return b"\n".join(path.read_bytes() for path in sorted(paths))


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Within it torch refuses what is not the same bits in every run."""
    before = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    # cuBLAS asks for it; NaN in fresh memory would only cost time here.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def train(settings: Settings, backend: str, device: torch.device, text: bytes, steps: int = 0) -> Run:
    """Trains by one backend, for `steps` of the schedule (0: all). On a CPU, "cutile" is interpreted."""
    interpreted = device.type == "cpu" and backend == "cutile"
    with deterministic(), interpreter.interpret() if interpreted else contextlib.nullcontext():
        return _train(settings, backend, device, text, steps or settings.steps)


def _train(settings: Settings, backend: str, device: torch.device, text: bytes, steps: int) -> Run:
    torch.manual_seed(settings.seed)
    # Drawn on the CPU, so that every device begins alike.
    model = LanguageModel(settings, backend).to(device)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    if len(data) <= settings.tokens:
        raise ValueError(f"the text must be longer than {settings.tokens} bytes, got {len(data)}")
    generator = torch.Generator().manual_seed(settings.seed)
    starts = torch.randint(len(data) - settings.tokens, (settings.steps, settings.batch), generator=generator)
    starts, window = starts.to(device), torch.arange(settings.tokens + 1, device=device)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=settings.rate,
        betas=(0.9, 0.95),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, settings.steps))
    dtype = DTYPES[settings.dtype]
    losses = torch.zeros(steps, device=device)
    run = Run([], None, 0.0, [])
    begin = timed_from = time.perf_counter()
    for step in range(steps):
        if step == WARM_UP:
            _synchronize(device)
            timed_from = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        batch = data[starts[step][:, None] + window].long()
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        schedule.step()
        losses[step] = loss.detach()
        # Or the next step would begin with this one's logits in memory.
        del logits, loss, batch
        if device.type == "cuda":
            run.peak_bytes.append(torch.cuda.max_memory_allocated(device))
    _synchronize(device)
    run.seconds = time.perf_counter() - begin
    if steps > WARM_UP:
        run.step_ms = (time.perf_counter() - timed_from) / (steps - WARM_UP) * 1e3
    run.losses = losses.tolist()
    return run


def _rate(step: int, steps: int) -> float:
    """The learning rate's factor: up in a line, then down along a cosine to a tenth."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    progress = (step - WARM_UP) / max(1, steps - WARM_UP)
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * progress))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- the comparison


def compare(settings: Settings, backends: list[str], device: torch.device) -> dict[str, Any]:
    """Trains by each backend, one after the other, and returns what is written to the file."""
    from tilegym_mamba2.bench import environment

    text = corpus()
    env = environment.describe(device)
    runs = {}
    for backend in backends:
        run = train(settings, backend, device, text)
        again = train(settings, backend, device, text, steps=min(WARM_UP, settings.steps))
        if device.type == "cuda":
            torch.cuda.empty_cache()
        runs[backend] = asdict(run) | {"repeated": again.losses == run.losses[: len(again.losses)]}
        print(f"{backend}: {run.seconds:.1f} s, last loss {run.losses[-1]:.3f}", flush=True)
    source = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    result = {"schema": 1, "env": env, "settings": asdict(settings), "text": source, "runs": runs}
    return result | {"summary": summary(result)}


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Numbers of a result: of each run, and the largest difference after the warm-up, with its step."""
    found: dict[str, Any] = {}
    for backend, run in result["runs"].items():
        losses, peaks = run["losses"], run["peak_bytes"]
        settled = PEAK_STEPS[0] - 1
        at = [step for step in (*PEAK_STEPS, len(peaks)) if step <= len(peaks)]
        found[backend] = {
            "first_mean": statistics.mean(losses[:AVERAGED]),
            "last_mean": statistics.mean(losses[-AVERAGED:]),
            "peak_bytes": {str(step): peaks[step - 1] for step in at if step},
            "flat": max(peaks[settled:], default=0)
            <= max(peaks[settled : settled + 1], default=0) + MEMORY_SLACK,
            "repeated": run["repeated"],
        }
    curves = [run["losses"] for run in result["runs"].values()]
    if len(curves) == 2 and len(curves[0]) > WARM_UP:
        gaps = [abs(p - q) for p, q in zip(*curves, strict=True)]
        worst = max(range(WARM_UP, len(gaps)), key=lambda step: gaps[step])
        found["difference"] = {
            "max": gaps[worst],
            "at_step": worst + 1,
            "mean": statistics.mean(gaps[WARM_UP:]),
            "max_in_warm_up": max(gaps[:WARM_UP]),
        }
    return found


def verdicts(result: dict[str, Any]) -> list[tuple[str, bool]]:
    """Each limit as a sentence with its number, and whether it holds."""
    numbers = result["summary"]
    found = []
    for backend in result["runs"]:
        of_run = numbers[backend]
        first, last = of_run["first_mean"], of_run["last_mean"]
        if result["settings"]["steps"] >= 2 * AVERAGED:
            text = f"{backend}: mean loss of the first {AVERAGED} steps {first:.3f}, of the last {last:.3f}"
            found.append((text, first - last >= MIN_GAIN))
        if of_run["peak_bytes"]:
            peaks = ", ".join(f"step {k}: {v / 2**20:.1f} MiB" for k, v in of_run["peak_bytes"].items())
            found.append((f"{backend}: peak memory at {peaks}", of_run["flat"]))
        found.append((f"{backend}: the first steps once more, same bits", of_run["repeated"]))
    if "difference" in numbers:
        gap = numbers["difference"]
        text = (
            f"largest |Δloss| after {WARM_UP} steps {gap['max']:.4f} (step {gap['at_step']}), "
            f"mean {gap['mean']:.4f}; within the first {WARM_UP} {gap['max_in_warm_up']:.4f}"
        )
        found.append((text, gap["max"] <= MAX_DIFFERENCE))
    return found


def plot(result: dict[str, Any], path: Path) -> None:
    """Both curves, and their difference below, with what they were measured with."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from tilegym_mamba2.bench.plots import COLOURS

    runs, settings, env = result["runs"], result["settings"], result["env"]
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(7.2, 5.4), sharex=True, height_ratios=(3, 1.3), layout="constrained"
    )
    steps = range(1, settings["steps"] + 1)
    for (backend, run), colour, dashes in zip(runs.items(), COLOURS, ("-", "--"), strict=False):
        upper.plot(steps, run["losses"], dashes, color=colour, linewidth=1.6, label=backend)
    upper.set_ylabel("loss, nats a byte")
    upper.legend(frameon=False)
    curves = [run["losses"] for run in runs.values()]
    if len(curves) == 2:
        gaps = [abs(p - q) for p, q in zip(*curves, strict=True)]
        lower.plot(steps, gaps, color=COLOURS[2], linewidth=1.2)
        lower.axhline(MAX_DIFFERENCE, color="0.35", linewidth=1.0, linestyle="--")
        lower.axvspan(0.5, WARM_UP + 0.5, color="0.9", zorder=0)
        lower.set_ylabel("|Δloss|")
        lower.set_ylim(0, max(1.15 * MAX_DIFFERENCE, 1.1 * max(gaps)))
    lower.set_xlabel("step (grey: warm-up of the learning rate)")
    for axis in (upper, lower):
        axis.grid(alpha=0.3)
    sizes = f"{settings['layers']} layers of width {settings['dim']}, N {settings['state_size']}"
    work = f"batches of {settings['batch']} × {settings['tokens']} bytes, {settings['dtype']}"
    figure.suptitle(
        f"Training a Mamba-2 byte model: {sizes}, {work}\n{env['device']}, {str(env['date'])[:10]}",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = Settings()
    for name, value in asdict(defaults).items():
        choices = tuple(DTYPES) if name == "dtype" else None
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, choices=choices)
    parser.add_argument("--backend", action="append", help="repeatable; by default cutile and torch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write losses, times, memory and versions to this file")
    parser.add_argument("--plot", type=Path, help="write the curves to this .png, .svg or .pdf")
    parser.add_argument("--from", dest="source", type=Path, help="train nothing: read a file of --json")
    options = vars(parser.parse_args(arguments))
    if options["source"] is None:
        settings = replace(defaults, **{name: options[name] for name in asdict(defaults)})
        backends = options["backend"] or ["cutile", "torch"]
        result = compare(settings, backends, torch.device(options["device"]))
        if options["json"] is not None:
            options["json"].parent.mkdir(parents=True, exist_ok=True)
            options["json"].write_text(json.dumps(result) + "\n", encoding="utf-8")
    else:
        result = json.loads(options["source"].read_text(encoding="utf-8"))
    for backend, run in result["runs"].items():
        time_of_step = "" if run["step_ms"] is None else f", {run['step_ms']:.2f} ms a step after the warm-up"
        print(f"{backend}: {run['seconds']:.1f} s{time_of_step}")
    results = verdicts(result)
    for text, ok in results:
        print(f"{'ok    ' if ok else 'BROKEN'}  {text}")
    if options["plot"] is not None:
        plot(result, options["plot"])
    return 0 if all(ok for _, ok in results) else 1


if __name__ == "__main__":
    sys.exit(main())
