"""The full scan as `torch.library` custom ops, known to autograd, torch.compile and checkpointing.

    tilegym_mamba2::scan            x, dt, a, b, c, d, z, dt_bias, init_state, cu_seqlens, seq_lens, options
                                    -> out, final_state, chunk_states, chunk_offsets (empty where not wanted)
    tilegym_mamba2::scan_backward   the same with dout, dfinal_state and `needed` -> nine gradients

As in `autograd`, the backend is picked inside, only inputs are saved, outputs alias nothing, and a gradient
that is not needed is an empty tensor.
"""

import operator
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from tilegym_mamba2.autograd import (
    call_op,
    differentiate_again,
    refuse_second_derivative,
    transforms_are_active,
    where_needed,
)
from tilegym_mamba2.options import MAX_CHUNK_SIZE, ScanOptions
from tilegym_mamba2.registry import resolve
from tilegym_mamba2.validate_scan import validate_scan

__all__ = ["BACKWARD", "FORWARD", "DirectScan", "options_of", "scan", "scan_backward", "scan_op"]

FORWARD, BACKWARD = "mamba2_chunk_scan", "mamba2_chunk_scan_backward"
# x, dt, a, b, c, d, z, dt_bias and init_state have gradients; cu_seqlens and seq_lens have none.
_DIFFERENTIABLE, _TENSORS = 9, 11
# Beside the tensors: dt_softplus, dt_min, dt_max, chunk_size, state_dtype, return_chunk_states, backend.
_OTHERS = 7


def options_of(
    tensors: Sequence[Tensor | None],
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    chunk_size: int,
    state_dtype: torch.dtype | None,
    return_chunk_states: bool = False,
) -> ScanOptions:
    """The options as a backend takes them, with the state's dtype filled in."""
    if state_dtype is None:
        x, init_state = tensors[0], tensors[8]
        if init_state is not None:
            state_dtype = init_state.dtype
        else:
            state_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    limit = (float(dt_min), float(dt_max))
    chunk_size = min(operator.index(chunk_size), MAX_CHUNK_SIZE)
    return ScanOptions(dt_softplus, limit, chunk_size, state_dtype, return_chunk_states)


@torch.library.custom_op("tilegym_mamba2::scan", mutates_args=())
def scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Optional[Tensor],  # noqa: UP045 - torch.library reads this form only
    z: Optional[Tensor],  # noqa: UP045
    dt_bias: Optional[Tensor],  # noqa: UP045
    init_state: Optional[Tensor],  # noqa: UP045
    cu_seqlens: Optional[Tensor],  # noqa: UP045
    seq_lens: Optional[Tensor],  # noqa: UP045
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    chunk_size: int,
    state_dtype: Optional[torch.dtype],  # noqa: UP045
    return_chunk_states: bool,
    backend: Optional[str],  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Validates, picks the backend and runs the forward; see `tilegym_mamba2.mamba2_chunk_scan`."""
    tensors = (x, dt, a, b, c, d, z, dt_bias, init_state, cu_seqlens, seq_lens)
    limit = (dt_min, dt_max)
    validate_scan(*tensors, dt_softplus, limit, chunk_size, state_dtype, return_chunk_states)
    options = options_of(tensors, dt_softplus, *limit, chunk_size, state_dtype, return_chunk_states)
    _, forward = resolve(FORWARD, backend, (*tensors, options))
    out, final_state, chunk_states, chunk_offsets = forward(*tensors, options)
    if chunk_states is None:
        chunk_states = x.new_empty(0, dtype=options.state_dtype)
    if chunk_offsets is None or not return_chunk_states:
        chunk_offsets = x.new_empty(0, dtype=torch.int32)
    return tuple(t.contiguous() for t in (out, final_state, chunk_states, chunk_offsets))


@scan.register_fake
def _(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    init_state: Tensor | None,
    cu_seqlens: Tensor | None,
    seq_lens: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    chunk_size: int,
    state_dtype: torch.dtype | None,
    return_chunk_states: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors = (x, dt, a, b, c, d, z, dt_bias, init_state, cu_seqlens, seq_lens)
    limit = (dt_min, dt_max)
    B, T, H, P, _, N = validate_scan(
        *tensors, dt_softplus, limit, chunk_size, state_dtype, return_chunk_states
    )
    options = options_of(tensors, dt_softplus, *limit, chunk_size, state_dtype, return_chunk_states)
    rows, chunks, offsets = B, -(-T // chunk_size), 0
    if cu_seqlens is not None:
        offsets = cu_seqlens.shape[0]
        rows = offsets - 1
        chunks = T // chunk_size + rows
    return (
        x.new_empty(x.shape),
        x.new_empty((rows, H, P, N), dtype=options.state_dtype),
        x.new_empty((B, H, chunks, P, N) if return_chunk_states else (0,), dtype=options.state_dtype),
        x.new_empty((offsets if return_chunk_states else 0,), dtype=torch.int32),
    )


@torch.library.custom_op("tilegym_mamba2::scan_backward", mutates_args=())
def scan_backward(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Optional[Tensor],  # noqa: UP045
    z: Optional[Tensor],  # noqa: UP045
    dt_bias: Optional[Tensor],  # noqa: UP045
    init_state: Optional[Tensor],  # noqa: UP045
    cu_seqlens: Optional[Tensor],  # noqa: UP045
    seq_lens: Optional[Tensor],  # noqa: UP045
    dout: Optional[Tensor],  # noqa: UP045
    dfinal_state: Optional[Tensor],  # noqa: UP045
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    chunk_size: int,
    state_dtype: Optional[torch.dtype],  # noqa: UP045
    backend: Optional[str],  # noqa: UP045
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients that are `needed`, in the order of the inputs; the others are empty."""
    tensors = (x, dt, a, b, c, d, z, dt_bias, init_state, cu_seqlens, seq_lens)
    validate_scan(*tensors, dt_softplus, (dt_min, dt_max), chunk_size, state_dtype, False)
    options = options_of(tensors, dt_softplus, dt_min, dt_max, chunk_size, state_dtype)
    arguments = (*tensors, dout, dfinal_state, options, tuple(needed))
    _, backward = resolve(BACKWARD, backend, arguments)
    return tuple(
        gradient.contiguous() if need and gradient is not None else x.new_empty(0)
        for gradient, need in zip(backward(*arguments), needed, strict=True)
    )


@scan_backward.register_fake
def _(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    init_state: Tensor | None,
    cu_seqlens: Tensor | None,
    seq_lens: Tensor | None,
    dout: Tensor | None,
    dfinal_state: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    chunk_size: int,
    state_dtype: torch.dtype | None,
    backend: str | None,
    needed: Sequence[bool],
) -> tuple[Tensor, ...]:
    inputs = (x, dt, a, b, c, d, z, dt_bias, init_state)
    return tuple(
        x.new_empty(0) if tensor is None or not need else tensor.new_empty(tensor.shape)
        for tensor, need in zip(inputs, needed, strict=True)
    )


# ---- first derivative


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.others = inputs[_TENSORS:]
    ctx.mark_non_differentiable(*output[2:])
    # Without this a gradient that did not come would be a whole tensor of zeros.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:_TENSORS])


def _differentiate(ctx: Any, dout: Tensor | None, dfinal_state: Tensor | None, *_: Any) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    inputs = tensors[:_DIFFERENTIABLE]
    needed = [need and tensor is not None for need, tensor in zip(ctx.needs_input_grad, inputs, strict=False)]
    if (dout is None and dfinal_state is None) or not any(needed):
        return (None,) * (_TENSORS + _OTHERS)
    *options, _, backend = ctx.others
    arguments = (*tensors, dout, dfinal_state, *options, backend, needed)
    gradients = call_op(scan_backward, _save_backward, _differentiate_twice, *arguments)
    return (*where_needed(gradients, needed), *(None,) * (_TENSORS - _DIFFERENTIABLE + _OTHERS))


scan.register_autograd(_differentiate, setup_context=_save)


# ---- second derivative


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *ctx.options, ctx.backend, ctx.needed = inputs[_TENSORS + 2 :]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[: _TENSORS + 2])


def _differentiate_twice(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
    """Through the torch backend's own backward, which autograd can follow; no other backend has one."""
    tensors = ctx.saved_tensors
    options = options_of(tensors, *ctx.options)
    name, _ = resolve(BACKWARD, ctx.backend, (*tensors, options, tuple(ctx.needed)))
    refuse_second_derivative(BACKWARD, name)
    from tilegym_mamba2.backends.torch import scan as torch_scan

    def backward(*views: Tensor | None) -> tuple[Tensor | None, ...]:
        return torch_scan.mamba2_chunk_scan_backward(*views, options, tuple(ctx.needed))

    found = differentiate_again(backward, tensors, ctx.needs_input_grad, cotangents, ctx.needed)
    return (*found, *(None,) * _OTHERS)


scan_backward.register_autograd(_differentiate_twice, setup_context=_save_backward)


def scan_op(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`scan`, also inside a transform of torch.func."""
    return call_op(scan, _save, _differentiate, *arguments)


# ---- without torch.library


class DirectScan(torch.autograd.Function):
    """Backend "cutile" in an eager call: as `scan`, past the machinery of torch.library; see `autograd`."""

    @staticmethod
    def forward(ctx: Any, forward: Any, options: ScanOptions, *tensors: Tensor | None) -> Any:
        results = forward(*tensors, options)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(t for t in results[2:] if t is not None))
        ctx.options = options
        return results

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dfinal_state: Tensor | None, *_: Any) -> tuple[Any, ...]:
        tensors, options = ctx.saved_tensors, ctx.options
        wanted = ctx.needs_input_grad[2 : 2 + _DIFFERENTIABLE]
        needed = tuple(want and t is not None for want, t in zip(wanted, tensors, strict=False))
        rest = (None,) * (_TENSORS - _DIFFERENTIABLE)
        if (dout is None and dfinal_state is None) or not any(needed):
            return (None,) * (2 + _TENSORS)
        if torch.is_grad_enabled() or transforms_are_active(dout, dfinal_state):
            flags = (options.dt_softplus, *options.dt_limit, options.chunk_size, options.state_dtype)
            gradients = scan_backward(*tensors, dout, dfinal_state, *flags, "cutile", needed)
            return (None, None, *where_needed(gradients, needed), *rest)
        arguments = (*tensors, dout, dfinal_state, options, needed)
        _, backward = resolve(BACKWARD, "cutile", arguments)
        return (None, None, *backward(*arguments), *rest)
