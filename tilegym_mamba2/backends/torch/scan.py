"""The full scan: dt pipeline, gate, packed sequences, padding and chunk states around the chunked op.

Every layout becomes one: the tokens are gathered into chunks that begin where their sequence begins, filled
up with tokens of zeros, which change no state. How many chunks there are follows from shapes alone, so that
nothing waits for the device: S sequences over T tokens fit into T // chunk_size + S. A chunk that begins a
sequence resets the state, and one that ends it the gradient of the state.

    dt_used = clamp(softplus(dt + dt_bias), *dt_limit)      y = scan(x, dt_used, a, b, c) + d∘x
    out = y∘silu(z)                                         dy = dout∘silu(z),  dz = dout∘y∘silu'(z)
"""

from typing import NamedTuple

import torch

from tilegym_mamba2.backends.torch import full_precision, segments, working_dtype
from tilegym_mamba2.backends.torch.step_size import step_size, step_size_slope
from tilegym_mamba2.options import ScanOptions

DIFFERENTIABLE = True

# Without chunk states the caller's chunk_size is a hint, as in `chunked`; with them it is cut to at most MAX.
MIN_CHUNK, MAX_CHUNK = 32, 128
# Elements of one segment's temporaries, as in `chunked`.
WORKSPACE = 2**23

Optional = torch.Tensor | None


class _Sequences(NamedTuple):
    """Which of K blocks belong to which of S packed sequences."""

    of_block: torch.Tensor  # (K,) int64
    begins: torch.Tensor  # (K,) bool: the block is the first of its sequence
    ends: torch.Tensor  # (K,) bool: the block is the last of its sequence
    first: torch.Tensor  # (S,) int64: each sequence's first block
    last: torch.Tensor  # (S,) int64
    empty: torch.Tensor  # (S,) bool


class _Layout(NamedTuple):
    """Where tokens go: chunks of `chunk_size` tokens, each of `parts` blocks of L slots."""

    L: int
    parts: int
    source: torch.Tensor  # (K * L,) int64: the token in each slot, T where there is none
    slot: torch.Tensor  # (T,) int64: the slot of each token
    valid: Optional  # (B, T) or (1, T) bool: the tokens that count; None: all
    sequences: _Sequences | None
    chunk_offsets: Optional  # (S + 1,) int64: index of each sequence's first chunk

    def mask(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, T, ...) with zeros in place of the tokens that do not count, whatever they hold."""
        if self.valid is None:
            return tokens
        return tokens.masked_fill(~self.valid.reshape(*self.valid.shape, *[1] * (tokens.dim() - 2)), 0.0)

    def lay_out(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, T, ...) -> (B, K * L, ...), zeros in the slots without a token."""
        filling = tokens.new_zeros(tokens.shape[0], 1, *tokens.shape[2:])
        return torch.cat([tokens, filling], dim=1).index_select(1, self.source)

    def take_back(self, slots: torch.Tensor) -> torch.Tensor:
        """(B, K * L, ...) -> (B, T, ...), zeros in the tokens that do not count."""
        return self.mask(slots.index_select(1, self.slot))


class _Prepared(NamedTuple):
    """A problem laid out: what the forward and the backward both walk over."""

    layout: _Layout
    pieces: list[tuple[torch.Tensor, ...]]  # x, b, c, dt as used, and in the backward dy
    state: torch.Tensor  # (B, H, P, N): the state that the first block enters with
    resets: list[segments.Reset] | None


@full_precision
def mamba2_chunk_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: Optional,
    z: Optional,
    dt_bias: Optional,
    init_state: Optional,
    cu_seqlens: Optional,
    seq_lens: Optional,
    options: ScanOptions,
) -> tuple[torch.Tensor, torch.Tensor, Optional, Optional]:
    """As `tilegym_mamba2.mamba2_chunk_scan`; computed in float32, or in float64 when any input is.

    Returns:
        out (B, T, H, P), final_state (B, H, P, N) or (S, H, P, N), chunk_states and chunk_offsets, which are
        None where they are not wanted and where nothing is packed.
    """
    work = working_dtype(x, dt, a, b, c, d, z, dt_bias, init_state, at_least=options.state_dtype)
    prepared = _prepare(x, dt, a, b, c, dt_bias, init_state, cu_seqlens, seq_lens, options, work)
    layout, state = prepared.layout, prepared.state
    outs, entry_states, exit_states = [], [], []
    for step in segments.forward(prepared.pieces, a, layout.L, state, d, prepared.resets):
        outs.append(step.out.flatten(1, 2))
        state = step.state
        if options.return_chunk_states:
            entry_states.append(step.entry_states)
        if prepared.resets is not None:
            exit_states.append(step.exit_states)
    y = layout.take_back(torch.cat(outs, dim=1)) if outs else x.to(work).clone()
    out = y if z is None else layout.mask(y * torch.nn.functional.silu(z.to(work)))
    if layout.sequences is not None:
        state = _per_sequence(layout.sequences, exit_states, init_state, x, b, work, at_the_end=True)
    chunk_states = None
    if options.return_chunk_states:
        chunk_states = _chunk_states(layout, entry_states, x, b, options).detach()
    offsets = None if layout.chunk_offsets is None else layout.chunk_offsets.to(torch.int32)
    return out.to(x.dtype), state.to(options.state_dtype), chunk_states, offsets


@full_precision
def mamba2_chunk_scan_backward(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: Optional,
    z: Optional,
    dt_bias: Optional,
    init_state: Optional,
    cu_seqlens: Optional,
    seq_lens: Optional,
    dout: Optional,
    dfinal_state: Optional,
    options: ScanOptions,
    needed: tuple[bool, ...] = (True,) * 9,
) -> tuple[Optional, ...]:
    """Gradients of sum(out * dout) + sum(final_state * dfinal_state); None stands for a zero one.

    Returns:
        dx, ddt, da, db, dc, dd, dz, ddt_bias, dinit_state, each with its input's shape and dtype; None where
        the input is None or the gradient is not `needed`. Tokens that do not count have zero gradients.
    """
    inputs = (x, dt, a, b, c, d, z, dt_bias, init_state)
    work = working_dtype(*inputs, dout, dfinal_state, at_least=options.state_dtype)
    prepared = _prepare(x, dt, a, b, c, dt_bias, init_state, cu_seqlens, seq_lens, options, work)
    layout, L = prepared.layout, prepared.layout.L
    dout = x.new_zeros(x.shape, dtype=work) if dout is None else layout.mask(dout.to(work))
    dz_wanted = z is not None and needed[6]
    steps = segments.forward(prepared.pieces, a, L, prepared.state, d, prepared.resets, with_out=dz_wanted)
    starts, outs = [], []
    for step in steps:
        starts.append(step.start)
        if dz_wanted:
            outs.append(step.out.flatten(1, 2))
    dy, dz = dout, None
    if z is not None:
        gate = layout.mask(z).to(work)
        dy = dout * torch.nn.functional.silu(gate)
    if dz_wanted:
        y = layout.take_back(torch.cat(outs, dim=1)) if outs else torch.zeros_like(dout)
        sigmoid = gate.sigmoid()
        dz = dout * y * (sigmoid * (1 + gate * (1 - sigmoid)))

    dy = layout.lay_out(dy)
    pieces = [(*p, q) for p, (q,) in zip(prepared.pieces, _pieces(layout, x, b, dy), strict=True)]
    sequences, resets = layout.sequences, None
    dstate = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[3], dtype=work)
    if sequences is not None:
        of_gradients = _resets(sequences.ends, sequences, dfinal_state, x, b, layout, work)
        resets = list(zip(prepared.resets, of_gradients, strict=True))
    elif dfinal_state is not None:
        dstate = segments.initial(dfinal_state, x, b, work)
    found = segments.backward(pieces, starts, a, L, dstate, d, resets)

    dx, db, dc, ddt = (
        x.new_zeros(like.shape, dtype=dtype) if gradient is None else layout.take_back(gradient)
        for gradient, like, dtype in zip(
            found[:4], (x, b, c, dt), (x.dtype, b.dtype, c.dtype, work), strict=True
        )
    )
    pipeline = (layout.mask(dt), dt_bias, options.dt_softplus, options.dt_limit, work)
    ddt = ddt * step_size_slope(*pipeline)
    dinit_state = found.dstate
    if sequences is not None and needed[8]:
        entries = [] if found.dentry_states is None else [found.dentry_states]
        dinit_state = _per_sequence(sequences, entries, dfinal_state, x, b, work, at_the_end=False)
    gradients = (
        dx,
        ddt,
        found.da,
        db,
        dc,
        found.dd,
        dz,
        ddt.sum((0, 1), dtype=torch.float64),
        dinit_state,
    )
    return tuple(
        None if tensor is None or not need else gradient.to(tensor.dtype)
        for gradient, tensor, need in zip(gradients, inputs, needed, strict=True)
    )


def _prepare(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt_bias: Optional,
    init_state: Optional,
    cu_seqlens: Optional,
    seq_lens: Optional,
    options: ScanOptions,
    work: torch.dtype,
) -> _Prepared:
    layout = _layout(x, cu_seqlens, seq_lens, options)
    # Masked before the pipeline, which could make NaN out of it, and after, where a step of 0 is none.
    steps = step_size(layout.mask(dt), dt_bias, options.dt_softplus, options.dt_limit, work)
    tokens = [layout.lay_out(layout.mask(t)) for t in (x, b, c, steps)]
    if layout.sequences is None:
        state = segments.initial(init_state, x, b, work)
        resets = None
    else:
        state = segments.initial(None, x, b, work)
        resets = _resets(layout.sequences.begins, layout.sequences, init_state, x, b, layout, work)
    return _Prepared(layout, _pieces(layout, x, b, *tokens), state, resets)


def _layout(x: torch.Tensor, cu_seqlens: Optional, seq_lens: Optional, options: ScanOptions) -> _Layout:
    """Lay out T tokens; `cu_seqlens` that is out of order or range gives some layout, and no fault."""
    T, device = x.shape[1], x.device
    chunk = options.chunk_size
    if not options.return_chunk_states:
        chunk = min(max(chunk, MIN_CHUNK), MAX_CHUNK)
    # No chunk holds more than `span` tokens.
    span = max(1, min(chunk, T))
    parts = -(-span // MAX_CHUNK)
    L = -(-span // parts)
    width = parts * L

    token = torch.arange(T, device=device)
    packed = cu_seqlens is not None
    if packed:
        borders = cu_seqlens.long().clamp(0, T).cummax(0).values
        num_chunks = T // chunk + borders.shape[0] - 1
    else:
        borders = torch.arange(2, device=device) * T
        num_chunks = -(-T // chunk)
    begin, end = borders[:-1], borders[1:]
    counts = (end - begin + chunk - 1) // chunk
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])

    index = torch.arange(num_chunks, device=device)
    sequence = torch.searchsorted(offsets[1:], index, right=True).clamp(max=begin.shape[0] - 1)
    start = begin[sequence] + (index - offsets[sequence]) * chunk
    within = torch.arange(width, device=device)
    source = start[:, None] + within
    filled = (within < chunk) & (source < end[sequence][:, None]) & (index < offsets[-1])[:, None]
    source = source.masked_fill(~filled, T).flatten()

    of_token = torch.searchsorted(end, token, right=True).clamp(max=begin.shape[0] - 1)
    since = (token - begin[of_token]).clamp(min=0)
    slot = (offsets[of_token] + since // chunk) * width + since % chunk
    slot = slot.clamp(max=max(0, num_chunks * width - 1))

    if not packed:
        valid = None if seq_lens is None else token < seq_lens[:, None]
        return _Layout(L, parts, source, slot, valid, None, None)
    block = torch.arange(num_chunks * parts, device=device)
    of_block = sequence.repeat_interleave(parts)
    first, last = offsets[:-1] * parts, offsets[1:] * parts - 1
    sequences = _Sequences(
        of_block,
        block == first[of_block],
        block == last[of_block],
        first,
        last,
        counts == 0,
    )
    valid = (token >= borders[0]) & (token < borders[-1])
    return _Layout(L, parts, source, slot, valid[None], sequences, offsets)


def _pieces(
    layout: _Layout, x: torch.Tensor, b: torch.Tensor, *slots: torch.Tensor
) -> list[tuple[torch.Tensor, ...]]:
    """Segments of as many blocks as fit the workspace."""
    return segments.pieces(layout.L * _blocks_per_segment(layout, x, b), *slots)


def _blocks_per_segment(layout: _Layout, x: torch.Tensor, b: torch.Tensor) -> int:
    B, _, H, P = x.shape
    L, N = layout.L, b.shape[3]
    return max(1, WORKSPACE // max(1, B * H * (3 * P * N + 4 * L * L + 3 * L * P)))


def _resets(
    at: torch.Tensor,
    sequences: _Sequences,
    states: Optional,
    x: torch.Tensor,
    b: torch.Tensor,
    layout: _Layout,
    work: torch.dtype,
) -> list[segments.Reset]:
    """For every segment, which blocks start anew (at (K,)), and from which of `states` (S, H, P, N)."""
    if states is None:
        states = x.new_zeros(1, 1, 1, 1, dtype=work).expand(len(at), *x.shape[2:], b.shape[3])
    else:
        states = states.to(work).index_select(0, sequences.of_block)
    count = _blocks_per_segment(layout, x, b)
    return [
        segments.Reset(at_piece, states_piece[None])
        for at_piece, states_piece in zip(at.split(count), states.split(count), strict=True)
    ]


def _per_sequence(
    sequences: _Sequences,
    block_states: list[torch.Tensor],
    untouched: Optional,
    x: torch.Tensor,
    b: torch.Tensor,
    work: torch.dtype,
    *,
    at_the_end: bool,
) -> torch.Tensor:
    """(S, H, P, N): of (1, K, H, P, N) in pieces each sequence's last or first, of empty ones `untouched`."""
    shape = (len(sequences.empty), *x.shape[2:], b.shape[3])
    kept = x.new_zeros(shape, dtype=work) if untouched is None else untouched.to(work).clone()
    if not block_states:
        return kept
    states = torch.cat(block_states, dim=1)[0]
    index = (sequences.last if at_the_end else sequences.first).clamp(0, len(states) - 1)
    return torch.where(sequences.empty[:, None, None, None], kept, states.index_select(0, index))


def _chunk_states(
    layout: _Layout,
    entry_states: list[torch.Tensor],
    x: torch.Tensor,
    b: torch.Tensor,
    options: ScanOptions,
) -> torch.Tensor:
    """(B, H, chunks, P, N): the entry state of each chunk's first block, zeros after the last chunk."""
    if not entry_states:
        return x.new_zeros(x.shape[0], x.shape[2], 0, x.shape[3], b.shape[3], dtype=options.state_dtype)
    states = torch.cat(entry_states, dim=1)[:, :: layout.parts].to(options.state_dtype)
    if layout.chunk_offsets is not None:
        index = torch.arange(states.shape[1], device=x.device)
        states = states.masked_fill((index >= layout.chunk_offsets[-1])[:, None, None, None], 0.0)
    return states.transpose(1, 2).contiguous()
