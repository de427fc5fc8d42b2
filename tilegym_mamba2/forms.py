"""The form of a call: all that shapes, strides, dtypes, devices and alignment of its tensors decide."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch._C import _functorch

__all__ = [
    "PLAIN",
    "Kept",
    "all_plain",
    "as_read",
    "batch_levels",
    "form_of",
    "form_of_step",
    "forms_of",
    "recogniser",
]

try:
    from torch._C._dynamo.guards import TensorGuards as _TensorGuards
except ImportError:
    _TensorGuards = None

# What a call may take past torch.library: a subclass of Tensor may want to see the op.
PLAIN = (torch.Tensor, torch.nn.Parameter)
_PLAIN_OR_MISSING = frozenset((*PLAIN, type(None)))


def all_plain(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether none is of a subclass, which may have no memory of its own."""
    return _PLAIN_OR_MISSING.issuperset(map(type, tensors))


def batch_levels(tensor: torch.Tensor) -> set[int]:
    """Of which vmaps, by their depth, a tensor holds a batch."""
    levels = set()
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            levels.add(_functorch.maybe_get_level(tensor))
        tensor = _functorch.get_unwrapped(tensor)
    return levels


class Kept(dict):
    """What was worked out for a form of call, by that form and what else decided it.

    Shapes change with every prompt length: full, it is emptied, so that it does not grow without end.
    """

    MOST = 4096

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= self.MOST:
            self.clear()
        super().__setitem__(key, value)


def forms_of(tensors: Iterable[torch.Tensor | None]) -> Hashable:
    """What of each tensor of one device decides the code that is launched."""
    # Base addresses off 16 bytes compile to other code.
    return tuple(None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() & 15) for t in tensors)


def as_read(tensors: Iterable[Any]) -> tuple[Any, ...]:
    """Those with torch's negative bit, such as `z.conj().imag`, as they read: kernels see memory alone."""
    return tuple(t.resolve_neg() if isinstance(t, torch.Tensor) and t.is_neg() else t for t in tensors)


def recogniser(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function of as many tensors that says whether they are like these in all but address and values:
    shape, strides, dtype, device, type, requires_grad, torch's negative bit. It may say no too often.

    The guards of torch.compile do that in one call, 0.8 µs for nine tensors; to make `form_of_step` and look
    it up takes 4.5.
    """
    if _TensorGuards is None:
        return _unknown
    guards = _TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )
    return guards.check


def _unknown(*tensors: Any) -> bool:
    return False


def form_of(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt: torch.Tensor,
    init_state: torch.Tensor | None,
) -> Hashable:
    """Equal for two calls of `mamba2_chunk_forward` whose arguments are valid alike and launch the same
    code."""
    addresses = x.data_ptr() | a.data_ptr() | b.data_ptr() | c.data_ptr() | dt.data_ptr()
    skip = init = None
    if d is not None:
        skip = (d.shape, d.dtype, d.stride(), d.get_device())
        addresses |= d.data_ptr()
    if init_state is not None:
        init = (init_state.shape, init_state.dtype, init_state.stride(), init_state.get_device())
        addresses |= init_state.data_ptr()
    return (
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
        b.shape,
        b.stride(),
        b.dtype,
        b.get_device(),
        c.shape,
        c.stride(),
        c.dtype,
        c.get_device(),
        dt.shape,
        dt.stride(),
        dt.dtype,
        dt.get_device(),
        a.shape,
        a.stride(),
        a.dtype,
        a.get_device(),
        skip,
        init,
        # Base addresses off 16 bytes compile to other code.
        addresses & 15
        and tuple(None if t is None else t.data_ptr() & 15 for t in (x, a, b, c, d, dt, init_state)),
    )


def form_of_step(
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
    out: torch.Tensor | None,
) -> Hashable:
    """As `form_of`, for the tensors of `mamba2_state_update`; out may be None where it has x's form."""
    addresses = state.data_ptr() | x.data_ptr() | dt.data_ptr() | a.data_ptr() | b.data_ptr() | c.data_ptr()
    skip = gate = bias = slots = to = None
    if d is not None:
        skip = (d.shape, d.stride(), d.dtype, d.get_device())
        addresses |= d.data_ptr()
    if z is not None:
        gate = (z.shape, z.stride(), z.dtype, z.get_device())
        addresses |= z.data_ptr()
    if dt_bias is not None:
        bias = (dt_bias.shape, dt_bias.stride(), dt_bias.dtype, dt_bias.get_device())
        addresses |= dt_bias.data_ptr()
    if state_indices is not None:
        slots = (state_indices.shape, state_indices.stride(), state_indices.dtype, state_indices.get_device())
        # Four int32 are 16 bytes: a slice of a row of slots is often off them.
        addresses |= state_indices.data_ptr()
    if out is not None:
        to = (out.shape, out.stride(), out.dtype, out.get_device())
        addresses |= out.data_ptr()
    return (
        state.shape,
        state.stride(),
        state.dtype,
        state.get_device(),
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
        dt.shape,
        dt.stride(),
        dt.dtype,
        dt.get_device(),
        a.shape,
        a.stride(),
        a.dtype,
        a.get_device(),
        b.shape,
        b.stride(),
        b.dtype,
        b.get_device(),
        c.shape,
        c.stride(),
        c.dtype,
        c.get_device(),
        skip,
        gate,
        bias,
        slots,
        to,
        addresses & 15
        and tuple(
            [
                None if t is None else t.data_ptr() & 15
                for t in (state, x, dt, a, b, c, d, z, dt_bias, state_indices, out)
            ]
        ),
    )
