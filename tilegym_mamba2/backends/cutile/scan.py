"""The full scan of the cutile backend: allocates, lays out the launches, runs them. No maths.

Sequences of one length, which is everybody's without cu_seqlens and seq_lens, are cut as the forward cuts
them, with the forward's kernels for the states:

    scan_rows        what dt and the decay contribute, per token
    segment_states, pass_states
    scan_out         outputs, gate and final state

Ragged ones are cut where a table made on the device says, see `kernels.scan_table`:

    packed_table or padded_table
    scan_rows
    carried_states, pass_carried    only what has a successor in its sequence
    scan_out

Chunk states take the table, rows and states once more, with the caller's chunks for segments. What follows
from shapes, strides and dtypes alone is worked out once, in a `_Plan`. Scratch: 16 bytes a token and head,
and a float32 state (P, N) for every segment that another follows.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tilegym_mamba2.forms import Kept, forms_of
from tilegym_mamba2.options import ScanOptions

from . import scan_config, tuning
from .forward import (
    PASS_AT_ONCE,
    TILE_P,
    last_contiguous,
    memory_form,
    pad_count,
    precision_of,
    smallest_like,
    state_steps,
    tile_of,
)
from .kernels import scan_out as _out
from .kernels import scan_rows as _rows
from .kernels import scan_states as _states
from .launch import INT32_REACH, Launch, Seen, Step, hinted, needs_wide, refuse_float64, run_plan
from .ragged import Ragged, table_arrays
from .scan_config import ScanConfig

__all__ = ["ScanSteps", "mamba2_chunk_scan", "supports"]

OP = "mamba2_chunk_scan"
# Channels of a strip, the best first; see `load_transposed`. 16 bytes where P is no multiple of 16.
_STRIPS = (16, 8)

_X_DTYPES = frozenset((torch.bfloat16, torch.float16, torch.float32))
_OK = (True, "")
_TENSORS = ("x", "dt", "a", "b", "c", "d", "z", "dt_bias", "init_state", "cu_seqlens", "seq_lens")
# The forward's, and with the last two the backward's.
_ARGUMENTS = (*_TENSORS, "dout", "dfinal_state")


def supports(op_name: str, x: torch.Tensor, *others: Any) -> tuple[bool, str]:
    """Whether the kernels take these arguments. Raises TypeError for float64: a GPU has no fast products in
    it."""
    wide = x.dtype not in _X_DTYPES
    for other in others:
        if isinstance(other, torch.Tensor):
            wide = wide or other.dtype is torch.float64
        elif isinstance(other, ScanOptions):
            wide = wide or other.state_dtype is torch.float64
    if wide:
        refuse_float64(op_name, _ARGUMENTS, (x, *others))
    return _OK


def mamba2_chunk_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    init_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    options: ScanOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """As `tilegym_mamba2.mamba2_chunk_scan`, by the kernels; chunk_size is followed for chunk states alone.

    float32 inputs follow `torch.get_float32_matmul_precision()`: three tf32 products at "highest", one
    otherwise. Returns out, final_state, chunk_states and chunk_offsets; the latter two None where chunk
    states are not wanted, offsets also where nothing is packed. Raises RuntimeError inside CUDA graph capture
    if a kernel is not compiled yet.
    """
    tensors = (x, dt, a, b, c, d, z, dt_bias, init_state, cu_seqlens, seq_lens)
    plan = _plan_of(tensors, options)
    if plan.copies:
        x, b, c, z = (None if t is None else last_contiguous(t) for t in (x, b, c, z))
        return mamba2_chunk_scan(x, dt, a, b, c, d, z, dt_bias, init_state, cu_seqlens, seq_lens, options)
    out, final = torch.empty_like(plan.out), torch.empty_like(plan.final)
    if plan.empty:
        return _without_tokens(plan, out, final, init_state)
    lengths = seq_lens if cu_seqlens is None else cu_seqlens
    bias = a if dt_bias is None else dt_bias
    init = final if init_state is None else init_state
    skip = a if d is None else d
    # Not read where there is none.
    gate = x if z is None else in_strips(z, plan.strip)

    rows = torch.empty_like(plan.rows_array)
    states, decay = torch.empty_like(plan.states), torch.empty_like(plan.decay)
    launches: list[Launch] = []
    if plan.ragged is None:
        table = plan.no_table
        launches.append(plan.rows.launch((a, dt, bias, table, rows)))
        if plan.local is not None:
            launches.append(plan.local.launch((x, b, rows, states, decay)))
            launches.append(plan.passing.launch((states, decay, init.unsqueeze(2), states)))
    else:
        tables = plan.ragged.tables(x.device)
        table, _, carried = tables
        launches.append(plan.table.launch(table_arrays(lengths, tables)))
        launches.append(plan.rows.launch((a, dt, bias, table, rows)))
        if plan.local is not None:
            launches.append(plan.local.launch((x, b, rows, table, carried, states, decay)))
            launches.append(plan.passing.launch((states, decay, table, carried, init)))
    arrays = (x, b, c, gate, gate, rows, skip, init, states, table, out, out, final)
    launches.append(plan.scan_out.launch(arrays, {"out": out, "final_state": final}))
    chunk_states = chunk_offsets = None
    if plan.chunk_states is not None and plan.chunks is None:
        chunk_states, chunk_offsets = plan.no_chunks()
    if plan.chunks is not None:
        chunk_states, chunk_offsets = plan.chunks.enqueue(launches, (x, dt, a, b, bias, lengths, init, final))
    run_plan(launches, x.device, OP, plan.seen)
    if chunk_states is not None:
        chunk_states = chunk_states.to(options.state_dtype)
    return out, final, chunk_states, chunk_offsets


@dataclass
class _Chunks:
    """The launches that make the chunk states."""

    ragged: Ragged
    table: Step
    rows_array: torch.Tensor
    states: torch.Tensor
    decay: torch.Tensor
    rows: Step
    local: Step
    passing: Step

    def enqueue(
        self, launches: list[Launch], arrays: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """chunk_states (B, H, chunks, P, N) in float32, and chunk_offsets where sequences are packed."""
        x, dt, a, b, bias, lengths, init, final = arrays
        ragged = self.ragged
        tables = ragged.tables(x.device)
        table, sequences, carried = tables
        rows = torch.empty_like(self.rows_array)
        states, decay = torch.empty_like(self.states), torch.empty_like(self.decay)
        launches.append(self.table.launch(table_arrays(lengths, tables)))
        launches.append(self.rows.launch((a, dt, bias, table, rows)))
        launches.append(self.local.launch((x, b, rows, table, carried, states, decay)))
        launches.append(self.passing.launch((states, decay, table, sequences, init, final)))
        states = states[:, :, : ragged.slots]
        if ragged.sequences is not None:
            return states, sequences[: ragged.sequences + 1, 0]
        return states[0].unflatten(1, (ragged.batch, -1)).transpose(0, 1), None


@dataclass
class _Plan:
    """All that a call needs and that shapes, strides, dtypes and options decide.

    Its tensors are forms, see `forward.memory_form`, to allocate the call's own after.
    """

    out: torch.Tensor | None = None
    final: torch.Tensor | None = None
    chunk_states: torch.Tensor | None = None
    rows_array: torch.Tensor | None = None
    states: torch.Tensor | None = None
    decay: torch.Tensor | None = None
    # Stands in for the table where there is none; nobody reads it.
    no_table: torch.Tensor | None = None
    packed: bool = False
    # Of z, see `in_strips`.
    strip: int = 0
    # x, b, c or z must be copied first; nothing else is set then.
    copies: bool = False
    empty: bool = False
    ragged: Ragged | None = None
    table: Step | None = None
    rows: Step | None = None
    local: Step | None = None
    passing: Step | None = None
    scan_out: Step | None = None
    chunks: _Chunks | None = None
    seen: Seen = field(default_factory=lambda: Seen(repeats=True))

    def no_chunks(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """chunk_states and chunk_offsets where no sequence has a token."""
        if self.chunk_states is None:
            return None, None
        offsets = None
        if self.packed:
            offsets = torch.zeros(self.final.shape[0] + 1, dtype=torch.int32, device=self.final.device)
        return torch.zeros_like(self.chunk_states, memory_format=torch.contiguous_format), offsets


_plans: dict[tuple[Any, ...], _Plan] = Kept()


def _plan_of(tensors: tuple[torch.Tensor | None, ...], options: ScanOptions) -> _Plan:
    x = tensors[0]
    key = (
        forms_of(tensors),
        options,
        x.device,
        precision_of(x.dtype),
        tuning.overridden(),
        scan_config.overridden(),
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _make_plan(tensors, options)
    return plan


def _make_plan(tensors: tuple[torch.Tensor | None, ...], options: ScanOptions) -> _Plan:
    x, dt, _, b, c, d, z, dt_bias, init_state, cu_seqlens, seq_lens = tensors
    if any(t is not None and t.stride(-1) != 1 for t in (x, b, c, z)):
        return _Plan(copies=True)
    batch, tokens, heads, head_size = x.shape
    groups, state_size = b.shape[2:]
    sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = (heads, head_size, state_size)
    device = x.device
    plan = _Plan(
        out=memory_form(x.shape, x.dtype, device),
        final=memory_form((batch if sequences is None else sequences, *state), options.state_dtype, device),
        packed=cu_seqlens is not None,
        empty=batch * tokens == 0,
    )
    config, scan = tuning.config_for(x, b), scan_config.overridden() or ScanConfig()
    # One chunk holds all tokens from T + 1 on, and T // chunk_size is 0 there.
    chunk = min(options.chunk_size, tokens + 1)
    chunks = Ragged(batch, tokens, sequences, seq_lens is not None, chunk, config.tile_tokens, False)
    if options.return_chunk_states:
        count = chunks.slots if sequences is not None else math.ceil(tokens / chunk)
        shape = (batch, heads, count, head_size, state_size)
        plan.chunk_states = memory_form(shape, options.state_dtype, device)
    if plan.empty:
        return plan
    plan.strip = strip_of(x)

    tile, p_tiles = config.tile_tokens, math.ceil(head_size / TILE_P)
    tiles = math.ceil(tokens / tile)
    if cu_seqlens is None and seq_lens is None:
        per_segment, segments = config.segments(tokens, heads * p_tiles)
        scratch, kept = (batch, heads, pad_count(tiles)), (batch, heads, pad_count(segments))
        if segments == 1:
            kept = None
    else:
        per_segment, segments = scan.segment_tiles(tiles, heads * p_tiles), 1
        per_segment = min(per_segment, tiles)
        plan.ragged = Ragged(batch, tokens, sequences, seq_lens is not None, per_segment * tile, tile)
        scratch, kept = (1, heads, pad_count(plan.ragged.tiles)), (1, heads, pad_count(plan.ragged.carried))
        if plan.ragged.carried == 0:
            kept = None
    problem = ScanSteps(tensors, options, config, scan, _is_wide(tensors, scratch, kept, tile))
    plan.rows_array = memory_form((4, *scratch, tile), torch.float32, device)
    # Not read without borders, but of a form that compiles to the code of longer sequences.
    small = (scratch[0], heads, 4, smallest_like(head_size), smallest_like(state_size))
    plan.states = memory_form(
        small if kept is None else (*kept, head_size, state_size), torch.float32, device
    )
    plan.decay = memory_form(plan.states.shape[:3], torch.float32, device)
    plan.no_table = memory_form((20, 8), torch.int32, device)
    if plan.ragged is None:
        plan.rows = problem.rows_step(batch, tiles, False)
        if kept is not None:
            plan.local, plan.passing = state_steps(
                (batch, *state),
                # The last segment's own state is nobody's entry state; scan_out writes the final one.
                (per_segment * tile, segments - 1, heads // groups),
                (precision_of(x.dtype), False, init_state is not None, False),
                config,
                problem.wide,
            )
        plan.scan_out = problem.out_step(batch, (per_segment * tile, segments, heads // groups), False)
    else:
        ragged = plan.ragged
        plan.table = ragged.step(bool(config.chained))
        plan.rows = problem.rows_step(ragged.slots, per_segment, True)
        if kept is not None:
            plan.local = problem.carried_step(ragged.carried, False)
            plan.passing = problem.passing_step(ragged.carried)
        plan.scan_out = problem.out_step(ragged.slots, (per_segment * tile, 1, heads // groups), True)
    if options.return_chunk_states and chunks.slots:
        plan.chunks = problem.chunks(chunks)
    return plan


def _is_wide(
    tensors: tuple[torch.Tensor | None, ...],
    scratch: tuple[int, ...],
    kept: tuple[int, ...] | None,
    tile: int,
) -> bool:
    """Whether anything reaches past what 32-bit indices reach."""
    x, b, init_state = tensors[0], tensors[3], tensors[8]
    state = x.shape[3] * b.shape[3]
    elements = [4 * math.prod(scratch) * tile, x.numel(), math.prod(kept or (0,)) * state]
    if init_state is not None:
        elements.append(init_state.numel())
    return needs_wide(tensors[:9]) or max(elements) >= INT32_REACH


@dataclass(frozen=True)
class ScanSteps:
    """Makes the steps of one problem, whose tensors are those of the op, in its order."""

    tensors: tuple[torch.Tensor | None, ...]
    options: ScanOptions
    config: tuning.ForwardConfig
    scan: ScanConfig
    wide: bool

    @property
    def chained(self) -> bool:
        return bool(self.config.chained)

    @property
    def has_init(self) -> bool:
        return self.tensors[8] is not None

    @property
    def heads(self) -> int:
        return self.tensors[0].shape[2]

    @property
    def p_tiles(self) -> int:
        return math.ceil(self.tensors[0].shape[3] / TILE_P)

    def rows_step(self, blocks: int, tiles: int, ragged: bool) -> Step:
        """`scan_rows` for so many rows or slots, of so many tiles each."""
        config, options = self.config, self.options
        occupancy = self.scan.rows_occupancy if ragged else config.rows_occupancy
        flags = (ragged, self.tensors[7] is not None, options.dt_softplus, self.chained)
        return Step(
            hinted(_rows.scan_rows, self.wide, (("occupancy", occupancy),)),
            (blocks * tiles * math.ceil(self.heads / config.rows_heads),),
            (*map(float, options.dt_limit), tiles, config.tile_tokens, config.rows_heads, flags),
            ragged and self.chained,
        )

    def _state_tiles(self) -> tuple[int, int]:
        state_size = self.tensors[3].shape[3]
        tile_n = min(tile_of(state_size), self.config.state_tile_n)
        return tile_n, math.ceil(state_size / tile_n)

    def carried_step(self, blocks: int, chunks: bool) -> Step:
        """`carried_states` for so many entries or slots."""
        config, (tile_n, n_tiles) = self.config, self._state_tiles()
        hints = (("occupancy", config.state_occupancy), ("num_worker_warps", config.state_warps))
        chained = self.chained and not chunks
        return Step(
            hinted(_states.carried_states, self.wide, hints),
            (blocks * self.p_tiles * self.heads, n_tiles),
            (
                self.heads // self.tensors[3].shape[2],
                config.tile_tokens,
                TILE_P,
                tile_n,
                precision_of(self.tensors[0].dtype),
                (chunks, chained),
                config.state_latency,
            ),
            chained,
        )

    def passing_step(self, blocks: int) -> Step:
        """`pass_carried` for so many entries."""
        tile_p, (tile_n, n_tiles) = self.scan.pass_tile_p, self._state_tiles()
        return Step(
            hinted(_states.pass_carried, self.wide, (("occupancy", self.config.pass_occupancy),)),
            (blocks * math.ceil(self.tensors[0].shape[3] / tile_p) * self.heads, n_tiles),
            (tile_p, tile_n, (self.has_init, self.chained), PASS_AT_ONCE, self.config.pass_latency),
            self.chained,
        )

    def out_step(
        self, blocks: int, sizes: tuple[int, int, int], ragged: bool, gate: int | None = None
    ) -> Step:
        """`scan_out` for so many rows or slots; sizes as in the kernel. gate: what it makes, by default
        outputs."""
        config, (_, _, _, _, _, d, z, *_) = self.config, self.tensors
        state_size = self.tensors[3].shape[3]
        tile_n = min(tile_of(state_size), config.out_tile_n)
        skip = _out.NO_SKIP
        if d is not None:
            skip = _out.SKIP_PER_HEAD if d.ndim == 1 else _out.SKIP_PER_CHANNEL
        if gate is None:
            gate = _out.NO_GATE if z is None else _out.GATE
        hints = (("occupancy", config.out_occupancy), ("num_worker_warps", config.out_warps))
        return Step(
            hinted(_out.scan_out, self.wide, hints),
            (blocks * sizes[1] * self.p_tiles * self.heads,),
            (
                sizes,
                config.tile_tokens,
                TILE_P,
                tile_n,
                math.ceil(state_size / tile_n),
                precision_of(self.tensors[0].dtype),
                (ragged, skip, gate, self.has_init, self.chained, strip_of(self.tensors[0])),
                (config.out_latency, self.scan.gate_latency, config.out_store_latency),
            ),
            self.chained,
        )

    def chunks(self, ragged: Ragged) -> _Chunks:
        x, b = self.tensors[0], self.tensors[3]
        shape = (1, self.heads, pad_count(ragged.slots), x.shape[3], b.shape[3])
        rows = (4, 1, self.heads, pad_count(ragged.tiles), ragged.tile)
        problem = self
        if max(math.prod(shape), math.prod(rows)) >= INT32_REACH:
            problem = replace(self, wide=True)
        sequences = ragged.batch if ragged.sequences is None else ragged.sequences
        tile_p, (tile_n, n_tiles) = self.scan.pass_tile_p, self._state_tiles()
        passing = Step(
            hinted(_states.pass_chunks, problem.wide, (("occupancy", self.config.pass_occupancy),)),
            (sequences * math.ceil(x.shape[3] / tile_p) * self.heads, n_tiles),
            (tile_p, tile_n, self.has_init, PASS_AT_ONCE, self.config.pass_latency),
        )
        return _Chunks(
            ragged,
            ragged.step(),
            memory_form(rows, torch.float32, x.device),
            memory_form(shape, torch.float32, x.device),
            memory_form(shape[:3], torch.float32, x.device),
            replace(problem.rows_step(ragged.slots, ragged.tiles_per_segment, True), chained=False),
            problem.carried_step(ragged.slots, True),
            passing,
        )


def strip_of(x: torch.Tensor) -> int:
    """Into strips of how many channels z and dout are cut for `scan_out`; 0: not cut."""
    if x.element_size() == 2:
        for strip in _STRIPS:
            if x.shape[3] % strip == 0:
                return strip
    return 0


def in_strips(tensor: torch.Tensor, strip: int) -> torch.Tensor:
    """(B, T, H, P) as (B, T, H, P / strip, strip), or (B, T, H, 1, P) for strip 0; see `load_transposed`."""
    return tensor.view(*tensor.shape[:3], -1, strip) if strip else tensor.unsqueeze(3)


def _without_tokens(
    plan: _Plan, out: torch.Tensor, final: torch.Tensor, init_state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    if init_state is None:
        final.zero_()
    else:
        final.copy_(init_state)
    return out, final, *plan.no_chunks()
