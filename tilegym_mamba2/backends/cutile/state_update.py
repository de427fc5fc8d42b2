"""The decoding step of the cutile backend: one launch, laid out once for all calls of a form. No maths."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .kernels import state_update as _kernels
from .launch import Step, hinted, needs_wide, run_plan

__all__ = ["StateUpdateConfig", "mamba2_state_update", "override", "supports"]

OP = "mamba2_state_update"

_X_DTYPES = frozenset((torch.bfloat16, torch.float16, torch.float32))
_OK = (True, "")


@dataclass(frozen=True)
class StateUpdateConfig:
    """How the state is cut into blocks, and compiler hints. Only moves time, but for the order of a sum."""

    # Elements of the state that a block takes: large blocks share the reading of x, b and c.
    tile_elements: int = 8192
    # Smaller ones where a call has fewer blocks: B 1 must fill 132 multiprocessors too.
    min_blocks: int = 528
    # 8 halve what a thread holds: 60 registers at 8192 elements, with 4 it is 128.
    warps: int = 8
    occupancy: int = 4

    def tile_p(self, heads: int, head_size: int, tile_n: int, element_size: int) -> int:
        """Rows of the state that a block takes; `heads` counts those of all rows of the batch."""
        tile = max(1, min(_ceil_power(head_size), self.tile_elements // tile_n))
        # 16 bytes for every thread.
        smallest = max(1, 32 * self.warps * 16 // element_size // tile_n)
        # P 80 is five tiles of 16, and not two of 64.
        while tile > smallest and -head_size % tile * 8 > head_size:
            tile //= 2
        while tile > smallest and heads * -(-head_size // tile) < self.min_blocks:
            tile //= 2
        return tile

    def hints(self, state: torch.Tensor, tile_n: int) -> tuple[tuple[str, int], ...]:
        """Compiler hints; fewer blocks to a multiprocessor where threads would have to spill registers."""
        ragged, wide = state.shape[3] != tile_n, tile_n > 128
        occupancy = self.occupancy
        if (ragged and wide) or state.stride(3) != 1:
            occupancy = min(occupancy, 2)
        elif ragged or wide or state.element_size() == 2:
            occupancy = min(occupancy, 3)
        return (("num_worker_warps", self.warps), ("occupancy", occupancy))


def _ceil_power(value: int) -> int:
    return 1 << (value - 1).bit_length()


_override: StateUpdateConfig | None = None


@contextlib.contextmanager
def override(config: StateUpdateConfig) -> Iterator[None]:
    """Within it every step uses `config`, in all threads: for tests and sweeps."""
    global _override
    before, _override = _override, config
    try:
        yield
    finally:
        _override = before


def supports(
    op_name: str, state: torch.Tensor, x: torch.Tensor, *others: torch.Tensor | None
) -> tuple[bool, str]:
    """Whether the kernel takes these tensors. Raises TypeError for float64, which it does not compute in."""
    if x.dtype in _X_DTYPES and state.dtype in _X_DTYPES:
        for tensor in others:
            if tensor is not None and tensor.dtype is torch.float64:
                break
        else:
            return _OK
    raise TypeError(
        f"{op_name}: backend 'cutile' takes bfloat16, float16 and float32 tensors, got a float64 one; "
        "use backend='torch'"
    )


def mamba2_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state_indices: torch.Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    out: torch.Tensor,
) -> None:
    """K tokens of every row, by one launch: updates state in place and writes out.

    state (slots, H, P, N); x, z, out (B, K, H, P); dt (B, K, H); a, dt_bias (H,); b, c (B, K, G, N); d (H,)
    or (H, P); state_indices (B,), int32 or int64: -1 leaves the state alone and gives zeros. bfloat16,
    float16 or float32 each, arithmetic in float32; any strides. Two rows of one slot: undefined.

    Raises RuntimeError inside CUDA graph capture if the kernel is not compiled yet.
    """
    # What is missing is not read; another tensor stands in, since every argument of a kernel has a type.
    skip = a if d is None else d
    gate = x if z is None else z
    bias = a if dt_bias is None else dt_bias
    slots = a if state_indices is None else state_indices
    addresses = state.data_ptr() | x.data_ptr() | dt.data_ptr() | a.data_ptr() | b.data_ptr() | c.data_ptr()
    addresses |= skip.data_ptr() | gate.data_ptr() | bias.data_ptr() | slots.data_ptr() | out.data_ptr()
    arrays = (state, x, dt, a, b, c, skip, gate, bias, slots, out)
    key = (
        state.shape,
        state.stride(),
        state.dtype,
        x.shape,
        x.stride(),
        x.dtype,
        dt.stride(),
        dt.dtype,
        a.stride(),
        a.dtype,
        b.shape,
        b.stride(),
        b.dtype,
        c.stride(),
        c.dtype,
        d is None or (d.stride(), d.dtype),
        z is None or (z.stride(), z.dtype),
        dt_bias is None or (dt_bias.stride(), dt_bias.dtype),
        state_indices is None or (state_indices.stride(), state_indices.dtype),
        dt_softplus,
        out.stride(),
        # Base addresses off 16 bytes compile to other code.
        addresses & 15 and tuple([tensor.data_ptr() & 15 for tensor in arrays]),
        x.device,
        _override,
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _make_plan(
            arrays,
            (d is not None, z is not None, dt_bias is not None, state_indices is not None, dt_softplus),
        )
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    if plan.step is None:
        return
    launch = plan.step.launch((*arrays, float(dt_limit[0]), float(dt_limit[1])), {"out": out})
    run_plan((launch,), x.device, OP, plan.compiled)
    plan.compiled = True


@dataclass
class _Plan:
    """The launch that all calls of one form share; None where there is nothing to do."""

    step: Step | None
    compiled: bool = False


_plans: dict[tuple[Any, ...], _Plan] = {}
# Batch sizes change while serving: keep the plans from growing without end.
_MAX_PLANS = 4096


def _make_plan(arrays: tuple[torch.Tensor, ...], options: tuple[bool, ...]) -> _Plan:
    """arrays as the kernel takes them; options: (d, z, dt_bias, state_indices is there, softplus)."""
    state, x, _, _, b, _, skip, *_ = arrays
    if x.numel() == 0:
        return _Plan(None)
    batch, _, heads, head_size = x.shape
    groups, state_size = b.shape[2:]
    config = _override or StateUpdateConfig()
    tile_n = _ceil_power(state_size)
    tile_p = config.tile_p(batch * heads, head_size, tile_n, state.element_size())
    p_tiles = -(-head_size // tile_p)
    has_skip, *others = options
    kind = _kernels.NO_SKIP
    if has_skip:
        kind = _kernels.SKIP_PER_HEAD if skip.ndim == 1 else _kernels.SKIP_PER_ROW
    step = Step(
        hinted(_kernels.state_update, needs_wide(arrays), config.hints(state, tile_n)),
        (batch * heads * p_tiles,),
        ((heads, heads // groups, p_tiles), tile_p, tile_n, (kind, *others)),
    )
    return _Plan(step)
