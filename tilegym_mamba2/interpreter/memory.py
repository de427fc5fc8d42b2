"""`cuda.tile`'s global arrays over CPU tensors, read and written in place, with bounds and race checks.

Every storage keeps, once it is written, an int32 per element: 0, or the number of the block that wrote it.
Offsets are absolute element offsets in the storage, so that overlapping views of one storage share it.
"""

import math

import numpy as np
import torch
from cuda.tile import PaddingMode, Slice
from cuda.tile import _datatype as dt

from .errors import NeverWrittenError, OutOfBoundsError, RaceError, RefusedError, UnsupportedError
from .tile import (
    STORAGE,
    DType,
    Int32,
    RuntimeInt,
    Tile,
    _is_float,
    _is_integral,
    bool_,
    broadcast_shape,
    check_implicit_cast,
    constant_int,
    constant_shape,
    dtype_of,
    normalize_axis,
    tensor_as,
)

ATOMIC = 2**31 - 1
# Recognisable, and small enough that index arithmetic on masked-out lanes does not overflow.
_POISON = {dt.int8: -91, dt.uint8: 165, dt.int16: -10003, dt.uint16: 60013, dt.uint32: 4_000_000_007}
_POISON_WIDE = -1_000_003
_FLOAT_PADDING = {
    PaddingMode.UNDETERMINED: math.nan,
    PaddingMode.ZERO: 0.0,
    PaddingMode.NEG_ZERO: -0.0,
    PaddingMode.NAN: math.nan,
    PaddingMode.POS_INF: math.inf,
    PaddingMode.NEG_INF: -math.inf,
}


class Run:
    """What is running now: the launch and its current block."""

    __slots__ = ("grid", "block", "me", "synced")

    def __init__(self, grid: tuple[int, int, int]):
        self.grid = grid
        self.block = (0, 0, 0)
        self.me = 0
        # A block that did an acquiring atomic may read what others wrote before their release.
        self.synced = False

    def block_of(self, number: int) -> tuple[int, int, int]:
        x, y, _ = self.grid
        n = number - 1
        return n % x, n // x % y, n // (x * y)


class Memory:
    """One storage seen as elements of one dtype."""

    __slots__ = ("t", "size", "itemsize", "writer", "run")

    def __init__(self, t: torch.Tensor, run: Run):
        self.t = t
        self.itemsize = t.element_size()
        self.size = t.untyped_storage().nbytes() // self.itemsize
        self.writer: torch.Tensor | None = None
        self.run = run

    def flat(self) -> torch.Tensor:
        return torch.as_strided(self.t, (self.size,), (1,), 0)

    def claim(self) -> torch.Tensor:
        # numpy asks for zero pages, which exist once they are written; torch.zeros would fill a huge parent.
        if self.writer is None:
            self.writer = torch.from_numpy(np.zeros(self.size, dtype=np.int32))
        return self.writer

    def check_read_race(self, w: torch.Tensor, array: "Array", place) -> None:
        """`w`: who wrote what is being read; `place` turns a position in it into an index of the array."""
        if not self.run.synced:
            self._check(w, array, place, "is read by block {} and written by {} in the same launch")

    def check_write_race(self, w: torch.Tensor, array: "Array", place) -> None:
        self._check(w, array, place, "is written by block {} and by {} in the same launch")

    def _check(self, w: torch.Tensor, array: "Array", place, what: str) -> None:
        # One reduction decides the common case, nobody wrote here yet.
        if not w.numel() or int(w.max()) == 0:
            return
        bad = (w != 0) & (w != self.run.me)
        if bad.any():
            at = tuple(bad.nonzero()[0].tolist())
            what = what.format(self.run.block, self._who(int(w[at])))
            raise RaceError(f"{array.name}{place(at)} {what}")

    def _who(self, number: int) -> str:
        return "an atomic operation" if number == ATOMIC else f"block {self.run.block_of(number)}"


class Array:
    """What a kernel sees of a tensor argument."""

    __slots__ = ("mem", "dtype", "name", "sizes", "steps", "offset", "shape", "strides", "index")

    def __init__(
        self, mem, dtype, name, sizes, steps, offset, index=Int32, static_shape=(), static_strides=()
    ):
        self.mem = mem
        self.dtype = dtype
        self.name = name
        self.sizes = tuple(sizes)
        self.steps = tuple(steps)
        self.offset = offset
        self.index = index
        self.shape = tuple(n if i in static_shape else index(n) for i, n in enumerate(self.sizes))
        self.strides = tuple(n if i in static_strides else index(n) for i, n in enumerate(self.steps))

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    def __repr__(self):
        return f"Array({self.name}, {self.dtype}{self.sizes})"

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        raise UnsupportedError(f"Array.{name} is not supported by the tile interpreter")

    def __getitem__(self, index):
        raise RefusedError("arrays cannot be indexed: use ct.load, ct.gather or array.slice")

    def __setitem__(self, index, value):
        raise RefusedError("arrays cannot be assigned to: use ct.store or ct.scatter")

    def slice(self, axis, start, stop) -> "Array":
        axis = normalize_axis(axis, self.ndim)
        first, last = index_value(start, "start of slice"), index_value(stop, "stop of slice")
        n = self.sizes[axis]
        if not (0 <= first <= last <= n):
            raise OutOfBoundsError(f"{self.name}.slice({axis}, {first}, {last}) of an axis of {n} elements")
        sizes = list(self.sizes)
        sizes[axis] = last - first
        return Array(self.mem, self.dtype, f"{self.name}.slice({axis}, {first}, {last})", sizes, self.steps,
                     self.offset + first * self.steps[axis], self.index)  # fmt: skip

    def tiled_view(self, tile_shape, *, padding_mode=PaddingMode.UNDETERMINED, traversal_steps=None):
        return TiledView(self, tile_shape, padding_mode, traversal_steps)

    def get_raw_memory(self) -> "RawArrayMemory":
        return RawArrayMemory(self)

    # ---- tiles ----

    def _locate(self, index, shape, order, check_bounds, what, steps=None):
        """(lengths inside the array, strides by tile axis, offset, first elements by array axis)."""
        sizes, strides = self.sizes, self.steps
        ndim = len(sizes)
        if not isinstance(index, tuple):
            index = (index,)
        if len(index) != ndim:
            raise RefusedError(
                f"{what} of {self.name}: index of length {len(index)} for an array of rank {ndim}"
            )
        if not shape:
            shape = (1,) * ndim
        elif len(shape) != ndim:
            raise RefusedError(f"{what} of {self.name}: tile shape {shape} for an array of rank {ndim}")
        axes = range(ndim) if order == "C" else axis_order(order, ndim)
        lengths, by, starts = [], [], [0] * ndim
        offset = self.offset
        for k, axis in enumerate(axes):
            n = shape[k]
            at = index[k]
            if type(at) is not int:
                at = index_value(at, f"index {k} in {what} of {self.name}")
            size = sizes[axis]
            start = at * (n if steps is None else steps[k])
            if start < 0 or start >= size:
                raise OutOfBoundsError(
                    f"{what} of {self.name}{list(self.sizes)}: tile {_shown(index)} of shape "
                    f"{tuple(shape)} lies outside the array along axis {axis} (starts at {start} of {size})"
                )
            left = size - start
            if left < n:
                if not check_bounds:
                    raise OutOfBoundsError(
                        f"{what} of {self.name}{list(self.sizes)} with check_bounds=False: tile "
                        f"{_shown(index)} of shape {tuple(shape)} crosses the end of axis {axis}"
                    )
                n = left
            lengths.append(n)
            by.append(strides[axis])
            starts[axis] = start
            offset += start * strides[axis]
        return lengths, by, offset, (starts, axes)

    def load(self, index, shape, order="C", padding_mode=PaddingMode.UNDETERMINED, check_bounds=True,
             ordered=False, steps=None) -> Tile:  # fmt: skip
        lengths, by, offset, where = self._locate(index, shape, order, check_bounds, "load", steps)
        mem = self.mem
        inside = torch.as_strided(mem.t, lengths, by, offset)
        if mem.writer is not None and not ordered:
            w = torch.as_strided(mem.writer, lengths, by, offset)
            mem.check_read_race(w, self, lambda at: _place(at, where))
        kind = STORAGE[self.dtype]
        full = shape or (1,) * len(lengths)
        if tuple(lengths) == tuple(full):
            t = (
                inside.clone(memory_format=torch.contiguous_format)
                if inside.dtype is kind
                else inside.to(kind)
            )
        else:
            t = torch.full(full, padding_value(padding_mode, self.dtype), dtype=kind, device="cpu")
            torch.as_strided(t, lengths, t.stride(), 0).copy_(inside)
        return Tile(t if shape else t.reshape(()), self.dtype)

    def store(self, index, tile, order="C", check_bounds=True, ordered=False, steps=None) -> None:
        check_implicit_cast(tile, self.dtype, f"store to {self.name}")
        t = tensor_as(tile, self.dtype)
        shape = tuple(t.shape)
        lengths, by, offset, where = self._locate(index, shape, order, check_bounds, "store", steps)
        if not shape:
            t = t.reshape((1,) * len(lengths))
        elif tuple(lengths) != shape:
            t = torch.as_strided(t, lengths, t.stride(), t.storage_offset())
        mem = self.mem
        w = torch.as_strided(mem.claim(), lengths, by, offset)
        if not ordered:
            mem.check_write_race(w, self, lambda at: _place(at, where))
        w.fill_(mem.run.me)
        torch.as_strided(mem.t, lengths, by, offset).copy_(t)

    # ---- elements ----

    def _offsets(self, indices, check_bounds, mask, what):
        """(offsets, mask of what is accessed or None): int64 and bool tensors of the common index shape."""
        if not isinstance(indices, tuple):
            indices = (indices,)
        if len(indices) != self.ndim:
            raise RefusedError(
                f"{what} of {self.name}: {len(indices)} indices for an array of rank {self.ndim}"
            )
        tensors = []
        for i, ind in enumerate(indices):
            if not _is_integral(dtype_of(ind)):
                raise RefusedError(f"{what} of {self.name}: index {i} has non-integer dtype {dtype_of(ind)}")
            tensors.append(tensor_as(ind, dt.int64))
        common = broadcast_shape(*(tuple(t.shape) for t in tensors))
        offsets = torch.full(common, self.offset, dtype=torch.int64, device="cpu")
        inside = torch.ones(common, dtype=torch.bool, device="cpu")
        for t, size, step in zip(tensors, self.sizes, self.steps, strict=True):
            inside = inside & (t >= 0) & (t < size)
            offsets = offsets + t * step
        custom = _mask(mask, common, what)
        active = inside if custom is None else inside & custom
        if not check_bounds:
            wrong = ~inside if custom is None else ~inside & custom
            if wrong.any():
                at = tuple(wrong.nonzero()[0].tolist())
                bad = [int(t.expand(common)[at]) for t in tensors]
                raise OutOfBoundsError(
                    f"{what} of {self.name}{list(self.sizes)} with check_bounds=False at index {bad}"
                )
        return offsets, active

    def gather(self, indices, mask=None, padding_value=0, check_bounds=True) -> Tile:
        offsets, active = self._offsets(indices, check_bounds, mask, "gather")
        return load_elements(self, offsets, active, padding_value, "gather")

    def scatter(self, indices, value, mask=None, check_bounds=True) -> None:
        offsets, active = self._offsets(indices, check_bounds, mask, "scatter")
        store_elements(self, offsets, active, value, "scatter")

    def _advanced(self, indices, what):
        if self.ndim < 2:
            raise RefusedError(f"{what} needs an array of rank 2 or more")
        if not isinstance(indices, tuple) or len(indices) != self.ndim:
            raise RefusedError(f"{what} of {self.name}: indices must be a tuple of length {self.ndim}")
        shape, sparse = [], 0
        for item in indices:
            if type(item) is Tile:
                if item.ndim != 1 or not _is_integral(item.dtype):
                    raise RefusedError(f"{what}: the sparse index must be a 1-D integer tile")
                sparse += 1
                shape.append(item.shape[0])
            elif isinstance(item, Slice):
                shape.append(constant_int(item.length, "length of ct.Slice"))
            else:
                raise RefusedError(f"{what}: an index is neither a 1-D integer tile nor a ct.Slice")
        if sparse != 1:
            raise RefusedError(f"{what}: exactly one index must be a 1-D integer tile, found {sparse}")
        shape = constant_shape(tuple(shape))
        full = []
        for k, item in enumerate(indices):
            if type(item) is Tile:
                t = item.t.to(torch.int64)
            else:
                t = torch.arange(shape[k], device="cpu") + index_value(item.start, "start of ct.Slice")
            full.append(Tile(t.reshape([-1 if i == k else 1 for i in range(self.ndim)]), dt.int64))
        return tuple(full), shape

    def load_advanced(self, indices, padding_mode) -> Tile:
        full, _ = self._advanced(indices, "load_advanced_indexing")
        offsets, active = self._offsets(full, True, None, "load_advanced_indexing")
        pad = padding_value(padding_mode, self.dtype)
        return load_elements(self, offsets, active, pad, "load_advanced_indexing", check_padding=False)

    def store_advanced(self, indices, tile) -> None:
        full, shape = self._advanced(indices, "store_advanced_indexing")
        if type(tile) is not Tile or tile.shape != shape:
            raise RefusedError(f"store_advanced_indexing: the tile must have shape {shape}")
        offsets, active = self._offsets(full, True, None, "store_advanced_indexing")
        store_elements(self, offsets, active, tile, "store_advanced_indexing")

    def atomic(self, indices, check_bounds, what):
        return self._offsets(indices, check_bounds, None, what)


def _index_of(array, offset: int) -> list[int]:
    """The index of an element of an array whose strides do not overlap, from its offset in the storage."""
    rest, index = offset - array.offset, [0] * array.ndim
    for axis in sorted(range(array.ndim), key=lambda a: -array.steps[a]):
        if array.steps[axis] > 0:
            index[axis], rest = divmod(rest, array.steps[axis])
    return index


def _shown(index) -> tuple[int, ...]:
    return tuple(i.__index__() for i in index)


def _place(at, where):
    starts, axes = where
    index = list(starts)
    for k, axis in enumerate(axes):
        index[axis] += at[k]
    return index


def index_value(x, what: str) -> int:
    """A signed integer scalar, constant or not, as a Python int."""
    if isinstance(x, RuntimeInt):
        return x.value
    if isinstance(x, int) and not isinstance(x, bool):
        return x
    if type(x) is Tile and x.t.ndim == 0 and _is_integral(x.dtype):
        return x.t.item()
    raise RefusedError(f"{what} must be an integer scalar, got {x!r}")


def axis_order(order, ndim: int) -> tuple[int, ...]:
    if isinstance(order, str):
        if order not in ("C", "F"):
            raise RefusedError(f"order must be 'C', 'F' or a permutation, got {order!r}")
        return tuple(range(ndim)) if order == "C" else tuple(range(ndim - 1, -1, -1))
    if not isinstance(order, tuple) or len(order) != ndim:
        raise RefusedError(f"order must be a permutation of {ndim} axes, got {order!r}")
    axes = tuple(normalize_axis(a, ndim, "axis of order") for a in order)
    if len(set(axes)) != ndim:
        raise RefusedError(f"order {order} uses an axis twice")
    return axes


def padding_value(mode: PaddingMode, dtype: DType):
    if not isinstance(mode, PaddingMode):
        raise RefusedError(f"padding_mode must be a ct.PaddingMode, got {mode!r}")
    if _is_float(dtype):
        return _FLOAT_PADDING[mode]
    if mode in (PaddingMode.ZERO, PaddingMode.NEG_ZERO):
        return 0
    if dtype is bool_:
        return True
    return _POISON.get(dtype, _POISON_WIDE)


def _mask(mask, common, what):
    if mask is None:
        return None
    if dtype_of(mask) is not bool_:
        raise RefusedError(f"{what}: mask must be boolean, got {dtype_of(mask)}")
    t = tensor_as(mask, bool_)
    if broadcast_shape(tuple(t.shape), common) != tuple(common):
        raise RefusedError(f"{what}: mask of shape {tuple(t.shape)} does not broadcast to {tuple(common)}")
    return t.expand(common)


def _values(array, value, common, what, check=True) -> torch.Tensor:
    if check:
        check_implicit_cast(value, array.dtype, f"{what} of {array.name}")
    t = tensor_as(value, array.dtype)
    if broadcast_shape(tuple(t.shape), common) != tuple(common):
        raise RefusedError(f"{what}: value of shape {tuple(t.shape)} does not broadcast to {tuple(common)}")
    return t.expand(common)


def load_elements(array, offsets, active, padding, what, check_padding=True) -> Tile:
    mem = array.mem
    pad = _values(array, padding, tuple(offsets.shape), f"padding value in {what}", check_padding)
    if not active.any():
        return Tile(pad.clone(), array.dtype)
    at = torch.where(active, offsets, offsets[active].reshape(-1)[0])
    if mem.writer is not None:
        w = torch.where(active, mem.writer[at], 0)
        mem.check_read_race(w, array, lambda i: _index_of(array, int(at[i])))
    return Tile(torch.where(active, mem.flat()[at].to(pad.dtype), pad), array.dtype)


def store_elements(array, offsets, active, value, what) -> None:
    mem = array.mem
    t = _values(array, value, tuple(offsets.shape), what)
    at = offsets[active]
    writer = mem.claim()
    mem.check_write_race(writer[at], array, lambda i: _index_of(array, int(at[i])))
    writer[at] = mem.run.me
    flat = mem.flat()
    flat[at] = t[active].to(flat.dtype)


def update_elements(array, offsets, active, combine, operands, what, acquire) -> Tile:
    """Read-modify-write; where inactive, the first operand comes back. Duplicate offsets go one by one."""
    mem = array.mem
    common = tuple(offsets.shape)
    values = [_values(array, v, common, what) for v in operands]
    old = values[0].clone()
    at = offsets[active]
    if acquire:
        mem.run.synced = True
    if at.numel():
        writer = mem.claim()
        before = writer[at]
        plain = torch.where(before == ATOMIC, 0, before)
        mem.check_write_race(plain, array, lambda i: _index_of(array, int(at[i])))
        writer[at] = ATOMIC
        flat = mem.flat()
        picked = [v[active] for v in values]
        if at.unique().numel() == at.numel():
            seen = flat[at].to(old.dtype)
            flat[at] = combine(seen, *picked).to(flat.dtype)
            old[active] = seen
        else:
            seen = torch.empty_like(picked[0])
            for i, offset in enumerate(at.tolist()):
                seen[i] = flat[offset]
                flat[offset] = combine(seen[i], *(p[i] for p in picked))
            old[active] = seen
    return Tile(old, array.dtype)


class RawArrayMemory:
    """Access by element offset from the array's first element."""

    __slots__ = ("array",)

    def __init__(self, array: Array):
        self.array = array

    @property
    def dtype(self):
        return self.array.dtype

    def offsets(self, offset, mask, what):
        array = self.array
        if not _is_integral(dtype_of(offset)):
            raise RefusedError(f"{what} of {array.name}: offset has non-integer dtype {dtype_of(offset)}")
        at = tensor_as(offset, dt.int64) + array.offset
        custom = _mask(mask, tuple(at.shape), what)
        active = torch.ones(at.shape, dtype=torch.bool, device="cpu") if custom is None else custom
        if ((at < 0) | (at >= array.mem.size))[active].any():
            raise OutOfBoundsError(f"{what} of {array.name}: an offset lies outside the storage")
        return at, active

    def load_offset(self, offset, /, *, mask=None, padding_value=0, latency=None) -> Tile:
        at, active = self.offsets(offset, mask, "load_offset")
        return load_elements(self.array, at, active, padding_value, "load_offset")

    def store_offset(self, offset, value, /, *, mask=None, latency=None) -> None:
        at, active = self.offsets(offset, mask, "store_offset")
        store_elements(self.array, at, active, value, "store_offset")


class TiledView:
    """`array.tiled_view(...)`: tiles of one shape, by default without overlap."""

    __slots__ = ("array", "tile_shape", "padding_mode", "traversal_steps")

    def __init__(self, array: Array, tile_shape, padding_mode, traversal_steps):
        self.array = array
        self.tile_shape = constant_shape(tile_shape, "tile_shape")
        if self.tile_shape and len(self.tile_shape) != array.ndim:
            raise RefusedError(f"tile_shape {self.tile_shape} for an array of rank {array.ndim}")
        self.padding_mode = padding_mode
        if traversal_steps is None:
            steps = self.tile_shape or (1,) * array.ndim
        else:
            steps = traversal_steps if isinstance(traversal_steps, tuple) else (traversal_steps,)
            for s in steps:
                if constant_int(s, "traversal step") <= 0:
                    raise RefusedError(f"traversal step {s} is not positive")
            if len(steps) != array.ndim:
                raise RefusedError(f"traversal_steps {steps} for an array of rank {array.ndim}")
        self.traversal_steps = tuple(steps)

    @property
    def dtype(self):
        return self.array.dtype

    @property
    def ndim(self):
        return self.array.ndim

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        raise UnsupportedError(f"TiledView.{name} is not supported by the tile interpreter")

    def num_tiles(self, axis):
        axis = normalize_axis(axis, self.ndim)
        return Int32(-(-self.array.sizes[axis] // self.traversal_steps[axis]))

    def load(self, index, *, check_bounds=True, latency=None, allow_tma=None) -> Tile:
        return self.array.load(index, self.tile_shape, "C", self.padding_mode, check_bounds,
                               steps=self.traversal_steps)  # fmt: skip

    def store(self, index, tile, *, check_bounds=True, latency=None, allow_tma=None) -> None:
        check_implicit_cast(tile, self.dtype, f"store to {self.array.name}")
        t = tensor_as(tile, self.dtype)
        if broadcast_shape(tuple(t.shape), self.tile_shape) != self.tile_shape:
            raise RefusedError(
                f"store of a tile of shape {tuple(t.shape)} to a tiled view of {self.tile_shape}"
            )
        tile = Tile(t.expand(self.tile_shape), self.dtype)
        self.array.store(index, tile, "C", check_bounds, steps=self.traversal_steps)


def check_written(mem: Memory | None, tensor: torch.Tensor, name: str) -> None:
    """Reports the first element of a tensor that no block wrote."""
    if tensor.numel() == 0:
        return
    if mem is None or mem.writer is None:
        raise NeverWrittenError(f"output {name} of shape {tuple(tensor.shape)} was never written")
    w = torch.as_strided(mem.writer, tensor.shape, tensor.stride(), tensor.storage_offset())
    missing = w == 0
    count = int(missing.sum())
    if count:
        first = missing.nonzero()[0].tolist()
        raise NeverWrittenError(
            f"output {name} of shape {tuple(tensor.shape)}: {count} of {tensor.numel()} elements "
            f"were never written, the first at {first}"
        )
