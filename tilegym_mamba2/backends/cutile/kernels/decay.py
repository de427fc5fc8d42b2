"""The decay on tiles: pure functions. g is the inclusive sum of a·dt·log2(e) from the start of a tile of
tokens.

g never rises: a parallel sum is not monotone in float32, so a running minimum follows it. Then every
difference that a factor needs is ≤ 0 and no factor exceeds 1.
"""

import cuda.tile as ct

LOG2E = 1.4426950408889634
# A factor of 2**-150 is 0 in float32, however the tokens before and after it decay.
_FORGOTTEN = -150.0
# Far below any exponent that matters: exp2 gives 0, and no inf or NaN can come of it.
_MASKED = -1.0e30


# The lowest rate that times a dt of 0 is 0.
_LOWEST = -3.0e38


def finite(rate):
    """A rate with −inf as the lowest finite one: it forgets everything at any dt > 0, and nothing at 0."""
    return ct.maximum(rate, _LOWEST, propagate_nan=True)


def _smaller(x, y):
    return ct.minimum(x, y, propagate_nan=True)


def cumulative_decay(rate_log2, axis):
    """g = running sum of `rate_log2` (= a·dt·log2 e, ≤ 0) along `axis`, made monotone."""
    return ct.scan(ct.cumsum(rate_log2, axis=axis), axis, _smaller, 0.0)


def at_most_forgotten(rate_log2):
    """a·dt·log2(e) of a token, but not below what makes a factor 0 in float32.

    It changes no factor, and keeps the running sum of 64 tokens below 2**14, where neighbours are 2**-10
    apart: otherwise tokens that forget far more than everything would cost later factors their last digits.
    """
    return ct.maximum(rate_log2, _FORGOTTEN, propagate_nan=True)


def exp2(x):
    """2**x, denormals flushed: without that each exponential costs three more instructions."""
    return ct.exp2(x, flush_to_zero=True)


def causal_weights_t(g, dt, tokens):
    """(L, L), transposed: [j, i] = exp2(g_i − g_j) · dt_j for i ≥ j, else 0. Masked before the
    exponential."""
    causal = tokens[None, :] >= tokens[:, None]
    return exp2(ct.where(causal, g[None, :] - g[:, None], _MASKED)) * dt[:, None]
