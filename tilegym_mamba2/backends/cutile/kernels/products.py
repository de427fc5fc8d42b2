"""Matrix products with float32 accumulation, in the precision that the inputs' dtype and the user allow.

A computed operand goes first: there it stays in registers; as loaded, operands go second, where the tensor
cores read them from shared memory.
"""

import cuda.tile as ct

# How an operand that was computed in float32 enters a product.
BF16 = 0  # inputs in bf16: rounded to bf16
TF32 = 1  # fp16: a state past 65504 must not become inf. fp32 at "high" and "medium": one tf32 product
TF32X3 = 2  # fp32 at "highest": two tf32 parts an operand, three products. A float32 mma spills on sm_90


def split_tf32(x):
    """Two tf32 tiles whose sum is x to about 2**-22."""
    high = x.astype(ct.tfloat32)
    low = (x - high.astype(ct.float32)).astype(ct.tfloat32)
    return high, low


def product(x, y, acc, precision):
    """x @ y + acc, for operands of which at least one was computed in float32."""
    if precision == BF16:
        return ct.mma(x.astype(ct.bfloat16), y.astype(ct.bfloat16), acc)
    if precision == TF32:
        return ct.mma(x.astype(ct.tfloat32), y.astype(ct.tfloat32), acc)
    x_high, x_low = split_tf32(x.astype(ct.float32))
    y_high, y_low = split_tf32(y.astype(ct.float32))
    # The small terms first, so that they are not rounded away against the large one.
    acc = ct.mma(x_low, y_high, acc)
    acc = ct.mma(x_high, y_low, acc)
    return ct.mma(x_high, y_high, acc)


def product_of_parts(x, y, acc, precision, parts):
    """x @ y + acc, for x computed in float32; in bf16, of 2 parts x keeps 16 bits, not 8."""
    acc = product(x, y, acc, precision)
    if precision == BF16 and parts == 2:
        acc = product(rounded_off(x), y, acc, precision)
    return acc


def rounded_off(x):
    """What bf16 lacks of float32 x."""
    return x - x.astype(ct.bfloat16).astype(ct.float32)


def product_of_loaded(x, y, acc, precision):
    """x @ y + acc for two operands as loaded: 16-bit inputs are exact operands already."""
    if x.dtype == ct.float32:
        return product(x, y, acc, precision)
    return ct.mma(x, y, acc)


def add_weighted(acc, x, y, weight, precision):
    """acc + weight ∘ (x @ y), for two operands as loaded and a weight (rows, 1).

    The rows of the product are weighted, so that x enters it as it is: weighted first, it would be rounded.
    """
    fresh = ct.zeros(acc.shape, ct.float32)
    return acc + product(x, y, fresh, precision) * weight
