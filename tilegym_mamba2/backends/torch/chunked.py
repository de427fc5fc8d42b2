"""The op as batched matrix products over chunks of L tokens, segment by segment.

With u = dt∘x, H the state at a chunk's entry, H' at its exit, g the inclusive sum of a·dt within the chunk:

    W_ij = (C Bᵀ)_ij exp(g_i - g_j) for i ≥ j, else 0
    Y    = exp(g)∘(C Hᵀ) + W u + d∘x
    H'   = exp(g_last) H + (exp(g_last - g)∘u)ᵀ B

A segment is as many chunks as fit the workspace. Its products are batched over its chunks; only the walk from
H to H' is a loop. Without autograd, memory beyond inputs and outputs is one segment's, whatever T is. The
backward is written out, not left to autograd: it walks the segments in reverse, from one entry state kept per
segment.

Three choices about g decide the accuracy:
- It is summed in float64: differences inside a chunk stay right next to a token that decays by 1e9.
- It is made non-increasing, so that no decay factor exceeds 1: its rounding is mended, its gradient left.
- exp(g_i - g_j) is masked before the exponential and never split in two.
"""

from typing import NamedTuple

import torch

from tilegym_mamba2.backends.torch import final_state_dtype, full_precision, working_dtype

DIFFERENTIABLE = True

# The caller's chunk_size is a hint: shorter chunks are all state traffic, longer ones all L×L matrices.
MIN_CHUNK, MAX_CHUNK = 32, 128
# Elements of one segment's temporaries: 32 MiB in float32, more where one chunk needs it.
WORKSPACE = 2**23

Optional = torch.Tensor | None


class _Segment(NamedTuple):
    """S chunks of a sequence; the last one is filled up with tokens of dt = 0, which change no state."""

    x: torch.Tensor  # (B, S, L, H, P)
    b: torch.Tensor  # (B, S, L, G, N)
    c: torch.Tensor  # (B, S, L, G, N)
    dt: torch.Tensor  # (B, S, L, H)
    g: torch.Tensor  # (B, S, L, H) float64

    def since_entry(self) -> torch.Tensor:
        """exp(g): what is left of the entry state at each token, (B, S, L, H, 1)."""
        return self.g.exp().to(self.x.dtype)[..., None]

    def until_exit(self) -> torch.Tensor:
        """exp(g_last - g): what is left of each token at the chunk's exit, (B, S, L, H, 1)."""
        return (self.g[:, :, -1:] - self.g).exp().to(self.x.dtype)[..., None]

    def across(self) -> torch.Tensor:
        """exp(g_last): what is left of the entry state at the exit, (B, S, H, 1, 1)."""
        return self.g[:, :, -1].exp().to(self.x.dtype)[..., None, None]


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
    """Outputs and final state of the Mamba-2 recurrence; see the module for the formula.

    Args:
        x: (B, T, H, P). Like every input: float64, float32, bfloat16 or float16, any strides, never written.
        a: (H,) rate, natural log per unit of dt, ≤ 0.
        b, c: (B, T, G, N); head k reads group k // (H // G).
        d: (H,) weight of the skip term, or None for no such term.
        dt: (B, T, H) step, ≥ 0, already processed.
        init_state: (B, H, P, N), or None for zero.
        chunk_size: a hint for the blocking, ≥ 1; the result does not depend on it beyond rounding.

    Returns:
        out (B, T, H, P) in x.dtype, and final_state (B, H, P, N) in init_state.dtype (without one: float32,
        or float64 when x is float64). Computed in float32, or in float64 when any input is; float32 products
        follow torch.set_float32_matmul_precision. Differentiable in every input, twice.
    """
    work = working_dtype(x, a, b, c, d, dt, init_state)
    L, S = _blocking(x, b, chunk_size)
    state = _state(init_state, x, b, work)
    outs = []
    for piece in _pieces(L * S, x, b, c, dt):
        segment = _segment(piece, a, L, work)
        entry_states, state = _walk(_local_states(segment), segment.across(), state)
        outs.append(_tokens(_outputs(segment, entry_states, d), like=piece[0]))
    out = torch.cat(outs, dim=1) if outs else x.clone()
    return out, state.to(final_state_dtype(x, init_state))


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
    """Gradients of sum(out * dout) + sum(final_state * dfinal_state).

    In the module's names, with dY = dout, dH' the gradient of a chunk's exit state, D_ij = exp(g_i - g_j):

        dH = exp(g_last) dH' + (exp(g)∘dY)ᵀ C                          gradient of the entry state
        dW = dY uᵀ for i ≥ j,   dS = Σ_heads dW∘D                      dS: gradient of C Bᵀ
        du = Wᵀ dY + v,         v = exp(g_last - g)∘(B dH'ᵀ)
        dC = dS B  + Σ_heads (exp(g)∘dY) H
        dB = dSᵀ C + Σ_heads (exp(g_last - g)∘u) dH'
        dx = dt∘du + d∘dY,      dd = Σ dY∘x

    and for the decay, with M = dW∘W below the diagonal (on it, g_i - g_i moves nothing):

        dg_i      = Σ_j M_ij - Σ_j M_ji + Σ_p (dY∘exp(g)∘(C Hᵀ))_i - Σ_p (u∘v)_i
        dg_last  += Σ_j Σ_p (u∘v)_j + exp(g_last) ⟨H, dH'⟩
        r_k       = Σ_{i≥k} dg_i                                       gradient of a·dt_k
        ddt = Σ_p x∘du + a∘r,   da = Σ r∘dt

    The two sums over M share all terms but those with i ≥ k > j, which are what is left in r_k; they are
    taken in float64, where the shared ones cancel.

    Args:
        x, a, b, c, d, dt, init_state, chunk_size: as in `mamba2_chunk_forward`.
        dout: (B, T, H, P), dfinal_state: (B, H, P, N); None stands for zero.
        state_dtype: least dtype of the recomputed states; one narrower than float32 is not narrowed to.

    Returns:
        dx, da, db, dc, dd, ddt, dinit_state, each with its input's shape and dtype; dd and dinit_state are
        None where d and init_state are.
    """
    work = working_dtype(x, a, b, c, d, dt, init_state, dout, dfinal_state, at_least=state_dtype)
    L, S = _blocking(x, b, chunk_size)
    dout = x.new_zeros(()).expand(x.shape) if dout is None else dout
    pieces = _pieces(L * S, x, b, c, dt, dout)

    state = _state(init_state, x, b, work)
    segment_entries = []
    for piece in pieces:
        segment_entries.append(state)
        segment = _segment(piece, a, L, work)
        _, state = _walk(_local_states(segment), segment.across(), state)

    dstate = _state(dfinal_state, x, b, work)
    da = dd = a.new_zeros(a.shape, dtype=torch.float64)
    per_token = []
    for piece, segment_entry in zip(reversed(pieces), reversed(segment_entries), strict=True):
        segment = _segment(piece, a, L, work)
        entry_states, _ = _walk(_local_states(segment), segment.across(), segment_entry)
        dy = _chunks(piece[4], L, work)
        # Gradient of every chunk's exit state, from the back.
        dentry = _outer(segment.since_entry() * dy, segment.c)
        dexit_states, dstate = _walk(dentry, segment.across(), dstate, reverse=True)
        dx, db, dc, ddt, dlog_decay = _segment_gradients(segment, dy, entry_states, dexit_states)
        if d is not None:
            dx = dx + d.to(work)[:, None] * dy
            dd = dd + (dy * segment.x).sum((0, 1, 2, 4), dtype=torch.float64)
        ddt = ddt + a.to(work) * dlog_decay.to(work)
        da = da + (dlog_decay * segment.dt).sum((0, 1, 2))
        per_token.append(
            [_tokens(grad, like) for grad, like in zip((dx, db, dc, ddt), piece[:4], strict=True)]
        )

    if per_token:
        dx, db, dc, ddt = (torch.cat(parts[::-1], dim=1) for parts in zip(*per_token, strict=True))
    else:
        dx, db, dc, ddt = (torch.zeros_like(like) for like in (x, b, c, dt))
    return (
        dx,
        da.to(a.dtype),
        db,
        dc,
        None if d is None else dd.to(d.dtype),
        ddt,
        None if init_state is None else dstate.to(init_state.dtype),
    )


def _blocking(x: torch.Tensor, b: torch.Tensor, chunk_size: int) -> tuple[int, int]:
    """Tokens per chunk and chunks per segment."""
    B, T, H, P = x.shape
    N = b.shape[3]
    L = max(1, min(max(chunk_size, MIN_CHUNK), MAX_CHUNK, T))
    # Per chunk and head: local and entry states and a copy; L×L in float64 and twice in float32; x thrice.
    per_chunk = B * H * (3 * P * N + 4 * L * L + 3 * L * P)
    return L, max(1, WORKSPACE // max(1, per_chunk))


def _pieces(length: int, *per_token: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Views of `length` tokens each (the last may be shorter) of every tensor; none without a token."""
    if per_token[0].shape[1] == 0:
        return []
    # split, not slicing: under autograd each slice would add a whole sequence of zeros.
    return list(zip(*(t.split(length, dim=1) for t in per_token), strict=True))


def _chunks(tokens: torch.Tensor, L: int, work: torch.dtype) -> torch.Tensor:
    """(B, tokens, ...) -> (B, S, L, ...) in `work`, filled up with zeros."""
    B, num_tokens, *rest = tokens.shape
    tokens = tokens.to(work)
    if missing := -num_tokens % L:
        tokens = torch.cat([tokens, tokens.new_zeros(B, missing, *rest)], dim=1)
    return tokens.reshape(B, (num_tokens + missing) // L, L, *rest)


def _tokens(chunks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(B, S, L, ...) -> shape and dtype of `like`, (B, tokens, ...); the filling is cut off."""
    return chunks.flatten(1, 2)[:, : like.shape[1]].to(like.dtype)


def _segment(piece: tuple[torch.Tensor, ...], a: torch.Tensor, L: int, work: torch.dtype) -> _Segment:
    """Cut one piece (x, b, c, dt, ...) into chunks and sum its decay."""
    x, b, c, dt = (_chunks(tokens, L, work) for tokens in piece[:4])
    # A product with a triangle of ones: torch.cumsum on CUDA is refused in deterministic mode.
    g = _triangle(L, dt.device) @ (a.double() * dt.double())
    # Rounded prefix sums of negative numbers need not decrease. Detached, so that a tie keeps its gradient.
    g = g + (g.detach().cummin(dim=2).values - g.detach())
    return _Segment(x, b, c, dt, g)


def _triangle(L: int, device: torch.device) -> torch.Tensor:
    """(L, L) ones on and below the diagonal, float64."""
    return torch.ones(L, L, dtype=torch.float64, device=device).tril()


def _state(given: Optional, x: torch.Tensor, b: torch.Tensor, work: torch.dtype) -> torch.Tensor:
    """(B, H, P, N) in `work`: zero, or a copy of `given` that shares no memory with it."""
    if given is None:
        return x.new_zeros(x.shape[0], *x.shape[2:], b.shape[3], dtype=work)
    return given.to(work).clone()


def _walk(
    local: torch.Tensor, across: torch.Tensor, state: torch.Tensor, *, reverse: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """state <- across_k state + local_k over the chunks k; returns the states before each, and the last."""
    before = []
    steps = list(zip(local.unbind(1), across.unbind(1), strict=True))
    for local_k, across_k in reversed(steps) if reverse else steps:
        before.append(state)
        state = torch.addcmul(local_k, across_k, state)
    return torch.stack(before[::-1] if reverse else before, dim=1), state


def _local_states(segment: _Segment) -> torch.Tensor:
    """(exp(g_last - g)∘u)ᵀ B: each chunk's exit state from a zero entry, (B, S, H, P, N)."""
    return _outer(segment.until_exit() * segment.dt[..., None] * segment.x, segment.b)


def _outputs(segment: _Segment, entry_states: torch.Tensor, d: Optional) -> torch.Tensor:
    """exp(g)∘(C Hᵀ) + W u + d∘x, (B, S, L, H, P)."""
    u = segment.dt[..., None] * segment.x
    weights = _per_group(_decay_matrix(segment), segment) * _scores(segment)
    within = weights.flatten(2, 3) @ u.transpose(2, 3)
    out = torch.addcmul(within.transpose(2, 3), segment.since_entry(), _read(segment.c, entry_states))
    return out if d is None else torch.addcmul(out, d.to(u.dtype)[:, None], segment.x)


def _segment_gradients(
    segment: _Segment, dy: torch.Tensor, entry_states: torch.Tensor, dexit_states: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """dx without the skip term, dB, dC, ddt without a∘r, all in chunks, and r (float64)."""
    x, b, c, dt, _ = segment
    R = x.shape[3] // b.shape[3]
    u = dt[..., None] * x
    decay = _decay_matrix(segment)
    weights = (_per_group(decay, segment) * _scores(segment)).flatten(2, 3)
    dweights = dy.transpose(2, 3) @ u.permute(0, 1, 3, 4, 2)
    dscores = _per_group(dweights * decay, segment).sum(3)

    v = segment.until_exit() * _read(b, dexit_states)
    du = (weights.mT @ dy.transpose(2, 3)).transpose(2, 3) + v
    dy_entry = segment.since_entry() * dy
    dc = (dscores @ b.transpose(2, 3)).transpose(2, 3) + _write(dy_entry, entry_states, R)
    db = (dscores.mT @ c.transpose(2, 3)).transpose(2, 3) + _write(segment.until_exit() * u, dexit_states, R)

    moved = (dweights * weights).tril(-1)
    carried = (u * v).sum(-1, dtype=torch.float64)
    dg = (moved.sum(-1, dtype=torch.float64) - moved.sum(-2, dtype=torch.float64)).transpose(2, 3)
    dg = dg + (dy_entry * _read(c, entry_states)).sum(-1, dtype=torch.float64) - carried
    dg_last = carried.sum(2) + (segment.across() * entry_states * dexit_states).sum(
        (-1, -2), dtype=torch.float64
    )
    dlog_decay = _triangle(dg.shape[2], dg.device).mT @ dg + dg_last[:, :, None]
    return dt[..., None] * du, db, dc, (x * du).sum(-1), dlog_decay


def _decay_matrix(segment: _Segment) -> torch.Tensor:
    """exp(g_i - g_j) for i ≥ j, else 0: (B, S, H, L, L)."""
    g = segment.g.transpose(2, 3)
    L = g.shape[3]
    above = torch.ones(L, L, dtype=torch.bool, device=g.device).triu(1)
    difference = (g[..., :, None] - g[..., None, :]).to(segment.x.dtype)
    return difference.masked_fill(above, -torch.inf).exp()


def _scores(segment: _Segment) -> torch.Tensor:
    """C Bᵀ: (B, S, G, 1, L, L), to meet (B, S, G, R, L, L)."""
    return (segment.c.transpose(2, 3) @ segment.b.permute(0, 1, 3, 4, 2))[:, :, :, None]


def _per_group(per_head: torch.Tensor, segment: _Segment) -> torch.Tensor:
    """(B, S, H, L, L) -> (B, S, G, R, L, L)."""
    G = segment.b.shape[3]
    return per_head.unflatten(2, (G, per_head.shape[2] // G))


def _outer(per_head: torch.Tensor, per_group: torch.Tensor) -> torch.Tensor:
    """Σ over tokens of (B, S, L, H, P) times (B, S, L, G, N): (B, S, H, P, N)."""
    B, S, L, H, P = per_head.shape
    G, N = per_group.shape[3:]
    left = per_head.reshape(B, S, L, G, H // G * P).permute(0, 1, 3, 4, 2)
    return (left @ per_group.transpose(2, 3)).reshape(B, S, H, P, N)


def _read(per_group: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Σ over n of (B, S, L, G, N) times (B, S, H, P, N): (B, S, L, H, P)."""
    B, S, H, P, N = states.shape
    L, G = per_group.shape[2:4]
    states = states.reshape(B, S, G, H // G * P, N)
    return (per_group.transpose(2, 3) @ states.mT).transpose(2, 3).reshape(B, S, L, H, P)


def _write(per_head: torch.Tensor, states: torch.Tensor, R: int) -> torch.Tensor:
    """Σ over a group's heads and p of (B, S, L, H, P) times (B, S, H, P, N): (B, S, L, G, N)."""
    B, S, L, H, P = per_head.shape
    left = per_head.reshape(B, S, L, H // R, R * P).transpose(2, 3)
    return (left @ states.reshape(B, S, H // R, R * P, -1)).transpose(2, 3)
