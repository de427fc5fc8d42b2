"""The `ct.*` functions: what each stub of `cuda.tile` does on the interpreter's tiles and arrays."""

import builtins

import cuda.tile as ct
import torch
from cuda.tile import MemoryOrder, MemoryScope, PaddingMode
from cuda.tile import _datatype as dt

from . import elementwise as E
from . import tile_functions as F
from .elementwise import check_math
from .errors import KernelAssertionError, RefusedError
from .memory import Array, RawArrayMemory, axis_order, index_value, update_elements
from .tile import (
    Int32,
    RuntimeInt,
    Tile,
    bool_,
    constant_int,
    constant_shape,
    dtype_of,
    normalize_axis,
    promote,
    tensor_as,
)


def _need_array(x, what: str) -> Array:
    if type(x) is not Array:
        raise RefusedError(f"{what}: expected an array, got {type(x).__name__}")
    return x


def _hints(latency, allow_tma=None):
    if latency is not None and not 1 <= constant_int(latency, "latency") <= 10:
        raise RefusedError(f"latency must be between 1 and 10, got {latency}")
    if allow_tma is not None and not isinstance(allow_tma, bool):
        raise RefusedError(f"allow_tma must be a bool, got {allow_tma!r}")


def _check_flag(check_bounds):
    if check_bounds is not True and check_bounds is not False:
        raise RefusedError(f"check_bounds must be a constant bool, got {check_bounds!r}")


def _check_padding(mode):
    if type(mode) is not PaddingMode:
        raise RefusedError(f"padding_mode must be a ct.PaddingMode, got {mode!r}")


def _ordered(what, order, scope, synchronising) -> bool:
    """Whether the access synchronises, which exempts it from the race checks."""
    if order is MemoryOrder.WEAK:
        if scope is not MemoryScope.NONE:
            raise RefusedError(f"{what} with weak memory order cannot have a memory scope")
        return False
    if order not in (MemoryOrder.RELAXED, synchronising):
        raise RefusedError(f"{what} cannot have memory order {order}")
    if scope not in (MemoryScope.BLOCK, MemoryScope.DEVICE, MemoryScope.SYS):
        raise RefusedError(f"{what} with memory order {order} needs a memory scope")
    return True


# ---- memory -----------------------------------------------------------------------------------------------


def load(array, /, index, shape, *, order="C", padding_mode=PaddingMode.UNDETERMINED, check_bounds=True,
         latency=None, allow_tma=None, memory_order=MemoryOrder.WEAK,
         memory_scope=MemoryScope.NONE):  # fmt: skip
    array = _need_array(array, "load")
    if latency is not None or allow_tma is not None:
        _hints(latency, allow_tma)
    ordered = _ordered("load", memory_order, memory_scope, MemoryOrder.ACQUIRE)
    _check_padding(padding_mode)
    _check_flag(check_bounds)
    return array.load(index, constant_shape(shape), order, padding_mode, check_bounds, ordered)


def store(array, /, index, tile, *, order="C", check_bounds=True, latency=None, allow_tma=None,
          memory_order=MemoryOrder.WEAK, memory_scope=MemoryScope.NONE):  # fmt: skip
    array = _need_array(array, "store")
    if latency is not None or allow_tma is not None:
        _hints(latency, allow_tma)
    _check_flag(check_bounds)
    ordered = _ordered("store", memory_order, memory_scope, MemoryOrder.RELEASE)
    array.store(index, tile, order, check_bounds, ordered)


def load_advanced_indexing(array, indices, /, *, padding_mode=PaddingMode.UNDETERMINED, latency=None,
                           allow_tma=None):  # fmt: skip
    _hints(latency, allow_tma)
    return _need_array(array, "load_advanced_indexing").load_advanced(indices, padding_mode)


def store_advanced_indexing(array, indices, tile, /, *, latency=None, allow_tma=None):
    _hints(latency, allow_tma)
    _need_array(array, "store_advanced_indexing").store_advanced(indices, tile)


def gather(array, indices, /, *, mask=None, padding_value=0, check_bounds=True, latency=None):
    _hints(latency)
    return _need_array(array, "gather").gather(indices, mask, padding_value, check_bounds)


def scatter(array, indices, value, /, *, mask=None, check_bounds=True, latency=None):
    _hints(latency)
    _need_array(array, "scatter").scatter(indices, value, mask, check_bounds)


def num_tiles(array, /, axis, shape, order="C"):
    array = _need_array(array, "num_tiles")
    shape = constant_shape(shape) or (1,) * array.ndim
    if len(shape) != array.ndim:
        raise RefusedError(f"num_tiles: tile shape {shape} for an array of rank {array.ndim}")
    axis = normalize_axis(axis, array.ndim)
    return Int32(-(-array.sizes[axis_order(order, array.ndim)[axis]] // shape[axis]))


def slice_init(self, start, length, /):
    self.start, self.length = start, length


_INTS = (dt.int32, dt.int64, dt.uint32)
_COMBINE = {
    "xchg": (lambda old, new: new, (*_INTS, dt.float32, dt.float64)),
    "add": (lambda old, new: old + new, (*_INTS, dt.float32, dt.float64, dt.float16, dt.bfloat16)),
    "max": (torch.maximum, _INTS),
    "min": (torch.minimum, _INTS),
    "and": (torch.bitwise_and, _INTS),
    "or": (torch.bitwise_or, _INTS),
    "xor": (torch.bitwise_xor, _INTS),
}


def _acquires(memory_order) -> bool:
    return memory_order in (MemoryOrder.ACQUIRE, MemoryOrder.ACQ_REL)


def _check_atomic(array, update, name, allowed):
    if array.dtype not in allowed:
        raise RefusedError(f"atomic_{name} does not support {array.dtype} arrays")
    if name in ("and", "or", "xor") and dtype_of(update) is not array.dtype:
        raise RefusedError(f"atomic_{name} needs an update of dtype {array.dtype}, got {dtype_of(update)}")


def _atomic(name):
    combine, allowed = _COMBINE[name]

    def on_array(array, indices, update, /, *, check_bounds=True, memory_order=MemoryOrder.ACQ_REL,
                 memory_scope=None):  # fmt: skip
        array = _need_array(array, f"atomic_{name}")
        _check_atomic(array, update, name, allowed)
        offsets, active = array.atomic(indices, check_bounds, f"atomic_{name}")
        return update_elements(
            array, offsets, active, combine, (update,), f"atomic_{name}", _acquires(memory_order)
        )

    def on_memory(self, offset, update, /, *, mask=None, memory_order=MemoryOrder.ACQ_REL, memory_scope=None):
        _check_atomic(self.array, update, name, allowed)
        at, active = self.offsets(offset, mask, f"atomic_{name}_offset")
        return update_elements(self.array, at, active, combine, (update,), f"atomic_{name}_offset",
                               _acquires(memory_order))  # fmt: skip

    return on_array, on_memory


def _swap_if_equal(old, expected, desired):
    return torch.where(old == expected, desired, old)


def atomic_cas(array, indices, expected, desired, /, *, check_bounds=True, memory_order=MemoryOrder.ACQ_REL,
               memory_scope=None):  # fmt: skip
    array = _need_array(array, "atomic_cas")
    offsets, active = array.atomic(indices, check_bounds, "atomic_cas")
    return update_elements(array, offsets, active, _swap_if_equal, (expected, desired), "atomic_cas",
                           _acquires(memory_order))  # fmt: skip


def atomic_cas_offset(self, offset, expected, desired, /, *, mask=None, memory_order=MemoryOrder.ACQ_REL,
                      memory_scope=None):  # fmt: skip
    at, active = self.offsets(offset, mask, "atomic_cas_offset")
    return update_elements(self.array, at, active, _swap_if_equal, (expected, desired), "atomic_cas_offset",
                           _acquires(memory_order))  # fmt: skip


# ---- elementwise with keywords ----------------------------------------------------------------------------


def _with_rounding(name, op, modes):
    def wrapped(x, y, /, *, rounding_mode=None, flush_to_zero=False):
        if rounding_mode is None and not flush_to_zero:
            return op(x, y)
        check_math(name, promote(x, y, name == "truediv"), rounding_mode, flush_to_zero, modes, True)
        if not flush_to_zero:
            return op(x, y)
        return E.flush(op(E.flush(x), E.flush(y)))

    return wrapped


# ---- the rest ---------------------------------------------------------------------------------------------


def assume_divisible_by(x, divisor):
    value, divisor = index_value(x, "x"), constant_int(divisor, "divisor")
    if divisor <= 0:
        raise RefusedError(f"assume_divisible_by: divisor {divisor} is not positive")
    if value % divisor:
        raise KernelAssertionError(f"assume_divisible_by: {value} is not divisible by {divisor}")
    return x


def assert_(cond, /, message=None):
    if dtype_of(cond) is not bool_:
        raise RefusedError(f"assert_: the condition must be bool, got {dtype_of(cond)}")
    t = tensor_as(cond, bool_)
    if not bool(t.all()):
        where = f" at {(~t).nonzero()[0].tolist()}" if t.ndim else ""
        raise KernelAssertionError(f"assertion failed{where}: {message or ''}")


def static_assert(condition, message=None, /):
    if not isinstance(condition, bool):
        raise RefusedError(f"static_assert: the condition must be a constant bool, got {condition!r}")
    if not condition:
        raise KernelAssertionError(f"static assertion failed: {message or ''}")


def static_eval(expr, /):
    return expr


def ensure_constant(value, /):
    if type(value) is Tile or isinstance(value, RuntimeInt):
        raise RefusedError(f"ensure_constant: {value!r} is not a compile-time constant")
    return value


def print_(*args, sep=" ", end="\n"):
    builtins.print(*args, sep=sep, end=end)


def printf(format, *args):
    values = []
    for a in args:
        t = F.need_tile(a, "printf").t
        values.append(t.item() if t.numel() == 1 else t.tolist())
    try:
        text = format % tuple(values)
    except TypeError:
        text = f"{format} {values}"
    builtins.print(text, end="")


def nothing(*args, **kwargs):
    return None


_HERE = """
    load store gather scatter num_tiles load_advanced_indexing store_advanced_indexing atomic_cas
    assume_divisible_by assert_ static_assert static_eval ensure_constant printf
"""
_ON_WHOLE_TILES = """
    arange full zeros ones astile reshape expand_dims broadcast_to permute transpose cat extract
    insert bitcast mma matmul prod argmax argmin reduce scan cumsum cumprod
"""
_ELEMENTWISE = """
    astype floordiv mod atan2 cdiv minimum maximum equal not_equal less less_equal greater
    greater_equal bitwise_and bitwise_or bitwise_xor bitwise_not where exp exp2 log log2 sqrt rsqrt
    sin cos tan sinh cosh tanh floor ceil negative isnan
"""


def _functions() -> dict:
    """Names in `cuda.tile` and what they do here. `bid` and `num_blocks` belong to the launch."""
    table = {name: globals()[name] for name in _HERE.split()}
    table |= {name: getattr(F, name) for name in _ON_WHOLE_TILES.split()}
    table |= {name: getattr(E, name) for name in _ELEMENTWISE.split()}
    table |= {
        "sum": F.sum_,
        "max": F.max_,
        "min": F.min_,
        "add": _with_rounding("add", E.add, E.BASIC_MODES),
        "sub": _with_rounding("sub", E.sub, E.BASIC_MODES),
        "mul": _with_rounding("mul", E.mul, E.BASIC_MODES),
        "truediv": _with_rounding("truediv", E.truediv, (*E.BASIC_MODES, "full", "approx")),
        "divmod": E.divmod_,
        "pow": E.pow_,
        "bitwise_lshift": E.lshift,
        "bitwise_rshift": E.rshift,
        "abs": E.abs_,
        "print": print_,
        "grid_dependency_control_wait": nothing,
        "grid_dependency_control_launch_dependents": nothing,
    }
    for name in _COMBINE:
        table[f"atomic_{name}"] = _atomic(name)[0]
    return table


def implementations() -> dict:
    """Stub function object -> implementation, for every stub of this `cuda.tile` that is implemented."""
    found = {}

    def register(stub, implementation):
        # Decorators for documentation wrap stubs; what reaches the dispatcher is one of the chain.
        while stub is not None:
            found[stub] = implementation
            stub = getattr(stub, "__wrapped__", None)

    for name, implementation in _functions().items():
        register(getattr(ct, name, None), implementation)
    register(ct.Slice.__init__, slice_init)
    return found


for _name in _COMBINE:
    setattr(RawArrayMemory, f"atomic_{_name}_offset", _atomic(_name)[1])
RawArrayMemory.atomic_cas_offset = atomic_cas_offset
