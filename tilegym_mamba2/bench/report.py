"""Rows on disk and on screen: JSON lines, CSV, a rich table, a markdown table."""

import csv
import io
import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from .measure import KINDS, Row, headline_us, speed_up

SUBJECT = "cutile"
KIND_NAMES = {
    "graph_us": "CUDA graph",
    "eager_us": "eager call",
    "host_us": "host",
    "wall_us": "wall-clock",
}


def load_rows(*paths: Path) -> list[Row]:
    """Rows of JSON-lines files. A last line cut short by a crash is dropped with a warning.

    Raises:
        ValueError: naming file and line, when any other line is not a row.
    """
    rows = []
    for path in paths:
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                if number == len(lines):
                    warnings.warn(f"{path}:{number}: dropped, cut short", stacklevel=2)
                    continue
                raise ValueError(f"{path}:{number}: not JSON: {error}") from error
            if not isinstance(row, dict) or row.get("schema") != 1 or "backend" not in row:
                raise ValueError(f"{path}:{number}: not a benchmark row of schema 1")
            rows.append(row)
    return rows


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append rows, one line each, on disk when this returns; a line cut short before is ended first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, sort_keys=True, allow_nan=False) + "\n" for row in rows)
    if path.exists() and path.stat().st_size:
        with path.open("rb+") as file:
            content = file.read()
            if not content.endswith(b"\n"):
                file.truncate(content.rfind(b"\n") + 1)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def groups(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows that were measured together. Of several groups of one spec, pass and device the last counts."""
    by_run: dict[str, list[Row]] = {}
    for row in rows:
        by_run.setdefault(row["run"], []).append(row)
    latest: dict[tuple, list[Row]] = {}
    for group in by_run.values():
        first = group[0]
        latest[first["spec"], first["pass"], first["env"].get("device")] = group
    return list(latest.values())


def _find(group: Sequence[Row], backend: str) -> Row | None:
    return next((row for row in group if row["backend"] == backend), None)


def _us(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _median(row: Row, kind: str) -> float | None:
    return row[kind]["median"] if row.get(kind) else None


def _size(value: int | None) -> str:
    if value is None:
        return "–"
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def _extra_memory(row: Row) -> str:
    size = _size(row.get("peak_bytes"))
    operands = row.get("operand_bytes")
    return f"{size} ({row['peak_bytes'] / operands:.2f}×)" if operands else size


def _error(row: Row) -> str:
    errors = row.get("errors")
    if not errors:
        return "–"
    unusable = [name for name, error in errors.items() if error is None]
    if unusable:
        return f"{unusable[0]} not finite"
    worst = max(errors, key=lambda k: errors[k] / row["budgets"][k] if row["budgets"][k] else 0.0)
    return f"{worst} {errors[worst]:.2g}"


def _shown(row: Row) -> bool:
    return row["status"] == "red" or headline_us(row) is not None


def rich_table(
    rows: Iterable[Row], *, subject: str = SUBJECT, title: str = "", kinds: Sequence[str] = KINDS
) -> Table:
    """One line a row; the last column says how many times faster `subject` is than that row's backend.

    "extra mem" of a pass with a backward is also given as a multiple of x, b, c, dt and their gradients.
    """
    found = groups(rows)
    on_gpu = any(row.get("graph_us") or row.get("eager_us") for group in found for row in group)
    table = Table(title=title or None)
    table.add_column("spec", overflow="fold")
    table.add_column("backend")
    numbers = ["graph µs", "eager µs", "host µs"] if on_gpu else ["wall µs"]
    for head in [*numbers, "TFLOP/s", "GB/s", "of floor"]:
        table.add_column(head, justify="right")
    if on_gpu:
        table.add_column("extra mem", justify="right")
    table.add_column("first s", justify="right")
    table.add_column("error", justify="right")
    table.add_column(f"{subject} is", justify="right")
    for group in found:
        ours = _find(group, subject)
        for i, row in enumerate(group):
            label = row["spec"] if row["pass"] == "forward" else f"{row['spec']} ({row['pass']})"
            cells = [label if i == 0 else "", _backend_label(row)]
            if row["status"] not in ("ok", "unchecked"):
                style = "bold red" if row["status"] == "red" else "dim"
                cells += [f"[{style}]{row['status']}[/{style}]", *["–"] * (len(table.columns) - 5)]
                table.add_row(*cells, _error(row), "–", end_section=i == len(group) - 1)
                continue
            columns = ("graph_us", "eager_us", "host_us") if on_gpu else ("wall_us",)
            cells += [_us(_median(row, kind)) for kind in columns]
            cells += [_number(row["tflops"]), _number(row["gbs"]), f"{row['floor_share']:.0%}"]
            if on_gpu:
                cells.append(_extra_memory(row))
            cells += [f"{row['first_call_s']:.2g}", _error(row)]
            ratio = speed_up(ours, row, kinds) if ours is not None and row is not ours else None
            cells.append("–" if ratio is None else f"{ratio:.2f}×")
            table.add_row(*cells, end_section=i == len(group) - 1)
    return table


def _backend_label(row: Row) -> str:
    variants = row.get("variants_us") or {}
    return f"{row['backend']} ({row['variant']})" if len(variants) > 1 else row["backend"]


def notes(rows: Iterable[Row]) -> list[str]:
    """What a reader must know beside the table: why a row has no times, searches, failed captures."""
    found: dict[str, list[str]] = {}
    for group in groups(rows):
        for row in group:
            quiet = row["status"] in ("ok", "unchecked")
            reason = row["reason"] if quiet or not row["reason"] else f"{row['status']}: {row['reason']}"
            for text in filter(None, (row.get("note"), reason)):
                found.setdefault(f"{row['backend']}: {text}", []).append(row["spec"])
    return [f"{text} ({_some(list(dict.fromkeys(specs)))})" for text, specs in found.items()]


def _some(names: Sequence[str], most: int = 3) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


_SHAPE = (
    ("B", "batch_size"),
    ("T", "num_tokens"),
    ("H", "num_heads"),
    ("P", "head_size"),
    ("G", "num_groups"),
    ("N", "state_size"),
)


def markdown_table(rows: Iterable[Row], *, subject: str = SUBJECT, kinds: Sequence[str] = KINDS) -> str:
    """A README's table: a line per spec, a column per backend, `subject`'s speed-up over each peer.

    Times are the first of `kinds` that a row has; the share of the floor is shown for device times alone.
    """
    found = groups(rows)
    backends = list(dict.fromkeys(row["backend"] for group in found for row in group if _shown(row)))
    backends.sort(key=lambda name: name != subject)
    passes = {row["pass"] for group in found for row in group}
    heads = ["spec", *(["pass"] if len(passes) > 1 else []), *(k for k, _ in _SHAPE)]
    heads += [f"{name} µs" for name in backends]
    memory = any(row.get("operand_bytes") for group in found for row in group)
    last = [f"{subject}: of floor"] if kinds == KINDS else []
    last += [f"{subject}: extra memory"] if memory else []
    last.append(f"{subject}: error")
    heads += last
    lines = ["| " + " | ".join(heads) + " |"]
    left = len(heads) - len(backends) - len(last) - len(_SHAPE)
    lines.append("|" + "---|" * left + "---:|" * (len(heads) - left))
    for group in found:
        ours = _find(group, subject)
        first = group[0]
        cells = [f"`{first['spec']}`", *([first["pass"]] if len(passes) > 1 else [])]
        cells += [str(first["fields"][field]) for _, field in _SHAPE]
        for name in backends:
            cells.append(_markdown_cell(_find(group, name), ours, kinds))
        good = ours is not None and ours["status"] == "ok"
        if kinds == KINDS:
            cells.append(f"{ours['floor_share']:.0%}" if good else "–")
        if memory:
            cells.append(_extra_memory(ours) if good else "–")
        cells.append(_error(ours) if ours is not None else "–")
        lines.append("| " + " | ".join(cells) + " |")
    closing = _provenance(found, kinds)
    if memory:
        closing.append(
            "Extra memory: the peak of a call, results included; in brackets as a multiple of x, b, c, dt "
            "and their gradients."
        )
    return "\n".join([*lines, "", *closing])


def _markdown_cell(row: Row | None, ours: Row | None, kinds: Sequence[str]) -> str:
    if row is None:
        return "–"
    if row["status"] == "red":
        return f"wrong ({_error(row)})"
    us = headline_us(row, kinds)
    if us is None:
        return row["status"]
    ratio = speed_up(ours, row, kinds) if ours is not None and row is not ours else None
    return _us(us) if ratio is None else f"{_us(us)} ({ratio:.2f}×)"


def kind_name(found: Sequence[Sequence[Row]], kinds: Sequence[str]) -> str:
    """What kind of time stands for most rows, in words."""
    kind = next((k for k in kinds if any(row.get(k) for group in found for row in group)), kinds[-1])
    return KIND_NAMES[kind]


def _provenance(found: Sequence[Sequence[Row]], kinds: Sequence[str]) -> list[str]:
    """One line per device: what the numbers were made with."""
    envs: dict[str, dict[str, Any]] = {}
    for group in found:
        for row in group:
            env = row["env"]
            envs.setdefault(env.get("device") or "unknown device", env)
    kind = kind_name(found, kinds)
    names = (("driver", "driver"), ("torch", "torch"), ("cuda_tile", "cuda-tile"), ("tileiras", "tileiras"))
    names += (("tilegym", "TileGym"), ("mamba_ssm", "mamba_ssm"), ("triton", "Triton"))
    lines = []
    for device, env in envs.items():
        versions = ", ".join(f"{label} {env[key]}" for key, label in names if env.get(key))
        lines.append(f"{device}; {versions}; {str(env.get('date'))[:10]}; medians of {kind} times.")
    searches = sorted(
        {
            f"{row['backend']}: {row['search']['limit']}"
            for group in found
            for row in group
            if row.get("search") and row["search"].get("limit")
        }
    )
    if searches:
        lines.append(f"Searches thinned, configurations a kernel: {', '.join(searches)}.")
    return lines


def flatten(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as `outer.inner` columns; lists as JSON."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = json.dumps(value) if isinstance(value, list) else value
    return flat


def csv_text(rows: Sequence[Row]) -> str:
    """All rows as CSV, one column for each nested field that any row has."""
    flat = [flatten(row) for row in rows]
    columns = list(dict.fromkeys(key for row in flat for key in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()
