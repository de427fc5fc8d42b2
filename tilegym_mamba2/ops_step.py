"""The decoding step as a public op, in place, and the `torch.library` op that torch.compile sees."""

from typing import Optional

import torch
from torch import Tensor

from tilegym_mamba2.autocast import FULL, KEEP, LOW, autocast
from tilegym_mamba2.options import NO_LIMIT
from tilegym_mamba2.registry import resolve
from tilegym_mamba2.validate_scan import validate_state_update

__all__ = ["mamba2_state_update"]

OP = "mamba2_state_update"
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# x, state, dt, a, b, c, d, z, dt_bias, state_indices, out
_AUTOCAST = (LOW, KEEP, FULL, FULL, LOW, LOW, FULL, LOW, FULL, KEEP, KEEP)


def mamba2_state_update(
    state: torch.Tensor,
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
    state_indices: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """One decoding step, or a few: `mamba2_chunk_scan` over 1 or K tokens per row, on states kept in place.

    Args:
        state: (B, H, P, N), or (slots, H, P, N) with state_indices, in float32, bfloat16, float16 or float64;
            overwritten with the states after the last token. Between the K tokens it is not rounded to its
            dtype.
        x: (B, H, P), or (B, K, H, P) with K of at least 1, in float64, float32, bfloat16 or float16.
        dt: (B, H) or (B, K, H). b, c: (B, G, N) or (B, K, G, N). z: as x. a, d, dt_bias, dt_softplus,
            dt_limit, and all dtypes: as in `mamba2_chunk_scan`, but dt is always cut to dt_limit.
        state_indices: (B,) int32 or int64, the slot of each row; −1 for a row that reads and writes no state
            and gives zeros. A slot named twice ends up undefined. None: row r uses slot r.
        out: where to write the result, in x's shape and dtype. None: a new tensor.
        backend: backend of this call; see `mamba2_chunk_forward`.

    Tensors may have any strides and are on one device. Nothing waits for the device. Works under
    torch.compile(fullgraph=True), in CUDA graphs and under autocast, which casts as in `mamba2_chunk_scan`
    and leaves `state` and `out` alone. Not differentiable.

    Returns:
        out, in x's shape and dtype.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what was expected and what came.
            state_indices out of range are found on the CPU only.
        RuntimeError: grad mode is on and a tensor requires grad.
        BackendUnavailable: the chosen backend cannot run on these tensors or on this machine.
    """
    tensors = autocast((x, state, dt, a, b, c, d, z, dt_bias, state_indices, out), _AUTOCAST)
    x, state, dt, a, b, c, d, z, dt_bias, state_indices, out = tensors
    compiling = torch.compiler.is_compiling()
    if not compiling:
        validate_state_update(state, x, dt, a, b, c, d, z, dt_bias, state_indices, dt_softplus, dt_limit, out)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            f"{OP} works in place and is not differentiable, and an input requires grad: call it under "
            "torch.no_grad() or torch.inference_mode(), and train with mamba2_chunk_scan"
        )
    if out is None:
        out = torch.empty_like(x)
    arguments = (state, x, dt, a, b, c, d, z, dt_bias, state_indices, dt_softplus)
    if compiling or type(x) not in _PLAIN:
        low, high = dt_limit
        state_update(*arguments, float(low), float(high), out, backend)
    else:
        _launch(*arguments, dt_limit, out, backend)
    return out


def _launch(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state_indices: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    out: Tensor,
    backend: str | None,
) -> None:
    """Pick the backend and call it, always with K."""
    if x.dim() == 3:
        # unsqueeze takes 1.1 µs, and indexing with None 1.7.
        x, dt, b, out = x.unsqueeze(1), dt.unsqueeze(1), b.unsqueeze(1), out.unsqueeze(1)
        c, z = c.unsqueeze(1), None if z is None else z.unsqueeze(1)
    tensors = (state, x, dt, a, b, c, d, z, dt_bias, state_indices)
    _, update = resolve(OP, backend, tensors)
    update(*tensors, dt_softplus, dt_limit, out)


@torch.library.custom_op("tilegym_mamba2::state_update", mutates_args=("state", "out"))
def state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Optional[Tensor],  # noqa: UP045 - torch.library reads this form only
    z: Optional[Tensor],  # noqa: UP045
    dt_bias: Optional[Tensor],  # noqa: UP045
    state_indices: Optional[Tensor],  # noqa: UP045
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    out: Tensor,
    backend: Optional[str],  # noqa: UP045
) -> None:
    """Validates, picks the backend and writes `state` and `out`; see `mamba2_state_update`."""
    limit = (dt_min, dt_max)
    validate_state_update(state, x, dt, a, b, c, d, z, dt_bias, state_indices, dt_softplus, limit, out)
    _launch(state, x, dt, a, b, c, d, z, dt_bias, state_indices, dt_softplus, limit, out, backend)


@state_update.register_fake
def _(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state_indices: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    out: Tensor,
    backend: str | None,
) -> None:
    limit = (dt_min, dt_max)
    validate_state_update(state, x, dt, a, b, c, d, z, dt_bias, state_indices, dt_softplus, limit, out)
