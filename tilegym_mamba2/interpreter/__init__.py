"""Runs `cuda.tile` kernels on CPU tensors, block by block: debug a kernel on a laptop, test it in CI.

    import torch
    from tilegym_mamba2 import interpreter

    with interpreter.interpret():                       # or TILEGYM_MAMBA2_INTERPRET=1 in the environment
        out, state = tilegym_mamba2.mamba2_chunk_forward(x, a, b, c, d, dt, state, backend="cutile")

    interpreter.launch((4,), my_kernel, (x, y, 64), outputs={"y": y})      # any @ct.kernel of your own

The kernel is the very object that would be compiled; its Python function runs with `ct.*` bound to the
interpreter. `print(tile)`, `breakpoint()` and a debugger work inside it.

*What it computes.* Tile-space indexing, `order`, padding, stores cut at the border, `cuda.tile`'s dtype rules
and its rounding: 16-bit arithmetic rounds after every operation, `mma` operands are what their dtype holds
(bf16, fp16, tf32 with 10 mantissa bits) and products accumulate in float32. Sums and scans run as trees, in
the tile's own precision. What a load without padding mode reads outside its array is NaN (a fixed odd value
for integers).

*What it reports*, with kernel, block, seed, source line, array and indices:

    RaceError             an element written by two blocks, or written by one and read by another
    NeverWrittenError     an element of `outputs` that no block wrote
    OutOfBoundsError      a tile wholly outside its array; check_bounds=False crossing a border
    RefusedError          what cuda.tile would not compile: a dimension that is no power of two, a run-time
                          value as a shape, misfitting operands of mma, float32 stored to bf16, `if tile:`
    IntegerOverflowError  int32 arithmetic past 2**31, in tiles and in scalars such as `ct.bid(0) * stride`
    IntegerDivisionError  an integer divided by zero
    UnsupportedError      a `ct.*` function, or mode of one, that the interpreter does not implement
    KernelAssertionError  ct.assert_, ct.static_assert, ct.assume_divisible_by
    LaunchError           arguments or a grid that a launch would refuse; tensors on a GPU
    KernelCrashError      any other exception in the kernel

*Order.* Blocks run one after the other in shuffled order. Each launch draws a seed, errors name it, and
`seed=` or TILEGYM_MAMBA2_INTERPRET_SEED replays it. A kernel whose blocks wait for each other never ends.

*Limits.* Python is not the `cuda.tile` compiler: what the compiler refuses as syntax (try, list displays) or
because a variable changes its type over a branch or a loop runs here, so compile as well. Of what it accepts,
`min()`, `max()` and `not` of tiles that are no scalars do not run: write ct.minimum, ct.maximum, ~. A read
before another block's write is only reported in the orders where it comes after. uint64, 4-bit floats,
directed rounding modes and `mma_scaled` are not implemented.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .errors import (
    IntegerDivisionError,
    IntegerOverflowError,
    InterpreterError,
    KernelAssertionError,
    KernelCrashError,
    LaunchError,
    NeverWrittenError,
    OutOfBoundsError,
    RaceError,
    RefusedError,
    UnsupportedError,
)

__all__ = [
    "IntegerDivisionError",
    "IntegerOverflowError",
    "InterpreterError",
    "KernelAssertionError",
    "KernelCrashError",
    "LaunchError",
    "NeverWrittenError",
    "OutOfBoundsError",
    "RaceError",
    "RefusedError",
    "UnsupportedError",
    "interpret",
    "is_active",
    "launch",
]

_TRUE = frozenset(("1", "true", "yes", "on"))


class _Depth(threading.local):
    value = 0


_depth = _Depth()


@contextmanager
def interpret() -> Iterator[None]:
    """Within it, on this thread, the `cutile` backend runs its kernels through the interpreter. Nests."""
    _depth.value += 1
    try:
        yield
    finally:
        _depth.value -= 1


def is_active() -> bool:
    """Whether kernels go through the interpreter: inside `interpret()`, or by TILEGYM_MAMBA2_INTERPRET=1."""
    return _depth.value > 0 or os.environ.get("TILEGYM_MAMBA2_INTERPRET", "").strip().lower() in _TRUE


def launch(
    grid: tuple[int, ...],
    kernel: Any,
    args: tuple,
    *,
    outputs: Mapping[str, Any] | Sequence[Any] | None = None,
    seed: int | None = None,
) -> None:
    """Runs every block of a kernel on CPU tensors, in place, in shuffled order.

    grid     one to three positive integers, as for `ct.launch`
    kernel   a `@ct.kernel` object
    args     one per parameter: CPU tensors of any strides, ints, floats, bools, tuples, lists of tensors
    outputs  tensors that must be written completely, by name or in a sequence; None checks nothing
    seed     of the order of blocks; random if None, and TILEGYM_MAMBA2_INTERPRET_SEED overrides both

    Raises a subclass of `InterpreterError` at the first thing that is wrong. No autograd is recorded, and
    `TorchDispatchMode`s do not see what the interpreter itself computes.
    """
    from .run import run_launch

    run_launch(grid, kernel, args, outputs=outputs, seed=seed)
