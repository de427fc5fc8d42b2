"""What the full scan means, token by token in float64: the yardstick of its tests, from the definition.

It imports nothing of the package. Sequences are walked one after the other and heads by indexing, so that
none of the arithmetic, and no way of cutting a sequence, is shared with what it judges. Gradients come from
torch's autograd through the loop.
"""

import math
from typing import Any

import torch

GRADIENTS = ("x", "dt", "a", "b", "c", "d", "z", "dt_bias", "init_state")


def scan(
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
    dt_limit: tuple[float, float] = (0.0, math.inf),
    init_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int] | None]:
    """out, final_state, chunk_states and, packed, the index of each sequence's first chunk; all float64."""
    batch, tokens, heads, head_size = x.shape
    state_size = b.shape[3]
    if cu_seqlens is not None:
        borders = cu_seqlens.tolist()
        spans = [(0, begin, end) for begin, end in zip(borders, borders[1:], strict=False)]
    else:
        ends = [tokens] * batch if seq_lens is None else seq_lens.tolist()
        spans = [(row, 0, end) for row, end in enumerate(ends)]
    dt = used_dt(dt, dt_bias, dt_softplus, dt_limit)

    rows = [[x.new_zeros(heads, head_size).double() for _ in range(tokens)] for _ in range(batch)]
    finals, chunks = [], []
    for index, (row, begin, end) in enumerate(spans):
        state = torch.zeros(heads, head_size, state_size, dtype=torch.float64)
        if init_state is not None:
            state = init_state[index].double()
        entries = []
        for t in range(begin, end):
            if (t - begin) % chunk_size == 0:
                entries.append(state)
            state, rows[row][t] = token(state, x[row, t], dt[row, t], a, b[row, t], c[row, t], d)
            if z is not None:
                gate = z[row, t].double()
                rows[row][t] = rows[row][t] * gate / (1 + torch.exp(-gate))
        finals.append(state)
        chunks.append(entries)

    flat = [torch.stack(row) if row else x.new_zeros(0, heads, head_size).double() for row in rows]
    empty = torch.zeros(heads, head_size, state_size, dtype=torch.float64)
    if cu_seqlens is None:
        offsets, count = None, -(-tokens // chunk_size)
        chunks = [
            entries + [final] * (count - len(entries)) for entries, final in zip(chunks, finals, strict=True)
        ]
    else:
        offsets = [sum(map(len, chunks[:k])) for k in range(len(chunks) + 1)]
        count = tokens // chunk_size + len(spans)
        together = [entry for entries in chunks for entry in entries]
        chunks = [together + [empty] * (count - len(together))]
    stacked = [torch.stack(c, dim=1) if c else empty[:, None][:, :0] for c in chunks]
    return torch.stack(flat), torch.stack(finals), torch.stack(stacked).detach(), offsets


def token(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step: (H, P, N) state, x (H, P), dt (H,) as used, b and c (G, N); the new state and y (H, P)."""
    heads = x.shape[0]
    group = torch.arange(heads) // (heads // b.shape[0])
    x, b, c = x.double(), b.double()[group], c.double()[group]
    kept = torch.exp(a.double() * dt)[:, None, None] * state
    state = kept + torch.einsum("h,hp,hn->hpn", dt, x, b)
    y = torch.einsum("hpn,hn->hp", state, c)
    if d is not None:
        y = y + (d.double() if d.dim() == 2 else d.double()[:, None]) * x
    return state, y


def used_dt(
    dt: torch.Tensor,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> torch.Tensor:
    """Bias, then softplus, then limits; float64."""
    dt = dt.double()
    if dt_bias is not None:
        dt = dt + dt_bias.double()
    if dt_softplus:
        # ln(1 + e^v) as it is, and v itself where e^v would be too much for float64.
        dt = torch.nn.functional.softplus(dt, threshold=700.0)
    low, high = dt_limit
    return torch.where(dt < low, low, torch.where(dt > high, high, dt))


def gradients(
    inputs: dict[str, Any], dout: torch.Tensor | None, dfinal_state: torch.Tensor | None
) -> dict[str, torch.Tensor | None]:
    """The float64 gradient of sum(out * dout) + sum(final_state * dfinal_state) for every tensor input."""
    leaves = {
        name: inputs[name].detach().double().requires_grad_()
        for name in GRADIENTS
        if inputs.get(name) is not None
    }
    arguments = {name: v for name, v in inputs.items() if v is not None} | leaves
    out, final_state, _, _ = scan(**arguments)
    total = sum(leaf.sum() * 0.0 for leaf in leaves.values())
    if dout is not None:
        total = total + (out * dout.double()).sum()
    if dfinal_state is not None:
        total = total + (final_state * dfinal_state.double()).sum()
    found = torch.autograd.grad(total, list(leaves.values()))
    return dict.fromkeys(GRADIENTS) | dict(zip(leaves, found, strict=True))
