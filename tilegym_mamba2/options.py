"""What `mamba2_chunk_scan` does beside the recurrence, as a backend sees it."""

import math
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["MAX_CHUNK_SIZE", "NO_LIMIT", "ScanOptions", "is_no_limit"]

# 0 and not 0.0: torch.compile with dynamic shapes would make a symbol of a float.
NO_LIMIT = (0, math.inf)
"""The default of dt_limit."""


def is_no_limit(dt_limit: Any) -> bool:
    """Whether dt_limit says what `NO_LIMIT` does, a list too; False for what no validation has seen yet."""
    if dt_limit is NO_LIMIT:
        return True
    if not isinstance(dt_limit, tuple | list) or len(dt_limit) != 2:
        return False
    low, high = dt_limit
    # Numbers alone are compared: an array has no truth value, and False equals 0.
    numbers = isinstance(low, int | float) and isinstance(high, int | float) and not isinstance(low, bool)
    return numbers and low == 0 and high == math.inf


MAX_CHUNK_SIZE = 2**31 - 1
"""A larger chunk_size means this one: backends multiply with it in 64 bits; torch.library takes no more."""


@dataclass(frozen=True)
class ScanOptions:
    """The options of one scan that are no tensors; hashable, so that a backend may keep what they lead to.

    Args:
        dt_softplus, dt_limit: dt as used is clamp(softplus(dt + dt_bias), *dt_limit); softplus only if asked
            for.
        chunk_size: tokens from one of the chunk states to the next, and a hint for the blocking.
        state_dtype: of the final state and the chunk states. None only before a call is resolved.
        return_chunk_states: whether the states at the chunks' entries are wanted.
    """

    dt_softplus: bool = False
    dt_limit: tuple[float, float] = NO_LIMIT
    chunk_size: int = 64
    state_dtype: torch.dtype | None = None
    return_chunk_states: bool = False
