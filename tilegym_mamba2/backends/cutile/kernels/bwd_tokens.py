"""The gradients of x and dt, tile by tile of L tokens, and what the decay's gradient is made of.

With u = dt∘x, W = [i ≥ j] exp2(g_i − g_j) (C Bᵀ), the state H at the tile's entry and the gradient dH' of
the one at its exit:

    v  = exp2(g_last − g) ∘ (B dH'ᵀ)
    du = Wᵀ dY + v                    dx = dt ∘ du + d ∘ dY        the direct part of ddt: Σ_p x∘du
    M  = [i > j] W ∘ (dY uᵀ)          by how much a pair of tokens feels the decay between them

A decay a·dt_k lies between token i ≥ k and what came before k, so its gradient is

    r_k = Σ_{i≥k>j} M_ij + Σ_{i≥k} inter_i + Σ_{j<k} carried_j + exp2(g_last) ⟨H, dH'⟩
    inter = Σ_p dY ∘ exp2(g) ∘ (C Hᵀ),   carried = Σ_p u ∘ v

and this kernel writes, per token, the row and the column sums of M, inter and carried, which `bwd_decay`
adds up.
L×L forms are transposed, (j, i), so that Wᵀ is computed where the product with dY takes its first operand.
"""

import cuda.tile as ct

from .bwd_tiles import (
    decay_t,
    decode_heads,
    load_saved_state,
    load_skip_row,
    ragged_tile,
    store_row,
)
from .decay import exp2
from .products import product, product_of_loaded
from .scan_out import SKIP_PER_HEAD
from .scan_table import window
from .tiles import (
    ROW_DT,
    ROW_EXP_G,
    ROW_G,
    ConstInt,
    ConstTuple,
    last_of_row,
    load_rows,
    load_tokens,
    row,
    store_tokens,
)

# Rows of the `drows` array, per token of a tile.
DROW_LATER, DROW_EARLIER, DROW_CARRIED, DROW_DIRECT, DROW_SKIP = 0, 1, 2, 3, 4
NUM_DROWS = 5


@ct.kernel
def compute_dx(
    x,
    b,
    c,
    rows,
    d_skip,
    dout,
    entry_states,
    dexit_states,
    tiles,
    table,
    dx,
    drows,
    overlap,
    sizes: tuple,
    L: ConstInt,
    TILE_P: ConstInt,
    TILE_N: ConstInt,
    TILES: ConstTuple,
    PRECISION: ConstInt,
    FLAGS: ConstTuple,
    LATENCY: ConstInt,
):
    """Some heads of one group at one tile of tokens.

    Grid: (B · tiles · G · ceil(R / heads a block),). sizes: see `decode_heads`.
    TILES: (ceil(P / TILE_P), ceil(N / TILE_N)). FLAGS: (what d_skip is, RAGGED). x, dout (B, T, H, P), b, c
    (B, T, G, N), rows (4, B, H, ≥ tiles, L), d_skip (H,) or (H, P), entry_states and dexit_states
    (B, H, ≥ tiles asked for, P, N); writes dx (B, T, H, P), drows (5, B, H, ≥ tiles, L), the row of the skip
    term only if it is a number for each head, and overlap (B, H, ≥ tiles, TILE_P), whose sum is
    exp2(g_last) ⟨H, dH'⟩.

    RAGGED: tiles and table say which tokens a tile has; scratch arrays have a batch of 1.
    """
    SKIP, RAGGED = FLAGS
    P_TILES, N_TILES = TILES
    batch, group, _, tile, saved, first, count = decode_heads(b.shape[2], sizes)
    at = tile
    if RAGGED:
        tile, span = ragged_tile(tiles, table, saved, sizes)
        if span[1] >= span[2]:
            return
        at = 0
        x, b, c = window(x, *span), window(b, *span), window(c, *span)
        dout, dx = window(dout, *span), window(dx, *span)
    tokens = ct.arange(L, dtype=ct.int32)
    zeros = ct.zeros((L, L), ct.float32)
    diagonal = tokens[None, :] == tokens[:, None]

    b_tile = load_tokens(b, (batch, at, group, 0), (L, TILE_N), LATENCY)
    c_tile = load_tokens(c, (batch, at, group, 0), (L, TILE_N), LATENCY)
    scores_t = product_of_loaded(b_tile, c_tile.transpose(), ct.zeros((L, L), ct.float32), PRECISION)
    if N_TILES > 1:
        for n_tile in range(1, N_TILES):
            b_more = load_tokens(b, (batch, at, group, n_tile), (L, TILE_N), LATENCY)
            c_more = load_tokens(c, (batch, at, group, n_tile), (L, TILE_N), LATENCY)
            scores_t = product_of_loaded(b_more, c_more.transpose(), scores_t, PRECISION)

    for k in range(count):
        head = first + k
        rows_tile = load_rows(rows, (batch, head, tile), L, LATENCY)
        g, dt = row(rows_tile, ROW_G), row(rows_tile, ROW_DT)[:, None]
        across = last_of_row(rows_tile, ROW_EXP_G)
        until_exit = exp2(last_of_row(rows_tile, ROW_G) - g)[:, None]
        weights_t = decay_t(g, tokens) * scores_t

        later = ct.zeros((L,), ct.float32)
        earlier = ct.zeros((L, 1), ct.float32)
        inter = ct.zeros((L, 1), ct.float32)
        carried = ct.zeros((L, 1), ct.float32)
        direct = ct.zeros((L, 1), ct.float32)
        on_diagonal = ct.zeros((L,), ct.float32)
        state_overlap = ct.zeros((TILE_P, 1), ct.float32)
        for p_tile in range(P_TILES):
            x_tile = load_tokens(x, (batch, at, head, p_tile), (L, TILE_P), LATENCY)
            dy_tile = load_tokens(dout, (batch, at, head, p_tile), (L, TILE_P), LATENCY)
            # All sums are linear in the P columns: each L×L form is used up before the next product.
            dweights_t = product_of_loaded(x_tile, dy_tile.transpose(), zeros, PRECISION)
            moved_t = ct.where(diagonal, 0.0, dweights_t * weights_t) * dt
            later = later + ct.sum(moved_t, axis=0)
            earlier = earlier + ct.sum(moved_t, axis=1, keepdims=True)
            if SKIP == SKIP_PER_HEAD:
                on_diagonal = on_diagonal + ct.sum(ct.where(diagonal, dweights_t, 0.0), axis=1)
            v = ct.zeros((L, TILE_P), ct.float32)
            from_entry = ct.zeros((L, TILE_P), ct.float32)
            for n_tile in range(N_TILES):
                index = (batch, head, saved, p_tile, n_tile)
                entry = load_saved_state(entry_states, index, (TILE_P, TILE_N), LATENCY)
                dexit = load_saved_state(dexit_states, index, (TILE_P, TILE_N), LATENCY)
                if N_TILES > 1:
                    b_part = load_tokens(b, (batch, at, group, n_tile), (L, TILE_N), LATENCY)
                    c_part = load_tokens(c, (batch, at, group, n_tile), (L, TILE_N), LATENCY)
                    v = product(b_part, dexit.transpose(), v, PRECISION)
                    from_entry = product(c_part, entry.transpose(), from_entry, PRECISION)
                else:
                    v = product(b_tile, dexit.transpose(), v, PRECISION)
                    from_entry = product(c_tile, entry.transpose(), from_entry, PRECISION)
                both = entry.astype(ct.float32) * dexit.astype(ct.float32)
                state_overlap = state_overlap + ct.sum(both, axis=1, keepdims=True)
            dy_wide = dy_tile.astype(ct.float32)
            inter = inter + ct.sum(dy_wide * from_entry, axis=1, keepdims=True)
            x_wide = x_tile.astype(ct.float32)
            v = v * until_exit
            carried = carried + ct.sum(x_wide * v, axis=1, keepdims=True)
            du = product(weights_t, dy_tile, v, PRECISION)
            direct = direct + ct.sum(x_wide * du, axis=1, keepdims=True)
            skip = load_skip_row(d_skip, head, p_tile, SKIP, TILE_P)
            store_tokens(dx, (batch, at, head, p_tile), du * dt + dy_wide * skip, LATENCY)

        inter = inter * row(rows_tile, ROW_EXP_G)[:, None]
        index = (batch, head, tile)
        store_row(drows, DROW_LATER, index, later)
        store_row(drows, DROW_EARLIER, index, inter - earlier)
        store_row(drows, DROW_CARRIED, index, carried * dt)
        store_row(drows, DROW_DIRECT, index, direct)
        if SKIP == SKIP_PER_HEAD:
            store_row(drows, DROW_SKIP, index, on_diagonal)
        ct.store(overlap, (batch, head, tile, 0), (state_overlap * across).reshape((1, 1, 1, TILE_P)))
