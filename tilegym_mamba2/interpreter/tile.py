"""Tiles and scalars: a torch CPU tensor with a `cuda.tile` dtype, and `cuda.tile`'s arithmetic on it.

Arithmetic follows three rules of `cuda.tile` that plain torch does not: Python numbers are loosely typed and
take the tile's dtype (rounded to it first), mixed dtypes promote by `cuda.tile`'s own table, and 16-bit
results are rounded after every operation. Tiles are values: no operation changes an existing tile.
"""

import operator

import torch
from cuda.tile import _cext
from cuda.tile import _datatype as dt

from .errors import (
    IntegerDivisionError,
    IntegerOverflowError,
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
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(as_tile(self), name)

    def astype(self, dtype, *, rounding_mode=None):
        return astype(self, dtype, rounding_mode=rounding_mode)

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


# The operators of tiles that take over where an operand is no integer; filled by elementwise.py.
_ON_TILES: dict = {}


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

    elementwise.py adds its operators, tile_functions.py the methods that are not elementwise: reshape,
    permute, transpose, extract, insert, item and `@`.
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

    def __pos__(self):
        return astype(self, int32) if self.dtype is bool_ else self

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
