"""Every gradient's error against float64, ours beside mamba_ssm's: what the backward's budgets are made from.

    python tests/benchmark/gradient_errors.py [--json FILE.json] [--tokens 4096] [--seeds 3] [--dtype bf16 …]
    python tests/benchmark/gradient_errors.py --spec bf16-slow --spec fp16-slow
    python tests/benchmark/gradient_errors.py --from FILE.json

Errors are ‖got − ref‖ / ‖ref‖ over a whole gradient. Each case is drawn with several seeds: the table gives
the root mean square over them, and how large ours is beside the peer's. A budget may be at most 1.2 times the
peer's error. By default the cases are the published layer (B 2, H 8, P 64, G 1, N 128) with the publication's
inputs, and with inputs of mean zero that remember 200 to 5000 tokens ("slow"), everything ("none") or next to
nothing ("violent"), in bfloat16 and float16. Without a GPU only the torch backend, or an interpreted small
problem, can be measured.
"""

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tilegym_mamba2 import interpreter, registry
from tilegym_mamba2.bench import environment, peers
from tilegym_mamba2.budgets import budget_for, relative_error
from tilegym_mamba2.spec import DECAYS, DTYPE_NAMES, SPECS, Mamba2ProblemSpec

OP, PASS = "mamba2_chunk_backward", "backward"
# A budget is at most so many times the peer's error on the same inputs.
ROOM = 1.2

Row = dict[str, Any]


def default_cases(dtypes: Sequence[str], decays: Sequence[str], tokens: int) -> dict[str, Mamba2ProblemSpec]:
    """The published layer at `tokens`, by name, for every dtype and decay."""
    by_name = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    layer = replace(SPECS["published"], batch_size=2, num_tokens=tokens)
    return {
        f"{dtype}-{decay}-{tokens}": replace(layer, dtype=by_name[dtype], decay=decay)
        for dtype in dtypes
        for decay in decays
    }


def measure(
    cases: Mapping[str, Mamba2ProblemSpec],
    backends: Sequence[peers.Backend],
    device: torch.device,
    seeds: Sequence[int],
) -> list[Row]:
    """A row for each case, backend and gradient: the error of every seed, and the budget in force.

    A backend that cannot run has one row for the case, with `reason` and no errors.
    """
    rows = []
    for case, spec in cases.items():
        errors: dict[tuple[str, str], list[float]] = {}
        budgets: dict[str, list[float]] = {}
        reasons: dict[str, str] = {}
        for seed in seeds:
            drawn = replace(spec, seed=seed)
            inputs = drawn.get_sample_inputs(device=device)
            references = {name: inputs.pop(name) for name in peers.OUTPUTS[OP]}
            for backend in backends:
                if backend.name in reasons:
                    continue
                try:
                    results = _gradients(backend, drawn, inputs)
                except Exception as error:  # noqa: BLE001 - a peer may fail in its own ways
                    reasons[backend.name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                    continue
                for name, reference in references.items():
                    got = results[name]
                    errors.setdefault((backend.name, name), []).append(relative_error(got, reference))
                    if backend is backends[0]:
                        entry = registry.ops()[OP]
                        budget = budget_for(entry, name, spec.dtype, spec.decay, reference, got.dtype)
                        budgets.setdefault(name, []).append(budget)
                del results
            del inputs, references
        common = {"case": case, "fields": _fields(spec), "seeds": list(seeds)}
        rows += [common | {"backend": name, "reason": reason} for name, reason in reasons.items()]
        rows += [
            common
            | {"backend": backend, "gradient": name, "errors": [_finite(e) for e in found]}
            | {"budget": max(budgets.get(name, [math.nan])) if backend == backends[0].name else None}
            for (backend, name), found in errors.items()
            if backend not in reasons
        ]
    return rows


def _gradients(backend: peers.Backend, spec: Mamba2ProblemSpec, inputs: dict[str, Any]) -> peers.Results:
    on_cpu = inputs["x"].device.type == "cpu"
    ok, reason = backend.status(PASS)
    if not ok and not (on_cpu and backend.name == "cutile"):
        raise RuntimeError(reason)
    variant = backend.variants(spec, PASS)[-1]
    interpreted = on_cpu and backend.name == "cutile"
    with interpreter.interpret() if interpreted else contextlib.nullcontext():
        return variant.named(variant.make(inputs)())


def _fields(spec: Mamba2ProblemSpec) -> dict[str, Any]:
    values = {field.name: getattr(spec, field.name) for field in fields(spec) if field.name != "seed"}
    return {k: DTYPE_NAMES[v] if isinstance(v, torch.dtype) else v for k, v in values.items()}


def _finite(value: float) -> float | None:
    # JSON has no NaN.
    return value if math.isfinite(value) else None


def root_mean_square(errors: Sequence[float | None]) -> float:
    """Over the seeds; NaN if one is not finite."""
    if any(error is None for error in errors):
        return math.nan
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


def table(rows: Sequence[Row], names: Sequence[str]) -> Table:
    """A line for each case and gradient: errors, ours over the peer's, the largest budget and the budget."""
    shown = Table(title="‖got − ref‖ / ‖ref‖ against float64, root mean square over the seeds (largest)")
    shown.add_column("case", overflow="fold")
    shown.add_column("gradient")
    for head in [*names, *(["ours / peer", f"{ROOM} × peer"] if len(names) > 1 else []), "budget"]:
        shown.add_column(head, justify="right")
    keys = list(dict.fromkeys((row["case"], row["gradient"]) for row in rows if "gradient" in row))
    by_key = {(row["case"], row["gradient"], row["backend"]): row for row in rows if "gradient" in row}
    for index, (case, gradient) in enumerate(keys):
        found = [by_key.get((case, gradient, name)) for name in names]
        cells = [_cell(row) for row in found]
        if len(names) > 1:
            ours, peer = (math.nan if row is None else root_mean_square(row["errors"]) for row in found[:2])
            over = ours / peer if peer else math.nan
            style = "red" if over > ROOM else "green"
            cells += ["–", "–"] if math.isnan(over) else [f"[{style}]{over:.2f}[/]", f"{ROOM * peer:.2e}"]
        budget = None if found[0] is None else found[0]["budget"]
        first = index == 0 or keys[index - 1][0] != case
        last = index + 1 == len(keys) or keys[index + 1][0] != case
        shown.add_row(
            case if first else "",
            gradient,
            *cells,
            "–" if budget is None else f"{budget:.2e}",
            end_section=last,
        )
    return shown


def _cell(row: Row | None) -> str:
    if row is None:
        return "–"
    if any(error is None for error in row["errors"]):
        return "not finite"
    return f"{root_mean_square(row['errors']):.2e} ({max(row['errors']):.2e})"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", action="append", choices=tuple(DTYPE_NAMES.values()), help="repeatable")
    parser.add_argument("--decay", action="append", choices=DECAYS, help="repeatable")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument(
        "--spec", action="append", choices=tuple(SPECS), help="instead of the published layer"
    )
    parser.add_argument("--backend", action="append", help="ours first; by default cutile and mamba_ssm")
    parser.add_argument("--mamba-chunk", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write all errors, the device and versions to this file")
    parser.add_argument("--from", dest="source", type=Path, help="measure nothing: read a file of --json")
    options = parser.parse_args(arguments)
    if options.source is not None:
        result = json.loads(options.source.read_text(encoding="utf-8"))
    else:
        dtypes, decays = options.dtype or ["bf16", "fp16"], options.decay or list(DECAYS)
        cases = default_cases(dtypes, decays, options.tokens)
        if unknown := set(options.spec or ()) - set(SPECS):
            parser.error(f"no spec {', '.join(sorted(unknown))}: `tilegym-mamba2 specs` lists them")
        if options.spec:
            cases = {name: SPECS[name] for name in options.spec}
        names = options.backend or ["cutile", "mamba_ssm"]
        chosen = peers.backends(names, mamba_chunks=(options.mamba_chunk,))
        device = torch.device(options.device)
        rows = measure(cases, chosen, device, range(options.seeds))
        names = [backend.name for backend in chosen]
        result = {"schema": 1, "env": environment.describe(device), "backends": names, "rows": rows}
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(result, allow_nan=False) + "\n", encoding="utf-8")
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table(result["rows"], result["backends"]))
    for row in result["rows"]:
        if "reason" in row:
            text = f"{row['case']}: {row['backend']} did not run: {row['reason']}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    return 0 if any("gradient" in row for row in result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
