"""The op by its definition, one token after the other.

    h_t = exp(a dt_t) h_{t-1} + dt_t x_t b_tᵀ        y_t = h_t c_t + d x_t

Slow and plain on purpose: other implementations are compared with it, and it shares no arithmetic with them.
"""

import torch

from tilegym_mamba2.backends.torch import final_state_dtype, full_precision, working_dtype
from tilegym_mamba2.backends.torch.segments import finite, log_decay

DIFFERENTIABLE = True

Optional = torch.Tensor | None


def _heads(per_group: torch.Tensor, num_heads: int) -> torch.Tensor:
    """(B, T, G, N) -> (B, T, H, N): head k reads group k // (H // G)."""
    return per_group.repeat_interleave(num_heads // per_group.shape[2], dim=2)


@full_precision
def mamba2_chunk_forward(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: Optional,
    dt: torch.Tensor,
    init_state: Optional,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and final state, by the token loop; arguments and results as in `chunked.mamba2_chunk_forward`.

    `chunk_size` changes nothing. Autograd keeps every token's state: T * B * H * P * N elements.
    """
    _, T, H, _ = x.shape
    work = working_dtype(x, a, b, c, d, dt, init_state)
    x_work, dt_work = x.to(work), dt.to(work)
    decay = log_decay(a.to(work), dt_work).exp()
    b_heads, c_heads = _heads(b.to(work), H), _heads(c.to(work), H)
    state = _initial(x, b, init_state, work)
    outs = []
    for t in range(T):
        update = (dt_work[:, t, :, None] * x_work[:, t])[..., None] * b_heads[:, t, :, None, :]
        state = decay[:, t, :, None, None] * state + update
        outs.append((state * c_heads[:, t, :, None, :]).sum(-1))
    out = torch.stack(outs, dim=1) if outs else x_work.clone()
    if d is not None:
        out = out + d.to(work)[:, None] * x_work
    return out.to(x.dtype), state.to(final_state_dtype(x, init_state))


@full_precision
def mamba2_chunk_backward(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: Optional,
    dt: torch.Tensor,
    init_state: Optional,
    dout: Optional,
    dfinal_state: Optional,
    chunk_size: int = 64,
    state_dtype: torch.dtype = torch.float32,
) -> tuple[Optional, ...]:
    """Gradients by the adjoint token loop; arguments and results as in `chunked.mamba2_chunk_backward`.

    With λ_t the gradient of h_t:  λ_t = exp(a dt_{t+1}) λ_{t+1} + dy_t c_tᵀ, starting from dfinal_state after
    the last token. Keeps every token's state: T * B * H * P * N elements.
    """
    B, T, H, P = x.shape
    G, N = b.shape[2:]
    work = working_dtype(x, a, b, c, d, dt, init_state, dout, dfinal_state, at_least=state_dtype)
    x_work, dt_work, a_work = x.to(work), dt.to(work), a.to(work)
    decay = log_decay(a_work, dt_work).exp()
    b_heads, c_heads = _heads(b.to(work), H), _heads(c.to(work), H)
    dy = torch.zeros_like(x_work) if dout is None else dout.to(work)

    states = [_initial(x, b, init_state, work)]
    for t in range(T):
        update = (dt_work[:, t, :, None] * x_work[:, t])[..., None] * b_heads[:, t, :, None, :]
        states.append(decay[:, t, :, None, None] * states[-1] + update)

    dstate = x_work.new_zeros(B, H, P, N) if dfinal_state is None else dfinal_state.to(work).clone()
    dx, db, dc = torch.empty_like(x_work), torch.empty_like(b_heads), torch.empty_like(c_heads)
    ddt, dlog_decay = torch.empty_like(dt_work), torch.empty_like(dt_work)
    for t in reversed(range(T)):
        dc[:, t] = (dy[:, t, :, :, None] * states[t + 1]).sum(-2)
        dstate = dstate + dy[:, t, :, :, None] * c_heads[:, t, :, None, :]
        dinput = (dstate * b_heads[:, t, :, None, :]).sum(-1)
        db[:, t] = (dstate * (dt_work[:, t, :, None] * x_work[:, t])[..., None]).sum(-2)
        dx[:, t] = dt_work[:, t, :, None] * dinput
        dlog_decay[:, t] = decay[:, t] * (dstate * states[t]).sum((-1, -2))
        ddt[:, t] = (dinput * x_work[:, t]).sum(-1) + finite(a_work) * dlog_decay[:, t]
        dstate = decay[:, t, :, None, None] * dstate
    if d is not None:
        dx = dx + d.to(work)[:, None] * dy
    return (
        dx.to(x.dtype),
        (dlog_decay * dt_work).sum((0, 1)).to(a.dtype),
        db.reshape(B, T, G, H // G, N).sum(3).to(b.dtype),
        dc.reshape(B, T, G, H // G, N).sum(3).to(c.dtype),
        None if d is None else (dy * x_work).sum((0, 1, 3)).to(d.dtype),
        ddt.to(dt.dtype),
        None if init_state is None else dstate.to(init_state.dtype),
    )


def _initial(x: torch.Tensor, b: torch.Tensor, init_state: Optional, work: torch.dtype) -> torch.Tensor:
    """A fresh (B, H, P, N) state: zero, or a copy that shares no memory with init_state."""
    if init_state is None:
        return x.new_zeros(x.shape[0], *x.shape[2:], b.shape[3], dtype=work)
    return init_state.to(work).clone()
