"""The main job behind `tilegym-mamba2 run`: inputs, a backend, errors against float64, time."""

import difflib
import importlib.metadata
import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from tilegym_mamba2 import __version__, registry
from tilegym_mamba2.backends.cutile import availability
from tilegym_mamba2.budgets import Verdict, check
from tilegym_mamba2.calls import CALLS, OpCall
from tilegym_mamba2.errors import BackendUnavailable
from tilegym_mamba2.spec import DTYPE_NAMES, SPECS, Mamba2ProblemSpec
from tilegym_mamba2.validate import validate_forward

OP = "mamba2_chunk_forward"
TENSORS = ("x", "a", "b", "c", "d", "dt", "init_state")
OPTIONAL_TENSORS = ("d", "init_state")
SECONDS, MIN_CALLS, MAX_CALLS = 1.0, 3, 100

DTYPES = {name: dtype for dtype, short in DTYPE_NAMES.items() for name in (short, str(dtype)[6:])}


class UsageError(Exception):
    """What the user asked for does not exist or does not fit; the message is one line."""


@dataclass(frozen=True)
class Problem:
    """What to run: where it came from, the inputs by name, the decay that picks the budgets, and the op."""

    description: dict[str, Any]
    inputs: dict[str, Any]
    decay: str | None
    op: str = OP

    @property
    def call(self) -> OpCall:
        return CALLS[self.op]

    @property
    def tokens(self) -> int:
        # A step's x may come without K.
        return math.prod(self.inputs["x"].shape[:-2])


@dataclass(frozen=True)
class Outcome:
    """One backend's run. `failure` is why it gave no result; otherwise times are in milliseconds."""

    backend: str
    failure: str | None = None
    verdicts: list[Verdict] = field(default_factory=list)
    median_ms: float = math.nan
    tokens_per_s: float = math.nan
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.failure is None and all(verdict.ok for verdict in self.verdicts)

    def as_json(self) -> dict[str, Any]:
        """`backend, errors, budgets, ok, median_ms, tokens_per_s`, with None for what is no finite number."""
        summary = {
            "backend": self.backend,
            "errors": {verdict.output: _finite(verdict.error) for verdict in self.verdicts},
            "budgets": {verdict.output: _finite(verdict.budget) for verdict in self.verdicts},
            "ok": self.ok,
            "median_ms": _finite(self.median_ms),
            "tokens_per_s": _finite(self.tokens_per_s),
        }
        return summary | ({"failure": self.failure} if self.failure else {})


def pick_device(name: str | None) -> torch.device:
    """The named device, or the current GPU, or the CPU. Raises UsageError for one that is not there."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device must be cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: torch finds {torch.cuda.device_count()} GPUs")
    return device


def pick_dtype(option: str, name: str) -> torch.dtype:
    """A dtype from "bf16" or "bfloat16"; UsageError, naming the option, for anything else."""
    if name not in DTYPES:
        raise UsageError(f"{option} must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def pick_spec(name: str, overrides: dict[str, Any]) -> Mamba2ProblemSpec:
    """The named spec with some fields replaced; UsageError for an unknown name or an impossible spec."""
    if name not in SPECS:
        near = difflib.get_close_matches(name, SPECS, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "`tilegym-mamba2 specs` lists them"
        raise UsageError(f"no spec is called {name!r}; {hint}")
    try:
        return replace(SPECS[name], **overrides)
    except ValueError as error:
        raise UsageError(str(error)) from error


def spec_as_json(spec: Mamba2ProblemSpec) -> dict[str, Any]:
    """The fields of a spec with dtypes as names."""
    values = {"op": spec.op} | {item.name: getattr(spec, item.name) for item in fields(spec)}
    values["dt_dtype"] = spec.step_dtype
    return {
        name: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for name, v in values.items()
    }


def problem_from_spec(name: str, spec: Mamba2ProblemSpec, device: torch.device) -> Problem:
    """The inputs that a spec draws, with the float64 reference still to come."""
    inputs = spec.get_sample_inputs(with_reference=False, with_backward=False, device=device)
    return Problem({"name": name, "id": spec.id} | spec_as_json(spec), inputs, spec.decay, spec.op)


def problem_from_file(path: Path, chunk_size: int, device: torch.device) -> Problem:
    """The tensors of a safetensors file: x, a, b, c, dt, and where wanted d and init_state.

    Raises UsageError for a file that cannot be read and for tensors that do not make a problem.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    try:
        tensors = load_file(path, device=str(device))
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path}: cannot be read as safetensors: {error}") from error
    if unknown := sorted(set(tensors) - set(TENSORS)):
        raise UsageError(f"{path}: unknown tensors {', '.join(unknown)}; known are {', '.join(TENSORS)}")
    if missing := [name for name in TENSORS if name not in tensors and name not in OPTIONAL_TENSORS]:
        raise UsageError(f"{path}: {', '.join(missing)} missing; needed are x, a, b, c, dt")
    inputs = {name: tensors.get(name) for name in TENSORS} | {"chunk_size": chunk_size}
    try:
        dims = validate_forward(**inputs)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from error
    sizes = {
        "batch_size": dims.B,
        "num_tokens": dims.T,
        "num_groups": dims.G,
        "num_heads": dims.H,
        "state_size": dims.N,
        "head_size": dims.P,
        "chunk_size": chunk_size,
        "dtype": str(inputs["x"].dtype).removeprefix("torch."),
    }
    return Problem({"input": str(path)} | sizes, inputs, None)


def run_backend(problem: Problem, backend: str, reference: dict[str, torch.Tensor | None]) -> Outcome:
    """Call the problem's op as `tilegym.ops.<op>` on one backend, check it against float64 and time it."""
    op, entry = problem.call, registry.ops()[problem.op]
    with torch.no_grad():
        inputs = op.fresh(problem.inputs)
        outputs = op.call(inputs, backend)
        dtype = problem.inputs["x"].dtype
        expected = dict.fromkeys(entry.outputs) | reference
        found = dict.fromkeys(entry.outputs) | outputs
        verdicts = check(entry, found, expected, dtype=dtype, decay=problem.decay)
        # Timed on copies of its own: an op in place goes on from where it stands.
        inputs = op.fresh(problem.inputs)
        median_ms = _median_ms(lambda: op.call(inputs, backend), problem.inputs["x"].device)
    return Outcome(backend, None, verdicts, median_ms, problem.tokens / (median_ms / 1e3), outputs)


def run(problem: Problem, backend: str | None, compare: bool) -> list[Outcome]:
    """The chosen backend's outcome, and with `compare` those of all others after it.

    Raises BackendUnavailable if the chosen backend cannot run. A compared one that cannot, or that fails, has
    a `failure` in its outcome.
    """
    arguments = problem.call.resolve_args(problem.inputs)
    with torch.no_grad():
        chosen, _ = registry.resolve(problem.op, backend, arguments)
    reference = problem.call.reference(problem.inputs)
    outcomes = [run_backend(problem, chosen, reference)]
    others = [name for name in registry.ops()[problem.op].backends if name != chosen] if compare else []
    for other in others:
        try:
            with torch.no_grad():
                registry.resolve(problem.op, other, arguments)
            outcomes.append(run_backend(problem, other, reference))
        except BackendUnavailable as error:
            outcomes.append(Outcome(other, failure=str(error)))
        except Exception as error:  # another's implementation: its failure is a row of the table
            outcomes.append(Outcome(other, failure=f"{type(error).__name__}: {error}"))
    return outcomes


def write_outputs(path: Path, outputs: dict[str, torch.Tensor]) -> None:
    """Write out and final_state as safetensors. Raises UsageError where that cannot be done."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.contiguous().cpu() for name, tensor in outputs.items()}, path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path}: cannot be written: {error}") from error


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({torch.get_num_threads()} threads)"


def versions() -> dict[str, str | None]:
    """Versions of what a result depends on; None for what is not installed."""
    found = {"tilegym_mamba2": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("tilegym", "cuda-tile"):
        try:
            found[package.replace("-", "_")] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package.replace("-", "_")] = None
    path = availability.find_tileiras()
    return found | {"tileiras": availability.tileiras_facts(path)[0] if path else None}


def _median_ms(call: Callable[[], Any], device: torch.device) -> float:
    """Median time of a call on a warm backend over about a second: CUDA events on a GPU, else wall clock."""
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < MIN_CALLS or (len(times) < MAX_CALLS and time.perf_counter() - begin < SECONDS):
        times.append(_event_ms(call, device) if device.type == "cuda" else _wall_ms(call))
    return statistics.median(times)


def _event_ms(call: Callable[[], Any], device: torch.device) -> float:
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
    return start.elapsed_time(end)


def _wall_ms(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
