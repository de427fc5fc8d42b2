"""The backward of the full scan on the cutile backend: allocates, lays out the launches, runs them. No maths.

`mamba2_chunk_scan_backward` is the backward of `backward.py` with a little more before and after it:

    packed_table or padded_table, tiles_of_slots      ragged sequences: where segments and tiles are
    scan_rows                                         dt's way to what is used, on top of `chunk_rows`
    the forward's kernels for states at borders       with a gate, and for ragged sequences
    scan_out                                          with a gate: dy and dz, from outputs computed again
    … all that `mamba2_chunk_backward` launches, with dy for dout
    skip_parts, sum_skip                              dd of a d (H, P)
    zero_padding                                      ragged sequences: the gradients of tokens in none

No length is read on the host. Copies and scratch are those of the bare backward, with a gate also dy in x's
dtype. A sequence's gradients depend on no other one's values.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilegym_mamba2.forms import Kept, forms_of
from tilegym_mamba2.options import ScanOptions

from . import scan_config, tuning
from .aligned import must_copy, through_copies
from .backward import Run, readable, without_tokens
from .backward_config import BackwardConfig
from .backward_plan import NO_SKIP, SKIP_PER_CHANNEL, SKIP_PER_HEAD, Builder, Plan, Problem, make_plan
from .forward import TILE_P, last_contiguous, pad_count, precision_of, state_steps, tile_of
from .kernels import bwd_ragged as _ragged
from .kernels import bwd_skip as _skip
from .kernels.scan_out import GATE_GRADIENTS
from .launch import Launch, Step, hinted
from .ragged import table_arrays
from .scan import ScanSteps, in_strips, strip_of, supports
from .scan_config import ScanConfig

__all__ = ["DIFFERENTIABLE", "mamba2_chunk_scan_backward", "supports"]

OP = "mamba2_chunk_scan_backward"
# Its results carry no graph: a second derivative is an error, which autograd.py raises.
DIFFERENTIABLE = False

Optional = torch.Tensor | None
_INPUTS = ("x", "dt", "a", "b", "c", "d", "z", "dt_bias", "init_state")
_TABLES = ("table", "sequences", "carried")
# A block of 64 tiles, and as many slots that it compares them with at a time.
_TILE_TILES, _TILE_SLOTS = 64, 64


def mamba2_chunk_scan_backward(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: Optional,
    z: Optional,
    dt_bias: Optional,
    init_state: Optional,
    cu_seqlens: Optional,
    seq_lens: Optional,
    dout: Optional,
    dfinal_state: Optional,
    options: ScanOptions,
    needed: tuple[bool, ...] = (True,) * len(_INPUTS),
) -> tuple[Optional, ...]:
    """Gradients of sum(out * dout) + sum(final_state * dfinal_state), by the kernels; None is a zero one.

    Returns dx, ddt, da, db, dc, dd, dz, ddt_bias, dinit_state, each with its input's shape and dtype; None
    where the input is None or the gradient is not `needed`. Tokens in no sequence have zero gradients.
    float32 inputs follow `torch.get_float32_matmul_precision()`. Raises RuntimeError inside CUDA graph
    capture if a kernel is not compiled yet.
    """
    tensors = (x, dt, a, b, c, d, z, dt_bias, init_state)
    needed = tuple(n and t is not None for n, t in zip(needed, tensors, strict=True))
    if not any(needed):
        return (None,) * len(_INPUTS)
    x, b, c = last_contiguous(x), last_contiguous(b), last_contiguous(c)
    silent = dout is None
    if silent:
        # Nothing comes back through the gate, whatever it is.
        dout, gate = torch.zeros_like(x, memory_format=torch.contiguous_format), None
    else:
        dout, gate = readable(dout), None if z is None else last_contiguous(z)
    lengths = seq_lens if cu_seqlens is None else cu_seqlens
    inputs = dict(zip(_INPUTS, (x, dt, a, b, c, d, gate, dt_bias, init_state), strict=True))
    plan = _plan_of(inputs, dout, dfinal_state, lengths, cu_seqlens is not None, options, needed)
    if plan.empty:
        return without_tokens(needed, dict(zip(_INPUTS, tensors, strict=True)), dfinal_state)
    if plan.copies:
        given = (x, dt, a, b, c, d, z, dt_bias, init_state)
        call = lambda copies, dout, dfinal: mamba2_chunk_scan_backward(  # noqa: E731
            *copies, cu_seqlens, seq_lens, dout, dfinal, options, needed
        )
        return through_copies(_INPUTS, given, None if silent else dout, dfinal_state, call)
    names = {name for name, need in zip(_INPUTS, needed, strict=True) if need}
    run = _Run(plan, names, inputs, dout, dfinal_state, lengths)
    plan.run(run.launches(), x.device, OP)
    if silent and needed[6]:
        run.results["z"] = torch.zeros(z.shape, dtype=z.dtype, device=z.device)
    return tuple(run.results[name] if n else None for name, n in zip(_INPUTS, needed, strict=True))


@dataclass
class _Plan(Plan):
    """As `Plan`, with the steps that only the scan has."""

    table: Step | None = None
    tiles: Step | None = None
    local: Step | None = None
    passing: Step | None = None
    gate: Step | None = None
    skip_parts: Step | None = None
    sum_skip: Step | None = None
    zero_padding: Step | None = None


class _Run(Run):
    """One call: its tensors, and its launches in order."""

    def __init__(
        self,
        plan: _Plan,
        needed: set[str],
        inputs: dict[str, Optional],
        dout: torch.Tensor,
        dfinal_state: Optional,
        lengths: Optional,
    ) -> None:
        super().__init__(
            plan, needed | ({"z"} if plan.gate is not None else set()), inputs, dout, dfinal_state
        )
        self.lengths = lengths
        if inputs["dt_bias"] is not None:
            self.dt_bias = inputs["dt_bias"]
        init = self.a if self.init_state is None else self.init_state
        self.ends = (init, self.a if dfinal_state is None else dfinal_state)
        if plan.ragged is not None:
            self.tables = tuple(self.scratch.empty(name, torch.int32) for name in _TABLES)
            self.table, _, self.carried = self.tables
            self.tiles = self.scratch.empty("of_tiles", torch.int32)

    def prepare(self) -> list[Launch]:
        plan, scratch = self.plan, self.scratch
        ragged = plan.ragged is not None
        launches = []
        if ragged:
            launches.append(plan.table.launch(table_arrays(self.lengths, self.tables)))
            launches.append(plan.tiles.launch((self.table, self.tiles)))
        if plan.rows is not None:
            launches.append(plan.rows.launch((self.a, self.dt, self.dt_bias, self.table, scratch.rows)))
        if plan.passing is not None:
            places = (self.table, self.carried) if ragged else ()
            states, decay = scratch.entries, scratch.empty("segment_decay")
            if plan.local is not None:
                launches.append(plan.local.launch((self.x, self.b, scratch.rows, *places, states, decay)))
            if ragged:
                launches.append(plan.passing.launch((states, decay, *places, self.ends[0])))
            else:
                init = states if self.init_state is None else self.init_state.unsqueeze(2)
                launches.append(plan.passing.launch((states, decay, init, states)))
        if plan.gate is not None:
            launches.append(self._through_the_gate())
        return launches

    def _through_the_gate(self) -> Launch:
        """From the gradient of what it gave to that of what it got."""
        dy, dz = torch.empty(self.x.shape, dtype=self.x.dtype, device=self.x.device), self.results["z"]
        skip = self.a if self.d is None else self.d
        strip = strip_of(self.x)
        z, dout = in_strips(self.inputs["z"], strip), in_strips(self.dout, strip)
        tokens = (self.x, self.b, self.c, z, dout, self.scratch.rows)
        states = (self.ends[0], self.scratch.entries, self.table)
        launch = self.plan.gate.launch((*tokens, skip, *states, dy, dz, self.a), {"dy": dy, "dz": dz})
        self.dout = dy
        return launch

    def finish(self) -> list[Launch]:
        plan, results, launches = self.plan, self.results, []
        if plan.skip_parts is not None:
            partial = self.scratch.empty("skip_parts")
            launches.append(plan.skip_parts.launch((self.x, self.dout, self.tiles, partial)))
            launches.append(plan.sum_skip.launch((partial, results["d"]), {"dd": results["d"]}))
        if plan.zero_padding is not None:
            dx, ddt = results.get("x", self.x), results.get("dt", self.dt)
            db, dc = results.get("b", self.b), results.get("c", self.c)
            launches.append(plan.zero_padding.launch((self.table, dx, db, dc, ddt)))
        return launches


_plans: dict[tuple[Any, ...], _Plan] = Kept()


def _plan_of(
    inputs: dict[str, Optional],
    dout: torch.Tensor,
    dfinal_state: Optional,
    lengths: Optional,
    packed: bool,
    options: ScanOptions,
    needed: tuple[bool, ...],
) -> _Plan:
    x = inputs["x"]
    key = (
        forms_of((*inputs.values(), dout, dfinal_state, lengths)),
        packed,
        # What else they say, a gradient does not depend on.
        options.dt_softplus,
        options.dt_limit,
        needed,
        x.device,
        precision_of(x.dtype),
        tuning.overridden(),
        scan_config.overridden(),
        BackwardConfig.overridden(),
    )
    plan = _plans.get(key)
    if plan is None:
        tensors = inputs | {"dout": dout, "dfinal_state": dfinal_state}
        plan = _plans[key] = _make_plan(tensors, lengths, packed, options, needed)
    return plan


def _make_plan(
    tensors: dict[str, Optional],
    lengths: Optional,
    packed: bool,
    options: ScanOptions,
    needed: tuple[bool, ...],
) -> _Plan:
    x, d, dt_bias = tensors["x"], tensors["d"], tensors["dt_bias"]
    if x.shape[0] * x.shape[1] == 0:
        return _Plan(empty=True)
    gate = () if tensors["z"] is None else (tensors["z"],)
    if must_copy((x, tensors["b"], tensors["c"], tensors["dout"], *gate)):
        return _Plan(empty=False, copies=True)
    skip = NO_SKIP
    if d is not None:
        skip = SKIP_PER_HEAD if d.ndim == 1 else SKIP_PER_CHANNEL
    problem = Problem(
        frozenset(name for name, need in zip(_INPUTS, needed, strict=True) if need),
        skip,
        tensors["init_state"] is not None,
        tensors["dfinal_state"] is not None,
        (dt_bias is not None, options.dt_softplus, *map(float, options.dt_limit)),
        lengths.shape[0] - 1 if packed else None,
        lengths is not None and not packed,
        tensors["z"] is not None,
    )
    plan = _Plan(empty=False)
    builder = make_plan(problem, tensors, plan)
    _Steps(problem, plan, builder, tensors, options).add()
    return plan


@dataclass(frozen=True)
class _Steps:
    """Adds to a plan what only the scan has."""

    problem: Problem
    plan: _Plan
    builder: Builder
    tensors: dict[str, Optional]
    options: ScanOptions

    def add(self) -> None:
        problem, plan, builder = self.problem, self.plan, self.builder
        skips = problem.skip == SKIP_PER_CHANNEL and "d" in problem.needed
        gated = problem.given_entries and (problem.walks or skips or "z" in problem.needed)
        if plan.ragged is not None:
            plan.table = plan.ragged.step()
            tables = plan.ragged.tables(torch.device("meta"))
            plan.shapes |= {name: table.shape for name, table in zip(_TABLES, tables, strict=True)}
            plan.shapes["of_tiles"] = (pad_count(builder.tiles), 4)
            plan.tiles = Step(
                hinted(_ragged.tiles_of_slots),
                (math.ceil(pad_count(builder.tiles) / _TILE_TILES),),
                (plan.ragged.slots, builder.config.tile_tokens, _TILE_TILES, _TILE_SLOTS),
            )
            if plan.finish_dt is not None or plan.for_groups:
                plan.zero_padding = self._zero_padding()
        if problem.walks or gated:
            self._add_states(gated)
        if skips:
            self._add_skip()

    def _add_states(self, gated: bool) -> None:
        problem, plan, builder = self.problem, self.plan, self.builder
        batch, tokens, heads, _ = self.tensors["x"].shape
        ragged, per_segment = problem.ragged, builder.tiles_per_segment
        tile = builder.config.tile_tokens
        config = replace(builder.forward, chained=False)
        tensors = tuple(self.tensors[name] for name in _INPUTS)
        steps = ScanSteps(
            tensors, self.options, config, scan_config.overridden() or ScanConfig(), builder.wide
        )
        blocks, tiles = (builder.segments, per_segment) if ragged else (batch, math.ceil(tokens / tile))
        plan.rows = steps.rows_step(blocks, tiles, ragged)
        segments = 1 if ragged else builder.segments
        if ragged and plan.ragged.carried and (gated or plan.entries):
            plan.local = steps.carried_step(plan.ragged.carried, False)
            plan.passing = steps.passing_step(plan.ragged.carried)
        if gated and not ragged:
            plan.local, plan.passing = state_steps(
                (batch, *builder.dims[1:]),
                # The last segment's own state is nobody's entry state.
                (per_segment * tile, segments - 1, builder.heads_per_group),
                (builder.precision, False, problem.has_init, False),
                config,
                builder.wide,
            )
            if segments == 1:
                plan.local = None
        if gated:
            sizes = (per_segment * tile, segments, builder.heads_per_group)
            plan.gate = steps.out_step(blocks, sizes, ragged, GATE_GRADIENTS)

    def _add_skip(self) -> None:
        plan, builder = self.plan, self.builder
        config, p_tiles = builder.config, builder.p_tiles
        tiles = builder.batch * builder.tiles
        parts = math.ceil(tiles / config.skip_tiles)
        plan.shapes["skip_parts"] = (parts, builder.heads, builder.head_size)
        sizes = (tiles, builder.tiles, config.skip_tiles)
        plan.skip_parts = Step(
            hinted(_skip.skip_parts, builder.wide),
            (parts * p_tiles * builder.heads,),
            (*sizes, config.tile_tokens, TILE_P, builder.ragged, config.skip_latency),
        )
        plan.sum_skip = Step(
            hinted(_skip.sum_skip, builder.wide), (p_tiles * builder.heads,), (config.skip_sum_tile, TILE_P)
        )

    def _zero_padding(self) -> Step:
        plan, builder = self.plan, self.builder
        config = builder.config
        tile_n = min(tile_of(builder.state_size), config.state_tile_n)
        flags = (plan.finish_dt is not None, plan.for_groups)
        return Step(
            hinted(_ragged.zero_padding, builder.wide),
            (plan.ragged.slots * builder.p_tiles * builder.heads,),
            (builder.heads_per_group, config.tile_tokens, TILE_P, tile_n, config.rows_heads, flags),
        )
