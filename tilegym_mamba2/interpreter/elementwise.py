"""Elementwise arithmetic of tiles and scalars: operators, and the `ct.*` functions of the same meaning."""

import math
import operator

import torch
from cuda.tile import _cext

from .errors import (
    IntegerDivisionError,
    IntegerOverflowError,
    InterpreterError,
    RefusedError,
    UnsupportedError,
)
from .tile import (
    _FLOATS,
    _ON_TILES,
    _WIDE_UNSIGNED,
    STORAGE,
    DType,
    RuntimeInt,
    Tile,
    _is_arithmetic,
    _is_float,
    _is_integral,
    _shape_error,
    as_tile,
    astype,
    bool_,
    broadcast_shape,
    constant,
    constant_dtype,
    dtype_of,
    float32,
    int8,
    int16,
    int32,
    int64,
    is_loose,
    promote,
    tensor_as,
    uint8,
    uint16,
)


def _fold(symbol: str, python, x, y):
    """Both operands are Python constants: the result is one, computed by Python."""
    constant_dtype(x), constant_dtype(y)
    try:
        return python(x, y)
    except (ZeroDivisionError, ValueError, OverflowError) as error:
        raise RefusedError(f"{x} {symbol} {y}: {error}") from None


def _arithmetic(symbol: str, fn, python, *, force_float: bool = False, exact_int=None):
    """Builds x `symbol` y. `exact_int` is `fn` on int64 tensors, whose result is checked or wrapped."""

    def general(x, y):
        if is_loose(x) and is_loose(y):
            return _fold(symbol, python, x, y)
        for side, v in (("left", x), ("right", y)):
            if not _is_arithmetic(dtype_of(v)):
                raise RefusedError(f"{side} operand of {symbol} has non-arithmetic dtype {dtype_of(v)}")
        common = promote(x, y, force_float)
        if common is bool_:
            raise RefusedError(f"{symbol} does not support bool: cast to an integer")
        if fn is None and not _is_integral(common):
            raise RefusedError(f"{symbol} does not support {common}")
        a, b = tensor_as(x, common), tensor_as(y, common)
        try:
            if not _is_integral(common):
                return Tile(fn(a, b), common)
            return Tile(_integer(symbol, exact_int or fn, a, b, common), common)
        except RuntimeError as error:
            if isinstance(error, InterpreterError):
                raise
            _shape_error(a, b, error)

    def op(x, y):
        if type(x) is Tile:
            dtype = x.dtype
            if dtype in _FLOATS and fn is not None:
                if type(y) is Tile:
                    if y.dtype is dtype:
                        try:
                            return Tile(fn(x.t, y.t), dtype)
                        except RuntimeError as error:
                            _shape_error(x.t, y.t, error)
                elif type(y) is float or type(y) is int:
                    return Tile(fn(x.t, constant(y, dtype)), dtype)
        return general(x, y)

    return op


def _integer(symbol: str, fn, a: torch.Tensor, b: torch.Tensor, dtype: DType) -> torch.Tensor:
    if symbol in ("//", "%", "cdiv") and bool((b == 0).any()):
        raise IntegerDivisionError(f"integer division by zero in a tile ({symbol})")
    wide = fn(a.to(torch.int64), b.to(torch.int64))
    mask = _WIDE_UNSIGNED.get(dtype)
    if mask is not None:
        return wide & mask
    if dtype is int64:
        return wide
    narrow = wide.to(STORAGE[dtype])
    if _cext.is_signed(dtype) and not torch.equal(narrow.to(torch.int64), wide):
        at = (narrow.to(torch.int64) != wide).nonzero()[0].tolist()
        raise IntegerOverflowError(
            f"{dtype} overflow in a tile: {symbol} gives {wide[tuple(at)].item()} at {tuple(at)}"
        )
    return narrow


def _floor_divide(a, b):
    if a.is_floating_point():
        return torch.floor(a / b)
    return torch.div(a, b, rounding_mode="floor")


def _min_or_max(symbol: str, ignore_nan, propagate_nan, python):
    plain = _arithmetic(symbol, ignore_nan, python, exact_int=propagate_nan)
    propagating = _arithmetic(symbol, propagate_nan, python)

    def op(x, y, *, flush_to_zero=False, propagate_nan=False):
        r = propagating(x, y) if propagate_nan else plain(x, y)
        if flush_to_zero:
            check_math(symbol, dtype_of(r), None, flush_to_zero, (), True)
            return flush(r)
        return r

    return op


def _refuse_integers(symbol: str):
    def refuse(a, b):
        raise RefusedError(
            f"{symbol} of two integers at run time is not implemented by cuda.tile: cast to float"
        )

    return refuse


add = _arithmetic("+", torch.add, operator.add)
sub = _arithmetic("-", torch.sub, operator.sub)
mul = _arithmetic("*", torch.mul, operator.mul)
truediv = _arithmetic("/", torch.div, operator.truediv, force_float=True)
floordiv = _arithmetic("//", _floor_divide, operator.floordiv)
mod = _arithmetic("%", torch.remainder, operator.mod)
cdiv = _arithmetic(
    "cdiv", None, lambda x, y: -((-x) // y), exact_int=lambda a, b: -torch.div(-a, b, rounding_mode="floor")
)
atan2 = _arithmetic("atan2", torch.atan2, math.atan2, exact_int=_refuse_integers("atan2"))
minimum = _min_or_max("minimum", torch.fmin, torch.minimum, min)
maximum = _min_or_max("maximum", torch.fmax, torch.maximum, max)
_float_pow = _arithmetic("**", torch.pow, operator.pow, exact_int=_refuse_integers("**"))
_ON_TILES.update({"+": add, "-": sub, "*": mul, "//": floordiv, "%": mod})


def pow_(x, y):
    if not is_loose(x) or not is_loose(y):
        base, exponent = dtype_of(x), dtype_of(y)
        if base in _FLOATS and exponent in (int8, int16, int32, uint8, uint16):
            wide = tensor_as(x, base).to(torch.float64)
            return Tile(torch.pow(wide, tensor_as(y, int32)).to(STORAGE[base]), base)
    return _float_pow(x, y)


def divmod_(x, y):
    if not (is_loose(x) and is_loose(y)) and _is_float(promote(x, y)):
        raise RefusedError("divmod() is not implemented for floating point tiles")
    if isinstance(x, RuntimeInt) or isinstance(y, RuntimeInt):
        return x // y, x % y
    return floordiv(x, y), mod(x, y)


def _comparison(symbol: str, fn, python):
    def op(x, y):
        if type(x) is Tile:
            if type(y) is Tile and y.dtype is x.dtype:
                a, b = x.t, y.t
            elif type(y) is float and x.dtype in _FLOATS:
                return Tile(fn(x.t, constant(y, x.dtype)), bool_)
            else:
                common = promote(x, y)
                a, b = tensor_as(x, common), tensor_as(y, common)
        elif type(y) is Tile:
            common = promote(x, y)
            a, b = tensor_as(x, common), tensor_as(y, common)
        elif is_loose(x) and is_loose(y):
            return _fold(symbol, python, x, y)
        else:
            common = promote(x, y)
            a, b = tensor_as(x, common), tensor_as(y, common)
        try:
            return Tile(fn(a, b), bool_)
        except RuntimeError as error:
            _shape_error(a, b, error)

    return op


equal = _comparison("==", torch.eq, operator.eq)
not_equal = _comparison("!=", torch.ne, operator.ne)
less = _comparison("<", torch.lt, operator.lt)
less_equal = _comparison("<=", torch.le, operator.le)
greater = _comparison(">", torch.gt, operator.gt)
greater_equal = _comparison(">=", torch.ge, operator.ge)


def _bitwise(symbol: str, fn, python, *, shift: bool = False):
    def op(x, y):
        if is_loose(x) and is_loose(y):
            return _fold(symbol, python, x, y)
        x_dtype, y_dtype = dtype_of(x), dtype_of(y)
        for dtype in (x_dtype, y_dtype):
            if not (_is_integral(dtype) or (dtype is bool_ and not shift)):
                raise RefusedError(f"{symbol} needs integers{'' if shift else ' or booleans'}, got {dtype}")
        if not shift and is_loose(x) == is_loose(y) and x_dtype is not y_dtype:
            raise RefusedError(f"operands of {symbol} must have the same dtype, got {x_dtype} and {y_dtype}")
        if not shift and {x_dtype, y_dtype} == {bool_, int8}:
            raise RefusedError(f"{symbol} does not support bool with int8")
        common = promote(x, y)
        a, b = tensor_as(x, common), tensor_as(y, common)
        if shift and bool(((b < 0) | (b >= common.bitwidth)).any()):
            raise IntegerOverflowError(
                f"{symbol} of {common} by a negative number or {common.bitwidth} and more"
            )
        try:
            r = fn(a, b)
        except RuntimeError as error:
            _shape_error(a, b, error)
        mask = _WIDE_UNSIGNED.get(common)
        return Tile(r if mask is None else r & mask, common)

    return op


bitwise_and = _bitwise("&", torch.bitwise_and, operator.and_)
bitwise_or = _bitwise("|", torch.bitwise_or, operator.or_)
bitwise_xor = _bitwise("^", torch.bitwise_xor, operator.xor)
lshift = _bitwise("<<", torch.bitwise_left_shift, operator.lshift, shift=True)
rshift = _bitwise(">>", torch.bitwise_right_shift, operator.rshift, shift=True)
_ON_TILES.update({"&": bitwise_and, "|": bitwise_or, "^": bitwise_xor, "<<": lshift, ">>": rshift})


def where(cond, x, y) -> Tile:
    """cond is cast to bool; x and y take their common dtype; the three shapes broadcast."""
    common = promote(x, y)
    c = tensor_as(cond, bool_)
    a, b = tensor_as(x, common), tensor_as(y, common)
    try:
        return Tile(torch.where(c, a, b), common)
    except RuntimeError:
        broadcast_shape(tuple(c.shape), tuple(a.shape), tuple(b.shape))
        raise


# ---- elementwise unary ------------------------------------------------------------------------------------


def check_math(
    name: str, dtype: DType, rounding_mode, flush_to_zero, modes: tuple[str, ...], ftz: bool
) -> None:
    """Refuses keyword combinations that `cuda.tile` refuses, and rounding that torch cannot do."""
    if rounding_mode is not None:
        mode = rounding_mode.value
        if mode not in modes:
            raise RefusedError(f"rounding mode {mode} is not supported for {name}")
        if dtype not in _FLOATS or (mode in ("full", "approx") and dtype is not float32):
            raise RefusedError(f"rounding mode {mode} of {name} cannot be used with {dtype}")
        if mode in ("zero", "negative_inf", "positive_inf"):
            raise UnsupportedError(f"rounding mode {mode} of {name} is not supported by the tile interpreter")
    if flush_to_zero and (not ftz or dtype is not float32):
        raise RefusedError(f"flush_to_zero of {name} cannot be used with {dtype}")


BASIC_MODES = ("nearest_even", "zero", "negative_inf", "positive_inf")


def flush(x):
    """Subnormal float32 elements become zeros of their sign."""
    if type(x) is not Tile:
        return x
    return Tile(torch.where(x.t.abs() < 2.0**-126, x.t * 0.0, x.t), x.dtype)


def _unary(name: str, fn, python, *, ints: str, modes: tuple[str, ...] = (), ftz: bool = False):
    """`ints`: what becomes of integers and booleans: "float" (float32), "keep", "refuse"."""

    def op(x, *, rounding_mode=None, flush_to_zero=False):
        if type(x) is not Tile:
            if is_loose(x):
                constant_dtype(x)
                try:
                    return python(x)
                except (ValueError, OverflowError) as error:
                    raise RefusedError(f"{name}({x}): {error}") from None
            x = as_tile(x)
        dtype = x.dtype
        if dtype not in _FLOATS:
            if _is_float(dtype):
                raise UnsupportedError(f"{name} of {dtype} is not supported by the tile interpreter")
            if ints == "refuse":
                raise RefusedError(f"{name} does not support {dtype}: cast to float")
            if ints == "float":
                x = astype(x, float32)
                dtype = float32
            elif dtype is bool_ and name == "negative":
                x = astype(x, int32)
                dtype = int32
        if rounding_mode is not None or flush_to_zero:
            check_math(name, dtype, rounding_mode, flush_to_zero, modes, ftz)
            if flush_to_zero:
                return flush(Tile(fn(flush(x).t), dtype))
        return Tile(fn(x.t), dtype)

    return op


exp = _unary("exp", torch.exp, math.exp, ints="float", modes=("full", "approx"))
exp2 = _unary("exp2", torch.exp2, lambda x: 2**x, ints="float", ftz=True)
log = _unary("log", torch.log, math.log, ints="float")
log2 = _unary("log2", torch.log2, math.log2, ints="float")
sqrt = _unary("sqrt", torch.sqrt, math.sqrt, ints="float", modes=(*BASIC_MODES, "approx"), ftz=True)
rsqrt = _unary("rsqrt", torch.rsqrt, lambda x: x**-0.5, ints="float", ftz=True)
sin = _unary("sin", torch.sin, math.sin, ints="float")
cos = _unary("cos", torch.cos, math.cos, ints="float")
tan = _unary("tan", torch.tan, math.tan, ints="float")
sinh = _unary("sinh", torch.sinh, math.sinh, ints="float")
cosh = _unary("cosh", torch.cosh, math.cosh, ints="float")
tanh = _unary("tanh", torch.tanh, math.tanh, ints="float", modes=("full", "approx"))
floor = _unary("floor", torch.floor, math.floor, ints="refuse")
ceil = _unary("ceil", torch.ceil, math.ceil, ints="refuse")
abs_ = _unary("abs", lambda t: t if t.dtype is torch.bool else torch.abs(t), abs, ints="keep")
_negative = _unary("negative", torch.neg, operator.neg, ints="keep")


def negative(x):
    r = _negative(x)
    if type(r) is Tile and r.dtype in _WIDE_UNSIGNED:
        return Tile(r.t & _WIDE_UNSIGNED[r.dtype], r.dtype)
    return r


def bitwise_not(x):
    if type(x) is not Tile:
        if constant_dtype(x) is float32:
            raise RefusedError(f"~ needs integers or booleans, got {x}")
        return (not x) if isinstance(x, bool) else ~x
    if _is_float(x.dtype):
        raise RefusedError(f"~ needs integers or booleans, got {x.dtype}")
    r = torch.bitwise_not(x.t)
    mask = _WIDE_UNSIGNED.get(x.dtype)
    return Tile(r if mask is None else r & mask, x.dtype)


def isnan(x):
    if type(x) is not Tile and is_loose(x):
        return math.isnan(x)
    if type(x) is not Tile or not _is_float(x.dtype):
        raise RefusedError(f"isnan needs a float tile, got {dtype_of(x)}")
    return Tile(torch.isnan(x.t), bool_)


# ---- operators --------------------------------------------------------------------------------------------


def _set_operators(cls, binary: dict, others: dict) -> None:
    for name, fn in binary.items():
        setattr(cls, f"__{name}__", fn)
        setattr(cls, f"__r{name}__", lambda self, other, fn=fn: fn(other, self))
    for name, fn in others.items():
        setattr(cls, f"__{name}__", fn)


_COMPARISONS = {
    "eq": equal,
    "ne": not_equal,
    "lt": less,
    "le": less_equal,
    "gt": greater,
    "ge": greater_equal,
}
_set_operators(RuntimeInt, {"truediv": truediv, "pow": pow_, "divmod": divmod_}, _COMPARISONS)
_set_operators(
    Tile,
    {
        "add": add,
        "sub": sub,
        "mul": mul,
        "truediv": truediv,
        "floordiv": floordiv,
        "mod": mod,
        "divmod": divmod_,
        "pow": pow_,
        "and": bitwise_and,
        "or": bitwise_or,
        "xor": bitwise_xor,
        "lshift": lshift,
        "rshift": rshift,
    },
    {**_COMPARISONS, "neg": negative, "abs": abs_, "invert": bitwise_not},
)
