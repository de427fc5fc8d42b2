"""The decoding step, in place: a few tokens per row on slots of a pool of states."""

import torch

from tilegym_mamba2.backends.torch import full_precision, working_dtype
from tilegym_mamba2.backends.torch.segments import log_decay
from tilegym_mamba2.backends.torch.step_size import step_size

Optional = torch.Tensor | None

DIFFERENTIABLE = False


@full_precision
def mamba2_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: Optional,
    z: Optional,
    dt_bias: Optional,
    state_indices: Optional,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    out: torch.Tensor,
) -> None:
    """As `tilegym_mamba2.mamba2_state_update`; writes `state` (slots, H, P, N) and `out` (B, K, H, P).

    x, z (B, K, H, P), dt (B, K, H), b, c (B, K, G, N). The state is carried through the K tokens in float32
    (float64 when any input is) and rounded once, at the end.
    """
    B, K, H, _ = x.shape
    if B == 0:
        return
    # Without slots no row has one.
    if state.shape[0] == 0:
        out.zero_()
        return
    work = working_dtype(state, x, dt, a, b, c, d, z, dt_bias)
    steps = step_size(dt, dt_bias, dt_softplus, dt_limit, work)
    x_work = x.to(work)
    decay = log_decay(a.to(work), steps).exp()[..., None, None]
    pushed = (steps[..., None] * x_work)[..., None] * _per_head(b.to(work), H)[..., None, :]
    c_heads = _per_head(c.to(work), H)[..., None]

    slots = torch.arange(B, device=x.device) if state_indices is None else state_indices.long()
    used = slots >= 0
    before = state.index_select(0, slots.clamp(min=0))
    carried = before.to(work)
    ys = []
    for k in range(K):
        carried = decay[:, k] * carried + pushed[:, k]
        ys.append((carried @ c_heads[:, k])[..., 0])
    y = torch.stack(ys, dim=1)
    if d is not None:
        y = y + (d.to(work) if d.dim() == 2 else d.to(work)[:, None]) * x_work
    if z is not None:
        y = y * torch.nn.functional.silu(z.to(work))
    out.copy_(y.masked_fill(~used[:, None, None, None], 0.0))

    # Which rows write is not known to the host: those that must not write again what a row that does writes,
    # and where none does, what slot 0 holds.
    row = torch.where(used, torch.arange(B, device=x.device), used.long().argmax())
    after = torch.where(used[:, None, None, None], carried.to(state.dtype), before)
    state.index_copy_(0, slots.index_select(0, row).clamp(min=0), after.index_select(0, row))


def _per_head(per_group: torch.Tensor, num_heads: int) -> torch.Tensor:
    """(B, K, G, N) -> (B, K, H, N): head k reads group k // (H // G)."""
    return per_group.repeat_interleave(num_heads // per_group.shape[2], dim=2)
