"""The gate z of the full scan and its derivative: pure functions on tiles."""

import cuda.tile as ct

from .decay import LOG2E, exp2

_APPROX = ct.RoundingMode.APPROX


def _over(x, y):
    """x / y for y ≥ 1, denormals flushed: without that each division costs three more instructions."""
    return ct.truediv(x, y, rounding_mode=_APPROX, flush_to_zero=True)


def sigmoid(v):
    """1 / (1 + exp(−v)), without overflow: past 88 the exponential is inf and the result 0."""
    # Not `_over`: with it `finish_dt` spills 8 bytes.
    return ct.truediv(1.0, 1.0 + exp2(-LOG2E * v), rounding_mode=_APPROX)


def silu(v):
    """v · sigmoid(v)."""
    return _over(v, 1.0 + exp2(-LOG2E * v))


def silu_slope(v):
    """d silu / dv."""
    s = sigmoid(v)
    return s * (1.0 + v * (1.0 - s))
