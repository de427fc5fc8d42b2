"""The form of a call: all that shapes, strides, dtypes, devices and alignment of its tensors decide."""

from collections.abc import Hashable

import torch

__all__ = ["form_of"]


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
