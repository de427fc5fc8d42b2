"""Chunks and segments: what the chunked op and the full scan are made of; the formulas are in `chunked`."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

Optional = torch.Tensor | None

# The log of what a token of a = -inf leaves of the state: past that of any other.
FORGOTTEN = -1e30


class Segment(NamedTuple):
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


class Reset(NamedTuple):
    """Chunks of one segment that do not carry on from their neighbour, and what they start from instead."""

    at: torch.Tensor  # (S,) bool
    states: torch.Tensor  # (B, S, H, P, N), read where `at` is set


class Step(NamedTuple):
    """One segment of the forward."""

    start: torch.Tensor  # (B, H, P, N): the state before the segment
    state: torch.Tensor  # (B, H, P, N): the state after it
    entry_states: torch.Tensor  # (B, S, H, P, N): before each chunk
    exit_states: Optional  # (B, S, H, P, N): after each chunk, where there are resets
    out: Optional  # (B, S, L, H, P)


class Gradients(NamedTuple):
    """Gradients of what `forward` takes; those of tokens are None without a token."""

    dx: Optional  # (B, tokens, H, P), like db, dc and ddt in its input's dtype
    db: Optional
    dc: Optional
    ddt: Optional
    da: torch.Tensor  # (H,) float64
    dd: Optional  # like d, float64
    dstate: torch.Tensor  # (B, H, P, N): of the state before the first segment
    dentry_states: (
        Optional  # (B, all chunks, H, P, N): of the state before each chunk, where there are resets
    )


def forward(
    cut_tokens: Sequence[tuple[torch.Tensor, ...]],
    a: torch.Tensor,
    L: int,
    state: torch.Tensor,
    d: Optional = None,
    resets: Sequence[Reset | None] | None = None,
    *,
    with_out: bool = True,
) -> Iterator[Step]:
    """Walk the segments (x, b, c, dt, ...) from `state`, whose dtype is the one to compute in.

    Args:
        cut_tokens: what `pieces` makes. a: (H,). d: (H,), (H, P) or None.
        resets: for every segment, the chunks that start from a state of their own.
    """
    for index, piece in enumerate(cut_tokens):
        segment = cut(piece, a, L, state.dtype)
        local = local_states(segment)
        start, reset = state, None if resets is None else resets[index]
        entry_states, state = walk(local, segment.across(), start, reset)
        exit_states = None if reset is None else torch.addcmul(local, segment.across(), entry_states)
        out = outputs(segment, entry_states, d) if with_out else None
        yield Step(start, state, entry_states, exit_states, out)


def backward(
    cut_tokens: Sequence[tuple[torch.Tensor, ...]],
    starts: Sequence[torch.Tensor],
    a: torch.Tensor,
    L: int,
    dstate: torch.Tensor,
    d: Optional = None,
    resets: Sequence[tuple[Reset | None, Reset | None]] | None = None,
) -> Gradients:
    """The segments in reverse, from `dstate`, the gradient of the last state.

    Args:
        cut_tokens: (x, b, c, dt, dy) as `pieces` makes them. starts: the state before each segment.
        resets: for every segment those of the forward, and those of the gradients: chunks whose last state
            has a gradient of its own instead of the next chunk's.
    """
    work = dstate.dtype
    da = a.new_zeros(a.shape, dtype=torch.float64)
    dd = None if d is None else d.new_zeros(d.shape, dtype=torch.float64)
    per_token, dentry_states = [], []
    for index in reversed(range(len(cut_tokens))):
        piece = cut_tokens[index]
        states_reset, gradients_reset = (None, None) if resets is None else resets[index]
        segment = cut(piece, a, L, work)
        entry_states, _ = walk(local_states(segment), segment.across(), starts[index], states_reset)
        dy = chunks(piece[4], L, work)
        dlocal = outer(segment.since_entry() * dy, segment.c)
        dexit_states, dstate = walk(dlocal, segment.across(), dstate, gradients_reset, reverse=True)
        if gradients_reset is not None:
            dentry_states.append(torch.addcmul(dlocal, segment.across(), dexit_states))
        dx, db, dc, ddt, dlog_decay = gradients(segment, dy, entry_states, dexit_states)
        if d is not None:
            dx = dx + _per_head(d, work) * dy
            terms = (dy * segment.x).sum((0, 1, 2), dtype=torch.float64)
            dd = dd + (terms if d.dim() == 2 else terms.sum(-1))
        ddt = ddt + finite(a).to(work) * dlog_decay.to(work)
        da = da + (dlog_decay * segment.dt).sum((0, 1, 2))
        per_token.append(
            [tokens(grad, like) for grad, like in zip((dx, db, dc, ddt), piece[:4], strict=True)]
        )
    joined = [torch.cat(parts[::-1], dim=1) for parts in zip(*per_token, strict=True)] or [None] * 4
    return Gradients(
        *joined, da, dd, dstate, torch.cat(dentry_states[::-1], dim=1) if dentry_states else None
    )


def pieces(length: int, *per_token: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Views of `length` tokens each (the last may be shorter) of every tensor; none without a token."""
    if per_token[0].shape[1] == 0:
        return []
    # split, not slicing: under autograd each slice would add a whole sequence of zeros.
    return list(zip(*(t.split(length, dim=1) for t in per_token), strict=True))


def chunks(tokens: torch.Tensor, L: int, work: torch.dtype) -> torch.Tensor:
    """(B, tokens, ...) -> (B, S, L, ...) in `work`, filled up with zeros."""
    B, num_tokens, *rest = tokens.shape
    tokens = tokens.to(work)
    if missing := -num_tokens % L:
        tokens = torch.cat([tokens, tokens.new_zeros(B, missing, *rest)], dim=1)
    return tokens.reshape(B, (num_tokens + missing) // L, L, *rest)


def tokens(chunks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(B, S, L, ...) -> shape and dtype of `like`, (B, tokens, ...); the filling is cut off."""
    return chunks.flatten(1, 2)[:, : like.shape[1]].to(like.dtype)


def cut(piece: tuple[torch.Tensor, ...], a: torch.Tensor, L: int, work: torch.dtype) -> Segment:
    """Cut one piece (x, b, c, dt, ...) into chunks and sum its decay."""
    x, b, c, dt = (chunks(tokens, L, work) for tokens in piece[:4])
    # A product with a triangle of ones: torch.cumsum on CUDA is refused in deterministic mode.
    ones, a, dt64 = triangle(L, dt.device), a.double(), dt.double()
    # Sums of large numbers round differently from row to row: what forgets is counted, and weighs in after.
    g = ones @ (finite(a) * dt64) + FORGOTTEN * (ones @ forgets(a, dt64).double())
    # Rounded prefix sums of negative numbers need not decrease. Detached, so that a tie keeps its gradient.
    g = g + (g.detach().cummin(dim=2).values - g.detach())
    return Segment(x, b, c, dt, g)


def log_decay(a: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
    """a·dt, a (H,), dt (..., H); FORGOTTEN where a is -inf and dt > 0, and 0 where dt is.

    -inf itself would make NaN of differences, and of dt = 0.
    """
    return (finite(a) * dt).masked_fill(forgets(a, dt), FORGOTTEN)


def forgets(a: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
    """Where a token leaves nothing of the state: a (H,) is -inf and dt (..., H) > 0."""
    return (a == -torch.inf) & (dt > 0)


def finite(a: torch.Tensor) -> torch.Tensor:
    """a with 0 for -inf, of which exp(a·dt) does not depend on dt."""
    return a.masked_fill(a == -torch.inf, 0.0)


def triangle(L: int, device: torch.device) -> torch.Tensor:
    """(L, L) ones on and below the diagonal, float64."""
    return torch.ones(L, L, dtype=torch.float64, device=device).tril()


def initial(given: Optional, x: torch.Tensor, b: torch.Tensor, work: torch.dtype) -> torch.Tensor:
    """(B, H, P, N) in `work`: zero, or a copy of `given` that shares no memory with it."""
    if given is None:
        return x.new_zeros(x.shape[0], *x.shape[2:], b.shape[3], dtype=work)
    return given.to(work).clone()


def walk(
    local: torch.Tensor,
    across: torch.Tensor,
    state: torch.Tensor,
    reset: Reset | None = None,
    *,
    reverse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """state <- across_k state + local_k over the chunks k; returns the states before each, and the last.

    Where `reset` says so, chunk k takes its own state instead. Chosen and not multiplied in: what another
    sequence left behind, infinities too, is gone.
    """
    before = []
    resets = [None] * local.shape[1] if reset is None else zip(reset.at, reset.states.unbind(1), strict=True)
    steps = list(zip(local.unbind(1), across.unbind(1), resets, strict=True))
    for local_k, across_k, reset_k in reversed(steps) if reverse else steps:
        if reset_k is not None:
            state = torch.where(reset_k[0], reset_k[1], state)
        before.append(state)
        state = torch.addcmul(local_k, across_k, state)
    return torch.stack(before[::-1] if reverse else before, dim=1), state


def local_states(segment: Segment) -> torch.Tensor:
    """(exp(g_last - g)∘u)ᵀ B: each chunk's exit state from a zero entry, (B, S, H, P, N)."""
    return outer(segment.until_exit() * segment.dt[..., None] * segment.x, segment.b)


def outputs(segment: Segment, entry_states: torch.Tensor, d: Optional) -> torch.Tensor:
    """exp(g)∘(C Hᵀ) + W u + d∘x, (B, S, L, H, P)."""
    u = segment.dt[..., None] * segment.x
    weights = _per_group(decay_matrix(segment), segment) * _scores(segment)
    within = weights.flatten(2, 3) @ u.transpose(2, 3)
    out = torch.addcmul(within.transpose(2, 3), segment.since_entry(), _read(segment.c, entry_states))
    return out if d is None else torch.addcmul(out, _per_head(d, u.dtype), segment.x)


def _per_head(d: torch.Tensor, work: torch.dtype) -> torch.Tensor:
    """(H,) or (H, P) as (H, 1) or (H, P)."""
    return d.to(work) if d.dim() == 2 else d.to(work)[:, None]


def gradients(
    segment: Segment, dy: torch.Tensor, entry_states: torch.Tensor, dexit_states: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """dx without the skip term, dB, dC, ddt without a∘r, all in chunks, and r (float64)."""
    x, b, c, dt, _ = segment
    R = x.shape[3] // b.shape[3]
    u = dt[..., None] * x
    decay = decay_matrix(segment)
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
    dlog_decay = triangle(dg.shape[2], dg.device).mT @ dg + dg_last[:, :, None]
    return dt[..., None] * du, db, dc, (x * du).sum(-1), dlog_decay


def decay_matrix(segment: Segment) -> torch.Tensor:
    """exp(g_i - g_j) for i ≥ j, else 0: (B, S, H, L, L)."""
    g = segment.g.transpose(2, 3)
    L = g.shape[3]
    above = torch.ones(L, L, dtype=torch.bool, device=g.device).triu(1)
    difference = (g[..., :, None] - g[..., None, :]).to(segment.x.dtype)
    return difference.masked_fill(above, -torch.inf).exp()


def _scores(segment: Segment) -> torch.Tensor:
    """C Bᵀ: (B, S, G, 1, L, L), to meet (B, S, G, R, L, L)."""
    return (segment.c.transpose(2, 3) @ segment.b.permute(0, 1, 3, 4, 2))[:, :, :, None]


def _per_group(per_head: torch.Tensor, segment: Segment) -> torch.Tensor:
    """(B, S, H, L, L) -> (B, S, G, R, L, L)."""
    G = segment.b.shape[3]
    return per_head.unflatten(2, (G, per_head.shape[2] // G))


def outer(per_head: torch.Tensor, per_group: torch.Tensor) -> torch.Tensor:
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
    return (left @ states.reshape(B, S, H // R, R * P, states.shape[-1])).transpose(2, 3)
