"""The backward op of the cutile backend: allocates, lays out the launches, runs them. No maths.

`mamba2_chunk_backward` launches, with S tiles of L tokens a segment:

    chunk_rows                         what the decay contributes, per token
    segment_borders, pass_borders      the state H at the entry of every segment, the gradient dH' at its exit
    then, for some segments at a time:
        tile_states                    H at the entry and dH' at the exit of every tile, or pair of tiles, and
                                       what their rounding to bfloat16 takes from da
        compute_dx                     dx, and sums per token
        compute_dbc                    db, dc, summed over the heads of a group
        compute_gradients              instead of the two, where a head's state is one tile
        compute_dx_side,               instead of the two beyond that, P 64 and bfloat16: entry states are
        compute_dbc_side               read once
    finish_dt, sum_heads               ddt; da, dd
    sum_parts                          db, dc, where a group's heads were cut in parts

States are computed again, not saved, and C Bᵀ never reaches memory. Every sum has a fixed order: the
gradients are the same bits in every run. Copies that are made: x, b, c or dout whose last dimension is not
contiguous, a dout that repeats elements, and all token arrays where the rows of one are no multiple of 16
bytes, see `aligned`. Scratch: two states (P, N) for every tile and head of the segments at hand, in bfloat16
for bfloat16 inputs, else float32 (at P 64, N 128 at most 537 MB, or 805 where that is enough for all segments
at once, however long the sequence; half of that in `compute_gradients` up to N 128 and in `bwd_sides`, which
but on sm_100 have them for every second tile); 36 bytes a token and head, 68 in `compute_gradients` and some
90 in `bwd_sides`; two float32 states a segment and head; and where a group of many heads is cut in parts, db
and dc in float32 for each part.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tilegym_mamba2.forms import Kept, forms_of

from . import tuning
from .aligned import must_copy, through_copies
from .backward_config import BackwardConfig
from .backward_plan import NO_SKIP, SKIP_PER_HEAD, Piece, Plan, Problem, make_plan
from .forward import last_contiguous, memory_form, precision_of, supports
from .launch import Lanes, Launch

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
    dout = readable(torch.zeros_like(x, memory_format=torch.contiguous_format) if dout is None else dout)
    x, b, c = last_contiguous(x), last_contiguous(b), last_contiguous(c)
    plan = _plan_of(x, a, b, c, d, dt, init_state, dout, dfinal_state, needed)
    inputs = dict(zip(_INPUTS, (x, a, b, c, d, dt, init_state), strict=True))
    if plan.empty:
        return without_tokens(needed, inputs, dfinal_state)
    if plan.copies:
        call = lambda copies, dout, dfinal: gradients(*copies, dout, dfinal, needed)  # noqa: E731
        return through_copies(_INPUTS, tuple(inputs.values()), dout, dfinal_state, call)
    names = {name for name, need in zip(_INPUTS, needed, strict=True) if need}
    run = Run(plan, names, inputs, dout, dfinal_state)
    plan.run(run.launches(), x.device, OP)
    return tuple(run.results.get(name) if n else None for name, n in zip(_INPUTS, needed, strict=True))


def readable(dout: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if its last dimension is not contiguous or it repeats elements."""
    dout = last_contiguous(dout)
    if any(stride == 0 and size > 1 for stride, size in zip(dout.stride(), dout.shape, strict=True)):
        return dout.contiguous()
    return dout


class Scratch:
    """The tensors between the kernels."""

    def __init__(self, plan: Plan, x: torch.Tensor) -> None:
        self._plan, self._device = plan, x.device
        self.rows = self.empty("rows")
        self.exits = self.empty("segments") if plan.pieces else self.rows
        # Of each lane, the states at entries and the gradients of those at exits.
        self.saved = [self._saved() for _ in range(plan.lanes)] if plan.pieces else []
        self.entries = self.empty("segments") if plan.keeps_entries else self.exits
        # Something must stand in for what is not wanted.
        self.cut_offs = self.empty("cut_offs") if plan.cuts_off else self.rows

    def _saved(self) -> tuple[torch.Tensor, torch.Tensor]:
        dexit_states = self.empty("tiles", self._plan.saved_dtype)
        entries = self.empty("tiles", self._plan.saved_dtype) if self._plan.entries else dexit_states
        return entries, dexit_states

    def empty(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        known = self._plan.forms.get(name)
        if known is None:
            known = self._plan.forms[name] = memory_form(self._plan.shapes[name], dtype, self._device)
        return torch.empty_like(known)


class Run:
    """One call: its tensors, and its launches in order."""

    def __init__(
        self,
        plan: Plan,
        needed: set[str],
        inputs: dict[str, Optional],
        dout: torch.Tensor,
        dfinal_state: Optional,
    ) -> None:
        """needed: names of those inputs whose gradients are wanted."""
        self.plan, self.inputs, self.dout, self.dfinal_state = plan, inputs, dout, dfinal_state
        self.x, self.a, self.b, self.c = inputs["x"], inputs["a"], inputs["b"], inputs["c"]
        self.d, self.dt, self.init_state = inputs["d"], inputs["dt"], inputs["init_state"]
        self.scratch = scratch = Scratch(plan, self.x)
        self.results: dict[str, torch.Tensor] = {}
        # What only ragged sequences have, and what is missing: something must stand in for it.
        self.table = self.carried = self.tiles = self.dt_bias = self.a
        self.ends = (self.a, self.a)
        names = set(needed)
        if plan.finish_dt is not None:
            names |= {"x", "a", "dt", "dt_bias"} | ({"d"} if plan.writes_dd else set())
            self.drows, self.overlap = scratch.empty("drows"), scratch.empty("overlap")
        if plan.for_groups:
            names |= {"b", "c"}
        if self.init_state is not None and plan.pieces:
            names.add("init_state")
        for name, like in inputs.items():
            if like is not None and name in names:
                self.results[name] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        self.db, self.dc = self.results.get("b"), self.results.get("c")
        if plan.sum_parts is not None:
            self.db, self.dc = scratch.empty("parts"), scratch.empty("parts")

    def prepare(self) -> list[Launch]:
        """What comes before the states."""
        return [self.plan.rows.launch((self.a, self.dt, self.scratch.rows))]

    def launches(self) -> list[Launch | Lanes]:
        plan, scratch, results = self.plan, self.scratch, self.results
        launches = self.prepare()
        if plan.pass_borders is not None:
            launches += self._borders()
        launches += self._pieces()
        if plan.finish_dt is not None:
            partial = scratch.empty("partial")
            sums = (scratch.rows, self.drows, self.overlap, results["dt"], partial)
            arrays = (self.a, self.dt, self.dt_bias, self.tiles, *sums)
            launches.append(plan.finish_dt.launch(arrays, self.written({"ddt": results["dt"]})))
            da = results["a"]
            dd = results["d"] if plan.writes_dd else da
            dbias = results.get("dt_bias", da)
            written = {"da": da, "dd": dd, "ddt_bias": dbias}
            cut_offs = scratch.cut_offs.view(1, self.a.shape[0], -1) if plan.cuts_off else partial
            arrays = (self.a, partial, cut_offs, da, dd, dbias)
            launches.append(plan.sum_heads.launch(arrays, written))
        if plan.sum_parts is not None:
            arrays = (self.db, self.dc, results["b"], results["c"])
            launches.append(plan.sum_parts.launch(arrays, {"db": results["b"], "dc": results["c"]}))
        return launches + self.finish()

    def finish(self) -> list[Launch]:
        """What comes after all else."""
        return []

    def written(self, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What a launch writes whole: the interpreter looks."""
        return {} if self.plan.ragged is not None else outputs

    def _borders(self) -> list[Launch]:
        plan, scratch = self.plan, self.scratch
        launches = []
        borders = (scratch.entries, scratch.exits)
        decays = (scratch.empty("segment_decay"), scratch.empty("segment_decay"))
        if plan.segment_borders is not None:
            tokens = (self.x, self.b, self.c, scratch.rows, self.dout)
            arrays = (*tokens, self.table, self.carried, *borders, *decays)
            launches.append(plan.segment_borders.launch(arrays))
        init_view = scratch.entries if self.init_state is None else self.init_state.unsqueeze(2)
        dfinal_view = scratch.exits if self.dfinal_state is None else self.dfinal_state.unsqueeze(2)
        arrays = (*borders, *decays, init_view, dfinal_view, self.table, self.carried)
        launches.append(plan.pass_borders.launch(arrays))
        return launches

    def _pieces(self) -> list[Launch | Lanes]:
        """The pieces need nothing of each other but the memory for their tiles' states."""
        lanes = [[] for _ in self.scratch.saved]
        # Of each lane, what its launches hand on.
        dscores = [(self.scratch.empty("dscores"),) if self.plan.in_sides else () for _ in lanes]
        for k, piece in enumerate(self.plan.pieces):
            lane = k % len(lanes)
            lanes[lane] += self._piece(piece, self.scratch.saved[lane], dscores[lane])
        return [Lanes(tuple(lanes))] if len(lanes) > 1 else [item for lane in lanes for item in lane]

    def _piece(
        self, piece: Piece, saved: tuple[torch.Tensor, torch.Tensor], dscores: tuple[torch.Tensor, ...]
    ) -> list[Launch]:
        plan, scratch, results = self.plan, self.scratch, self.results
        x, b, c, dout = (piece.of(t) for t in (self.x, self.b, self.c, self.dout))
        rows = piece.of(scratch.rows, 1)
        outputs = {}
        dinit_view = saved[1]
        if "init_state" in results:
            dinit = piece.of(results["init_state"])
            dinit_view = dinit.unsqueeze(2)
            if piece.tokens.start == 0:
                outputs["dinit_state"] = dinit
        borders = (piece.of(scratch.entries), piece.of(scratch.exits))
        arrays = (x, b, c, rows, dout, *borders, *self.ends, self.table, *saved, dinit_view)
        arrays += (piece.of(scratch.cut_offs, 1),)
        launches = [piece.tile_states.launch(arrays, self.written(outputs))]
        of_tokens, of_groups, tokens_written, groups_written = (), (), {}, {}
        if plan.finish_dt is not None:
            dx = piece.of(results["x"])
            # Those of `compute_dx` have their rows first.
            rows_first = int(not plan.in_shares)
            of_tokens = (dx, piece.of(self.drows, rows_first), piece.of(self.overlap))
            tokens_written = {"dx": dx}
        if plan.for_groups:
            of_groups = (piece.of(self.db), piece.of(self.dc))
            if plan.sum_parts is None:
                groups_written = dict(zip(("db", "dc"), of_groups, strict=True))
        skip = self.a if self.d is None else self.d
        places = (self.tiles, self.table)
        if piece.compute_gradients is not None:
            arrays = (x, b, c, rows, skip, dout, *saved, *places, *of_tokens, *of_groups)
            outputs = self.written(piece.written(tokens_written | groups_written))
            launches.append(piece.compute_gradients.launch(arrays, outputs))
        if piece.compute_dx_side is not None:
            arrays = (x, b, c, rows, skip, dout, saved[1], *places, *of_tokens, *dscores)
            outputs = self.written(piece.written(tokens_written))
            launches.append(piece.compute_dx_side.launch(arrays, outputs))
            arrays = (x, b, c, rows, dout, *saved, *places, *of_groups, *of_tokens[1:], *dscores)
            outputs = self.written(piece.written(groups_written))
            launches.append(piece.compute_dbc_side.launch(arrays, outputs))
        if piece.compute_dx is not None:
            arrays = (x, b, c, rows, skip, dout, *saved, *places, *of_tokens)
            launches.append(piece.compute_dx.launch(arrays, self.written(piece.written(tokens_written))))
        if piece.compute_dbc is not None:
            arrays = (x, b, c, rows, dout, *saved, *places, *of_groups)
            launches.append(piece.compute_dbc.launch(arrays, self.written(piece.written(groups_written))))
        return launches


def without_tokens(
    needed: Sequence[bool], inputs: dict[str, Optional], dfinal_state: Optional
) -> tuple[Optional, ...]:
    """The gradients where there is no token: zeros, but for the states, which are passed through."""
    results = [
        torch.zeros(t.shape, dtype=t.dtype, device=t.device) if n else None
        for n, t in zip(needed, inputs.values(), strict=True)
    ]
    if needed[-1] and dfinal_state is not None:
        results[-1].copy_(dfinal_state)
    return tuple(results)


_plans: dict[tuple[Any, ...], Plan] = Kept()


def _plan_of(*arguments: Any) -> Plan:
    *tensors, needed = arguments
    x = tensors[0]
    key = (
        forms_of(tensors),
        needed,
        x.device,
        precision_of(x.dtype),
        tuning.overridden(),
        BackwardConfig.overridden(),
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _make_plan(tensors, needed)
    return plan


def _make_plan(tensors: list[Optional], needed: tuple[bool, ...]) -> Plan:
    x, _, b, c, d, _, init_state, dout, dfinal_state = tensors
    if x.shape[0] * x.shape[1] == 0:
        return Plan(empty=True)
    if must_copy((x, b, c, dout)):
        return Plan(empty=False, copies=True)
    names = frozenset(name for name, need in zip(_INPUTS, needed, strict=True) if need)
    skip = NO_SKIP if d is None else SKIP_PER_HEAD
    problem = Problem(names, skip, init_state is not None, dfinal_state is not None)
    plan = Plan(empty=False)
    make_plan(problem, dict(zip((*_INPUTS, "dout", "dfinal_state"), tensors, strict=True)), plan)
    return plan
