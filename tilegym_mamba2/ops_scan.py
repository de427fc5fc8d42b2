"""The whole Mamba-2 scan as a public op: gates, dt pipeline, packed and padded sequences."""

import operator
from collections.abc import Callable

import torch

from tilegym_mamba2 import autograd_scan, registry
from tilegym_mamba2.autocast import FULL, KEEP, LOW, autocast
from tilegym_mamba2.autograd import (
    differentiable,
    goes_by_ops,
    in_transform,
    is_watched,
    transforms_are_active,
)
from tilegym_mamba2.errors import BackendUnavailable
from tilegym_mamba2.forms import all_plain, as_read
from tilegym_mamba2.ops_chunk import mamba2_chunk_forward
from tilegym_mamba2.options import MAX_CHUNK_SIZE, NO_LIMIT, is_no_limit
from tilegym_mamba2.validate_scan import check_bool, check_scan_values, validate_scan

__all__ = ["mamba2_chunk_scan"]

# x, dt, a, b, c, d, z, dt_bias, init_state, cu_seqlens, seq_lens
_AUTOCAST = (LOW, FULL, FULL, LOW, LOW, FULL, LOW, FULL, FULL, KEEP, KEEP)


def mamba2_chunk_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *,
    d: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    init_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    chunk_size: int = 64,
    state_dtype: torch.dtype | None = None,
    return_chunk_states: bool = False,
    check: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """The Mamba-2 recurrence over all tokens, with all that a model puts around it.

    Per sequence and head k, with group k // (H // G):

        dt'_t = clamp(softplus(dt_t + dt_bias), *dt_limit)       softplus only with dt_softplus
        h_t   = exp(a · dt'_t) · h_{t-1} + dt'_t · x_t b_tᵀ      (P, N), h_0 = init_state
        out_t = (h_t c_t + d · x_t) · silu(z_t)                  (P,)

    Args:
        x: (B, T, H, P) in float64, float32, bfloat16 or float16.
        dt: (B, T, H) in any of the four. Computed with in float32 (float64 where any input is float64).
        a: (H,) natural-log decay rate, ≤ 0; float32 or x's dtype. -inf forgets all that was before a dt > 0.
        b, c: (B, T, G, N) in x's dtype; G divides H.
        d: (H,) or (H, P) weight of the skip term; float32 or x's dtype. None: no skip term.
        z: (B, T, H, P) gate in x's dtype. None: no gate.
        dt_bias: (H,) float32 or x's dtype. None: zero.
        dt_softplus: whether dt goes through softplus, which is exact for large values.
        dt_limit: (low, high), 0 ≤ low ≤ high; the gradient of a dt that is cut to them is 0. dt < 0 as used
            is outside the contract: cut to low where the call has an option, and undefined where it has none.
        init_state: (B, H, P, N), packed (S, H, P, N), in float32, bfloat16, float64 or x's dtype. None: zero.
        cu_seqlens: (S + 1,) int32 or int64, with B of 1: sequence s is the tokens from cu_seqlens[s] to
            cu_seqlens[s + 1], which may be none. It begins with 0; tokens past its end give zeros.
        seq_lens: (B,) int32 or int64: row r has seq_lens[r] tokens, and those after it give zeros.
        chunk_size: tokens per block and from one of the chunk states to the next, at least 1; changes out and
            final_state only by rounding.
        state_dtype: of the states that come back: float32, bfloat16, float64 or x's dtype. None: that of
            init_state, else float32 (float64 for float64 x).
        return_chunk_states: whether to return the states at the chunks' entries too.
        check: also checks values: a ≤ 0, dt ≥ 0 where used, lengths in order and in range (lengths on the CPU
            always are). The host waits for the device; not under torch.compile.
        backend: backend of this call; see `mamba2_chunk_forward`.

    Inputs may have any strides and are not modified. All are on one device. What x, dt, b, c and z hold in
    tokens past a sequence's end has no influence, NaN neither. NaN or infinity in a token before it may reach
    all later ones and the earlier ones of its block (64 tokens; on "torch" up to 128), but no other sequence.
    Nothing waits for the device. Under autocast x, b, c and z go to its dtype and a, d, dt, dt_bias and
    init_state to float32.

    Differentiable in every floating tensor, also under torch.compile(fullgraph=True) with dynamic T,
    activation checkpointing, autocast and `torch.func`; only the inputs are saved, and chunk states carry no
    gradient. Second derivatives and forward mode: backend "torch" alone. In a compiled graph `use_backend` is
    asked when the graph runs, and the backward may run on another thread: there a choice by `backend=` or
    `tilegym.set_backend` reaches both.

    Without any option it is `mamba2_chunk_forward` and runs on the backends of that.

    Returns:
        out (B, T, H, P) in x's dtype and final_state (B, H, P, N), packed (S, H, P, N): the state after each
        sequence's last token. With return_chunk_states also chunk_states (B, H, ceil(T / chunk_size), P, N),
        which past a row's length hold its final state. Packed, chunk_states are (1, H, T // chunk_size + S,
        P, N), the sequences' chunks after one another and then zeros, and chunk_offsets (S + 1,) int32 says
        where each sequence's begin.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what was expected and what came.
        BackendUnavailable: the chosen backend cannot run on these tensors or on this machine.
    """
    bare = (
        z is None
        and dt_bias is None
        and dt_softplus is False
        and cu_seqlens is None
        and seq_lens is None
        and state_dtype is None
        and return_chunk_states is False
        and is_no_limit(dt_limit)
        and getattr(d, "ndim", 1) != 2
        and (torch.compiler.is_compiling() or _forward_has(backend))
    )
    if bare and check is False:
        try:
            return mamba2_chunk_forward(x, a, b, c, d, dt, init_state, chunk_size, backend=backend)
        except (TypeError, ValueError, RuntimeError) as error:
            _raise_as_scan(error, x, dt, a, b, c, d, init_state, chunk_size)
            raise

    tensors = (x, dt, a, b, c, d, z, dt_bias, init_state, cu_seqlens, seq_lens)
    if not torch.compiler.is_compiling():
        tensors = as_read(tensors)
    tensors = autocast(tensors, _AUTOCAST)
    flags = (dt_softplus, dt_limit, chunk_size, state_dtype, return_chunk_states)
    if check is not False:
        check_bool("check", check)
        _check_values(tensors, flags)
        if bare:
            options = {"d": d, "init_state": init_state, "chunk_size": chunk_size, "backend": backend}
            return mamba2_chunk_scan(x, dt, a, b, c, **options)
    if torch.compiler.is_compiling():
        return _by_op(tensors, flags, backend)
    validate_scan(*tensors, *flags)
    # An int of Python: torch.library knows no other.
    flags = (dt_softplus, dt_limit, operator.index(chunk_size), state_dtype, return_chunk_states)
    records = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if goes_by_ops(tensors, records):
        by_op, name = differentiable(backend, autograd_scan.BACKWARD)
        if by_op:
            return _recorded(tensors, flags, name)
    options = autograd_scan.options_of(tensors, dt_softplus, *dt_limit, *flags[2:])
    name, scan = registry.resolve(autograd_scan.FORWARD, backend, (*tensors, options))
    if in_transform(name) or is_watched(name):
        return _by_op(tensors, flags, name, autograd_scan.scan_op)
    return _results(*scan(*tensors, options), cu_seqlens is not None, return_chunk_states)


def _recorded(
    tensors: tuple[torch.Tensor | None, ...], flags: tuple, backend: str | None
) -> tuple[torch.Tensor, ...]:
    """A call of which autograd, or a subclass of Tensor, is to know."""
    if all_plain(tensors) and not transforms_are_active():
        options = autograd_scan.options_of(tensors, flags[0], *flags[1], *flags[2:])
        # Under no_grad: the kernels alone compute no gradients.
        with torch.no_grad():
            name, scan = registry.resolve(autograd_scan.FORWARD, backend, (*tensors, options))
        if name == "cutile":
            results = autograd_scan.DirectScan.apply(scan, options, *tensors)
            return _results(*results, tensors[9] is not None, options.return_chunk_states)
    return _by_op(tensors, flags, backend, autograd_scan.scan_op)


def _raise_as_scan(
    error: Exception,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    init_state: torch.Tensor | None,
    chunk_size: int,
) -> None:
    """Raises an error of `mamba2_chunk_forward` as one of the scan: with the shapes it takes, by its name.

    One that is neither about arguments nor by a name is left to the caller.
    """
    if type(error) in (TypeError, ValueError):
        tensors = autocast((x, dt, a, b, c, d, None, None, init_state, None, None), _AUTOCAST)
        try:
            validate_scan(*tensors, False, NO_LIMIT, chunk_size, None, False)
        except (TypeError, ValueError) as told:
            raise told from None
    text, theirs = str(error), "mamba2_chunk_forward"
    if type(error) in (TypeError, ValueError, RuntimeError, BackendUnavailable) and text.startswith(theirs):
        raise type(error)(autograd_scan.FORWARD + text.removeprefix(theirs)) from None


def _forward_has(backend: str | None) -> bool:
    """Whether the chosen backend, if any, is one of mamba2_chunk_forward's, or of neither op's."""
    name = registry.choice(backend)[0]
    return name is None or not registry.only_in(name, autograd_scan.FORWARD, "mamba2_chunk_forward")


def _by_op(
    tensors: tuple[torch.Tensor | None, ...],
    flags: tuple,
    backend: str | None,
    op: Callable[..., tuple[torch.Tensor, ...]] = autograd_scan.scan,
) -> tuple[torch.Tensor, ...]:
    dt_softplus, (low, high), chunk_size, state_dtype, return_chunk_states = flags
    # What is no int is left to validation, inside the op.
    if type(chunk_size) is int:
        chunk_size = min(chunk_size, MAX_CHUNK_SIZE)
    results = op(
        *tensors, dt_softplus, float(low), float(high), chunk_size, state_dtype, return_chunk_states, backend
    )
    return _results(*results, tensors[9] is not None, return_chunk_states)


def _results(
    out: torch.Tensor,
    final_state: torch.Tensor,
    chunk_states: torch.Tensor | None,
    chunk_offsets: torch.Tensor | None,
    packed: bool,
    with_chunk_states: bool,
) -> tuple[torch.Tensor, ...]:
    if not with_chunk_states:
        return out, final_state
    return (out, final_state, chunk_states, chunk_offsets) if packed else (out, final_state, chunk_states)


def _check_values(tensors: tuple[torch.Tensor | None, ...], flags: tuple) -> None:
    """What `check=True` asks for, once the arguments are right in all else."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "check=True reads values on the host, which a compiled graph cannot; check outside"
        )
    validate_scan(*tensors, *flags)
    _, dt, a, *_, dt_bias, _, cu_seqlens, seq_lens = tensors
    check_scan_values(dt, a, dt_bias, cu_seqlens, seq_lens, *flags[:2])
