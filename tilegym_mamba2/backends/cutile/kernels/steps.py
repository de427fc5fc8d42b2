"""From dt as given to the step that is used: bias, softplus, clamp, in float32; and how steep that is. Pure
functions on tiles."""

import cuda.tile as ct

from .gate import sigmoid

# 2·atanh(s) = 2s·Σ s^2k / (2k + 1): at s ≤ 1/3 the next term is below a float32 digit.
_ATANH = (1 / 3, 1 / 5, 1 / 7, 1 / 9, 1 / 11, 1 / 13)


def log1p_up_to_one(e):
    """log(1 + e) for e in [0, 1] to float32's last digits: log(1 + e) itself loses e below 2**-24."""
    s = ct.truediv(e, e + 2.0, rounding_mode=ct.RoundingMode.APPROX)
    square = s * s
    total = 1 / 15
    for coefficient in ct.static_iter(_ATANH[::-1]):
        total = total * square + coefficient
    return 2.0 * s * (total * square + 1.0)


def softplus(v):
    """log(1 + exp(v)) without overflow: softplus(100) is 100."""
    return ct.maximum(v, 0.0) + log1p_up_to_one(ct.exp(-ct.abs(v)))


def clamp(v, low, high):
    """v in [low, high]; NaN stays NaN."""
    return ct.minimum(ct.maximum(v, low, propagate_nan=True), high, propagate_nan=True)


def slope(v, low, high, is_softplus):
    """The derivative of clamp(softplus(v), low, high), or of clamp(v, low, high): 0 where it is clamped."""
    steep = 1.0
    if is_softplus:
        steep, v = sigmoid(v), softplus(v)
    return ct.where((v < low) | (v > high), 0.0, steep)
