"""The decoding step of the cutile backend: one launch, laid out once for all calls of a form. No maths."""

import contextlib
import functools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tilegym_mamba2.forms import Kept, form_of_step

from .availability import find_tileiras, tileiras_facts
from .kernels import state_update as _kernels
from .launch import Seen, Step, hinted, needs_wide, refuse_float64, run_plan

__all__ = ["StateUpdateConfig", "mamba2_state_update", "override", "supports"]

OP = "mamba2_state_update"

_X_DTYPES = frozenset((torch.bfloat16, torch.float16, torch.float32))
_OK = (True, "")
_ARGUMENTS = ("state", "x", "dt", "a", "b", "c", "d", "z", "dt_bias")


@dataclass(frozen=True)
class StateUpdateConfig:
    """How the state is cut into blocks, and compiler hints. Only moves time, but for the order of a sum."""

    # Elements of the state that a block takes: large blocks share the reading of x, b and c.
    tile_elements: int = 8192
    # Smaller ones where a call has fewer blocks: B 1 must fill 132 multiprocessors too.
    min_blocks: int = 528
    # 8 halve what a thread holds: 60 registers at 8192 elements, with 4 it is 128.
    warps: int = 8
    # Blocks to a multiprocessor, for states of 4 bytes and of 2.
    occupancy: int = 4
    occupancy_16bit: int = 3
    # Tiles that a block of a 16-bit state is cut into: with two, all of its loads come before any use.
    parts_16bit: int = 2

    def tile_p(self, heads: int, head_size: int, tile_n: int, element_size: int) -> int:
        """Rows of the state that a block takes; `heads` counts those of all rows of the batch."""
        tile = max(1, min(_ceil_power(head_size), self.tile_elements // tile_n))
        smallest = self._smallest(tile_n, element_size)
        # P 80 is five tiles of 16, and not two of 64.
        while tile > smallest and -head_size % tile * 8 > head_size:
            tile //= 2
        while tile > smallest and heads * -(-head_size // tile) < self.min_blocks:
            tile //= 2
        return tile

    def parts(self, tile_p: int, tile_n: int, element_size: int, fits: bool) -> int:
        """Tiles that a block of `tile_p` rows is cut into."""
        parts = self.parts_16bit if fits and element_size == 2 else 1
        return max(1, min(parts, tile_p // self._smallest(tile_n, element_size)))

    def hints(
        self, state: torch.Tensor, tile_n: int, fits: bool, tokens: int = 1
    ) -> tuple[tuple[str, int], ...]:
        """Compiler hints; fewer blocks to a multiprocessor where threads would have to spill registers."""
        ragged, wide = state.shape[3] != tile_n, tile_n > 128
        occupancy = self.occupancy if state.element_size() == 4 else self.occupancy_16bit
        if (ragged and wide) or state.stride(3) != 1:
            occupancy = min(occupancy, 2)
        elif wide or not fits or tokens > 1:
            occupancy = min(occupancy, 3)
        return (("num_worker_warps", self.warps), ("occupancy", occupancy))

    def _smallest(self, tile_n: int, element_size: int) -> int:
        """Rows that give every thread 16 bytes."""
        return max(1, 32 * self.warps * 16 // element_size // tile_n)


@functools.cache
def _unchecked_loads() -> bool:
    """Whether the compiler takes loads without a bounds check."""
    path = find_tileiras()
    version = tileiras_facts(path)[0] if path else None
    return version is not None and tuple(int(part) for part in version.split(".")[:2]) >= (13, 4)


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
    refuse_float64(op_name, _ARGUMENTS, (state, x, *others))


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
    or (H, P); state_indices (B,), int32 or int64: -1 leaves the state alone and gives zeros. K may be missing
    in all of them. bfloat16, float16 or float32 each, arithmetic in float32; any strides. Two rows of one
    slot: undefined.

    Raises RuntimeError inside CUDA graph capture if the kernel is not compiled yet.
    """
    tensors = (state, x, dt, a, b, c, d, z, dt_bias, state_indices)
    by_form(form_of_step(*tensors, out), tensors, dt_softplus, dt_limit, out)(tensors, out)


def by_form(
    form: Hashable,
    tensors: tuple[torch.Tensor | None, ...],
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    out: torch.Tensor,
) -> "_Plan":
    """What computes every call of a form, see `forms.form_of_step`, with dt_softplus and dt_limit.

    Called with the first ten arguments of `mamba2_state_update` as a tuple and with out.
    """
    low, high = dt_limit
    limit = (float(low), float(high))
    key = (form, dt_softplus, limit, _override)
    plan = _plans.get(key)
    if plan is None:
        plan = _make_plan(tensors, dt_softplus, limit, out)
        _plans[key] = plan
    return plan


# The public op keeps what this one gives, and calls it where it sees a form again.
mamba2_state_update.by_form = by_form


@dataclass
class _Plan:
    """The launch that all calls of one form share; None where there is nothing to do."""

    step: Step | None
    dt_softplus: bool
    dt_limit: tuple[float, float]
    config: StateUpdateConfig | None
    # 64-bit indices, which are for arrays only.
    wide: bool = False
    seen: Seen = field(default_factory=lambda: Seen(repeats=True))

    def __call__(self, tensors: tuple[torch.Tensor | None, ...], out: torch.Tensor) -> None:
        if self.step is None:
            return
        if self.config != _override:
            mamba2_state_update(*tensors, self.dt_softplus, self.dt_limit, out)
            return
        state, x, dt, a, b, c, d, z, dt_bias, state_indices = tensors
        # Stands for what is missing and not read: a tensor costs a launch 0.75 us of the host.
        missing = a if self.wide else 0
        arrays = (
            state,
            x,
            dt,
            a,
            b,
            c,
            missing if d is None else d,
            missing if z is None else z,
            missing if dt_bias is None else dt_bias,
            missing if state_indices is None else state_indices,
            out,
        )
        run_plan((self.step.launch(arrays, {"out": out}),), x.device, OP, self.seen)

    def repeat(self, arrays: Sequence[torch.Tensor]) -> bool:
        """The same for tensors like those of the first call, addresses apart, if that is quickly done; else
        False, and nothing is done. arrays: those that are there of the ten, and out."""
        packed = self.seen.packed
        if packed is None or self.wide or self.config is not _override:
            return False
        device = arrays[0].get_device()
        if device != torch.cuda.current_device():
            return False
        # Off 16 bytes they are of another form.
        stream = torch._C._cuda_getCurrentRawStream(device)
        return packed[0].launch_aligned(stream, [array.data_ptr() for array in arrays])


_plans: dict[tuple[Any, ...], _Plan] = Kept()


def _make_plan(
    tensors: tuple[torch.Tensor | None, ...],
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    out: torch.Tensor,
) -> _Plan:
    state, x, _, _, b, _, d, z, dt_bias, state_indices = tensors
    if x.numel() == 0:
        return _Plan(None, dt_softplus, dt_limit, _override)
    batch, heads, head_size = x.shape[0], *x.shape[-2:]
    groups, state_size = b.shape[-2:]
    config = _override or StateUpdateConfig()
    tile_n = _ceil_power(state_size)
    tile_p = config.tile_p(batch * heads, head_size, tile_n, state.element_size())
    p_tiles = -(-head_size // tile_p)
    fits = tile_n == state_size and head_size % tile_p == 0 and _unchecked_loads()
    parts = config.parts(tile_p, tile_n, state.element_size(), fits)
    tokens = x.shape[1] if x.ndim == 4 else 1
    kind = _kernels.NO_SKIP
    if d is not None:
        kind = _kernels.SKIP_PER_HEAD if d.ndim == 1 else _kernels.SKIP_PER_ROW
    others = (z is not None, dt_bias is not None, state_indices is not None, dt_softplus)
    wide = needs_wide((*tensors, out))
    step = Step(
        hinted(_kernels.state_update, wide, config.hints(state, tile_n, fits, tokens)),
        (batch * heads * p_tiles,),
        (
            *dt_limit,
            (heads, heads // groups, p_tiles, parts, fits),
            tile_p // parts,
            tile_n,
            (kind, *others),
        ),
    )
    return _Plan(step, dt_softplus, dt_limit, _override, wide)
