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

import torch

from tilegym_mamba2.backends.torch import final_state_dtype, full_precision, segments, working_dtype

DIFFERENTIABLE = True

# The caller's chunk_size is a hint: shorter chunks are all state traffic, longer ones all L×L matrices.
MIN_CHUNK, MAX_CHUNK = 32, 128
# Elements of one segment's temporaries: 32 MiB in float32, more where one chunk needs it.
WORKSPACE = 2**23

Optional = torch.Tensor | None


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
    state = segments.initial(init_state, x, b, work)
    outs = []
    pieces = segments.pieces(L * S, x, b, c, dt)
    for piece, step in zip(pieces, segments.forward(pieces, a, L, state, d), strict=True):
        outs.append(segments.tokens(step.out, like=piece[0]))
        state = step.state
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
    pieces = segments.pieces(L * S, x, b, c, dt, dout)
    state = segments.initial(init_state, x, b, work)
    starts = [step.start for step in segments.forward(pieces, a, L, state, with_out=False)]
    dstate = segments.initial(dfinal_state, x, b, work)
    found = segments.backward(pieces, starts, a, L, dstate, d)
    dx, db, dc, ddt = (
        torch.zeros_like(like) if gradient is None else gradient
        for gradient, like in zip(found[:4], (x, b, c, dt), strict=True)
    )
    return (
        dx,
        found.da.to(a.dtype),
        db,
        dc,
        None if d is None else found.dd.to(d.dtype),
        ddt,
        None if init_state is None else found.dstate.to(init_state.dtype),
    )


def _blocking(x: torch.Tensor, b: torch.Tensor, chunk_size: int) -> tuple[int, int]:
    """Tokens per chunk and chunks per segment."""
    B, T, H, P = x.shape
    N = b.shape[3]
    L = max(1, min(max(chunk_size, MIN_CHUNK), MAX_CHUNK, T))
    # Per chunk and head: local and entry states and a copy; L×L in float64 and twice in float32; x thrice.
    per_chunk = B * H * (3 * P * N + 4 * L * L + 3 * L * P)
    return L, max(1, WORKSPACE // max(1, per_chunk))
