"""Configurations of the forward pipeline: data, looked up per problem, never searched for at call time.

Order: the user's table (written by `tilegym-mamba2 tune`), the shipped table of the architecture, the nearest
entry of either, the default. TILEGYM_MAMBA2_TUNE=off uses the defaults alone; `table` is the default;
`search` tunes a problem at its first call, unless TILEGYM_DISABLE_AUTOTUNE forbids that.

A key holds what changes the code or the winner: architecture, dtype, P, N, and the sizes H and T in powers of
two. The batch size is not in it: a row's result must not depend on how many rows there are.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import platformdirs
import torch

SCHEMA = 1
TUNE_ENV = "TILEGYM_MAMBA2_TUNE"
CACHE_ENV = "TILEGYM_MAMBA2_CACHE_DIR"
# Architectures that use another's table: same generation, same instructions.
_TABLE_OF = {"sm_103": "sm_100", "sm_121": "sm_120", "sm_86": "sm_80", "sm_87": "sm_80", "sm_89": "sm_80"}
_KEY = re.compile(r"(sm_\d+)/(\w+)/P([1-9]\d*)/N([1-9]\d*)/H([1-9]\d*)/T([1-9]\d*)")

# Tiles of a row from which on it is cut into twice and four times as many blocks as `segment_blocks`, but
# into no more than an H200 holds at a time.
_LONG_ROWS, _MOST_BLOCKS_OF_A_ROW = (512, 2048), 256

logger = logging.getLogger("tilegym_mamba2")


@dataclass(frozen=True)
class ForwardConfig:
    """One configuration of the forward's kernels: sizes that fix the result's rounding, and compiler hints.

    The result depends on `tile_tokens`, `segment_blocks` and `min_segment_tiles`; the rest only moves time.
    """

    # L, tokens of the quadratic form. With the state in registers 64 costs less arithmetic than 128.
    tile_tokens: int = 64
    # Into how many blocks a batch row is cut, H and P included, as far as T allows.
    segment_blocks: int = 64
    min_segment_tiles: int = 4
    rows_heads: int = 8
    rows_occupancy: int = 8
    state_tile_n: int = 128
    state_occupancy: int = 2
    state_warps: int = 4
    state_latency: int = 3
    # Up to this many segments, compute_out sums up its entry state itself, and pass_states need not run.
    fold_segments: int = 4
    # 8: 53.3 to 51.5 us at N 512, T 1024, 122 to 119 at T 4096, the same elsewhere (H200).
    pass_tile_p: int = 8
    pass_occupancy: int = 4
    pass_latency: int = 5
    # The state is kept as tiles of this many columns.
    out_tile_n: int = 128
    out_occupancy: int = 2
    out_warps: int = 4
    # 3: loads are double-buffered, 109 KB of shared memory; 6: single-buffered, 89 µs against 73.
    out_latency: int = 3
    out_store_latency: int = 3
    # 1: a kernel's blocks may start before the previous kernel has ended (programmatic dependent launch).
    chained: int = 0

    def segments(self, num_tokens: int, blocks_per_segment: int) -> tuple[int, int]:
        """(tiles a segment, segments) for T tokens, where one segment takes H · ceil(P / TILE_P) blocks."""
        tiles = math.ceil(num_tokens / self.tile_tokens)
        # Long rows are cut finer, so that one alone does not leave a GPU idle (B 1, 65536 tokens of 8 heads:
        # 292 to 161 us, 117 if cut in four), but not too fine: for B 4 that costs 4 % (12 in four).
        finer = sum(tiles >= length for length in _LONG_ROWS)
        blocks = max(self.segment_blocks, min(_MOST_BLOCKS_OF_A_ROW, self.segment_blocks << finer))
        wanted = max(1, blocks // blocks_per_segment)
        segments = max(1, min(wanted, tiles // self.min_segment_tiles))
        tiles_per_segment = math.ceil(tiles / segments)
        return tiles_per_segment, math.ceil(tiles / tiles_per_segment)


def problem_key(x: torch.Tensor, b: torch.Tensor) -> str:
    """The key of a problem: x (B, T, H, P) and b (B, T, G, N) decide it."""
    _, tokens, heads, head_size = x.shape
    return key_of(arch_of(x.device), x.dtype, tokens, heads, head_size, b.shape[3])


def key_of(arch: str, dtype: torch.dtype, tokens: int, heads: int, head_size: int, state_size: int) -> str:
    """The key of a problem's sizes on an architecture ("sm_90")."""
    name = str(dtype).removeprefix("torch.")
    sizes = f"P{_ceil_power(head_size)}/N{_ceil_power(state_size)}"
    return f"{arch}/{name}/{sizes}/H{_near_power(heads)}/T{_near_power(max(tokens, 1))}"


def _ceil_power(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _near_power(value: int) -> int:
    return 1 << round(math.log2(value))


@cache
def arch_of(device: torch.device) -> str:
    """The architecture's name, "sm_90"; for CPU tensors (the interpreter) "sm_90" too: same sizes, same
    result."""
    if device.type != "cuda":
        return "sm_90"
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


_override: ForwardConfig | None = None


@contextlib.contextmanager
def override(config: ForwardConfig) -> Iterator[None]:
    """Within it every forward uses `config`, in all threads: for tests and for the tuner."""
    global _override
    before, _override = _override, config
    try:
        yield
    finally:
        _override = before


def overridden() -> ForwardConfig | None:
    return _override


_searched: set[str] = set()
# Found by a search of this process, where the user's table could not be written.
_unsaved: dict[str, ForwardConfig] = {}


def config_for(x: torch.Tensor, b: torch.Tensor) -> ForwardConfig:
    """The configuration of a problem; with TILEGYM_MAMBA2_TUNE=search, searched for if no table has its key.

    x (B, T, H, P) and b (B, T, G, N) decide. Never searches for CPU tensors or inside CUDA graph capture.
    """
    key = problem_key(x, b)
    config, source = lookup(key)
    if source in ("override", "user table", "shipped table") or tune_mode() != "search":
        return config
    if key not in _searched and _may_search(x.device):
        _searched.add(key)
        _search(key, x, b)
        config = lookup(key)[0]
    return _unsaved.get(key, config)


def _may_search(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def _search(key: str, x: torch.Tensor, b: torch.Tensor) -> None:
    # The tuner is a user of the op, not a part of it: imported only where somebody asked for a search.
    from tilegym_mamba2.backends.cutile.forward import mamba2_chunk_forward
    from tilegym_mamba2.bench import tune
    from tilegym_mamba2.spec import Mamba2ProblemSpec

    batch, tokens, heads, head_size = x.shape
    groups, state_size = b.shape[2:]
    spec = Mamba2ProblemSpec(
        batch, tokens, groups, heads, state_size, head_size, 64, x.dtype, torch.float32, decay="slow"
    )
    logger.warning("searching a configuration for %s (%s=search); this takes up to 3 minutes", key, TUNE_ENV)
    try:
        result = tune.search(
            key, spec, device=x.device, tuning=sys.modules[__name__], op=mamba2_chunk_forward
        )
    except RuntimeError as error:
        logger.warning("no configuration was found for %s: %s", key, error)
        return
    try:
        tune.save(sys.modules[__name__], key.split("/", 1)[0], result, torch.cuda.get_device_name(x.device))
    except OSError as error:
        logger.warning("what was found for %s holds for this process only: %s", key, error)
        _unsaved[key] = result.config


def lookup(key: str) -> tuple[ForwardConfig, str]:
    """The configuration for a key and where it comes from: "user table", "shipped table", "nearest: <key>"
    (of the table named after it) or "default"."""
    if _override is not None:
        return _override, "override"
    arch = key.split("/", 1)[0]
    mode = tune_mode()
    default = default_config(key)
    if mode == "off":
        return default, "default"
    tables = {"user table": user_table(arch), "shipped table": shipped_table(arch)["entries"]}
    for source, entries in tables.items():
        if key in entries:
            return dataclasses.replace(default, **entries[key]["config"]), source
    for source, entries in tables.items():
        near = _nearest(key, entries)
        if near is not None:
            return dataclasses.replace(default, **entries[near]["config"]), f"nearest: {near} ({source})"
    return default, "default"


def tune_mode() -> str:
    """off, table or search, from the environment; TileGym's switch against searching turns search to
    table."""
    mode = os.environ.get(TUNE_ENV, "table").strip().lower() or "table"
    if mode not in ("off", "table", "search"):
        raise ValueError(f"{TUNE_ENV} must be off, table or search, got {mode!r}")
    if mode == "search":
        from tilegym.autotune import is_autotune_disabled

        if is_autotune_disabled():
            return "table"
    return mode


def default_config(key: str) -> ForwardConfig:
    """The kernels' default for a key: what spills nowhere, and the architecture's own defaults over it."""
    arch, dtype, head_size, state_size, heads, _ = _parse(key)
    config = ForwardConfig()
    if heads >= 16:
        # Models of this size run at B 1 too: fill the GPU from one row (132 multiprocessors, two blocks
        # each).
        config = dataclasses.replace(config, segment_blocks=264)
    if dtype == "float32":
        # tf32 operands take twice the shared memory, and pass through it to be transposed.
        config = dataclasses.replace(config, out_occupancy=1, out_latency=1, state_latency=1)
    if state_size > 128:
        # Half a block's registers are the state: 8 warps, one block a multiprocessor, half as many segments.
        blocks = config.segment_blocks // 2
        config = dataclasses.replace(
            config, out_occupancy=1, out_warps=8, out_latency=6, segment_blocks=blocks, fold_segments=1
        )
    return dataclasses.replace(config, **shipped_table(arch)["defaults"])


def candidates(key: str) -> list[ForwardConfig]:
    """What the tuner tries for a key, the one in use first; at most 30."""
    first, _ = lookup(key)
    blocks = first.segment_blocks
    changes: list[dict[str, int]] = [
        {"segment_blocks": max(1, blocks // 2)},
        {"segment_blocks": blocks * 2},
        {"segment_blocks": blocks * 4},
        {"min_segment_tiles": 2},
        {"min_segment_tiles": 8},
        {"min_segment_tiles": 10**6},
        *({"out_latency": value} for value in (1, 2, 3, 4, 5, 6, 9)),
        *({"out_occupancy": 1, "out_latency": value} for value in (1, 3, 6)),
        {"out_warps": 8, "out_occupancy": 1},
        {"out_store_latency": 1},
        *({"state_latency": value} for value in (1, 3, 6)),
        {"state_occupancy": 1},
        {"state_tile_n": 64},
        {"state_tile_n": 256, "state_occupancy": 1},
        {"out_tile_n": 256, "out_occupancy": 1},
        {"out_tile_n": 64},
        {"chained": 1 - first.chained},
        {"fold_segments": 1},
        {"fold_segments": 8},
        {"rows_heads": 16},
    ]
    found = [first] + [dataclasses.replace(first, **change) for change in changes]
    return list(dict.fromkeys(found))[:30]


def _parse(key: str) -> tuple[str, str, int, int, int, int]:
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError(f"key must look like sm_90/bfloat16/P64/N128/H8/T16384, got {key!r}")
    arch, dtype, *sizes = match.groups()
    return (arch, dtype, *map(int, sizes))


def _nearest(key: str, entries: Mapping[str, Any]) -> str | None:
    """The entry of the same dtype, P and N that is nearest in H and T, counted in doublings."""
    *same, heads, tokens = _parse(key)
    best, best_distance = None, math.inf
    for other in sorted(entries):
        *other_same, other_heads, other_tokens = _parse(other)
        if other_same[1:] == same[1:]:
            distance = 2 * abs(math.log2(other_heads / heads)) + abs(math.log2(other_tokens / tokens))
            if distance < best_distance:
                best, best_distance = other, distance
    return best


# ---- tables


@cache
def shipped_table(arch: str) -> dict[str, Any]:
    """The package's table of an architecture: `defaults` over ForwardConfig's, and measured `entries`."""
    name = _TABLE_OF.get(arch, arch)
    path = Path(__file__).parent / "tuned" / f"{name}.json"
    if not path.exists():
        return {"measured": False, "defaults": {}, "entries": {}}
    return _checked(json.loads(path.read_text()), path)


def user_table_path(arch: str) -> Path:
    """Where the user's table of an architecture is: TILEGYM_MAMBA2_CACHE_DIR, else the user's cache
    folder."""
    folder = os.environ.get(CACHE_ENV) or platformdirs.user_cache_dir("tilegym-mamba2", appauthor=False)
    return Path(folder) / f"tuned-{arch}.json"


def user_table(arch: str) -> dict[str, Any]:
    """The entries of the user's table; empty, with a warning, if it is damaged or of another version."""
    path = user_table_path(arch)
    try:
        modified = path.stat().st_mtime_ns
    except OSError:
        return {}
    return _read_user_table(path, modified)


@lru_cache(maxsize=8)
def _read_user_table(path: Path, modified: int) -> dict[str, Any]:
    try:
        return _checked(json.loads(path.read_text()), path)["entries"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        logger.warning("ignoring the tuning table %s: %s", path, error)
        return {}


def _checked(table: Any, path: Path) -> dict[str, Any]:
    if not isinstance(table, dict) or table.get("schema") != SCHEMA:
        found = table.get("schema") if isinstance(table, dict) else type(table).__name__
        raise ValueError(f"schema {found!r}, expected {SCHEMA}")
    for config in [entry["config"] for entry in table["entries"].values()] + [table.get("defaults", {})]:
        wrong = [f"{name}={value!r}" for name, value in config.items() if not _allowed(name, value)]
        if wrong:
            raise ValueError(f"not a field of ForwardConfig with a whole number it takes: {', '.join(wrong)}")
    for key in table["entries"]:
        _parse(key)
    return {"measured": True, "defaults": {}} | table


# By the end of a field's name: its smallest and largest value, and whether it must be a power of two.
_LIMITS = {
    "tile_tokens": (16, 256, True),
    "tile_n": (16, 1024, True),
    "tile_p": (1, 64, True),
    "rows_heads": (1, 256, True),
    "warps": (1, 32, True),
    "occupancy": (1, 32, False),
    "latency": (1, 10, False),
    "chained": (0, 1, False),
}


def _allowed(name: str, value: Any) -> bool:
    """Whether a field of ForwardConfig may have the value: another would fail in the middle of a call."""
    if name not in ForwardConfig.__dataclass_fields__ or type(value) is not int:
        return False
    limits = (limits for end, limits in _LIMITS.items() if name.endswith(end))
    least, most, power = next(limits, (1, 2**31, False))
    return least <= value <= most and not (power and value & (value - 1))


def save_user_entries(arch: str, entries: Mapping[str, Any]) -> None:
    """Adds entries {key: {"config": {…}, "median_us": …, "device": …}} to the user's table.

    Several processes may do so at once: a lock file orders them, and the table is replaced as a whole.
    """
    from filelock import FileLock

    path = user_table_path(arch)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        # What was read in the same tick of the file system's clock may be older than another process's save.
        _read_user_table.cache_clear()
        table = {"schema": SCHEMA, "arch": arch, "entries": user_table(arch) | dict(entries)}
        _checked(table, path)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(table, file, indent=1, sort_keys=True)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    # A second save within the file system's clock tick would otherwise go unnoticed.
    _read_user_table.cache_clear()
