"""The chunked forward and backward of the publication, as public ops."""

import operator
from collections.abc import Callable

import torch
from torch.autograd import forward_ad

from tilegym_mamba2 import autograd, registry
from tilegym_mamba2.autocast import FULL, LOW, autocast
from tilegym_mamba2.backends.cutile.availability import interpreter_active
from tilegym_mamba2.forms import Kept, all_plain, as_read, form_of
from tilegym_mamba2.options import MAX_CHUNK_SIZE
from tilegym_mamba2.validate import validate_backward, validate_forward

__all__ = ["mamba2_chunk_backward", "mamba2_chunk_forward"]

FORWARD, BACKWARD = "mamba2_chunk_forward", "mamba2_chunk_backward"

# x, a, b, c, d, dt, init_state
_AUTOCAST = (LOW, FULL, LOW, LOW, FULL, FULL, FULL)


def mamba2_chunk_forward(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt: torch.Tensor,
    init_state: torch.Tensor | None,
    chunk_size: int = 64,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The Mamba-2 recurrence over all tokens: outputs and final state.

    Per batch row and head k, with group k // (H // G):

        h_t = exp(a · dt_t) · h_{t-1} + dt_t · x_t b_tᵀ      (P, N), h_0 = init_state
        y_t = h_t c_t + d · x_t                               (P,)

    Args:
        x: (B, T, H, P) in float64, float32, bfloat16 or float16.
        a: (H,) natural-log decay rate, ≤ 0 (not checked); float32 or x's dtype. -inf forgets all that was
            before a token of dt > 0.
        b, c: (B, T, G, N) in x's dtype; G divides H.
        d: (H,) weight of the skip term; float32 or x's dtype. None: no skip term.
        dt: (B, T, H) step sizes as used, ≥ 0 (not checked; undefined below); any of the four dtypes.
        init_state: (B, H, P, N) in float32, bfloat16, float64 or x's dtype. None: zeros.
        chunk_size: tokens per block, at least 1; changes the result only by rounding.
        backend: backend of this call ("cutile", "torch", "tilegym", or one of your own). None: the choice of
            `use_backend`, `tilegym.set_backend` or TILEGYM_MAMBA2_BACKEND, else the best that can run.

    Inputs may have any strides and are not modified. All are on one device. A NaN or inf in a token reaches
    all later ones and may reach earlier ones of the same 64 to 128. Under autocast x, b and c go to its dtype
    and a, d, dt and init_state to float32.

    Differentiable in every tensor, on every backend that has a `mamba2_chunk_backward`; only the inputs are
    saved. Second derivatives and forward mode: backend "torch" alone, RuntimeError elsewhere. Also under
    `torch.func`, where vmap calls the kernels once per element.

    Returns:
        out (B, T, H, P) in x's dtype and final_state (B, H, P, N) in the dtype of init_state.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what was expected and what came.
        BackendUnavailable: the chosen backend cannot run on these tensors or on this machine.
    """
    if type(chunk_size) is int:
        chunk_size = min(chunk_size, MAX_CHUNK_SIZE)
    if torch.compiler.is_compiling():
        tensors = autocast((x, a, b, c, d, dt, init_state), _AUTOCAST)
        return autograd.chunk_scan(*tensors, chunk_size, backend)
    key = _key(x, a, b, c, d, dt, init_state, chunk_size, backend)
    known = _known.get(key)
    if known is not None:
        form, records = key[:2]
        if records:
            return autograd.DirectScan.apply(known, form, chunk_size, x, a, b, c, d, dt, init_state)
        return known(form, x, a, b, c, d, dt, init_state)
    tensors = autocast(as_read((x, a, b, c, d, dt, init_state)), _AUTOCAST)
    validate_forward(*tensors, chunk_size)
    chunk_size = min(operator.index(chunk_size), MAX_CHUNK_SIZE)
    records = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if autograd.goes_by_ops(tensors, records):
        by_ops, name = autograd.differentiable(backend)
        if by_ops:
            if key is not None:
                # Under no_grad: the kernels alone compute no gradients.
                with torch.no_grad():
                    _remember(key, *registry.resolve(FORWARD, name, tensors))
            return autograd.chunk_scan_op(*tensors, chunk_size, name)
    name, forward = registry.resolve(FORWARD, backend, tensors)
    if autograd.in_transform(name) or autograd.is_watched(name):
        return autograd.chunk_scan_op(*tensors, chunk_size, name)
    results = forward(*tensors, chunk_size)
    if key is not None and not records:
        _remember(key, name, forward)
    return results


# Calls that were checked and given a backend once, by their form: doing that again took 10 us of 26, and
# torch.library's way to the gradients several times that.
_known: dict[tuple, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = Kept()


def _remember(key: tuple, name: str, forward: Callable) -> None:
    by_form = getattr(forward, "by_form", None)
    if by_form is None or name != "cutile":
        return
    _known[key] = by_form


def _key(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt: torch.Tensor,
    init_state: torch.Tensor | None,
    chunk_size: int,
    backend: str | None,
) -> tuple | None:
    """What decides whether a call is valid and who computes it; None where more than that must be asked."""
    # On the CPU the kernels run through the interpreter alone.
    if x is None or not all_plain((x, a, b, c, d, dt, init_state)):
        return None
    if not (x.is_cuda or (x.is_cpu and interpreter_active())):
        return None
    if forward_ad._current_level >= 0 or autograd.transforms_are_active():
        return None
    if not (backend is None or type(backend) is str):
        return None
    if torch.is_autocast_enabled(x.device.type) or type(chunk_size) is not int or chunk_size < 1:
        return None
    try:
        records = torch.is_grad_enabled() and (
            x.requires_grad
            or a.requires_grad
            or b.requires_grad
            or c.requires_grad
            or dt.requires_grad
            or (d is not None and d.requires_grad)
            or (init_state is not None and init_state.requires_grad)
        )
        if (
            x.is_neg()
            or a.is_neg()
            or b.is_neg()
            or c.is_neg()
            or dt.is_neg()
            or (d is not None and d.is_neg())
            or (init_state is not None and init_state.is_neg())
        ):
            return None
        form = form_of(x, a, b, c, d, dt, init_state)
    except (AttributeError, RuntimeError):  # no tensor, or a sparse one: validation says which
        return None
    return form, records, registry.choice(backend)[0], registry.generation()


def mamba2_chunk_backward(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    dt: torch.Tensor,
    init_state: torch.Tensor | None,
    dout: torch.Tensor | None,
    dfinal_state: torch.Tensor | None,
    chunk_size: int = 64,
    state_dtype: torch.dtype = torch.float32,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of `mamba2_chunk_forward`, given those of its results.

    Args:
        x, a, b, c, d, dt, init_state, chunk_size, backend: as in `mamba2_chunk_forward`.
        dout: (B, T, H, P) in x's dtype, gradient of out. None: zero.
        dfinal_state: (B, H, P, N) in float32, bfloat16, float64 or x's dtype, gradient of final_state.
            None: zero.
        state_dtype: dtype of the states that are computed again.

    Returns:
        dx, da, db, dc, dd, ddt, dinit_state, each in the shape and dtype of its input; dd and dinit_state are
        None where d and init_state are.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what was expected and what came.
        BackendUnavailable: the chosen backend cannot run on these tensors or on this machine.
    """
    validate_backward(x, a, b, c, d, dt, init_state, dout, dfinal_state, chunk_size, state_dtype)
    tensors = as_read((x, a, b, c, d, dt, init_state, dout, dfinal_state))
    name, backward = registry.resolve(BACKWARD, backend, tensors)
    autograd.refuse_transform(BACKWARD, name)
    chunk_size = min(operator.index(chunk_size), MAX_CHUNK_SIZE)
    if autograd.is_watched(name) or not all_plain(tensors):
        needed = [tensor is not None for tensor in tensors[:7]]
        results = autograd.chunk_scan_backward(*tensors, chunk_size, state_dtype, name, needed)
        return autograd.where_needed(results, needed)
    return backward(*tensors, chunk_size, state_dtype)
