"""The `ct.*` functions that make, reshape, multiply, reduce and scan tiles."""

import builtins
import math

import cuda.tile as ct
import torch
from cuda.tile import _datatype as dt

from . import elementwise as E
from . import tile as T
from .elementwise import check_math
from .errors import RefusedError
from .memory import index_value
from .tile import (
    STORAGE,
    RuntimeInt,
    Tile,
    as_dtype,
    as_tile,
    bool_,
    broadcast_shape,
    constant_dtype,
    constant_int,
    constant_shape,
    dtype_of,
    float32,
    int32,
    normalize_axis,
    promote,
    storage_of,
    tensor_as,
)

_NARROW = frozenset((dt.float16, dt.bfloat16))


def need_tile(x, what: str) -> Tile:
    if type(x) is Tile:
        return x
    if T.is_scalar(x):
        return as_tile(x)
    raise RefusedError(f"{what}: expected a tile, got {type(x).__name__}")


# ---- making tiles -----------------------------------------------------------------------------------------


def arange(size, /, *, dtype, start=0, step=1):
    dtype = as_dtype(dtype)
    (n,) = constant_shape(constant_int(size, "size of arange"), "arange")
    base = dtype if T._is_integral(dtype) else int32
    storage_of(base)
    r = Tile(T.cast(torch.arange(n, device="cpu"), dt.int64, base), base)
    r = T.astype(r, dtype)
    # Constants 1 and 0 add nothing; anything else is cast to the dtype first.
    if not (type(step) is int and step == 1):
        r = E.mul(r, T.astype(step, dtype))
    if not (type(start) is int and start == 0):
        r = E.add(r, T.astype(start, dtype))
    return r


def full(shape, fill_value, dtype):
    shape = constant_shape(shape)
    dtype = as_dtype(dtype)
    if type(fill_value) is Tile and fill_value.t.ndim:
        raise RefusedError(f"full: the fill value must be a scalar, got a tile of shape {fill_value.shape}")
    dtype_of(fill_value)
    storage_of(dtype)
    return Tile(tensor_as(fill_value, dtype).expand(shape), dtype)


def zeros(shape, dtype):
    return full(shape, 0, dtype)


def ones(shape, dtype):
    return full(shape, 1, dtype)


def astile(value, /, *, dtype):
    dtype = as_dtype(dtype)
    if not isinstance(value, tuple):
        if type(value) is Tile and value.t.ndim:
            raise RefusedError("astile takes a scalar or a tuple of scalars, not a tile")
        return T.astype(value, dtype)

    def shape_of(v, path):
        if not isinstance(v, tuple):
            if type(v) is Tile and v.t.ndim:
                raise RefusedError(f"astile: {path} is a tile, expected a scalar")
            return ()
        if not v or len(v) & (len(v) - 1):
            raise RefusedError(f"astile: tuple length {len(v)} at {path} is not a power of two")
        inner = {shape_of(x, f"{path}[{i}]") for i, x in enumerate(v)}
        if len(inner) != 1:
            raise RefusedError(f"astile: inner tuples of {path} differ in shape")
        return (len(v), *inner.pop())

    def flatten(v):
        return [x for item in v for x in flatten(item)] if isinstance(v, tuple) else [tensor_as(v, dtype)]

    shape = shape_of(value, "value")
    return Tile(torch.stack(flatten(value)).reshape(shape), dtype)


# ---- shapes -----------------------------------------------------------------------------------------------


def reshape(x, /, shape):
    x = need_tile(x, "reshape")
    if not isinstance(shape, tuple):
        raise RefusedError(f"reshape: shape must be a tuple, got {shape!r}")
    for n in shape:
        if type(n) is not int:
            constant_int(n, "dimension of reshape")
    if any(n < -1 for n in shape) or builtins.sum(n == -1 for n in shape) > 1:
        raise RefusedError(f"bad shape {shape} in reshape")
    try:
        return Tile(x.t.reshape(shape), x.dtype)
    except RuntimeError:
        raise RefusedError(f"cannot reshape a tile of shape {x.shape} to {shape}") from None


def expand_dims(x, /, axis):
    x = need_tile(x, "expand_dims")
    return Tile(x.t.unsqueeze(normalize_axis(axis, x.t.ndim + 1)), x.dtype)


def broadcast_to(x, /, shape):
    x = need_tile(x, "broadcast_to")
    shape = constant_shape(shape, single=False)
    try:
        return Tile(x.t.expand(shape), x.dtype)
    except RuntimeError:
        raise RefusedError(f"shape {x.shape} is not broadcastable to {shape}") from None


def permute(x, /, axes):
    x = need_tile(x, "permute")
    if not isinstance(axes, tuple) or len(axes) != x.t.ndim:
        raise RefusedError(f"permute: axes {axes!r} for a tile of rank {x.t.ndim}")
    axes = [normalize_axis(a, x.t.ndim) for a in axes]
    if len(set(axes)) != len(axes):
        raise RefusedError(f"permute: axes {axes} repeat")
    return Tile(x.t.permute(axes), x.dtype)


def transpose(x, /, axis0=None, axis1=None):
    x = need_tile(x, "transpose")
    ndim = x.t.ndim
    if ndim < 2:
        raise RefusedError("transpose needs a tile of rank 2 or more")
    if (axis0 is None) != (axis1 is None):
        raise RefusedError("transpose: both axes must be given, or none")
    if axis0 is None:
        if ndim != 2:
            raise RefusedError("transpose: the axes must be given for a tile of rank above 2")
        axis0, axis1 = 0, 1
    return Tile(x.t.transpose(normalize_axis(axis0, ndim), normalize_axis(axis1, ndim)), x.dtype)


def cat(tiles, /, axis):
    if not isinstance(tiles, tuple):
        raise RefusedError("cat takes a tuple of tiles")
    if not 1 <= len(tiles) <= 2:
        raise RefusedError(f"cat takes one or two tiles, got {len(tiles)}")
    if len(tiles) == 1:
        return tiles[0]
    x, y = (need_tile(t, "cat") for t in tiles)
    axis = normalize_axis(axis, x.t.ndim)
    if x.dtype is not y.dtype:
        raise RefusedError(f"cat: the dtypes differ, {x.dtype} and {y.dtype}")
    rest = [(a, b) for i, (a, b) in enumerate(zip(x.shape, y.shape, strict=False)) if i != axis]
    if x.t.ndim != y.t.ndim or any(a != b for a, b in rest):
        raise RefusedError(f"cat: shapes {x.shape} and {y.shape} do not fit along axis {axis}")
    r = torch.cat((x.t, y.t), axis)
    constant_shape(tuple(r.shape), "the result of cat")
    return Tile(r, x.dtype)


def _subtile(x, index, shape, what):
    if not isinstance(index, tuple):
        index = (index,)
    if len(index) != x.t.ndim:
        raise RefusedError(f"{what}: index of length {len(index)} for a tile of rank {x.t.ndim}")
    region = []
    for i, (size, n, at) in enumerate(zip(x.shape, shape, index, strict=True)):
        if size % n:
            raise RefusedError(f"{what}: shape {x.shape} is not divisible by {shape} at dimension {i}")
        at = index_value(at, f"index {i} of {what}")
        if not 0 <= at < size // n:
            raise RefusedError(f"{what}: index {at} is out of range at dimension {i}, 0 to {size // n - 1}")
        region.append(slice(at * n, at * n + n))
    return tuple(region)


def extract(x, /, index, shape):
    x = need_tile(x, "extract")
    shape = constant_shape(shape)
    if shape and len(shape) != x.t.ndim:
        raise RefusedError(f"extract: shape {shape} for a tile of rank {x.t.ndim}")
    region = _subtile(x, index, shape or (1,) * x.t.ndim, "extract")
    r = x.t[region]
    return Tile(r if shape else r.reshape(()), x.dtype)


def insert(x, /, index, value):
    x, value = need_tile(x, "insert"), need_tile(value, "insert")
    if x.dtype is not value.dtype:
        raise RefusedError(f"insert: cannot insert a {value.dtype} tile into a {x.dtype} tile")
    v = value.t if value.t.ndim else value.t.reshape((1,) * x.t.ndim)
    if v.ndim != x.t.ndim:
        raise RefusedError(f"insert: value of rank {v.ndim} for a tile of rank {x.t.ndim}")
    region = _subtile(x, index, tuple(v.shape), "insert")
    r = x.t.clone()
    r[region] = v
    return Tile(r, x.dtype)


def bitcast(x, /, dtype):
    x, dtype = need_tile(x, "bitcast"), as_dtype(dtype)
    if bool_ in (x.dtype, dtype) or x.dtype.bitwidth != dtype.bitwidth:
        raise RefusedError(f"cannot bitcast from {x.dtype} to {dtype}")
    t = x.t
    for wide, (narrow, sign) in _SIGNED_TWIN.items():
        if x.dtype is wide:
            t = T.cast(t, dt.int64, sign)
        if dtype is wide:
            return Tile(t.contiguous().view(STORAGE[sign]).to(torch.int64) & narrow, dtype)
    return Tile(t.contiguous().view(storage_of(dtype)), dtype)


_SIGNED_TWIN = {dt.uint16: (0xFFFF, dt.int16), dt.uint32: (0xFFFFFFFF, dt.int32)}


# ---- products ---------------------------------------------------------------------------------------------

_MMA_CHECKED: set[tuple] = set()


def _check_mma(x, y, acc) -> None:
    if x.t.ndim < 2 or y.t.ndim < 2:
        raise RefusedError(f"mma: operands must be at least 2-D, got {x.shape} and {y.shape}")
    if x.shape[-1] != y.shape[-2]:
        raise RefusedError(f"mma: incompatible shapes {x.shape} and {y.shape}")
    out = (*broadcast_shape(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-1])
    if acc.shape != out:
        raise RefusedError(f"mma: acc must have shape {out}, got {acc.shape}")
    _mma_dtype(x.dtype, y.dtype, acc.dtype)


def _mma_dtype(x_dtype, y_dtype, acc_dtype=None):
    try:
        return dt._resolve_mma_supported_dtype(x_dtype, y_dtype, acc_dtype)
    except ct.TileError as error:
        raise RefusedError(f"mma: {str(error).splitlines()[0]}") from None


def _multiply(a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor, acc_dtype) -> torch.Tensor:
    if acc_dtype is float32 or acc_dtype is dt.float16:
        a, b = a.float(), b.float()
    elif acc_dtype is int32:
        # Exact: products of 8-bit integers, summed in float64.
        return (torch.matmul(a.double(), b.double()) + acc.double()).to(torch.int64).to(torch.int32)
    if a.ndim == 2 and b.ndim == 2 and acc.dtype is a.dtype:
        return torch.addmm(acc, a, b)
    return (acc.to(a.dtype) + torch.matmul(a, b)).to(acc.dtype)


def mma(x, y, /, acc, *, use_fast_acc=False):
    x, y, acc = need_tile(x, "mma"), need_tile(y, "mma"), need_tile(acc, "mma")
    key = (x.dtype, y.dtype, acc.dtype, x.t.shape, y.t.shape, acc.t.shape)
    if key not in _MMA_CHECKED:
        _check_mma(x, y, acc)
        _MMA_CHECKED.add(key)
    if use_fast_acc and x.dtype not in (dt.float8_e4m3fn, dt.float8_e5m2):
        raise RefusedError(f"mma: use_fast_acc is for 8-bit floats, got {x.dtype}")
    return Tile(_multiply(x.t, y.t, acc.t, acc.dtype), acc.dtype)


def matmul(x, y, /):
    x, y = need_tile(x, "matmul"), need_tile(y, "matmul")
    common = promote(x, y)
    acc = _mma_dtype(common, common)
    a, b = tensor_as(x, common), tensor_as(y, common)
    if a.ndim < 1 or b.ndim < 1 or a.shape[-1] != b.shape[-2 if b.ndim > 1 else -1]:
        raise RefusedError(f"matmul: incompatible shapes {x.shape} and {y.shape}")
    broadcast_shape(tuple(a.shape[:-2]), tuple(b.shape[:-2]))
    wide = torch.float32 if acc is float32 else torch.float64
    r = torch.matmul(a.to(wide), b.to(wide)).to(STORAGE[acc])
    return Tile(T.cast(r, acc, common), common)


# ---- reductions and scans ---------------------------------------------------------------------------------


def _axes(axis, ndim: int) -> list[int]:
    if axis is None:
        return list(range(ndim))
    axes = sorted(normalize_axis(a, ndim) for a in (axis if isinstance(axis, tuple) else (axis,)))
    if len(set(axes)) != len(axes):
        raise RefusedError(f"reduction axes {axis} repeat")
    return axes


def _halves(t: torch.Tensor, axis: int, fn) -> torch.Tensor:
    """Reduces an axis (kept, of length 1) as a tree, so that 16-bit sums round at every step."""
    while t.shape[axis] > 1:
        a, b = t.chunk(2, axis)
        t = fn(a, b)
    return t


def _reduction_input(x, name, rounding_mode, flush_to_zero, modes):
    x = need_tile(x, name)
    if not T._is_arithmetic(x.dtype):
        raise RefusedError(f"{name} does not support {x.dtype}")
    check_math(name, x.dtype, rounding_mode, flush_to_zero, modes, True)
    if flush_to_zero:
        x = E.flush(x)
    return T.astype(x, int32) if x.dtype is bool_ else x


def _squeeze(t: torch.Tensor, axes: list[int], keepdims: bool) -> torch.Tensor:
    if keepdims:
        return t
    return t.reshape([n for i, n in enumerate(t.shape) if i not in axes])


def sum_(x, /, axis=None, *, keepdims=False, rounding_mode=None, flush_to_zero=False):
    x = _reduction_input(x, "sum", rounding_mode, flush_to_zero, E.BASIC_MODES)
    axes = _axes(axis, x.t.ndim)
    t = x.t
    if x.dtype in _NARROW:
        for a in axes:
            t = _halves(t, a, torch.add)
        t = _squeeze(t, axes, keepdims)
    elif axes:
        t = (
            T.cast(t.sum(axes, keepdim=keepdims), dt.int64, x.dtype)
            if T._is_integral(x.dtype)
            else t.sum(axes, keepdim=keepdims)
        )
    return Tile(t, x.dtype)


def prod(x, /, axis=None, *, keepdims=False, rounding_mode=None, flush_to_zero=False):
    x = _reduction_input(x, "prod", rounding_mode, flush_to_zero, E.BASIC_MODES)
    axes = _axes(axis, x.t.ndim)
    r = x
    for a in axes:
        r = Tile(_halves(r.t, a, lambda p, q: E.mul(Tile(p, x.dtype), Tile(q, x.dtype)).t), x.dtype)
    return Tile(_squeeze(r.t, axes, keepdims), x.dtype)


def _extremum(name, reduce_, worst):
    def op(x, /, axis=None, *, keepdims=False, flush_to_zero=False, propagate_nan=False):
        x = _reduction_input(x, name, None, flush_to_zero, ())
        axes = _axes(axis, x.t.ndim)
        if not axes:
            return x
        r = reduce_(x.t, axes, keepdim=keepdims)
        if x.t.is_floating_point() and not propagate_nan and r.isnan().any():
            nan = x.t.isnan()
            r = reduce_(torch.where(nan, worst, x.t), axes, keepdim=keepdims)
            r = torch.where(torch.amin(nan.to(torch.uint8), axes, keepdim=keepdims) != 0, math.nan, r)
        return Tile(r, x.dtype)

    return op


max_ = _extremum("max", torch.amax, -math.inf)
min_ = _extremum("min", torch.amin, math.inf)


def _arg_extremum(name, reduce_, worst):
    def op(x, /, axis=None, *, keepdims=False, propagate_nan=False):
        x = need_tile(x, name)
        if T._is_float(x.dtype) and x.dtype not in T._FLOATS:
            raise RefusedError(f"{name} does not support {x.dtype}")
        if x.dtype is bool_:
            x = T.astype(x, int32)
        ndim = x.t.ndim
        t = x.t.reshape(-1) if axis is None else x.t
        a = 0 if axis is None else normalize_axis(axis, ndim)
        if t.is_floating_point() and t.isnan().any():
            nan = t.isnan()
            if propagate_nan:
                best = torch.where(nan.any(a, keepdim=True), nan, t == reduce_(t, a, keepdim=True))
            else:
                clean = torch.where(nan, worst, t)
                best = (clean == reduce_(clean, a, keepdim=True)) & ~nan
        else:
            best = t == reduce_(t, a, keepdim=True)
        # argmax of booleans as integers: the first of the best ones.
        r = best.to(torch.uint8).argmax(a, keepdim=keepdims and axis is not None).to(torch.int32)
        return Tile(r.reshape((1,) * ndim) if axis is None and keepdims else r, int32)

    return op


argmax = _arg_extremum("argmax", torch.amax, -math.inf)
argmin = _arg_extremum("argmin", torch.amin, math.inf)


def _tuple_of_tiles(x, what):
    many = isinstance(x, tuple)
    tiles = tuple(need_tile(t, what) for t in (x if many else (x,)))
    if not tiles:
        raise RefusedError(f"{what} needs at least one tile")
    shape = broadcast_shape(*(t.shape for t in tiles))
    return many, [Tile(t.t.expand(shape), t.dtype) for t in tiles], shape


def _check_identity(identity, count, what):
    values = identity if isinstance(identity, tuple) else (identity,)
    if len(values) != count:
        raise RefusedError(f"{what}: {len(values)} identities for {count} tiles")
    for v in values:
        if isinstance(v, RuntimeInt):
            raise RefusedError(f"{what}: the identity must be a constant")
        constant_dtype(v)


def _call_body(func, many, left, right, what):
    r = func(*left, *right)
    results = r if many else (r,)
    if not isinstance(results, tuple) or len(results) != len(left):
        raise RefusedError(f"{what}: the function must return {len(left)} values")
    out = []
    for x, v in zip(left, results, strict=True):
        T.check_implicit_cast(v, x.dtype, f"result of the function of {what}")
        out.append(Tile(tensor_as(v, x.dtype).expand(x.t.shape), x.dtype))
    return out


def reduce(x, /, axis, func, identity, *, keepdims=False):
    many, tiles, shape = _tuple_of_tiles(x, "reduce")
    _check_identity(identity, len(tiles), "reduce")
    axis = normalize_axis(axis, len(shape))
    while tiles[0].t.shape[axis] > 1:
        pairs = [t.t.chunk(2, axis) for t in tiles]
        left = [Tile(p[0], t.dtype) for p, t in zip(pairs, tiles, strict=True)]
        right = [Tile(p[1], t.dtype) for p, t in zip(pairs, tiles, strict=True)]
        tiles = _call_body(func, many, left, right, "reduce")
    out = tuple(Tile(_squeeze(t.t, [axis], keepdims), t.dtype) for t in tiles)
    return out if many else out[0]


def scan(x, /, axis, func, identity, *, reverse=False):
    many, tiles, shape = _tuple_of_tiles(x, "scan")
    _check_identity(identity, len(tiles), "scan")
    axis = normalize_axis(axis, len(shape))
    if reverse:
        tiles = [Tile(t.t.flip(axis), t.dtype) for t in tiles]
    n, step = shape[axis], 1
    while step < n:
        early = [Tile(t.t.narrow(axis, 0, n - step), t.dtype) for t in tiles]
        late = [Tile(t.t.narrow(axis, step, n - step), t.dtype) for t in tiles]
        joined = _call_body(func, many, early, late, "scan")
        tiles = [
            Tile(torch.cat((t.t.narrow(axis, 0, step), j.t), axis), t.dtype)
            for t, j in zip(tiles, joined, strict=True)
        ]
        step *= 2
    if reverse:
        tiles = [Tile(t.t.flip(axis), t.dtype) for t in tiles]
    return tuple(tiles) if many else tiles[0]


def _cumulative(name, fn):
    def op(x, /, axis=0, *, reverse=False, rounding_mode=None, flush_to_zero=False):
        x = _reduction_input(x, name, rounding_mode, flush_to_zero, E.BASIC_MODES)
        axis = normalize_axis(axis, x.t.ndim)
        t = x.t.flip(axis) if reverse else x.t
        if T._is_integral(x.dtype):
            t = T.cast(
                torch.cumsum(t, axis) if name == "cumsum" else torch.cumprod(t, axis), dt.int64, x.dtype
            )
        else:
            # A parallel prefix scan in the tile's own precision, as a GPU would do it: torch's is sequential
            # in float64, and so would hide that such a scan is not monotone and loses 16-bit sums.
            n, step = t.shape[axis], 1
            while step < n:
                t = torch.cat(
                    (
                        t.narrow(axis, 0, step),
                        fn(t.narrow(axis, 0, n - step), t.narrow(axis, step, n - step)),
                    ),
                    axis,
                )
                step *= 2
        return Tile(t.flip(axis) if reverse else t, x.dtype)

    return op


cumsum = _cumulative("cumsum", torch.add)
cumprod = _cumulative("cumprod", torch.mul)


for _function in (reshape, permute, transpose, extract, insert):
    setattr(Tile, _function.__name__, _function)
Tile.__matmul__ = matmul
Tile.item = lambda self: reshape(self, ())
