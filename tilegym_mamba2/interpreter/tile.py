"""Tiles and scalars: a torch CPU tensor with a `cuda.tile` dtype, and `cuda.tile`'s arithmetic on it.

Arithmetic follows three rules of `cuda.tile` that plain torch does not: Python numbers are loosely typed and
take the tile's dtype (rounded to it first), mixed dtypes promote by `cuda.tile`'s own table, and 16-bit
results are rounded after every operation. Tiles are values: no operation changes an existing tile.
"""

import math
import operator

import torch
from cuda.tile import _cext
from cuda.tile import _datatype as dt

from .errors import (
    IntegerDivisionError,
    IntegerOverflowError,
    InterpreterError,
    RefusedError,
    UnsupportedError,
)

DType = dt.DType
bool_, int8, int16, int32, int64 = dt.bool_, dt.int8, dt.int16, dt.int32, dt.int64
uint8, uint16, uint32, uint64 = dt.uint8, dt.uint16, dt.uint32, dt.uint64
float16, bfloat16, float32, float64, tfloat32 = dt.float16, dt.bfloat16, dt.float32, dt.float64, dt.tfloat32

# uint16 and uint32 live in int64, since torch has next to no arithmetic on them; uint64 has no home.
STORAGE = {
    bool_: torch.bool,
    int8: torch.int8,
    int16: torch.int16,
    int32: torch.int32,
    int64: torch.int64,
    uint8: torch.uint8,
    uint16: torch.int64,
    uint32: torch.int64,
    float16: torch.float16,
    bfloat16: torch.bfloat16,
    float32: torch.float32,
    tfloat32: torch.float32,
    float64: torch.float64,
    dt.float8_e4m3fn: torch.float8_e4m3fn,
    dt.float8_e5m2: torch.float8_e5m2,
}
_WIDE_UNSIGNED = {uint16: 0xFFFF, uint32: 0xFFFFFFFF}
_FLOATS = frozenset((float16, bfloat16, float32, float64))
_CASTS = {(a, b): STORAGE[b] for a in (*_FLOATS, tfloat32) for b in _FLOATS}
_NARROW_FLOATS = frozenset((float16, bfloat16))
_is_integral, _is_float, _is_arithmetic = _cext.is_integral, _cext.is_float, _cext.is_arithmetic


def as_dtype(x) -> DType:
    """A `cuda.tile` dtype from itself or from a foreign one such as `torch.float32`."""
    if type(x) is DType:
        return x
    native = None if isinstance(x, (int, float, str, tuple)) else _cext.foreign_dtype_object_to_native(x)
    if native is None:
        raise RefusedError(f"expected a dtype, got {x!r}")
    return native


def storage_of(dtype: DType) -> torch.dtype:
    try:
        return STORAGE[dtype]
    except KeyError:
        raise UnsupportedError(f"{dtype} tiles are not supported by the tile interpreter") from None


# ---- runtime integer scalars ------------------------------------------------------------------------------


class RuntimeInt:
    """An integer that the kernel only knows at run time: a block index, a shape, a plain parameter.

    It is strictly typed (a Python int is a loosely typed constant), may not be a tile dimension, and its
    arithmetic reports overflow. It is no `int`, or `2.5 * n` would be a loosely typed constant.
    """

    __slots__ = ("value",)
    __hash__ = None
    dtype: DType
    low: int
    high: int

    def __init__(self, value: int):
        self.value = value

    def __index__(self):
        return self.value

    def __repr__(self):
        return str(self.value)

    def __format__(self, spec):
        return format(self.value, spec)

    def __int__(self):
        raise RefusedError("int() of a run-time value")

    def __float__(self):
        raise RefusedError("float() of a run-time value: use ct.astype")

    def __bool__(self):
        return self.value != 0

    def __getattr__(self, name):
        # Scalars are 0-d tiles too: shape, ndim, reshape, item.
        return getattr(as_tile(self), name)

    def astype(self, dtype, *, rounding_mode=None):
        return astype(self, dtype, rounding_mode=rounding_mode)

    def __truediv__(self, other):
        return truediv(self, other)

    def __rtruediv__(self, other):
        return truediv(other, self)

    def __pow__(self, other):
        return pow_(self, other)

    def __rpow__(self, other):
        return pow_(other, self)

    def __divmod__(self, other):
        return self // other, self % other

    def __rdivmod__(self, other):
        return other // self, other % self

    def __eq__(self, other):
        return equal(self, other)

    def __ne__(self, other):
        return not_equal(self, other)

    def __lt__(self, other):
        return less(self, other)

    def __le__(self, other):
        return less_equal(self, other)

    def __gt__(self, other):
        return greater(self, other)

    def __ge__(self, other):
        return greater_equal(self, other)

    def __abs__(self):
        return self if self.value >= 0 else -self

    def __neg__(self):
        return _fit(-self.value, type(self), f"-({self.value})")

    def __pos__(self):
        return self

    def __invert__(self):
        return type(self)(~self.value)


class Int32(RuntimeInt):
    __slots__ = ()
    dtype, low, high = int32, -(2**31), 2**31 - 1


class Int64(RuntimeInt):
    __slots__ = ()
    dtype, low, high = int64, -(2**63), 2**63 - 1


def _fit(value: int, cls: type[RuntimeInt], expression: str) -> RuntimeInt:
    if cls.low <= value <= cls.high:
        return cls(value)
    raise IntegerOverflowError(f"{cls.dtype} overflow: {expression} = {value}")


def _runtime_int_operator(symbol: str, fn):
    constants = (int,) if symbol in ("<<", ">>") else (int, bool)

    def apply(cls, a: int, b: int):
        if symbol in ("//", "%") and b == 0:
            raise IntegerDivisionError(f"integer division by zero: {a} {symbol} 0")
        if symbol in ("<<", ">>") and not 0 <= b < cls.dtype.bitwidth:
            raise IntegerOverflowError(f"shift of a {cls.dtype} by {b}")
        r = fn(a, b)
        if cls.low <= r <= cls.high:
            return cls(r)
        return _fit(r, cls, f"{a} {symbol} {b}")

    def forward(self, other):
        kind = type(other)
        if kind in constants:
            return apply(type(self), self.value, _constant_int(other, self.dtype))
        if kind is Int32 or kind is Int64:
            return apply(Int64 if kind is Int64 else type(self), self.value, other.value)
        return _ON_TILES[symbol](self, other)

    def backward(self, other):
        if type(other) in constants:
            return apply(type(self), _constant_int(other, self.dtype), self.value)
        return _ON_TILES[symbol](other, self)

    return forward, backward


_INT_OPERATORS = {
    "+": ("add", operator.add),
    "-": ("sub", operator.sub),
    "*": ("mul", operator.mul),
    "//": ("floordiv", operator.floordiv),
    "%": ("mod", operator.mod),
    "&": ("and", operator.and_),
    "|": ("or", operator.or_),
    "^": ("xor", operator.xor),
    "<<": ("lshift", operator.lshift),
    ">>": ("rshift", operator.rshift),
}
for _symbol, (_name, _fn) in _INT_OPERATORS.items():
    _forward, _backward = _runtime_int_operator(_symbol, _fn)
    setattr(RuntimeInt, f"__{_name}__", _forward)
    setattr(RuntimeInt, f"__r{_name}__", _backward)


def _constant_int(value: int, dtype: DType) -> int:
    if not _cext.integer_dtype_min(dtype) <= value <= _cext.integer_dtype_max(dtype):
        raise RefusedError(f"integer constant {value} is out of range of {dtype}")
    return value


# ---- dtypes of values, promotion, conversion --------------------------------------------------------------


def is_scalar(x) -> bool:
    return isinstance(x, (int, float, RuntimeInt))


def constant_dtype(value) -> DType:
    """The dtype that `cuda.tile` gives a Python constant on its own."""
    if isinstance(value, RuntimeInt):
        return value.dtype
    if isinstance(value, bool):
        return bool_
    if isinstance(value, int):
        if -(2**31) <= value < 2**31:
            return int32
        if -(2**63) <= value < 2**63:
            return int64
        raise RefusedError(f"constant {value} is out of range of int64")
    if isinstance(value, float):
        return float32
    raise RefusedError(f"expected a tile or a number, got {type(value).__name__}: {value!r}")


def dtype_of(x) -> DType:
    return x.dtype if type(x) is Tile else constant_dtype(x)


def is_loose(x) -> bool:
    return type(x) is not Tile and not isinstance(x, RuntimeInt)


_CATEGORY = {}


def _category(dtype: DType) -> int:
    if dtype not in _CATEGORY:
        _CATEGORY[dtype] = min(int(dt.numeric_dtype_category(dtype)), 2)
    return _CATEGORY[dtype]


_PROMOTED: dict[tuple[DType, DType], DType] = {}


def _promote_strict(a: DType, b: DType) -> DType:
    if a is b:
        return a
    key = (a, b)
    if key not in _PROMOTED:
        if _cext.is_restricted_float(a) or _cext.is_restricted_float(b):
            raise RefusedError(f"no implicit promotion of {a} and {b}: cast explicitly")
        common = _cext._promote_dtypes(a, b)
        if common is None:
            raise RefusedError(f"no implicit promotion of {a} and {b}: cast explicitly")
        _PROMOTED[key] = common
    return _PROMOTED[key]


def promote(x, y, force_float: bool = False) -> DType:
    """The common dtype of two operands, each a tile or a number."""
    x_dtype, y_dtype = dtype_of(x), dtype_of(y)
    x_loose, y_loose = is_loose(x), is_loose(y)
    if x_loose == y_loose:
        common = _promote_strict(x_dtype, y_dtype)
    else:
        strict, loose, value = (y_dtype, x_dtype, x) if x_loose else (x_dtype, y_dtype, y)
        if _category(loose) > _category(strict):
            common = loose
        else:
            common = strict
            if _category(loose) == _category(strict) == 1 and not force_float:
                _constant_int(value, strict)
    return common if not force_float or _is_float(common) else float32


def round_to_tf32(t: torch.Tensor) -> torch.Tensor:
    """float32 rounded to a 10-bit mantissa, to nearest even."""
    bits = t.view(torch.int32)
    half = bits >> 13
    half &= 1
    half += 0xFFF
    half += bits
    half &= ~0x1FFF
    rounded = half.view(torch.float32)
    # The carry of a NaN's mantissa may run into its sign.
    return torch.where(t.isnan(), t, rounded) if bool(t.isnan().any()) else rounded


def cast(t: torch.Tensor, src: DType, dst: DType) -> torch.Tensor:
    """Converts as `ct.astype` does: to nearest even, floats to integers towards zero, integers wrap."""
    if src is dst:
        return t
    direct = _CASTS.get((src, dst))
    if direct is not None:
        return t.to(direct)
    to = storage_of(dst)
    if dst is tfloat32:
        return round_to_tf32(t.to(torch.float32))
    if dst is bool_:
        return (t.float().trunc() if _is_float(src) else t) != 0
    if _is_integral(dst):
        if _is_float(src):
            t = t.to(torch.int64)
        mask = _WIDE_UNSIGNED.get(dst)
        return t.to(to) if mask is None else t.to(torch.int64) & mask
    return t.to(to)


_CONSTANTS: dict[tuple, torch.Tensor] = {}


def constant(value, dtype: DType) -> torch.Tensor:
    """A number as a 0-d tensor of the dtype, rounded to it; tensors are shared, so do not write to them."""
    if isinstance(value, RuntimeInt):
        return cast(torch.tensor(value.value, dtype=torch.int64, device="cpu"), int64, dtype)
    real = type(value) is float
    # 0.0 and -0.0 are equal, and so would share an entry.
    key = (value or repr(value) if real else int(value), real, dtype)
    found = _CONSTANTS.get(key)
    if found is None:
        if len(_CONSTANTS) > 4096:
            _CONSTANTS.clear()
        wide = float64 if real else int64
        t = torch.tensor(value if real else int(value), dtype=STORAGE[wide], device="cpu")
        found = _CONSTANTS[key] = cast(t, wide, dtype)
    return found


def tensor_as(x, dtype: DType) -> torch.Tensor:
    """The tensor of an operand, converted to the dtype."""
    if type(x) is Tile:
        return x.t if x.dtype is dtype else cast(x.t, x.dtype, dtype)
    return constant(x, dtype)


def as_tile(x) -> "Tile":
    """A number as a 0-d tile of its own dtype; a tile as itself."""
    if type(x) is Tile:
        return x
    dtype = constant_dtype(x)
    return Tile(constant(x, dtype), dtype)


def check_implicit_cast(x, dtype: DType, what: str) -> None:
    """Refuses what `cuda.tile` refuses to convert silently on a store: float32 to bfloat16, 1.5 to int32."""
    if is_loose(x):
        loose = constant_dtype(x)
        if dtype is bool_:
            if loose is float32 or x not in (0, 1):
                raise RefusedError(f"{what}: cannot implicitly cast {x} to {dtype}")
        elif _category(loose) > _category(dtype):
            raise RefusedError(f"{what}: cannot implicitly cast {x} to {dtype}")
        elif _category(loose) == _category(dtype) == 1:
            _constant_int(x, dtype)
        return
    src = dtype_of(x)
    if src is dtype:
        return
    try:
        common = _promote_strict(src, dtype)
    except RefusedError:
        common = None
    if common is not dtype:
        raise RefusedError(f"{what}: cannot implicitly cast {src} to {dtype}, use astype")


# ---- shapes -----------------------------------------------------------------------------------------------

_GOOD_SHAPES: set[tuple[int, ...]] = set()


def constant_int(x, what: str) -> int:
    if isinstance(x, RuntimeInt) or type(x) is Tile:
        raise RefusedError(f"{what} must be a compile-time constant, got a run-time value ({x!r})")
    if isinstance(x, bool) or not isinstance(x, int):
        raise RefusedError(f"{what} must be an integer, got {x!r}")
    return x


def constant_shape(shape, what: str = "shape", single: bool = True) -> tuple[int, ...]:
    """A tile shape: compile-time integers, each a power of two; `single` admits one integer for a tuple."""
    if type(shape) is not tuple:
        if isinstance(shape, list) or not single:
            raise RefusedError(f"{what} must be a tuple, got {shape!r}")
        shape = (shape,)
    # A RuntimeInt equals a plain int, so the types are looked at before the cache.
    for i, n in enumerate(shape):
        if type(n) is not int:
            constant_int(n, f"dimension {i} of {what}")
    if shape not in _GOOD_SHAPES:
        for i, n in enumerate(shape):
            if n <= 0 or n & (n - 1):
                raise RefusedError(f"dimension {i} of {what} {shape} is not a power of two")
        _GOOD_SHAPES.add(shape)
    return shape


def normalize_axis(axis, ndim: int, what: str = "axis") -> int:
    axis = constant_int(axis, what)
    if not -ndim <= axis < ndim:
        raise RefusedError(f"{what} {axis} is out of range for a tile or array of rank {ndim}")
    return axis % ndim


def broadcast_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        raise RefusedError(f"shapes are not broadcastable: {', '.join(map(str, shapes))}") from None


def _shape_error(x: torch.Tensor, y: torch.Tensor, error: RuntimeError):
    broadcast_shape(tuple(x.shape), tuple(y.shape))
    raise error


# ---- the tile ---------------------------------------------------------------------------------------------


class Tile:
    """A `cuda.tile` tile. `t` is its tensor (in `STORAGE[dtype]`), never changed after construction.

    ops.py adds the methods that are not elementwise: reshape, permute, transpose, extract, insert, item, `@`.
    """

    __slots__ = ("t", "dtype")
    __hash__ = None

    def __init__(self, t: torch.Tensor, dtype: DType):
        self.t = t
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.t.shape)

    @property
    def ndim(self) -> int:
        return self.t.ndim

    def __repr__(self):
        return f"Tile({self.t.tolist() if self.t.numel() <= 64 else '...'}, {self.dtype}{self.shape})"

    def __str__(self):
        return str(self.t.tolist())

    def __format__(self, spec):
        if not spec:
            return str(self)

        def show(v):
            return f"[{', '.join(map(show, v))}]" if isinstance(v, list) else format(v, spec)

        return show(self.t.tolist())

    def __bool__(self):
        if self.t.ndim:
            raise RefusedError(
                f"a tile of shape {self.shape} used as a condition (if, while, and, or, not, min(), max()): "
                "only scalars can be; use ct.where, &, |, ~, ct.minimum or ct.maximum"
            )
        return cast(self.t, self.dtype, bool_).item()

    def __index__(self):
        if self.t.ndim or not _is_integral(self.dtype):
            raise RefusedError(f"a {self.dtype} tile of shape {self.shape} used as an integer")
        return self.t.item()

    def __int__(self):
        raise RefusedError("int() of a run-time value: use astype")

    def __float__(self):
        raise RefusedError("float() of a run-time value: use astype")

    def __len__(self):
        raise RefusedError("len() of a tile: use tile.shape")

    def __iter__(self):
        raise RefusedError("a tile cannot be iterated over or unpacked")

    def __getitem__(self, index):
        if not isinstance(index, tuple):
            if index is not None:
                raise RefusedError("a tile cannot be indexed directly: use ct.extract or item()")
            index = (None,)
        for i in index:
            if not (i is None or i is Ellipsis or (isinstance(i, slice) and i == slice(None))):
                raise RefusedError(f"a tile index may hold None, ':' and '...' only, got {i!r}")
        if sum(i is Ellipsis for i in index) > 1:
            raise RefusedError("a tile index may hold '...' once")
        try:
            return Tile(self.t[index], self.dtype)
        except IndexError as error:
            raise RefusedError(f"bad index for a tile of shape {self.shape}: {error}") from None

    def __setitem__(self, index, value):
        raise RefusedError("a tile cannot be assigned to: use ct.insert or ct.where")

    def __add__(self, other):
        return add(self, other)

    def __radd__(self, other):
        return add(other, self)

    def __sub__(self, other):
        return sub(self, other)

    def __rsub__(self, other):
        return sub(other, self)

    def __mul__(self, other):
        return mul(self, other)

    def __rmul__(self, other):
        return mul(other, self)

    def __truediv__(self, other):
        return truediv(self, other)

    def __rtruediv__(self, other):
        return truediv(other, self)

    def __floordiv__(self, other):
        return floordiv(self, other)

    def __rfloordiv__(self, other):
        return floordiv(other, self)

    def __mod__(self, other):
        return mod(self, other)

    def __rmod__(self, other):
        return mod(other, self)

    def __divmod__(self, other):
        return divmod_(self, other)

    def __rdivmod__(self, other):
        return divmod_(other, self)

    def __pow__(self, other):
        return pow_(self, other)

    def __rpow__(self, other):
        return pow_(other, self)

    def __and__(self, other):
        return bitwise_and(self, other)

    def __rand__(self, other):
        return bitwise_and(other, self)

    def __or__(self, other):
        return bitwise_or(self, other)

    def __ror__(self, other):
        return bitwise_or(other, self)

    def __xor__(self, other):
        return bitwise_xor(self, other)

    def __rxor__(self, other):
        return bitwise_xor(other, self)

    def __lshift__(self, other):
        return lshift(self, other)

    def __rlshift__(self, other):
        return lshift(other, self)

    def __rshift__(self, other):
        return rshift(self, other)

    def __rrshift__(self, other):
        return rshift(other, self)

    def __eq__(self, other):
        return equal(self, other)

    def __ne__(self, other):
        return not_equal(self, other)

    def __lt__(self, other):
        return less(self, other)

    def __le__(self, other):
        return less_equal(self, other)

    def __gt__(self, other):
        return greater(self, other)

    def __ge__(self, other):
        return greater_equal(self, other)

    def __neg__(self):
        return negative(self)

    def __pos__(self):
        return astype(self, int32) if self.dtype is bool_ else self

    def __abs__(self):
        return abs_(self)

    def __invert__(self):
        return bitwise_not(self)

    def astype(self, dtype, *, rounding_mode=None):
        return astype(self, dtype, rounding_mode=rounding_mode)


def astype(x, dtype, *, rounding_mode=None) -> Tile:
    dtype = as_dtype(dtype)
    if rounding_mode is not None:
        if not (_is_float(dtype_of(x)) and _is_float(dtype)):
            raise RefusedError("rounding_mode is only valid for float to float conversions")
        if rounding_mode.value != "nearest_even":
            raise UnsupportedError(f"astype with {rounding_mode} is not supported by the tile interpreter")
    if isinstance(x, RuntimeInt) and (dtype is int32 or dtype is int64):
        return Int64(x.value) if dtype is int64 else Int32((x.value + 2**31) % 2**32 - 2**31)
    x = as_tile(x)
    if x.dtype is dtype:
        return x
    return Tile(cast(x.t, x.dtype, dtype), dtype)


# ---- elementwise binary -----------------------------------------------------------------------------------


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
_ON_TILES = {"+": add, "-": sub, "*": mul, "//": floordiv, "%": mod}


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
_ON_TILES |= {"&": bitwise_and, "|": bitwise_or, "^": bitwise_xor, "<<": lshift, ">>": rshift}


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
