"""The gate z of the full scan and its derivative: pure functions on tiles."""

import cuda.tile as ct

from .decay import LOG2E, exp2

_APPROX = ct.RoundingMode.APPROX


def sigmoid(v):
    """1 / (1 + exp(−v)), without overflow: past 88 the exponential is inf and the result 0."""
    return ct.truediv(1.0, 1.0 + exp2(-LOG2E * v), rounding_mode=_APPROX)


def silu(v):
    """v · sigmoid(v)."""
    return ct.truediv(v, 1.0 + exp2(-LOG2E * v), rounding_mode=_APPROX)


def silu_slope(v):
    """d silu / dv."""
    s = sigmoid(v)
    return s * (1.0 + v * (1.0 - s))
