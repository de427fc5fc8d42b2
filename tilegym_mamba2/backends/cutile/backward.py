"""The backward op of the cutile backend: allocates, lays out the launches, runs them. No maths.

`mamba2_chunk_backward` launches, with S tiles of L tokens a segment:

    chunk_rows                                      what the decay contributes, per token
    segment_states, pass_states, tile_states        the state H at the entry of every tile
    segment_dstates, pass_dstates, tile_dstates     the gradient dH' of the state at every tile's exit
    compute_dx                                      dx, and sums per token
    finish_dt, sum_heads                            ddt; da, dd
    compute_dbc, sum_parts                          db, dc, summed over the heads of a group

States are computed again, not saved, and C Bᵀ never reaches memory. Every sum has a fixed order: the
gradients are the same bits in every run. Copies that are made: x, b, c or dout whose last dimension is not
contiguous, and a dout that repeats elements. Scratch: two states (P, N) a tile and head, in bfloat16 for
bfloat16 inputs, else float32; 36 bytes a token and head; two float32 states a segment and head; and where a
group of many heads is cut in parts, db and dc in float32 for each part.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from . import tuning
from .backward_config import BackwardConfig, config_for
from .forward import (
    TILE_P,
    last_contiguous,
    pad_count,
    precision_of,
    rows_step,
    state_steps,
    supports,
    tile_of,
)
from .kernels import bwd_decay as _decay
from .kernels import bwd_groups as _groups
from .kernels import bwd_states as _states
from .kernels import bwd_tokens as _tokens
from .launch import INT32_REACH, Launch, Step, hinted, needs_wide, run_plan

__all__ = ["DIFFERENTIABLE", "gradients", "mamba2_chunk_backward", "supports"]

OP = "mamba2_chunk_backward"
# Its results carry no graph: a second derivative is an error, which autograd.py raises.
DIFFERENTIABLE = False

Optional = torch.Tensor | None
_INPUTS = ("x", "a", "b", "c", "d", "dt", "init_state")


def mamba2_chunk_backward(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: Optional,
    dt: torch.Tensor,
    init_state: Optional,
    dout: Optional,
    dfinal_state: Optional,
    chunk_size: int = 64,
    state_dtype: torch.dtype = torch.float32,
) -> tuple[Optional, ...]:
    """As `tilegym_mamba2.mamba2_chunk_backward`, by the kernels.

    `chunk_size` is a hint, and not followed. States are computed in float32 whatever `state_dtype` says, and
    enter products as the inputs' dtype allows; float64 is refused with a TypeError.
    """
    if state_dtype is torch.float64:
        raise TypeError(f"{OP}: backend 'cutile' computes no float64 states; use backend='torch'")
    return gradients(x, a, b, c, d, dt, init_state, dout, dfinal_state, (True,) * len(_INPUTS))


def gradients(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: Optional,
    dt: torch.Tensor,
    init_state: Optional,
    dout: Optional,
    dfinal_state: Optional,
    needed: tuple[bool, ...],
) -> tuple[Optional, ...]:
    """dx, da, db, dc, dd, ddt, dinit_state; None for those that are not `needed` and for a None input."""
    needed = tuple(n and t is not None for n, t in zip(needed, (x, a, b, c, d, dt, init_state), strict=True))
    if not any(needed):
        return (None,) * len(_INPUTS)
    dout = torch.zeros_like(x) if dout is None else dout
    x, b, c, dout = (last_contiguous(t) for t in (x, b, c, dout))
    if any(stride == 0 and size > 1 for stride, size in zip(dout.stride(), dout.shape, strict=True)):
        dout = dout.contiguous()
    plan = _plan_of(x, a, b, c, d, dt, init_state, dout, dfinal_state, needed)
    if plan.empty:
        return _without_tokens(needed, (x, a, b, c, d, dt, init_state), dfinal_state)
    scratch = _Scratch(plan, x)
    launches = [plan.rows.launch((a, dt, scratch.rows))]
    results: dict[str, torch.Tensor] = {}
    if plan.tile_states is not None:
        launches += _state_launches(plan, scratch, x, b, init_state)
    launches += _dstate_launches(plan, scratch, results, dout, c, init_state, dfinal_state)
    tokens = (x, b, c, scratch.rows)
    if plan.compute_dx is not None:
        launches += _token_launches(plan, scratch, results, tokens, (a, d, dt), dout)
    if plan.compute_dbc is not None:
        launches += _group_launches(plan, scratch, results, tokens, dout)
    plan.run(launches, x.device)
    return tuple(results.get(name) if n else None for name, n in zip(_INPUTS, needed, strict=True))


@dataclass
class _Plan:
    """All that a call needs and that shapes, strides and dtypes decide."""

    empty: bool
    shapes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    saved_dtype: torch.dtype = torch.float32
    rows: Step | None = None
    segment_states: Step | None = None
    pass_states: Step | None = None
    tile_states: Step | None = None
    segment_dstates: Step | None = None
    pass_dstates: Step | None = None
    tile_dstates: Step | None = None
    compute_dx: Step | None = None
    finish_dt: Step | None = None
    sum_heads: Step | None = None
    compute_dbc: Step | None = None
    sum_parts: Step | None = None
    compiled: bool = False

    def run(self, launches: list[Launch], device: torch.device) -> None:
        run_plan(launches, device, OP, self.compiled)
        self.compiled = True


class _Scratch:
    """The tensors between the kernels."""

    def __init__(self, plan: _Plan, x: torch.Tensor) -> None:
        self._shapes, self._device = plan.shapes, x.device
        self.rows = self.empty("rows")
        self.entry_states = self.empty("tiles", plan.saved_dtype) if plan.tile_states is not None else None
        self.dexit_states = self.empty("tiles", plan.saved_dtype)

    def empty(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(self._shapes[name], dtype=dtype, device=self._device)


def _state_launches(
    plan: _Plan, scratch: _Scratch, x: torch.Tensor, b: torch.Tensor, init_state: Optional
) -> list[Launch]:
    launches = []
    entries, decay = scratch.empty("segments"), scratch.empty("segment_decay")
    if plan.segment_states is not None:
        launches.append(plan.segment_states.launch((x, b, scratch.rows, entries, decay)))
    init_view = entries if init_state is None else init_state.unsqueeze(2)
    launches.append(plan.pass_states.launch((entries, decay, init_view, entries)))
    launches.append(plan.tile_states.launch((x, b, scratch.rows, entries, scratch.entry_states)))
    return launches


def _dstate_launches(
    plan: _Plan,
    scratch: _Scratch,
    results: dict[str, torch.Tensor],
    dout: torch.Tensor,
    c: torch.Tensor,
    init_state: Optional,
    dfinal_state: Optional,
) -> list[Launch]:
    launches = []
    exits, decay = scratch.empty("segments"), scratch.empty("segment_decay")
    if plan.segment_dstates is not None:
        launches.append(plan.segment_dstates.launch((dout, c, scratch.rows, exits, decay)))
    dfinal_view = exits if dfinal_state is None else dfinal_state.unsqueeze(2)
    launches.append(plan.pass_dstates.launch((exits, decay, dfinal_view)))
    outputs = {}
    dinit_view = scratch.dexit_states
    if init_state is not None:
        outputs["dinit_state"] = results["init_state"] = torch.empty(
            init_state.shape, dtype=init_state.dtype, device=dout.device
        )
        dinit_view = results["init_state"].unsqueeze(2)
    arrays = (dout, c, scratch.rows, exits, scratch.dexit_states, dinit_view)
    launches.append(plan.tile_dstates.launch(arrays, outputs))
    return launches


def _token_launches(
    plan: _Plan,
    scratch: _Scratch,
    results: dict[str, torch.Tensor],
    tokens: tuple[torch.Tensor, ...],
    per_head: tuple[torch.Tensor, Optional, torch.Tensor],
    dout: torch.Tensor,
) -> list[Launch]:
    a, d, dt = per_head
    skip = a if d is None else d
    dx = results["x"] = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
    ddt = results["dt"] = torch.empty(dt.shape, dtype=dt.dtype, device=dt.device)
    da = results["a"] = torch.empty_like(a, memory_format=torch.contiguous_format)
    dd = da
    if d is not None:
        dd = results["d"] = torch.empty_like(d, memory_format=torch.contiguous_format)
    drows, overlap, partial = scratch.empty("drows"), scratch.empty("overlap"), scratch.empty("partial")
    states = (scratch.entry_states, scratch.dexit_states)
    return [
        plan.compute_dx.launch((*tokens, skip, dout, *states, dx, drows, overlap), {"dx": dx}),
        plan.finish_dt.launch((a, scratch.rows, drows, overlap, ddt, partial), {"ddt": ddt}),
        plan.sum_heads.launch((partial, da, dd), {"da": da, "dd": dd}),
    ]


def _group_launches(
    plan: _Plan,
    scratch: _Scratch,
    results: dict[str, torch.Tensor],
    tokens: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
) -> list[Launch]:
    _, b, c, _ = tokens
    db = results["b"] = torch.empty(b.shape, dtype=b.dtype, device=b.device)
    dc = results["c"] = torch.empty(c.shape, dtype=c.dtype, device=c.device)
    outputs = {"db": db, "dc": dc}
    arrays = (*tokens, dout, scratch.entry_states, scratch.dexit_states)
    if plan.sum_parts is None:
        return [plan.compute_dbc.launch((*arrays, db, dc), outputs)]
    parts = (scratch.empty("parts"), scratch.empty("parts"))
    return [
        plan.compute_dbc.launch((*arrays, *parts)),
        plan.sum_parts.launch((*parts, db, dc), outputs),
    ]


def _without_tokens(
    needed: tuple[bool, ...], inputs: tuple[Optional, ...], dfinal_state: Optional
) -> tuple[Optional, ...]:
    results = [
        torch.zeros(t.shape, dtype=t.dtype, device=t.device) if n else None
        for n, t in zip(needed, inputs, strict=True)
    ]
    if results[-1] is not None and dfinal_state is not None:
        results[-1].copy_(dfinal_state)
    return tuple(results)


_plans: dict[tuple[Any, ...], _Plan] = {}
# Shapes change with every sequence length: keep the plans from growing without end.
_MAX_PLANS = 4096


def _plan_of(*arguments: Any) -> _Plan:
    *tensors, needed = arguments
    x = tensors[0]
    key = (
        tuple(None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() & 15) for t in tensors),
        needed,
        x.device,
        precision_of(x.dtype),
        tuning.overridden(),
        BackwardConfig.overridden(),
    )
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        plan = _plans[key] = _make_plan(tensors, needed)
    return plan


def _make_plan(tensors: list[Optional], needed: tuple[bool, ...]) -> _Plan:
    x, a, b, c, d, dt, init_state, dout, dfinal_state = tensors
    batch, tokens, heads, head_size = x.shape
    groups, state_size = b.shape[2:]
    plan = _Plan(empty=batch * tokens == 0)
    if plan.empty:
        return plan
    need = dict(zip(_INPUTS, needed, strict=True))
    dims = (batch, heads, head_size, state_size)
    config = config_for(x, b)
    tile = config.tile_tokens
    tiles = math.ceil(tokens / tile)
    forward = dataclasses.replace(
        tuning.default_config(tuning.problem_key(x, b)),
        tile_tokens=tile,
        segment_blocks=config.segment_blocks,
        min_segment_tiles=config.min_segment_tiles,
    )
    p_tiles = math.ceil(head_size / TILE_P)
    tiles_per_segment, segments = forward.segments(tokens, heads * p_tiles)
    parts = config.parts(
        tiles * groups * math.ceil(state_size / config.group_tile_n(state_size)), heads // groups
    )
    # The heads that one block of compute_dbc takes; the number of parts follows from it.
    group_heads = math.ceil(heads // groups / parts)
    parts = math.ceil(heads // groups / group_heads)
    plan.shapes = {
        "rows": (4, batch, heads, pad_count(tiles), tile),
        "drows": (_tokens.NUM_DROWS, batch, heads, pad_count(tiles), tile),
        "overlap": (batch, heads, pad_count(tiles), TILE_P),
        "partial": (2, heads, pad_count(batch * tiles)),
        "tiles": (batch, heads, pad_count(tiles), head_size, state_size),
        "segments": (batch, heads, pad_count(segments), head_size, state_size),
        "segment_decay": (batch, heads, pad_count(segments)),
        # Never a multiple of 16, which would be another compilation.
        "parts": (batch, tokens, groups * parts + (groups * parts % 16 == 0), state_size),
    }
    plan.saved_dtype = torch.bfloat16 if x.dtype is torch.bfloat16 else torch.float32
    wide = needs_wide(tensors) or max(math.prod(shape) for shape in plan.shapes.values()) >= INT32_REACH
    precision = precision_of(x.dtype)
    plan.rows = rows_step(batch, heads, tiles, forward, wide)

    builder = _Builder(dims, (tiles_per_segment, segments, heads // groups, tiles), precision, config, wide)
    for_tokens = need["x"] or need["a"] or need["d"] or need["dt"]
    for_groups = need["b"] or need["c"]
    if for_tokens or for_groups:
        has_init = init_state is not None
        sizes = (tiles_per_segment * tile, segments - 1, heads // groups)
        options = (precision, False, has_init, False)
        local, plan.pass_states = state_steps(dims, sizes, options, forward, wide)
        if segments > 1:
            plan.segment_states = local
        plan.tile_states = builder.tile_states()
    if segments > 1:
        plan.segment_dstates = builder.segment_dstates()
    # Also where there is one segment: the walks then read the same form of array, and compile once.
    plan.pass_dstates = builder.pass_dstates(dfinal_state is not None)
    plan.tile_dstates = builder.tile_dstates(init_state is not None)
    if for_tokens:
        plan.compute_dx = builder.compute_dx(groups, d is not None)
        plan.finish_dt = builder.finish_dt(d is not None)
        plan.sum_heads = builder.sum_heads(d is not None)
    if for_groups:
        plan.compute_dbc = builder.compute_dbc(groups, group_heads)
        if parts > 1:
            plan.sum_parts = builder.sum_parts(groups, parts)
    return plan


class _Builder:
    """The backward's own steps for one problem.

    dims: (B, H, P, N); sizes: (tiles a segment, segments, heads a group, tiles).
    """

    def __init__(
        self,
        dims: tuple[int, int, int, int],
        sizes: tuple[int, int, int, int],
        precision: int,
        config: BackwardConfig,
        wide: bool,
    ) -> None:
        self.batch, self.heads, self.head_size, self.state_size = dims
        self.sizes, self.precision, self.config, self.wide = sizes, precision, config, wide
        self.p_tiles = math.ceil(self.head_size / TILE_P)
        self.tile_n = min(tile_of(self.state_size), config.state_tile_n)
        self.n_tiles = math.ceil(self.state_size / self.tile_n)

    def _state_step(self, kernel: Any, segments: int, occupancy: int, flags: tuple[Any, ...]) -> Step:
        config = self.config
        hints = (("occupancy", occupancy), ("num_worker_warps", config.state_warps))
        grid = (self.batch * segments * self.p_tiles * self.heads, self.n_tiles)
        constants = (self.sizes, config.tile_tokens, TILE_P, self.tile_n, self.precision)
        return Step(hinted(kernel, self.wide, hints), grid, (*constants, *flags, config.state_latency))

    def segment_dstates(self) -> Step:
        return self._state_step(_states.segment_dstates, self.sizes[1] - 1, self.config.segment_occupancy, ())

    def tile_states(self) -> Step:
        return self._state_step(_states.tile_states, self.sizes[1], self.config.state_occupancy, ())

    def tile_dstates(self, write_dinit: bool) -> Step:
        return self._state_step(
            _states.tile_dstates, self.sizes[1], self.config.state_occupancy, (write_dinit,)
        )

    def pass_dstates(self, has_dfinal: bool) -> Step:
        config = self.config
        kernel = hinted(_states.pass_dstates, self.wide, (("occupancy", config.pass_occupancy),))
        grid = (self.batch * math.ceil(self.head_size / config.pass_tile_p) * self.heads, self.n_tiles)
        constants = (self.sizes[1], config.pass_tile_p, self.tile_n, has_dfinal, config.pass_latency)
        return Step(kernel, grid, constants)

    def compute_dx(self, groups: int, has_d: bool) -> Step:
        config, tiles, heads_per_group = self.config, self.sizes[3], self.sizes[2]
        # Nothing is summed over heads here, so the cut may follow the batch.
        parts = config.parts(self.batch * tiles * groups, heads_per_group)
        heads = math.ceil(heads_per_group / parts)
        tile_n = config.token_tile_n(self.state_size)
        hints = (("occupancy", config.token_occupancy), ("num_worker_warps", config.token_warps))
        return Step(
            hinted(_tokens.compute_dx, self.wide, hints),
            (self.batch * tiles * groups * math.ceil(heads_per_group / heads),),
            (
                (tiles, heads_per_group, heads),
                config.tile_tokens,
                TILE_P,
                tile_n,
                (self.p_tiles, math.ceil(self.state_size / tile_n)),
                self.precision,
                has_d,
                config.token_latency,
            ),
        )

    def compute_dbc(self, groups: int, heads: int) -> Step:
        config, tiles, heads_per_group = self.config, self.sizes[3], self.sizes[2]
        tile_n = config.group_tile_n(self.state_size)
        hints = (("occupancy", config.group_occupancy), ("num_worker_warps", config.group_warps))
        return Step(
            hinted(_groups.compute_dbc, self.wide, hints),
            (
                self.batch * tiles * groups * math.ceil(heads_per_group / heads),
                math.ceil(self.state_size / tile_n),
            ),
            (
                (tiles, heads_per_group, heads),
                config.tile_tokens,
                TILE_P,
                tile_n,
                self.p_tiles,
                self.precision,
                config.group_latency,
            ),
        )

    def sum_parts(self, groups: int, parts: int) -> Step:
        config, tiles = self.config, self.sizes[3]
        grid = (self.batch * tiles * groups, self.n_tiles, 2)
        constants = (tiles, parts, config.tile_tokens, self.tile_n, config.pass_latency)
        return Step(hinted(_groups.sum_parts, self.wide), grid, constants)

    def finish_dt(self, has_d: bool) -> Step:
        config, tiles = self.config, self.sizes[3]
        grid = (self.batch * tiles * math.ceil(self.heads / config.rows_heads),)
        constants = (tiles, config.tile_tokens, TILE_P, config.rows_heads, has_d)
        return Step(hinted(_decay.finish_dt, self.wide), grid, constants)

    def sum_heads(self, has_d: bool) -> Step:
        constants = (self.batch * self.sizes[3], self.config.sum_tile, has_d)
        return Step(hinted(_decay.sum_heads, self.wide), (self.heads,), constants)
