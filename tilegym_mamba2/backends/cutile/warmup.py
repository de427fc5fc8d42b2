"""Compiling before the first call: what a server, a training run or a CUDA graph must not wait for."""

import functools
from typing import Any

import torch

from tilegym_mamba2.errors import BackendUnavailable

from . import tuning
from .availability import available
from .backward import mamba2_chunk_backward
from .forward import mamba2_chunk_forward

__all__ = ["warmup"]


def warmup(spec: Any, device: torch.device | str | None = None, *, backward: bool = False) -> None:
    """Compiles what `mamba2_chunk_forward` needs for a spec at any number of tokens from 2 to the spec's, so
    that no later call waits; with `backward`, what a training step needs.

    Args:
        spec: a Mamba2ProblemSpec or the name of one. a and d are taken to be float32.
        device: default: the current GPU.
        backward: also compiles `mamba2_chunk_backward` for all gradients. Both ops are then compiled with an
            initial state and its gradient, and without.

    Over T there are two forms of each kernel, T a multiple of 16 or not, and a third of some where the steps
    dt of a token are no multiple of 16 bytes. The spec's sizes are run on zeros, at its own length and at one
    for each configuration that tuning found for shorter ones. Tensors with gaps between their rows, or past
    2³¹ elements, may compile again.

    Raises:
        ValueError, TypeError: `spec` is no spec. BackendUnavailable: the kernels cannot run on `device`.
    """
    from tilegym_mamba2.spec import SPECS, Mamba2ProblemSpec

    if isinstance(spec, str):
        if spec not in SPECS:
            raise ValueError(f"spec must be a name in tilegym_mamba2.SPECS, got {spec!r}")
        spec = SPECS[spec]
    elif not isinstance(spec, Mamba2ProblemSpec):
        raise TypeError(f"spec must be a Mamba2ProblemSpec or the name of one, got {type(spec).__name__}")
    device = torch.device("cuda" if device is None else device)
    ok, reason = available(device)
    if not ok:
        raise BackendUnavailable(f"warmup: backend 'cutile' cannot run on {device}: {reason}")
    for tokens in lengths(spec, tuning.arch_of(device)):
        run(spec, tokens, device, backward)


def lengths(spec: Any, arch: str) -> list[int]:
    """Numbers of tokens at which all forms of the kernels appear that the spec's own or fewer need."""
    longest = max(16, spec.num_tokens // 16 * 16)
    # The longest for each configuration that the tables give to some length: a short one is one segment.
    of_config = {}
    for tokens in (*(2**power for power in range(4, longest.bit_length())), longest):
        key = tuning.key_of(arch, spec.dtype, tokens, spec.num_heads, spec.head_size, spec.state_size)
        of_config[tuning.lookup(key)[0]] = tokens
    # In the shortest the backward cuts the heads of a group in parts: another form of two kernels.
    bases = {16, *of_config.values()}
    steps = (0, 1, 8) if spec.num_heads * spec.step_dtype.itemsize % 16 else (0, 1)
    return [base + step for base in sorted(bases) for step in steps]


def run(spec: Any, tokens: int, device: torch.device, backward: bool) -> None:
    """The calls that compile: the spec's sizes with `tokens` tokens, all zeros."""
    zeros, zeros_like = functools.partial(torch.zeros, device=device), torch.zeros_like
    batch, heads, head_size, state_size = spec.batch_size, spec.num_heads, spec.head_size, spec.state_size
    x = zeros(batch, tokens, heads, head_size, dtype=spec.dtype)
    b = zeros(batch, tokens, spec.num_groups, state_size, dtype=spec.dtype)
    a, d, dt = zeros(heads), zeros(heads), zeros(x.shape[:3], dtype=spec.step_dtype)
    c, state = zeros_like(b), zeros(batch, heads, head_size, state_size, dtype=spec.state_dtype)
    for init_state in (state, None) if backward else (state,):
        inputs = (x, a, b, c, d, dt, init_state)
        mamba2_chunk_forward(*inputs)
        if backward:
            dfinal_state = None if init_state is None else zeros_like(state)
            mamba2_chunk_backward(*inputs, zeros_like(x), dfinal_state)
