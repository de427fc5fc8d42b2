"""The differentiable op: `torch.library` custom ops, known to autograd, torch.compile and checkpointing.

    tilegym_mamba2::chunk_scan            x, a, b, c, d, dt, init_state, chunk_size, backend
                                          -> out, final_state
    tilegym_mamba2::chunk_scan_backward   the same with dout, dfinal_state, state_dtype and `needed`
                                          -> seven gradients

The backend is picked inside, so a compiled graph holds the op and not one backend's code. Only inputs are
saved. The ops' outputs alias nothing; a gradient that is not needed is an empty tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch._C import _dispatch_tls_is_dispatch_key_included, _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from tilegym_mamba2.forms import all_plain
from tilegym_mamba2.registry import choice, resolve
from tilegym_mamba2.validate import validate_backward, validate_forward

__all__ = [
    "DirectScan",
    "call_op",
    "chunk_scan",
    "chunk_scan_backward",
    "chunk_scan_op",
    "differentiable",
    "differentiate_again",
    "goes_by_ops",
    "in_transform",
    "is_watched",
    "modes_are_active",
    "refuse_second_derivative",
    "refuse_transform",
    "transforms_are_active",
    "where_needed",
]

FORWARD, BACKWARD = "mamba2_chunk_forward", "mamba2_chunk_backward"
_INPUTS = 7
# Backends of this package take None for a gradient that did not come; others get zeros.
_TAKES_NONE = ("cutile", "torch")
# These launch kernels on the memory of their arguments.
_KERNELS = ("cutile", "tilegym")
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch


@torch.library.custom_op("tilegym_mamba2::chunk_scan", mutates_args=())
def chunk_scan(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Optional[Tensor],  # noqa: UP045 - torch.library reads this form only
    dt: Tensor,
    init_state: Optional[Tensor],  # noqa: UP045
    chunk_size: int,
    backend: Optional[str],  # noqa: UP045
) -> tuple[Tensor, Tensor]:
    """Validates, picks the backend and runs the forward; see `tilegym_mamba2.mamba2_chunk_forward`."""
    tensors = (x, a, b, c, d, dt, init_state)
    validate_forward(*tensors, chunk_size)
    _, forward = resolve(FORWARD, backend, tensors)
    out, final_state = forward(*tensors, chunk_size)
    return out.contiguous(), final_state.contiguous()


@chunk_scan.register_fake
def _(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt: Tensor,
    init_state: Tensor | None,
    chunk_size: int,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    validate_forward(x, a, b, c, d, dt, init_state, chunk_size)
    dtype = _state_dtype(x, init_state)
    return x.new_empty(x.shape), x.new_empty((x.shape[0], *x.shape[2:], b.shape[3]), dtype=dtype)


@torch.library.custom_op("tilegym_mamba2::chunk_scan_backward", mutates_args=())
def chunk_scan_backward(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Optional[Tensor],  # noqa: UP045
    dt: Tensor,
    init_state: Optional[Tensor],  # noqa: UP045
    dout: Optional[Tensor],  # noqa: UP045
    dfinal_state: Optional[Tensor],  # noqa: UP045
    chunk_size: int,
    state_dtype: Optional[torch.dtype],  # noqa: UP045
    backend: Optional[str],  # noqa: UP045
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients that are `needed`, in the order of the inputs; the others are empty."""
    inputs = (x, a, b, c, d, dt, init_state)
    if state_dtype is None:
        state_dtype = _state_dtype(x, None)
    validate_backward(*inputs, dout, dfinal_state, chunk_size, state_dtype)
    name, backward = resolve(BACKWARD, backend, (*inputs, dout, dfinal_state))
    if name not in _TAKES_NONE:
        dout = torch.zeros_like(x) if dout is None else dout
        if dfinal_state is None:
            dfinal_state = x.new_zeros(_state_shape(x, b), dtype=_state_dtype(x, init_state))
    # The backend's own function, which computes all gradients, has the words for a dtype that it refuses.
    if name == "cutile" and state_dtype is not torch.float64:
        from tilegym_mamba2.backends.cutile.backward import gradients

        results = gradients(*inputs, dout, dfinal_state, tuple(needed))
    else:
        results = backward(*inputs, dout, dfinal_state, chunk_size, state_dtype)
    return tuple(
        gradient.contiguous() if need and gradient is not None else x.new_empty(0)
        for gradient, need in zip(results, needed, strict=True)
    )


@chunk_scan_backward.register_fake
def _(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt: Tensor,
    init_state: Tensor | None,
    dout: Tensor | None,
    dfinal_state: Tensor | None,
    chunk_size: int,
    state_dtype: torch.dtype | None,
    backend: str | None,
    needed: Sequence[bool],
) -> tuple[Tensor, ...]:
    return tuple(
        x.new_empty(0) if tensor is None or not need else tensor.new_empty(tensor.shape)
        for tensor, need in zip((x, a, b, c, d, dt, init_state), needed, strict=True)
    )


def _state_shape(x: Tensor, b: Tensor) -> tuple[int, ...]:
    return (x.shape[0], *x.shape[2:], b.shape[3])


def _state_dtype(x: Tensor, init_state: Tensor | None) -> torch.dtype:
    if init_state is not None:
        return init_state.dtype
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# ---- first derivative


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.chunk_size, ctx.backend = inputs
    # Without this a gradient that did not come would be a whole tensor of zeros.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dout: Tensor | None, dfinal_state: Tensor | None) -> tuple[Any, ...]:
    inputs = ctx.saved_tensors
    needed = [need and tensor is not None for need, tensor in zip(ctx.needs_input_grad, inputs, strict=False)]
    if (dout is None and dfinal_state is None) or not any(needed):
        return (None,) * (_INPUTS + 2)
    arguments = (*inputs, dout, dfinal_state, ctx.chunk_size, None, ctx.backend, needed)
    gradients = call_op(chunk_scan_backward, _save_backward, _differentiate_twice, *arguments)
    return (*where_needed(gradients, needed), None, None)


def where_needed(gradients: Sequence[Tensor], needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """None in place of the empty tensors that stand for what is not needed."""
    return tuple(gradient if need else None for gradient, need in zip(gradients, needed, strict=True))


chunk_scan.register_autograd(_differentiate, setup_context=_save)


# ---- second derivative


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.chunk_size, ctx.state_dtype, ctx.backend, ctx.needed = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _differentiate_twice(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
    """Through the torch backend's own backward, which autograd can follow; no other backend has one."""
    tensors = ctx.saved_tensors
    name, _ = resolve(BACKWARD, ctx.backend, tuple(tensors))
    refuse_second_derivative(BACKWARD, name)
    from tilegym_mamba2.backends.torch import chunked

    def backward(*views: Tensor | None) -> tuple[Tensor | None, ...]:
        state_dtype = ctx.state_dtype or _state_dtype(tensors[0], None)
        return chunked.mamba2_chunk_backward(*views, ctx.chunk_size, state_dtype)

    found = differentiate_again(backward, tensors, ctx.needs_input_grad, cotangents, ctx.needed)
    return (*found, None, None, None, None)


def refuse_second_derivative(op_name: str, backend: str) -> None:
    """Raises RuntimeError for every backend but torch's own."""
    if backend != "torch":
        raise RuntimeError(
            f"{op_name}: backend {backend!r} has no second derivative; use backend='torch' where a gradient "
            "is differentiated again (create_graph=True)"
        )


def differentiate_again(
    backward: Callable[..., Sequence[Tensor | None]],
    tensors: Sequence[Tensor | None],
    needs_grad: Sequence[bool],
    cotangents: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of sum(backward(*tensors) * cotangents), over what is `needed`, for each of `tensors`."""
    results: list[Tensor | None] = [None] * len(tensors)
    wanted = [i for i, (t, need) in enumerate(zip(tensors, needs_grad, strict=False)) if need]
    with torch.enable_grad():
        # Views, so that each input is a node of its own even where one tensor is passed twice.
        views = [None if t is None else t.view_as(t) for t in tensors]
        pairs = [
            (gradient, cotangent)
            for gradient, cotangent, need in zip(backward(*views), cotangents, needed, strict=True)
            if need and cotangent is not None and gradient is not None and gradient.requires_grad
        ]
        if pairs:
            found = torch.autograd.grad(
                [gradient for gradient, _ in pairs],
                [views[i] for i in wanted],
                [cotangent for _, cotangent in pairs],
                create_graph=True,
                allow_unused=True,
            )
            for i, gradient in zip(wanted, found, strict=True):
                results[i] = gradient
    return results


chunk_scan_backward.register_autograd(_differentiate_twice, setup_context=_save_backward)


# ---- inside the transforms of torch.func


class _Transformed(torch.autograd.Function):
    """A call of an op: torch.func does not take the autograd function that torch.library makes for it."""

    # Each backend gets plain tensors: vmap loops over the op.
    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> Any:
        *arguments, op, _, _ = inputs
        return op(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *arguments, _, save, ctx.differentiate = inputs
        save(ctx, tuple(arguments), output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return (*ctx.differentiate(ctx, *gradients), None, None, None)


def call_op(op: Any, save: Callable[..., None], differentiate: Callable[..., Any], *arguments: Any) -> Any:
    """An op of torch.library, with what its `register_autograd` got; also inside a transform."""
    if in_transform():
        return _Transformed.apply(*arguments, op, save, differentiate)
    return op(*arguments)


def chunk_scan_op(*arguments: Any) -> tuple[Tensor, Tensor]:
    """`chunk_scan`, also inside a transform of torch.func."""
    return call_op(chunk_scan, _save, _differentiate, *arguments)


def in_transform(backend: str = "cutile") -> bool:
    """Whether a transform of torch.func is at work, whose tensors have no memory, and `backend` needs it."""
    return peek_interpreter_stack() is not None and backend in _KERNELS


def modes_are_active() -> bool:
    """Whether a dispatch mode is at work, such as that of `make_fx`.

    Those that look before autograd does (pre_dispatch=True) are on no stack of torch._C, and known by a key.
    """
    return _len_torch_dispatch_stack() > 0 or _dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)


def is_watched(backend: str | None) -> bool:
    """Whether a dispatch mode must see the op: it does not see kernels."""
    return backend in _KERNELS and modes_are_active()


def goes_by_ops(tensors: Sequence[Tensor | None], records: bool) -> bool:
    """Whether the ops of torch.library serve a call better than its backend alone.

    They cost the host tens of microseconds: only where somebody asks for them. They know no forward mode.
    """
    if records and forward_ad._current_level >= 0 and in_transform():
        return False
    return records or not all_plain(tensors)


def refuse_transform(op_name: str, backend: str) -> None:
    """Raises RuntimeError if `in_transform`."""
    if in_transform(backend):
        raise RuntimeError(
            f"{op_name}: backend {backend!r} works on memory, which tensors inside a transform of torch.func "
            "(vmap, grad) do not have; use backend='torch' there"
        )


# ---- without torch.library


class DirectScan(torch.autograd.Function):
    """Backend "cutile" in an eager call: as `chunk_scan`, past the machinery of torch.library.

    Where a gradient is to be differentiated again, the backward goes through the op, which knows what to say.
    """

    @staticmethod
    def forward(ctx: Any, by_form: Any, form: Any, chunk_size: int, *tensors: Tensor | None) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.chunk_size = chunk_size
        return by_form(form, *tensors)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dfinal_state: Tensor | None) -> tuple[Any, ...]:
        inputs = ctx.saved_tensors
        if dout is None and dfinal_state is None:
            return (None,) * (3 + _INPUTS)
        needed = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled() or transforms_are_active(dout, dfinal_state):
            asked = [need and tensor is not None for need, tensor in zip(needed, inputs, strict=True)]
            arguments = (*inputs, dout, dfinal_state, ctx.chunk_size, None, "cutile", asked)
            gradients = chunk_scan_backward(*arguments)
            return (None, None, None, *where_needed(gradients, asked))
        from tilegym_mamba2.backends.cutile.backward import gradients as compute

        return (None, None, None, *compute(*inputs, dout, dfinal_state, needed))


def transforms_are_active(*gradients: Tensor | None) -> bool:
    """Whether something is at work that knows the ops and not `DirectScan`: a transform of torch.func, a
    dispatch mode, such as that of selective checkpointing, or a batch of these incoming gradients.

    Also where one of them has its sign beside its memory, as behind `torch.complex(…, out).conj()`: torch
    gives ops the negated values. Asking costs the host 0.08 us a gradient.
    """
    # Not by `modes_are_active`: the decoding step asks every time, and a call costs 0.03 us.
    if (
        peek_interpreter_stack() is not None
        or _len_torch_dispatch_stack() > 0
        or _dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)
    ):
        return True
    try:
        for gradient in gradients:
            if gradient is not None:
                gradient.data_ptr()
                if gradient.is_neg():
                    return True
    except RuntimeError:  # torch.autograd.grad(…, is_grads_batched=True) has a vmap of its own
        return True
    return False


def differentiable(backend: str | None, backward: str = BACKWARD) -> tuple[bool, str | None]:
    """Whether the custom ops around `backward` serve the backend that a call would use, and its name.

    The name is None where it is picked per call.
    A backend without a backward of its own is left to torch's autograd.
    """
    from tilegym_mamba2.registry import ops

    name = choice(backend)[0]
    entry = ops().get(backward)
    return entry is not None and (name is None or name in entry.backends), name
