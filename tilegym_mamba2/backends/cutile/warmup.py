"""Compiling before the first call: what a server, a training run or a CUDA graph must not wait for."""

import functools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from tilegym_mamba2.errors import BackendUnavailable
from tilegym_mamba2.options import NO_LIMIT, ScanOptions

from . import tuning
from .availability import available
from .backward import mamba2_chunk_backward
from .backward_config import BackwardConfig
from .forward import mamba2_chunk_forward
from .scan import mamba2_chunk_scan
from .scan_backward import mamba2_chunk_scan_backward
from .state_update import StateUpdateConfig, mamba2_state_update

__all__ = ["warmup"]


def warmup(spec: Any, device: torch.device | str | None = None, *, backward: bool = False) -> None:
    """Compiles what an op needs for a spec at any number of tokens from 2 to the spec's, so that no later
    call waits; with `backward`, what a training step needs.

    Args:
        spec: the name of a spec or one: a Mamba2ProblemSpec for `mamba2_chunk_forward`, a Mamba2ScanSpec for
            `mamba2_chunk_scan` with the spec's options (packed: of at most as many sequences), a
            Mamba2StepSpec for `mamba2_state_update` with the spec's options, its K, and at most its rows.
            a, d and dt_bias are taken to be float32, lengths int32.
        device: default: the current GPU.
        backward: also compiles the backward for all gradients. Both ops are then compiled with an initial
            state and its gradient, and without.

    Over T there are two forms of each kernel, T a multiple of 16 or not, and a third of some where the steps
    dt of a token are no multiple of 16 bytes. The spec's sizes are run on zeros, at its own length and at one
    for each configuration that tuning found for shorter ones. Tensors with gaps between their rows, or past
    2³¹ elements, may compile again, and so may chunk states.

    Raises:
        ValueError, TypeError: `spec` is no spec, or a step's with `backward`. BackendUnavailable: the kernels
        cannot run on `device`.
    """
    from tilegym_mamba2.spec import SPECS, Mamba2ProblemSpec, Mamba2ScanSpec, Mamba2StepSpec

    if isinstance(spec, str):
        if spec not in SPECS:
            raise ValueError(f"spec must be a name in tilegym_mamba2.SPECS, got {spec!r}")
        spec = SPECS[spec]
    elif not isinstance(spec, Mamba2ProblemSpec):
        raise TypeError(
            "spec must be a Mamba2ProblemSpec, Mamba2ScanSpec or Mamba2StepSpec or the name of one, "
            f"got {type(spec).__name__}"
        )
    if isinstance(spec, Mamba2StepSpec) and backward:
        raise ValueError("backward must be False for a Mamba2StepSpec: mamba2_state_update has no backward")
    device = torch.device("cuda" if device is None else device)
    ok, reason = available(device)
    if not ok:
        raise BackendUnavailable(f"warmup: backend 'cutile' cannot run on {device}: {reason}")
    if isinstance(spec, Mamba2StepSpec):
        for batch in batches(spec):
            run_step(spec, batch, device)
    elif isinstance(spec, Mamba2ScanSpec):
        for case in scan_cases(spec, tuning.arch_of(device)):
            run_scan(case, device, backward)
    else:
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


def _zero_inputs(spec: Any, device: torch.device) -> dict[str, torch.Tensor | None]:
    """x, dt, a, b, c, d, z and dt_bias of a scan's or a step's spec, all zeros; None for what it has not."""
    dtypes = dict.fromkeys(("x", "b", "c", "z"), spec.dtype) | {"dt": spec.step_dtype}
    shapes = spec.shapes
    return {
        name: torch.zeros(shapes[name], dtype=dtypes.get(name, torch.float32), device=device)
        if name in shapes
        else None
        for name in ("x", "dt", "a", "b", "c", "d", "z", "dt_bias")
    }


# ---- the scan


def scan_cases(spec: Any, arch: str) -> list[Any]:
    """Specs at which all forms of the kernels appear that the spec's own or shorter ones need."""
    found = lengths(spec, arch)
    if spec.padded:
        found += _lengths_of_tiles(spec)
    cases = [replace(spec, num_tokens=tokens) for tokens in found]
    if not spec.num_sequences:
        return cases
    most = max(16, spec.num_sequences // 16 * 16)
    counts = (1, 2, most - 1, most)
    return [replace(case, num_sequences=count) for case in cases for count in counts]


def _lengths_of_tiles(spec: Any) -> list[int]:
    """Numbers of tokens at which the tiles of all rows together are a multiple of 16, and are none."""
    tile = BackwardConfig.tile_tokens
    most = math.ceil(spec.num_tokens / tile)
    found = []
    for even in (True, False):
        fitting = (n for n in range(most, 0, -1) if (spec.batch_size * n % 16 == 0) == even)
        if (tiles := next(fitting, None)) is not None:
            found += [tile * tiles, tile * tiles - 1]
    return found


def run_scan(spec: Any, device: torch.device, backward: bool) -> None:
    """The calls that compile one of `scan_cases`: all zeros, and lengths of zero."""
    zeros, zeros_like = functools.partial(torch.zeros, device=device), torch.zeros_like
    inputs = _zero_inputs(spec, device)
    lengths_of = functools.partial(zeros, dtype=torch.int32)
    borders = {
        "cu_seqlens": lengths_of(spec.num_sequences + 1) if spec.num_sequences else None,
        "seq_lens": lengths_of(spec.batch_size) if spec.padded else None,
    }
    options = ScanOptions(spec.raw_dt, tuple(map(float, NO_LIMIT)), spec.chunk_size, spec.state_dtype)
    state = None if spec.stateless else zeros(spec.shapes["init_state"], dtype=spec.state_dtype)
    for init_state in (state, None) if backward and state is not None else (state,):
        arguments = (*inputs.values(), init_state, *borders.values())
        mamba2_chunk_scan(*arguments, options)
        if backward:
            dfinal_state = None if init_state is None else zeros_like(state)
            mamba2_chunk_scan_backward(*arguments, zeros_like(inputs["x"]), dfinal_state, options)


# ---- the step


def batches(spec: Any) -> Iterable[int]:
    """Numbers of rows at which all forms of the kernel appear that the spec's own or fewer need."""
    # Up to here the blocks get larger with the number of rows; past it only multiples of 16 differ.
    growing = math.ceil(StateUpdateConfig().min_blocks / spec.num_heads)
    most = max(16, spec.batch_size // 16 * 16)
    return sorted({*range(1, min(growing, spec.batch_size) + 1), most, most + 1})


def run_step(spec: Any, batch: int, device: torch.device) -> None:
    """The calls that compile: the spec's sizes with `batch` rows, all zeros, and rows of no slot."""
    one = replace(spec, batch_size=batch, num_slots=spec.num_slots and max(spec.num_slots, batch))
    inputs = _zero_inputs(one, device)
    if spec.num_tokens == 1:
        for name in ("x", "dt", "b", "c", "z"):
            inputs[name] = None if inputs[name] is None else inputs[name][:, 0]
    state = torch.zeros(one.shapes["init_state"], dtype=spec.state_dtype, device=device)
    for dtype in (torch.int32, torch.int64) if spec.num_slots else (None,):
        slots = None if dtype is None else torch.full((batch,), -1, dtype=dtype, device=device)
        out = torch.empty_like(inputs["x"])
        mamba2_state_update(state, *inputs.values(), slots, spec.raw_dt, NO_LIMIT, out)
