"""One group: every backend on one spec and pass, in one process. Parity first, then time, side by side."""

import contextlib
import dataclasses
import gc
import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from . import roofline, timing
from .passes import OUTPUTS, PASSES, STEP_OP, outputs_of
from .peers import OWN_BACKENDS, Backend, Results, Search, Variant
from .roofline import Ceilings

SCHEMA = 1
# A peer rounds in its own places: it has to show that it computes the same function, not our budget.
PEER_SLACK = 4.0
MAX_INPUT_SETS = 16
Row = dict[str, Any]


class DeviceLost(RuntimeError):
    """The device answers nothing any more: no later measurement in this process can be trusted."""


@dataclasses.dataclass
class _Lane:
    """A variant that passed its check, ready to be timed."""

    backend: Backend
    variant: Variant
    search: Search
    first_call_s: float
    errors: dict[str, float]
    budgets: dict[str, float]

    @property
    def key(self) -> str:
        return f"{self.backend.name} {self.variant.label}"


def new_row(name: str, spec: Any, pass_name: str, backend: str, run: str, env: Mapping[str, Any]) -> Row:
    """A row with what is known before anything ran. `status` becomes ok, red, unsupported or failed.

    "unavailable" is for this machine, "unsupported" for what the backend has not got anywhere.
    """
    fields = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
    fields = {
        k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for k, v in fields.items()
    }
    return {
        "schema": SCHEMA,
        "run": run,
        "spec": name,
        "op": spec.op,
        "fields": fields,
        "pass": pass_name,
        "backend": backend,
        "status": "unavailable",
        "reason": "",
        "env": dict(env),
    }


def measure_group(
    name: str,
    spec: Any,
    pass_name: str,
    backends: Sequence[Backend],
    *,
    device: torch.device,
    ceilings: Ceilings,
    env: Mapping[str, Any],
    seconds: float = 0.5,
    check: bool = True,
    on_step: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Measure all backends on one spec and pass; one row each, in the order of `backends`.

    Rows of one call share `run`: only those may be divided by each other. A backend that cannot run, fails,
    or gives a wrong result has a row that says so and no times. `seconds` bounds the timing of each lane.
    `check=False` leaves out the float64 reference (`errors` is then null and the status "unchecked").

    Raises:
        DeviceLost: after an error that leaves the device unusable.
    """
    run = uuid.uuid4().hex[:12]
    rows = {b.name: new_row(name, spec, pass_name, b.name, run, env) for b in backends}
    runnable = []
    for backend in backends:
        if missing := backend.lacks(spec, pass_name):
            rows[backend.name] |= {"status": "unsupported", "reason": missing}
            continue
        ok, reason = backend.status(pass_name, spec.op)
        if ok:
            runnable.append(backend)
        else:
            rows[backend.name]["reason"] = reason
    if not runnable:
        return list(rows.values())

    on_step(f"{name} {pass_name}: inputs and float64 reference" if check else f"{name} {pass_name}: inputs")
    try:
        inputs = _inputs(spec, pass_name, device, check)
    except (RuntimeError, MemoryError) as error:
        for backend in runnable:
            rows[backend.name] |= {"status": "failed", "reason": f"inputs: {_one_line(error)}"}
        _device_alive(device)
        return list(rows.values())

    reference = _split_reference(inputs, spec, pass_name)
    lanes: list[_Lane] = []
    nbytes_tensors: dict[str, Any] = {}
    for backend in runnable:
        on_step(f"{name} {pass_name}: {backend.name}, first call")
        lanes += _prepare(
            backend, spec, pass_name, inputs, reference, rows[backend.name], device, nbytes_tensors
        )
    reference.clear()
    _collect(device)

    if lanes:
        on_step(f"{name} {pass_name}: timing {', '.join(dict.fromkeys(lane.backend.name for lane in lanes))}")
        _time(lanes, rows, inputs, device, seconds)
    flops, floor_flops, nbytes = roofline.work(spec, pass_name, nbytes_tensors or None)
    for row in rows.values():
        if row["status"] in ("ok", "unchecked"):
            _add_rates(row, flops, floor_flops, nbytes, ceilings)
    return list(rows.values())


def _split_reference(inputs: dict[str, Any], spec: Any, pass_name: str) -> Results:
    """Takes all float64 results away from the inputs; returns those of the pass."""
    known = {output for ops in PASSES[spec.op].values() for op in ops for output in OUTPUTS[op]}
    found = {k: inputs.pop(k) for k in known & inputs.keys()}
    return {k: found[k] for k in outputs_of(spec, pass_name) if found.get(k) is not None}


def _inputs(spec: Any, pass_name: str, device: torch.device, check: bool) -> dict[str, Any]:
    backward = pass_name != "forward"
    return spec.get_sample_inputs(with_reference=check, with_backward=backward, device=device)


def _prepare(
    backend: Backend,
    spec: Any,
    pass_name: str,
    inputs: Mapping[str, Any],
    reference: Results,
    row: Row,
    device: torch.device,
    tensors: dict[str, Any],
) -> list[_Lane]:
    """First call and check of every variant; the row gets the reason when none can be timed."""
    lanes, problems = [], []
    for variant in backend.variants(spec, pass_name):
        try:
            with backend.searching() as search:
                call = variant.make(inputs)
                seconds, results = timing.first_call(call)
            named = variant.named(results)
            errors, budgets = _check(named, reference, spec, pass_name, backend.name)
            if not tensors:
                tensors |= {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor)}
                # shapes only: a results dict kept here would count as memory in use
                tensors |= {k: torch.empty_like(v, device="meta") for k, v in named.items()}
            del results, named, call
        except Exception as error:
            status = "unavailable" if type(error).__name__ == "BackendUnavailable" else "failed"
            problems.append((status, f"{variant.label}: {_one_line(error)}", {}, {}))
            _device_alive(device)
            _collect(device)
            continue
        over = [k for k in errors if not errors[k] <= budgets[k]]  # NaN is over too
        if over:
            text = ", ".join(f"{k} {errors[k]:.3g} > {budgets[k]:.3g}" for k in over)
            problems.append(("red", f"{variant.label}: {text}", errors, budgets))
            continue
        lanes.append(_Lane(backend, variant, search, seconds, errors, budgets))
    if not lanes:
        status, reason, errors, budgets = next((p for p in problems if p[0] == "red"), problems[0])
        # JSON has no NaN: an error that is not finite is null in a row
        finite = {k: v if math.isfinite(v) else None for k, v in errors.items()}
        row |= {"status": status, "reason": reason, "errors": finite or None, "budgets": budgets or None}
    elif problems:
        row["reason"] = "left out: " + "; ".join(p[1] for p in problems)
    return lanes


def _check(
    results: Results, reference: Results, spec: Any, pass_name: str, backend: str
) -> tuple[dict[str, float], dict[str, float]]:
    from tilegym_mamba2 import registry
    from tilegym_mamba2.budgets import budget_for, relative_error

    errors: dict[str, float] = {}
    budgets: dict[str, float] = {}
    slack = 1.0 if backend in OWN_BACKENDS else PEER_SLACK
    for op in PASSES[spec.op][pass_name]:
        entry = registry.ops().get(op)
        for output in OUTPUTS[op]:
            # A peer's variant says in its note what it does not give.
            absent = output not in results and backend not in OWN_BACKENDS
            if output not in reference or absent:
                continue
            got, ref = results[output], reference[output]
            errors[output] = relative_error(got, ref)
            budgets[output] = slack * budget_for(entry, output, spec.dtype, spec.decay, ref, got.dtype)
    return errors, budgets


def _time(
    lanes: list[_Lane], rows: dict[str, Row], inputs: Mapping[str, Any], device: torch.device, seconds: float
) -> None:
    on_gpu = device.type == "cuda"
    sets, cache_note = _input_sets(inputs, device) if on_gpu else ([inputs], "")
    calls: dict[str, list[Callable[[], Any]]] = {}
    for lane in lanes:
        calls[lane.key] = [lane.variant.make(s) for s in sets]
    refused: dict[str, str] = {}
    if on_gpu:
        times, refused = timing.graph_medians(calls, seconds=seconds)
        missing = [key for key in calls if key not in times]
        eager = {key: timing.eager_median(calls[key]) for key in missing}
    else:
        times, eager = timing.wall_medians(calls, seconds=seconds), {}

    for name, row in rows.items():
        own = [lane for lane in lanes if lane.backend.name == name]
        if not own:
            continue
        best = min(own, key=lambda lane: (times.get(lane.key) or eager[lane.key]).median)
        call = calls[best.key]
        row |= {
            "status": "ok" if best.errors else "unchecked",
            "variant": best.variant.label,
            "variants_us": {
                lane.variant.label: round((times.get(lane.key) or eager[lane.key]).median, 3) for lane in own
            },
            "errors": best.errors or None,
            "budgets": best.budgets or None,
            "first_call_s": round(best.first_call_s, 3),
            "search": best.search.as_data(),
            "note": "; ".join(filter(None, (best.search.sentence(), best.variant.note, cache_note))),
            "input_sets": len(sets),
        }
        if not on_gpu:
            row["wall_us"] = _as_data(times[best.key])
            continue
        if best.key in times:
            row["graph_us"] = _as_data(times[best.key])
        else:
            row["note"] = "; ".join(filter(None, (row["note"], f"no graph: {refused[best.key]}")))
        row["eager_us"] = _as_data(timing.eager_median(call))
        try:
            row["host_us"] = _as_data(timing.host_time(call[0]))
        except RuntimeError as error:
            row["note"] = "; ".join(filter(None, (row["note"], _one_line(error))))
            _device_alive(device)
        row["peak_bytes"], row["scratch_bytes"] = timing.peak_memory(call[0])
        _check_states(row, call)
        if row["pass"] != "forward":
            row["operand_bytes"] = 2 * roofline.tensor_bytes([inputs[k] for k in ("x", "b", "c", "dt")])


def _check_states(row: Row, calls: Sequence[Callable[[], Any]]) -> None:
    """Notes that a step, called on its own states again and again, has left their range."""
    if row["op"] != STEP_OP:
        return
    if not all(bool(torch.isfinite(call()[1]).all()) for call in calls):
        row["note"] = "; ".join(filter(None, (row["note"], "states are no longer finite after timing")))


def _input_sets(inputs: Mapping[str, Any], device: torch.device) -> tuple[list[Mapping[str, Any]], str]:
    """Copies of the inputs to rotate among, so many that together they do not stay in the L2 cache.

    A problem that is larger than the cache by itself needs one set. Small ones would need too many: a note
    says where they do stay.
    """
    l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    one = max(1, roofline.tensor_bytes(inputs))
    if one >= l2:
        return [inputs], ""
    count = min(MAX_INPUT_SETS, 2 * l2 // one + 1)
    note = ""
    if count * one < l2:
        total, cache = (f"{size / 2**20:.2g} MiB" for size in (count * one, l2))
        note = f"inputs stay in the L2 cache: {count} sets, {total} of {cache}"
    return [inputs] + [_copy(inputs) for _ in range(count - 1)], note


def _copy(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The same values at other addresses, strides kept (a clone of a slice would become contiguous)."""

    def again(tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return copy.copy_(tensor)

    return {k: again(v) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}


def _add_rates(row: Row, flops: int, floor_flops: int, nbytes: int, ceilings: Ceilings) -> None:
    us = headline_us(row)
    floor_us, bound = ceilings.floor_us(nbytes, floor_flops)
    row |= {
        "flops": flops,
        "bytes": nbytes,
        "tflops": flops / us / 1e6,
        "gbs": nbytes / us / 1e3,
        "floor_us": floor_us,
        "floor_bound": bound,
        "floor_share": floor_us / us,
        "ceilings": dataclasses.asdict(ceilings),
    }


KINDS = ("graph_us", "eager_us", "wall_us")


def headline_us(row: Mapping[str, Any], kinds: Sequence[str] = KINDS) -> float | None:
    """The time that stands for a row, the first of `kinds` that it has; None for a row without times."""
    for kind in kinds:
        if row.get(kind):
            return row[kind]["median"]
    return None


def speed_up(row: Mapping[str, Any], peer: Mapping[str, Any], kinds: Sequence[str] = KINDS) -> float | None:
    """How many times faster `row` is than `peer`; None unless both passed their check in the same run.

    Both sides use the same kind of time, the first of `kinds` that both have.
    """
    if row.get("run") != peer.get("run") or row.get("status") != "ok" or peer.get("status") != "ok":
        return None
    for kind in kinds:
        if row.get(kind) and peer.get(kind):
            return peer[kind]["median"] / row[kind]["median"]
    return None


def _as_data(result: timing.TimingResult) -> dict[str, float]:
    return {k: v if k == "n" else round(v, 3) for k, v in result._asdict().items()}


def _one_line(error: BaseException) -> str:
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of device memory"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def _device_alive(device: torch.device) -> None:
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise DeviceLost(_one_line(error)) from error


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def complete(
    rows: Iterable[Row],
    name: str,
    spec: Any,
    pass_name: str,
    backends: Sequence[Backend],
    env: Mapping[str, Any],
) -> bool:
    """Whether `rows` hold a finished group: every backend, in one run, same fields, same versions."""
    from .environment import versions_of

    want = new_row(name, spec, pass_name, "", "", env)["fields"]
    runs: dict[str, set[str]] = {}
    for row in rows:
        same = row["spec"] == name and row["pass"] == pass_name and row["fields"] == want
        if not same or row["status"] == "failed":
            continue
        if versions_of(row["backend"], row["env"]) == versions_of(row["backend"], env):
            runs.setdefault(row["run"], set()).add(row["backend"])
    return any({b.name for b in backends} <= have for have in runs.values())
