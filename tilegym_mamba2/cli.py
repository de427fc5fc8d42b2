"""The command line `tilegym-mamba2`. Exit status: 0 fine, 1 a budget is broken, 2 impossible to do."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tilegym_mamba2 import __version__
from tilegym_mamba2.bench import cli as bench_cli

app = typer.Typer(
    help="Mamba-2 ops for TileGym: run, check, measure and tune them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Into a pipe or a file, tables are written whole and not folded to 80 columns.
_console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160)
_errors = Console(stderr=True)

# The field overrides of `run`, in the order of the spec.
_FIELD_PANEL = "Fields of the spec"


def _field(help_text: str) -> Any:
    return typer.Option(help=help_text, rich_help_panel=_FIELD_PANEL, show_default=False)


def _fail(message: object) -> NoReturn:
    _errors.print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command("run")
def run_command(
    spec: Annotated[
        str | None, typer.Option(help="A named spec; by default `published` on a GPU, `cpu` elsewhere.")
    ] = None,
    batch_size: Annotated[int | None, _field("B")] = None,
    num_tokens: Annotated[int | None, _field("T")] = None,
    num_groups: Annotated[int | None, _field("G, a divisor of H")] = None,
    num_heads: Annotated[int | None, _field("H")] = None,
    state_size: Annotated[int | None, _field("N")] = None,
    head_size: Annotated[int | None, _field("P")] = None,
    chunk_size: Annotated[int | None, _field("tokens per block; also with --input, where it is 64")] = None,
    dtype: Annotated[str | None, _field("of x, b, c: bf16, fp16, fp32, fp64")] = None,
    state_dtype: Annotated[str | None, _field("of the states")] = None,
    dt_dtype: Annotated[str | None, _field("of dt")] = None,
    seed: Annotated[int | None, _field("of the inputs")] = None,
    decay: Annotated[str | None, _field("published, slow, none or violent")] = None,
    layout: Annotated[str | None, _field("contiguous or sliced")] = None,
    backend: Annotated[str | None, typer.Option(help="cutile, torch, tilegym or one of your own.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; by default the GPU if any.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run every usable backend side by side.")
    ] = False,
    input_file: Annotated[
        Path | None,
        typer.Option("--input", help="Run on x, a, b, c, dt[, d, init_state] of a safetensors file."),
    ] = None,
    output_file: Annotated[
        Path | None, typer.Option("--output", help="Write out and final_state to a safetensors file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Run the forward, check it against float64, print errors, budgets, time and tokens per second."""
    from tilegym_mamba2 import run
    from tilegym_mamba2.errors import BackendUnavailable

    overrides = {
        "batch_size": batch_size,
        "num_tokens": num_tokens,
        "num_groups": num_groups,
        "num_heads": num_heads,
        "state_size": state_size,
        "head_size": head_size,
        "chunk_size": chunk_size,
        "dtype": dtype,
        "state_dtype": state_dtype,
        "dt_dtype": dt_dtype,
        "seed": seed,
        "decay": decay,
        "layout": layout,
    }
    overrides = {name: value for name, value in overrides.items() if value is not None}
    try:
        if output_file is not None and not output_file.absolute().parent.is_dir():
            raise run.UsageError(f"{output_file}: its folder does not exist")
        place = run.pick_device(device)
        with _errors.status("drawing inputs, running, checking against float64 …"):
            problem, note = _problem(spec, overrides, input_file, place)
            outcomes = run.run(problem, backend, compare)
        if output_file is not None:
            run.write_outputs(output_file, outcomes[0].outputs)
    except (run.UsageError, BackendUnavailable) as error:
        _fail(error)
    if as_json:
        _print_run_json(problem, outcomes, run.device_name(place), run.versions(), compare)
    else:
        _print_run(problem, outcomes, run.device_name(place), note)
    # TileGym's own implementation is compared, not vouched for.
    if not all(o.ok for o in outcomes if o is outcomes[0] or (o.verdicts and o.backend != "tilegym")):
        raise typer.Exit(1)


def _problem(spec_name: str | None, overrides: dict[str, Any], input_file: Path | None, place: Any) -> Any:
    """The problem to run and a note on how it was chosen."""
    from tilegym_mamba2 import run

    if input_file is not None:
        refused = [f"--{name.replace('_', '-')}" for name in overrides if name != "chunk_size"]
        refused += ["--spec"] * (spec_name is not None)
        if refused:
            raise run.UsageError(f"--input brings its own sizes and dtypes: leave out {', '.join(refused)}")
        chunk_size = overrides.get("chunk_size", 64)
        return run.problem_from_file(input_file, chunk_size, place), None
    note = None
    if spec_name is None:
        spec_name = "published" if place.type == "cuda" else "cpu"
        if place.type == "cpu":
            note = (
                "On the CPU the default is the small spec `cpu`; `--spec published` takes the publication's."
            )
    for name in ("dtype", "state_dtype", "dt_dtype"):
        if name in overrides:
            overrides[name] = run.pick_dtype(f"--{name.replace('_', '-')}", overrides[name])
    return run.problem_from_spec(spec_name, run.pick_spec(spec_name, overrides), place), note


def _print_run_json(problem: Any, outcomes: list[Any], device: str, versions: dict, compare: bool) -> None:
    chosen = outcomes[0].as_json()
    result = {"spec": problem.description, "backend": chosen.pop("backend"), "device": device} | chosen
    if compare:
        result["compare"] = [outcome.as_json() for outcome in outcomes]
    typer.echo(json.dumps(result | {"versions": versions}))


def _print_run(problem: Any, outcomes: list[Any], device: str, note: str | None) -> None:
    what = problem.description
    _console.print(f"{what.get('input') or what['name']} on {device}", style="bold", markup=False)
    _console.print(
        f"B {what['batch_size']}, T {what['num_tokens']}, H {what['num_heads']}, P {what['head_size']}, "
        f"G {what['num_groups']}, N {what['state_size']}, chunk {what['chunk_size']}, {what['dtype']}"
        + (f", decay {what['decay']}" if "decay" in what else ""),
        highlight=False,
    )
    if note:
        _console.print(note, markup=False, highlight=False)
    table = Table("backend", "output", "shape", "error", "budget", "ok")
    times = Table("backend", "median", "tokens/s")
    for outcome in outcomes:
        if outcome.failure:
            continue
        for index, verdict in enumerate(outcome.verdicts):
            tensor = outcome.outputs[verdict.output]
            shape = "×".join(map(str, tensor.shape)) + f" {tensor.dtype}".replace("torch.", "")
            ok = "[green]yes[/]" if verdict.ok else "[red]no[/]"
            numbers = (f"{verdict.error:.2e}", f"{verdict.budget:.2e}")
            table.add_row("" if index else outcome.backend, verdict.output, shape, *numbers, ok)
        times.add_row(outcome.backend, f"{outcome.median_ms:.3f} ms", f"{outcome.tokens_per_s:,.0f}")
    _console.print(table)
    _console.print(times)
    for outcome in outcomes:
        if outcome.failure:
            _console.print(f"{outcome.backend} did not run: {outcome.failure}", markup=False, highlight=False)


@app.command()
def specs(
    tag: Annotated[list[str] | None, typer.Option(help="Only specs with this tag; repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """List the named specs."""
    from tilegym_mamba2 import run
    from tilegym_mamba2.spec import DTYPE_NAMES, select, tags

    try:
        chosen = select(*(tag or ()))
    except ValueError as error:
        _fail(error)
    if as_json:
        rows = {
            name: run.spec_as_json(spec)
            | {"tags": sorted(tags(name)), "flops": spec.flops(), "bytes_moved": spec.bytes_moved()}
            for name, spec in chosen.items()
        }
        typer.echo(json.dumps(rows))
        return
    columns = ("name", "B", "T", "H", "P", "G", "N", "chunk", "dtype", "decay", "GFLOP", "MB", "tags")
    table = Table(*columns, title=f"{len(chosen)} specs")
    for name, spec in chosen.items():
        sizes = (spec.batch_size, spec.num_tokens, spec.num_heads, spec.head_size, spec.num_groups)
        sizes += (spec.state_size, spec.chunk_size)
        work = (f"{spec.flops() / 1e9:,.1f}", f"{spec.bytes_moved() / 1e6:,.1f}")
        kind = (DTYPE_NAMES[spec.dtype], spec.decay)
        table.add_row(name, *map(str, sizes), *kind, *work, " ".join(sorted(tags(name))))
    _console.print(table)


@app.command()
def backends(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """List every op's backends: which can run here, and why not."""
    from tilegym_mamba2 import registry

    status = {op: registry.backend_status(op) for op in registry.ops()}
    if as_json:
        rows = {
            op: {name: {"usable": ok, "reason": reason} for name, (ok, reason) in of_op.items()}
            for op, of_op in status.items()
        }
        typer.echo(json.dumps(rows))
        return
    table = Table("op", "backend", "usable", "why", "implementation")
    for op, of_op in status.items():
        for index, (name, (ok, reason)) in enumerate(of_op.items()):
            usable = "[green]yes[/]" if ok else "[red]no[/]"
            target = registry.ops()[op].backends[name]
            table.add_row("" if index else op, name, usable, escape(reason), escape(target))
    _console.print(table)


@app.command()
def doctor(
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Compile every kernel and count registers and instructions.")
    ] = False,
    arch: Annotated[
        list[str] | None, typer.Option(help="With --kernels: only for this GPU, as sm_90; repeatable.")
    ] = None,
    op: Annotated[
        list[str] | None,
        typer.Option(
            help="With --kernels: only of forward, backward, scan, scan-backward, packed, packed-backward or "
            "step; repeatable."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Show what the kernels need, what was found of it, and what to install."""
    if kernels:
        _kernel_report(arch, op, as_json)
        return
    if arch or op:
        _fail(f"{'--arch' if arch else '--op'} goes with --kernels")
    from dataclasses import asdict

    from tilegym_mamba2 import run
    from tilegym_mamba2.backends.cutile import availability

    found = availability.probe()
    ok, verdict = availability.available()
    if as_json:
        result = {"probe": asdict(found), "versions": run.versions(), "cutile": ok, "verdict": verdict}
        typer.echo(json.dumps(result))
        return
    capability = found.arch or "-"
    built = f"built for CUDA {found.torch_cuda}" if found.torch_cuda else "built without CUDA"
    table = Table("part", "found", show_header=True)
    table.add_row("tilegym-mamba2", __version__)
    table.add_row("torch", f"{found.torch}, {built}")
    table.add_row("GPU", f"{found.gpu_name}, {capability}" if found.gpu_name else "none")
    table.add_row("driver", found.driver or "none")
    table.add_row("TileGym", run.versions()["tilegym"] or "none")
    table.add_row("cuda-tile", found.cuda_tile or "none")
    table.add_row("tileiras", found.tileiras_version or "none")
    table.add_row("tileiras path", found.tileiras_path or "-")
    table.add_row("GPUs it knows", ", ".join(found.tileiras_gpus) or "-")
    _console.print(table)
    _console.print(f"cutile: {verdict}", style="green" if ok else "yellow", markup=False, highlight=False)


_KERNEL_COLUMNS = (
    "op",
    "kernel",
    "arch",
    "dtype",
    "registers",
    "shared",
    "stack",
    "HGMMA",
    "LDSM",
    "STS",
    "BAR",
    "UTMALDG",
)


def _kernel_report(archs: list[str] | None, ops: list[str] | None, as_json: bool) -> None:
    """A row as soon as its kernel is compiled: all of them take many minutes."""
    from tilegym_mamba2.backends.cutile import inspection
    from tilegym_mamba2.backends.cutile.availability import find_tileiras, tileiras_facts

    path = find_tileiras()
    known = tileiras_facts(path)[1] if path else ()
    for arch in archs or ():
        if known and arch not in known:
            _fail(f"--arch must be one of {', '.join(known)}, got {arch!r}")
    done, broken = 0, []
    try:
        chosen = {name: values for name, values in (("archs", archs), ("ops", ops)) if values}
        jobs = inspection.plan(**chosen)
        _errors.print(f"{len(jobs)} kernels to compile, a few seconds each", highlight=False)
        widths = [max(len(name), 6) for name in _KERNEL_COLUMNS]
        widths[0] = max([widths[0], *(len(job.op) for job in jobs)])
        widths[1] = max([widths[1], *(len(inspection.name_of(job.launch)) for job in jobs)])
        for done, row in enumerate(inspection.rows(jobs), 1):
            if row.get("error"):
                broken.append(row)
            if as_json:
                typer.echo((",\n" if done > 1 else '{"kernels": [\n') + json.dumps(row), nl=False)
                continue
            if done == 1:
                typer.echo(_kernel_line(_KERNEL_COLUMNS, widths))
            cells = ["-" if row.get(name) is None else str(row[name]) for name in _KERNEL_COLUMNS]
            typer.echo(_kernel_line(cells, widths))
    except (OSError, RuntimeError, ValueError) as error:
        _fail(error)
    if as_json:
        typer.echo("\n]}" if done else '{"kernels": []}')
    for row in [] if as_json else broken:
        what = f"{row['kernel']} for {row['arch']}, {row['dtype']}: {row['error']}"
        _console.print(what, style="red", markup=False, highlight=False)
    if broken:
        raise typer.Exit(1)


def _kernel_line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Names to the left, numbers to the right."""
    pairs = enumerate(zip(cells, widths, strict=True))
    return "  ".join(cell.ljust(width) if i < 4 else cell.rjust(width) for i, (cell, width) in pairs).rstrip()


bench_cli.register(app)
