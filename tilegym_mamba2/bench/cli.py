"""The commands `bench` and `tune`. Heavy imports wait until a command runs."""

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer

SpecNames = Annotated[
    list[str] | None, typer.Option("--spec", help="A spec's name; repeatable, or with commas.")
]
Tags = Annotated[
    list[str] | None,
    typer.Option("--tag", help="All specs with this tag; repeatable. 'published+grid' asks for both tags."),
]


def register(app: typer.Typer) -> None:
    """Attach `bench` and `tune` to the application."""
    app.command("bench")(bench)
    app.command("tune")(tune)


def bench(
    spec: SpecNames = None,
    tag: Tags = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="cutile, torch, tilegym, mamba_ssm or any other; repeatable."),
    ] = None,
    pass_: Annotated[
        list[str] | None,
        typer.Option(
            "--pass", help="forward, backward, both (a row each), forward+backward (through autograd)."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1; by default the GPU if there is one.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.01, help="Time for measuring each backend on each spec.")
    ] = 0.5,
    thin_tilegym: Annotated[
        int | None,
        typer.Option(min=4, help="TileGym searches at most so many configurations a kernel."),
    ] = None,
    tilegym_chunk: Annotated[
        list[int] | None,
        typer.Option(help="Chunk sizes to try for TileGym, the best is reported; repeatable."),
    ] = None,
    mamba_chunk: Annotated[
        list[int] | None, typer.Option(help="Chunk sizes to try for mamba_ssm (128 and 256); repeatable.")
    ] = None,
    check: Annotated[
        bool, typer.Option(help="Compare with float64 first. Without it no row has a speed-up.")
    ] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write one JSON line a row to this file.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the --json file: leave out what it has for these versions."),
    ] = False,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write all rows as CSV.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Folder for the plots, or the first plot's file (.png, .svg, .pdf).")
    ] = None,
    from_: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Measure nothing: read rows from this file; repeatable."),
    ] = None,
    table: Annotated[str, typer.Option(help="rich, markdown or none.")] = "rich",
    time: Annotated[
        str,
        typer.Option(help="What tables and plots compare: graph, eager or host times, where there are any."),
    ] = "graph",
    subject: Annotated[
        str, typer.Option(help="The backend whose speed-up over the others is shown.")
    ] = "cutile",
    version_of: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VERSION of a package used from a source tree without metadata; repeatable."),
    ] = None,
) -> None:
    """Measure backends side by side: parity with float64 first, then time, memory, share of the floor.

    A spec's op is what is measured: the forward and its backward, the full scan, or the decoding step.
    """
    from rich.console import Console

    from . import report

    if table not in ("rich", "markdown", "none"):
        raise typer.BadParameter(f"--table is rich, markdown or none, got {table!r}")
    if time not in ("graph", "eager", "host"):
        raise typer.BadParameter(f"--time is graph, eager or host, got {time!r}")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("--plot needs matplotlib: pip install 'tilegym-mamba2[bench]'")
    if resume and json_file is None:
        raise typer.BadParameter("--resume needs --json FILE")
    if from_:
        measuring = (spec, tag, backend, pass_, json_file)
        if any(value for value in measuring):
            raise typer.BadParameter(
                "--from measures nothing: leave out --spec, --tag, --backend, --pass and --json"
            )
        try:
            rows = report.load_rows(*from_)
        except OSError as error:
            raise typer.BadParameter(f"--from: {error.filename} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise typer.BadParameter(f"--from: {error}") from error
    else:
        specs, passes = _specs(spec, tag, device), _passes(pass_)
        _refuse_unknown_passes(specs, passes)
        rows = _measure(
            specs=specs,
            backend_names=_split(backend),
            passes=passes,
            device_name=device,
            seconds=seconds,
            peer_options={
                "thin_tilegym": thin_tilegym,
                "tilegym_chunks": tuple(tilegym_chunk or ()),
                "mamba_chunks": tuple(mamba_chunk or ()),
            },
            check=check,
            json_file=json_file,
            resume=resume,
            versions=_pairs(version_of),
        )
    if rows and subject not in {row["backend"] for row in rows} | {"cutile"}:
        have = ", ".join(sorted({row["backend"] for row in rows}))
        raise typer.BadParameter(f"--subject: no row of {subject!r}; there are rows of: {have}")
    if csv_file is not None:
        try:
            csv_file.parent.mkdir(parents=True, exist_ok=True)
            csv_file.write_text(report.csv_text(rows), encoding="utf-8")
        except OSError as error:
            raise typer.BadParameter(f"--csv: {csv_file} cannot be written: {error}") from error
    from .measure import KINDS

    kinds = KINDS if time == "graph" else (f"{time}_us",)
    if table == "markdown":
        print(report.markdown_table(rows, subject=subject, kinds=kinds))
    elif table == "rich":
        console = _console()
        console.print(report.rich_table(rows, subject=subject, kinds=kinds))
        for note in report.notes(rows):
            console.print(f"- {note}", markup=False, highlight=False)
    if plot is not None:
        from . import plots

        try:
            written = plots.write(rows, plot, subject=subject, kinds=kinds)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        except OSError as error:
            raise typer.BadParameter(f"--plot: {plot} cannot be written: {error}") from error
        Console(stderr=True).print("plots: " + ", ".join(str(path) for path in written), markup=False)
    from .peers import OWN_BACKENDS

    if not from_ and any(r["status"] in ("red", "failed") and r["backend"] in OWN_BACKENDS for r in rows):
        raise typer.Exit(1)


def _refuse_unknown_passes(specs: dict[str, Any], passes: list[str]) -> None:
    from .passes import PASSES

    for name, spec in specs.items():
        for pass_name in passes:
            if pass_name not in PASSES[spec.op]:
                has = ", ".join(PASSES[spec.op])
                raise typer.BadParameter(
                    f"--pass {pass_name}: {name} is a spec of {spec.op}, which has {has}"
                )


def _refuse_unknown_backends(names: list[str]) -> None:
    from tilegym_mamba2 import registry

    known = {name for entry in registry.ops().values() for name in entry.backends} | {"mamba_ssm"}
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"unknown backend {name!r}; there are: {', '.join(sorted(known))}")


def _measure(
    *,
    specs: dict[str, Any],
    backend_names: list[str],
    passes: list[str],
    device_name: str | None,
    seconds: float,
    peer_options: dict[str, Any],
    check: bool,
    json_file: Path | None,
    resume: bool,
    versions: dict[str, str],
) -> list[dict[str, Any]]:
    import torch
    from rich.console import Console

    import tilegym_mamba2  # noqa: F401  registers the ops

    from . import environment, measure, peers, report, roofline

    device = _device(device_name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise typer.BadParameter(f"--device {device}: torch {torch.__version__} finds no GPU")
        torch.cuda.set_device(device)
    _refuse_unknown_backends(backend_names)
    chosen = peers.backends(backend_names or peers.DEFAULT_BACKENDS, **peer_options)
    known = report.load_rows(json_file) if resume and json_file.exists() else []
    if json_file is not None and not resume and json_file.exists() and json_file.stat().st_size:
        raise typer.BadParameter(f"{json_file} exists: add --resume to continue it, or remove it")
    env = environment.describe(device, versions)
    jobs = [
        (name, spec, pass_name)
        for name, spec in specs.items()
        for pass_name in passes
        if not measure.complete(known, name, spec, pass_name, chosen, env)
    ]
    rows = list(known)
    if not jobs:
        return rows
    err = Console(stderr=True)
    with _progress(err) as progress:
        task = progress.add_task("ceilings: copy and matrix product", total=len(jobs))
        ceilings = roofline.measure(device)
        for name, spec, pass_name in jobs:
            env = environment.describe(device, versions)
            try:
                new = measure.measure_group(
                    name,
                    spec,
                    pass_name,
                    chosen,
                    device=device,
                    ceilings=ceilings,
                    env=env,
                    seconds=seconds,
                    check=check,
                    on_step=lambda text: progress.update(task, description=text),
                )
            except measure.DeviceLost as error:
                err.print(
                    f"{name} {pass_name}: the device is lost, nothing more is measured: {error}", style="red"
                )
                raise typer.Exit(2) from error
            rows += new
            if json_file is not None:
                report.append_rows(json_file, new)
            progress.advance(task)
    return rows


def tune(
    spec: SpecNames = None,
    tag: Tags = None,
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1; by default the current GPU.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that compile candidates; 0: compile in this one.")
    ] = None,
    limit: Annotated[float, typer.Option(min=10.0, help="Seconds for one spec, about.")] = 170.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be gained, write nothing.")
    ] = False,
) -> None:
    """Search the fastest configuration of the cutile forward on this GPU and keep it for later calls."""
    import torch
    from rich.console import Console
    from rich.table import Table

    import tilegym_mamba2
    from tilegym_mamba2.backends.cutile.availability import gpu_available

    from . import environment
    from . import tune as tuner

    console, err = _console(), Console(stderr=True)
    where = _device(device or "cuda")
    if where.type != "cuda":
        raise typer.BadParameter("tune needs a GPU: --device cuda or cuda:N")
    # Not the tile interpreter: it takes no time that says anything.
    ok, reason = gpu_available(where if torch.cuda.is_available() else None)
    if not ok:
        err.print(f"error: cutile cannot run here: {reason}", style="red", markup=False)
        raise typer.Exit(2)
    from tilegym_mamba2.backends.cutile import tuning

    torch.cuda.set_device(where)
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability(where))
    device_name = environment.device_name(where)

    def forward(*args: Any) -> Any:
        return tilegym_mamba2.mamba2_chunk_forward(*args, backend="cutile")

    results: list[tuner.TuneResult] = []
    failures = 0
    specs = _specs(spec, tag, str(where))
    if others := [name for name, one in specs.items() if one.op != "mamba2_chunk_forward"]:
        raise typer.BadParameter(f"{', '.join(others)}: a spec of {specs[others[0]].op}, which is not tuned")
    with _progress(err) as progress:
        outer = progress.add_task("specs", total=len(specs))
        inner = progress.add_task("")

        def step(stage: str, done: int, total: int) -> None:
            progress.update(inner, description=f"{name}: {stage}", completed=done, total=total)

        for name, one in specs.items():
            inputs = one.get_sample_inputs(with_reference=False, with_backward=False, device=where)
            key = tuner.problem_key(tuning, inputs)
            del inputs
            if key in {r.key for r in results}:
                progress.advance(outer)
                continue
            try:
                result = tuner.search(
                    name,
                    one,
                    device=where,
                    tuning=tuning,
                    op=forward,
                    workers=workers,
                    limit_seconds=limit,
                    on_step=step,
                )
            except (RuntimeError, ValueError) as error:
                err.print(f"{name}: not tuned: {error}", style="red", markup=False)
                failures += 1
                progress.advance(outer)
                continue
            results.append(result)
            if not dry_run:
                tuner.save(tuning, arch, result, device_name)
            progress.advance(outer)

    shown = Table(title=f"tuned on {device_name}")
    for head, justify in (
        ("spec", "left"),
        ("key", "left"),
        ("in use before", "left"),
        ("before µs", "right"),
        ("after µs", "right"),
        ("gain", "right"),
        ("tried", "right"),
        ("failed", "right"),
        ("s", "right"),
    ):
        shown.add_column(head, justify=justify, overflow="fold")
    for r in results:
        gain = f"{r.gain:.1%}" if r.changed else "none"
        numbers = (f"{r.before_us:.1f}", f"{r.after_us:.1f}", gain, str(r.tried), str(len(r.failed)))
        shown.add_row(r.spec, r.key, r.source, *numbers, f"{r.seconds:.0f}")
    console.print(shown)
    for r in results:
        for config, why in r.failed:
            console.print(f"- {r.spec}: left out {config}: {why}", markup=False, highlight=False)
    place = tuning.user_table_path(arch)
    console.print(f"written: {place}" if not dry_run else f"nothing written (would be {place})", markup=False)
    if failures:
        raise typer.Exit(1)


# --- shared --------------------------------------------------------------------------------------


def _split(values: list[str] | None) -> list[str]:
    return [part.strip() for value in values or () for part in value.split(",") if part.strip()]


def _pairs(values: list[str] | None) -> dict[str, str]:
    pairs = {}
    for value in values or ():
        name, found, version = value.partition("=")
        if not found or not name or not version:
            raise typer.BadParameter(f"--version-of takes NAME=VERSION, got {value!r}")
        pairs[name.replace("-", "_")] = version
    return pairs


def _specs(names: list[str] | None, tags: list[str] | None, device: str | None) -> dict[str, Any]:
    from tilegym_mamba2.spec import SPECS, select

    chosen: dict[str, Any] = {}
    for name in _split(names):
        if name not in SPECS:
            raise typer.BadParameter(f"no spec {name!r}: `tilegym-mamba2 specs` lists them")
        chosen[name] = SPECS[name]
    for tag in _split(tags):
        try:
            chosen |= select(*tag.split("+"))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    if not chosen:
        if names or tags:
            raise typer.BadParameter("no spec has these tags")
        name = "published" if _device(device).type == "cuda" else "cpu"
        chosen = {name: SPECS[name]}
    return chosen


def _passes(values: list[str] | None) -> list[str]:
    from .passes import PASS_NAMES

    passes: list[str] = []
    for value in _split(values) or ["forward"]:
        if value != "both" and value not in PASS_NAMES:
            raise typer.BadParameter(f"--pass is {', '.join(PASS_NAMES)} or both, got {value!r}")
        passes += ["forward", "backward"] if value == "both" else [value]
    return list(dict.fromkeys(passes))


def _device(name: str | None) -> Any:
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise typer.BadParameter(f"--device: {error}") from error
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _console() -> Any:
    from rich.console import Console

    console = Console()
    # a file or a pipe has no width of its own, and 80 columns would fold every cell
    return console if console.is_terminal else Console(width=170)


def _progress(console: Any) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)
