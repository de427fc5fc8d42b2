"""The forward op of the cutile backend: allocates, lays out the launches, runs them. No maths.

`mamba2_chunk_forward` launches, with S tiles of L tokens a segment:

    chunk_rows       what the decay contributes, per token
    segment_states   each segment from zero; if there is more than one
    pass_states      local states to entry states; if there are many, else compute_out sums them up itself
    compute_out      outputs and the final state

What follows from shapes, strides and dtypes alone is worked out once, in a `_Plan`. Copies that are made: x,
b or c whose last dimension is not contiguous. Scratch: 16 bytes a token and head, and one float32 state (P,
N) per segment and head.
"""

import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tilegym_mamba2.forms import Kept, form_of

from . import tuning
from .kernels import chunk_cumsum as _cumsum
from .kernels import compute_out as _out
from .kernels import fwd_pass_state as _states
from .kernels.products import BF16, TF32, TF32X3
from .launch import INT32_REACH, Launch, Seen, Step, hinted, needs_wide, refuse_float64, run_plan

__all__ = [
    "chunk_cumsum",
    "compute_out",
    "fwd_pass_state",
    "mamba2_chunk_forward",
    "supports",
]

OP = "mamba2_chunk_forward"
TILE_P = 64
# How many segments' states pass_states loads before it needs the first.
PASS_AT_ONCE = 4
# A product needs at least 16 in each dimension.
MIN_TILE_N = 16

_X_DTYPES = frozenset((torch.bfloat16, torch.float16, torch.float32))
_OK = (True, "")
_ARGUMENTS = ("x", "a", "b", "c", "d", "dt", "init_state", "dout", "dfinal_state")


def supports(op_name: str, x: torch.Tensor, *others: torch.Tensor | None) -> tuple[bool, str]:
    """Whether the kernels take these tensors. Raises TypeError for float64: a GPU has no fast products in
    it."""
    # b and c have x's dtype, a and d it or float32: float64 can only be in x, dt and the states after it.
    if x.dtype in _X_DTYPES:
        for tensor in others[4:]:
            if tensor is not None and tensor.dtype is torch.float64:
                break
        else:
            return _OK
    refuse_float64(op_name, _ARGUMENTS, (x, *others))


def mamba2_chunk_forward(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt: torch.Tensor,
    init_state: torch.Tensor | None,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `tilegym_mamba2.mamba2_chunk_forward`, by the kernels. `chunk_size` is a hint, and not followed.

    float32 inputs follow `torch.get_float32_matmul_precision()`: three tf32 products at "highest", one
    otherwise.
    """
    tensors = (x, a, b, c, d, dt, init_state)
    return by_form(form_of(*tensors), *tensors)


def by_form(
    form: Hashable,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt: torch.Tensor,
    init_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mamba2_chunk_forward` for tensors whose form is known, see `forms.form_of`."""
    plan = _plan_of(form, x, a, b, c, d, dt, init_state)
    if plan.copies:
        x, b, c = last_contiguous(x), last_contiguous(b), last_contiguous(c)
        return mamba2_chunk_forward(x, a, b, c, d, dt, init_state)
    out = torch.empty_like(plan.out)
    final = torch.empty_like(plan.final)
    if plan.empty:
        _without_tokens(final, init_state)
        return out, final
    rows = torch.empty_like(plan.rows_array)
    states, decay = torch.empty_like(plan.states), torch.empty_like(plan.decay)
    init = final if init_state is None else init_state
    skip = a if d is None else d

    launches = [plan.rows.launch((a, dt, rows))]
    if plan.segment_states is not None:
        launches.append(plan.segment_states.launch((x, b, rows, states, decay)))
    if plan.pass_states is not None:
        launches.append(plan.pass_states.launch((states, decay, init.unsqueeze(2), states)))
        # Float32 whatever init_state is, and read where there is one segment only.
        init = states[:, :, 0]
    arrays = (x, b, c, rows, skip, init, states, decay, out, final)
    launches.append(plan.compute_out.launch(arrays, {"out": out}))
    plan.run(launches, x.device)
    return out, final


# The public op calls this one where it has seen a form before.
mamba2_chunk_forward.by_form = by_form


@dataclass
class _Plan:
    """All that a call needs and that shapes, strides and dtypes decide.

    Its tensors are forms, see `memory_form`, to allocate the call's own after.
    """

    out: torch.Tensor | None = None
    final: torch.Tensor | None = None
    rows_array: torch.Tensor | None = None
    states: torch.Tensor | None = None
    decay: torch.Tensor | None = None
    # x, b or c must be copied first; nothing else is set then.
    copies: bool = False
    empty: bool = False
    rows: Step | None = None
    segment_states: Step | None = None
    pass_states: Step | None = None
    compute_out: Step | None = None
    seen: Seen = field(default_factory=lambda: Seen(repeats=True))

    def run(self, launches: Sequence[Launch], device: torch.device) -> None:
        run_plan(launches, device, OP, self.seen)


_plans: dict[tuple[Any, ...], _Plan] = Kept()


def _plan_of(form: Hashable, *tensors: torch.Tensor | None) -> _Plan:
    key = (form, precision_of(tensors[0].dtype), tuning.overridden())
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _make_plan(*tensors)
    return plan


def _make_plan(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt: torch.Tensor,
    init_state: torch.Tensor | None,
) -> _Plan:
    batch, tokens, heads, head_size = x.shape
    groups, state_size = b.shape[2:]
    if any(t.stride(-1) != 1 for t in (x, b, c)):
        return _Plan(copies=True)
    state_shape = (batch, heads, head_size, state_size)
    state_dtype = torch.float32 if init_state is None else init_state.dtype
    plan = _Plan(
        out=memory_form(x.shape, x.dtype, x.device),
        final=memory_form(state_shape, state_dtype, x.device),
        empty=batch * tokens == 0,
    )
    if plan.empty:
        return plan

    config = tuning.config_for(x, b)
    tile, p_tiles = config.tile_tokens, math.ceil(head_size / TILE_P)
    tiles_per_segment, segments = config.segments(tokens, heads * p_tiles)
    tiles = math.ceil(tokens / tile)
    rows_shape = (4, batch, heads, pad_count(tiles), tile)
    states_shape = (batch, heads, pad_count(segments), head_size, state_size)
    elements = max(math.prod(rows_shape), math.prod(states_shape), x.numel())
    wide = needs_wide((x, b, c, dt, init_state)) or elements >= INT32_REACH
    precision = precision_of(x.dtype)
    dims = (batch, heads, head_size, state_size)
    segment_tokens, heads_per_group = tiles_per_segment * tile, heads // groups

    plan.rows_array = memory_form(rows_shape, torch.float32, x.device)
    plan.rows = rows_step(batch, heads, tiles, config, wide)
    # The last segment's own state is nobody's entry state; compute_out writes the final one.
    steps = state_steps(
        dims,
        (segment_tokens, segments - 1, heads_per_group),
        (precision, False, init_state is not None, False),
        config,
        wide,
    )
    # compute_out reads entry states as float32: another dtype would be another compilation.
    converts = init_state is not None and init_state.dtype is not torch.float32
    passes = converts or segments > config.fold_segments
    if segments > 1:
        plan.segment_states = steps[0]
    if passes:
        plan.pass_states = steps[1]
    if not passes and segments == 1:
        # Not read, but of a form that compiles to the code of longer sequences.
        states_shape = states_shape[:3] + (smallest_like(head_size), smallest_like(state_size))
    plan.states = memory_form(states_shape, torch.float32, x.device)
    plan.decay = memory_form(states_shape[:3], torch.float32, x.device)
    entries = segments if passes else int(init_state is not None)
    plan.compute_out = out_step(
        dims,
        (segment_tokens, segments, heads_per_group, entries),
        precision,
        (False, d is not None, True, config.fold_segments > 1),
        config,
        wide,
    )
    return plan


def memory_form(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of one element's memory, of which `torch.empty_like` makes a contiguous one: 0.8 µs, where
    `torch.empty` takes 1.6 to read its arguments."""
    return _one_element(dtype, device).expand(shape)


@functools.cache
def _one_element(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(1, dtype=dtype, device=device)


def smallest_like(size: int) -> int:
    """A small size that divides by 16 and by 4 (16 bytes of floats) where `size` does, and is 1 where it
    is."""
    if size == 1 or size % 16 == 0:
        return min(size, 16)
    return max(math.gcd(size, 4), 2 + size % 2)


def pad_count(count: int) -> int:
    """`count` or a little more: a multiple of 4 and never of 16.

    Compiled code depends on whether a dimension divides by 16 and a stride by 16 bytes. Scratch dimensions
    that follow from T must not change that, or a new T would compile again.
    """
    padded = math.ceil(count / 4) * 4
    return padded if padded % 16 else padded + 4


def tile_of(state_size: int) -> int:
    """The tile that holds all of N: the next power of two."""
    return max(MIN_TILE_N, 1 << (state_size - 1).bit_length())


def precision_of(dtype: torch.dtype) -> int:
    """How operands that are computed in float32 enter products, for inputs of `dtype`."""
    if dtype is torch.bfloat16:
        return BF16
    highest = dtype is torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return TF32X3 if highest else TF32


def rows_step(batch: int, heads: int, tiles: int, config: tuning.ForwardConfig, wide: bool) -> Step:
    """`chunk_rows` for all tiles of L tokens."""
    kernel = hinted(_cumsum.chunk_rows, wide, (("occupancy", config.rows_occupancy),))
    grid = (batch * tiles * math.ceil(heads / config.rows_heads),)
    return Step(kernel, grid, (tiles, config.tile_tokens, config.rows_heads, bool(config.chained)))


def state_steps(
    dims: tuple[int, int, int, int],
    sizes: tuple[int, int, int],
    options: tuple[int, bool, bool, bool],
    config: tuning.ForwardConfig,
    wide: bool,
) -> tuple[Step, Step]:
    """`segment_states` and `pass_states`.

    dims: (B, H, P, N); sizes: (tokens a segment, segments, heads a group); options: (precision, segments cut
    anywhere, there is an initial state, the last state is the final one).
    """
    batch, heads, head_size, state_size = dims
    precision, sliced, has_init, to_final = options
    _, segments, _ = sizes
    tile_n = min(tile_of(state_size), config.state_tile_n)
    n_tiles = math.ceil(state_size / tile_n)
    hints = (("occupancy", config.state_occupancy), ("num_worker_warps", config.state_warps))
    segment_states = Step(
        hinted(_states.segment_states, wide, hints),
        (batch * segments * math.ceil(head_size / TILE_P) * heads, n_tiles),
        (
            sizes,
            config.tile_tokens,
            TILE_P,
            tile_n,
            precision,
            (sliced, bool(config.chained)),
            config.state_latency,
        ),
        bool(config.chained),
    )
    pass_states = Step(
        hinted(_states.pass_states, wide, (("occupancy", config.pass_occupancy),)),
        (batch * math.ceil(head_size / config.pass_tile_p) * heads, n_tiles),
        (segments, config.pass_tile_p, tile_n, (has_init, to_final), PASS_AT_ONCE, config.pass_latency),
    )
    return segment_states, pass_states


def out_step(
    dims: tuple[int, int, int, int],
    sizes: tuple[int, int, int, int],
    precision: int,
    flags: tuple[bool, bool, bool, bool],
    config: tuning.ForwardConfig,
    wide: bool,
) -> Step:
    """`compute_out`; dims as in `state_steps`, sizes as in the kernel, flags too but for the last."""
    batch, heads, head_size, state_size = dims
    segments = sizes[1]
    tile_n = min(tile_of(state_size), config.out_tile_n)
    hints = (("occupancy", config.out_occupancy), ("num_worker_warps", config.out_warps))
    return Step(
        hinted(_out.compute_out, wide, hints),
        (batch * segments * math.ceil(head_size / TILE_P) * heads,),
        (
            sizes,
            config.tile_tokens,
            TILE_P,
            tile_n,
            math.ceil(state_size / tile_n),
            precision,
            (*flags, bool(config.chained)),
            config.out_latency,
            config.out_store_latency,
        ),
        bool(config.chained),
    )


def last_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it if its last dimension is not contiguous."""
    # Not `contiguous`: what has no element, or one in its last dimension, counts as that at any stride.
    return tensor if tensor.stride(-1) == 1 else tensor.clone(memory_format=torch.contiguous_format)


def _without_tokens(final: torch.Tensor, init_state: torch.Tensor | None) -> None:
    if init_state is None:
        final.zero_()
    else:
        final.copy_(init_state)


# ---- the published kernels on their own


def chunk_cumsum(a: torch.Tensor, dt: torch.Tensor, *, chunk_size: int) -> torch.Tensor:
    """The decay of every token since the start of its chunk, in log2: the sum of a·dt·log2(e), inclusive.

    a (H,), natural-log rate, ≤ 0; dt (B, T, H), ≥ 0; float32, bfloat16 or float16. The sum starts anew every
    `chunk_size` tokens. Returns decay_log2 (B, H, T), float32, never rising within a chunk.
    """
    batch, tokens, heads = dt.shape
    decay_log2 = torch.empty((batch, heads, tokens), dtype=torch.float32, device=dt.device)
    if decay_log2.numel() == 0:
        return decay_log2
    config = tuning.ForwardConfig()
    chunks = math.ceil(tokens / chunk_size)
    kernel = hinted(_cumsum.chunk_cumsum, needs_wide((dt, decay_log2)))
    step = Step(
        kernel,
        (batch * chunks * math.ceil(heads / config.rows_heads),),
        (chunks, chunk_size, config.tile_tokens, config.rows_heads),
    )
    _run_alone([step.launch((a, dt, decay_log2), {"decay_log2": decay_log2})], dt.device)
    return decay_log2


def fwd_pass_state(
    x: torch.Tensor,
    b: torch.Tensor,
    dt: torch.Tensor,
    decay_log2: torch.Tensor,
    init_state: torch.Tensor | None,
    *,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state at the entry of every chunk, and after the last token.

    x (B, T, H, P), b (B, T, G, N) of one dtype; dt (B, T, H); decay_log2 (B, H, T) as from `chunk_cumsum`
    with this chunk_size; init_state (B, H, P, N) or None (zeros). Returns entry_states
    (B, H, ceil(T / chunk_size), P, N) in float32 and final_state (B, H, P, N) in init_state's dtype, else
    float32.
    """
    x, b = last_contiguous(x), last_contiguous(b)
    batch, tokens, heads, head_size = x.shape
    groups, state_size = b.shape[2:]
    chunks = math.ceil(tokens / chunk_size)
    states = torch.empty((batch, heads, chunks, head_size, state_size), dtype=torch.float32, device=x.device)
    final_dtype = torch.float32 if init_state is None else init_state.dtype
    final = torch.empty((batch, heads, head_size, state_size), dtype=final_dtype, device=x.device)
    if states.numel() == 0:
        _without_tokens(final, init_state)
        return states, final
    config = tuning.config_for(x, b)
    rows, make_rows = _rows_of(decay_log2, dt, chunk_size, config)
    decay = torch.empty(states.shape[:3], dtype=torch.float32, device=x.device)
    segment_states, pass_states = state_steps(
        (batch, heads, head_size, state_size),
        (chunk_size, chunks, heads // groups),
        (precision_of(x.dtype), chunk_size % config.tile_tokens != 0, init_state is not None, True),
        config,
        needs_wide((x, b, rows, states)),
    )
    final_view = final.unsqueeze(2)
    init_view = final_view if init_state is None else init_state.unsqueeze(2)
    launches = [
        make_rows,
        segment_states.launch((x, b, rows, states, decay), {"local_states": states}),
        pass_states.launch((states, decay, init_view, final_view), {"final_state": final}),
    ]
    _run_alone(launches, x.device)
    return states, final


def compute_out(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt: torch.Tensor,
    decay_log2: torch.Tensor,
    entry_states: torch.Tensor,
    *,
    chunk_size: int,
) -> torch.Tensor:
    """The outputs (B, T, H, P) in x's dtype, from the state at the entry of every chunk.

    x (B, T, H, P), b and c (B, T, G, N) of one dtype; d (H,) or None; dt (B, T, H); decay_log2 (B, H, T) as
    from `chunk_cumsum` and entry_states (B, H, ceil(T / chunk_size), P, N) as from `fwd_pass_state`, with
    this chunk_size.
    """
    x, b, c = last_contiguous(x), last_contiguous(b), last_contiguous(c)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    batch, _, heads, head_size = x.shape
    groups, state_size = b.shape[2:]
    config = tuning.config_for(x, b)
    rows, make_rows = _rows_of(decay_log2, dt, chunk_size, config)
    step = out_step(
        (batch, heads, head_size, state_size),
        (chunk_size, entry_states.shape[2], heads // groups, entry_states.shape[2]),
        precision_of(x.dtype),
        (chunk_size % config.tile_tokens != 0, d is not None, False, False),
        config,
        needs_wide((x, b, c, rows, entry_states)),
    )
    skip = dt[0, 0] if d is None else d
    decay = rows[0, :, :, 0, :4]
    first = entry_states[:, :, 0]
    arrays = (x, b, c, rows, skip, first, entry_states, decay, out, first)
    _run_alone([make_rows, step.launch(arrays, {"out": out})], x.device)
    return out


def _rows_of(
    decay_log2: torch.Tensor, dt: torch.Tensor, chunk_size: int, config: tuning.ForwardConfig
) -> tuple[torch.Tensor, Launch]:
    batch, tokens, heads = dt.shape
    tile = config.tile_tokens
    tiles = math.ceil(tokens / chunk_size) * math.ceil(chunk_size / tile)
    rows = torch.empty((4, batch, heads, tiles, tile), dtype=torch.float32, device=dt.device)
    step = Step(
        hinted(_cumsum.rows_of_decay, needs_wide((dt, decay_log2, rows))),
        (batch * tiles * math.ceil(heads / config.rows_heads),),
        (tiles, chunk_size, tile, config.rows_heads),
    )
    return rows, step.launch((decay_log2, dt, rows))


def _run_alone(launches: Sequence[Launch], device: torch.device) -> None:
    run_plan(launches, device, OP, Seen())
