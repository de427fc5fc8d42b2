"""One launch: checks the arguments as a launch would, then runs the kernel's function block by block."""

import inspect
import os
import random
import traceback
from collections.abc import Mapping, Sequence

import cuda.tile as ct
import torch
from cuda.tile import _cext
from torch.utils._python_dispatch import _disable_current_modes

from .errors import InterpreterError, KernelCrashError, LaunchError, RefusedError, UnsupportedError
from .memory import Array, Memory, Run, check_written
from .ops import implementations
from .tile import STORAGE, Int32, Int64, RuntimeInt, Tile, constant_int, float32

try:
    from cuda.tile._dispatch_mode import DispatchMode
except ImportError:
    raise InterpreterError(
        f"the tile interpreter needs cuda.tile._dispatch_mode.DispatchMode, which cuda-tile "
        f"{getattr(ct, '__version__', '(unknown version)')} does not have; it works with cuda-tile 1.7"
    ) from None

# cuda.tile refuses more than 24 bits on any axis, CUDA more than 65535 blocks on y and z.
GRID_LIMITS = (2**24 - 1, 65535, 65535)
_OWN_FILES = os.path.dirname(os.path.abspath(__file__))
_CT_FILES = os.path.dirname(os.path.abspath(ct.__file__))
_TORCH_FILES = os.path.dirname(os.path.abspath(torch.__file__))
_WIDE_UNSIGNED_TENSORS = (torch.uint16, torch.uint32)


class InterpreterMode(DispatchMode):
    """Sends every `ct.*` call of this thread to the interpreter."""

    def __init__(self, run: Run):
        self._run = run
        self._table = {**_shared_table()}
        for name, implementation in (("bid", self._bid), ("num_blocks", self._num_blocks)):
            self._table[getattr(ct, name)] = implementation

    def call_tile_function_from_host(self, func, args, kwargs):
        implementation = self._table.get(func)
        if implementation is None:
            implementation = self._resolve(func)
        return implementation(*args, **kwargs)

    def _resolve(self, func):
        if getattr(func, "_cutile_python_stub", None) is None and hasattr(func, "__wrapped__"):
            # A user's helper marked @ct.function: its body is ordinary tile code.
            self._table[func] = func.__wrapped__
            return func.__wrapped__
        name = getattr(func, "__qualname__", str(func))
        raise UnsupportedError(f"cuda.tile.{name} is not supported by the tile interpreter")

    def _bid(self, axis):
        return Int32(self._run.block[_grid_axis(axis)])

    def _num_blocks(self, axis):
        return Int32(self._run.grid[_grid_axis(axis)])


def _grid_axis(axis) -> int:
    if constant_int(axis, "grid axis") not in (0, 1, 2):
        raise RefusedError(f"grid axis must be 0, 1 or 2, got {axis}")
    return axis


_table: dict | None = None


def _shared_table() -> dict:
    global _table
    if _table is None:
        _table = implementations()
    return _table


def _check_grid(grid) -> tuple[int, int, int]:
    if not isinstance(grid, (tuple, list)) or not 1 <= len(grid) <= 3:
        raise LaunchError(f"grid must be a tuple of one to three integers, got {grid!r}")
    for axis, (n, limit) in enumerate(zip(grid, GRID_LIMITS, strict=False)):
        if isinstance(n, bool) or not isinstance(n, int):
            raise LaunchError(f"grid[{axis}] must be an integer, got {n!r}")
        if not 1 <= n <= limit:
            raise LaunchError(f"grid[{axis}] must be between 1 and {limit}, got {n}")
    return tuple(int(n) for n in grid) + (1,) * (3 - len(grid))


class _Arguments:
    """Turns launch arguments into what the kernel sees."""

    def __init__(self, run: Run):
        self._run = run
        self._memories: dict[tuple, Memory] = {}

    def memory_of(self, t: torch.Tensor) -> Memory | None:
        return self._memories.get((t.untyped_storage().data_ptr(), t.dtype))

    def convert(self, value, annotation, name: str):
        kind = getattr(annotation, "KIND", "leaf")
        if kind == "homogeneous_tuple" or kind == "heterogeneous_tuple" or isinstance(value, tuple):
            if not isinstance(value, tuple):
                raise LaunchError(f"{name} must be a tuple, got {type(value).__name__}")
            if kind == "heterogeneous_tuple":
                if len(value) != len(annotation.items):
                    raise LaunchError(f"{name} must have {len(annotation.items)} items, got {len(value)}")
                inner = annotation.items
            else:
                inner = [annotation.each if kind == "homogeneous_tuple" else annotation] * len(value)
            return tuple(
                self.convert(v, a, f"{name}[{i}]") for i, (v, a) in enumerate(zip(value, inner, strict=True))
            )
        if isinstance(value, torch.Tensor):
            return self._array(value, getattr(annotation, "array", None), name)
        if isinstance(value, list):
            element = getattr(getattr(annotation, "list", None), "element", None)
            if not value or not all(isinstance(v, torch.Tensor) for v in value):
                raise LaunchError(f"{name} must be a list of tensors")
            return [self._array(v, element, f"{name}[{i}]") for i, v in enumerate(value)]
        if getattr(annotation, "constant", False):
            return self._constant(value, name)
        return self._scalar(value, getattr(annotation, "scalar", None), name)

    def _constant(self, value, name: str):
        if _cext.classify_constant(value, True) is None:
            raise LaunchError(f"constant argument {name} of type {type(value).__name__} is not supported")
        return value

    def _scalar(self, value, annotation, name: str):
        if isinstance(value, bool):
            return Tile(torch.tensor(value, device="cpu"), ct.bool_)
        if isinstance(value, int):
            wide = annotation is not None and annotation.dtype is ct.int64
            cls: type[RuntimeInt] = Int64 if wide else Int32
            if not cls.low <= value <= cls.high:
                raise LaunchError(f"argument {name} = {value} does not fit {cls.dtype}; see ct.ScalarInt64")
            return cls(value)
        if isinstance(value, float):
            return Tile(torch.tensor(value, dtype=torch.float32, device="cpu"), float32)
        raise LaunchError(f"argument {name} of type {type(value).__name__} is not supported")

    def _array(self, t: torch.Tensor, annotation, name: str) -> Array:
        if t.device.type != "cpu":
            raise LaunchError(f"argument {name} is on {t.device}: the tile interpreter runs on CPU tensors")
        if t.layout is not torch.strided:
            raise LaunchError(f"argument {name} has layout {t.layout}, expected a strided tensor")
        if t.is_neg():
            raise LaunchError(
                f"argument {name} is negated beside its memory (is_neg()), which a kernel would read without "
                "the sign; see Tensor.resolve_neg"
            )
        dtype = _cext.foreign_dtype_object_to_native(t.dtype)
        if dtype is None or (STORAGE.get(dtype) is not t.dtype and t.dtype not in _WIDE_UNSIGNED_TENSORS):
            raise LaunchError(f"argument {name} has unsupported dtype {t.dtype}")
        index = Int64 if annotation is not None and annotation.index_dtype is ct.int64 else Int32
        for what, numbers in (("shape", t.shape), ("stride", t.stride())):
            for axis, n in enumerate(numbers):
                if n > index.high:
                    raise LaunchError(
                        f"{what}[{axis}] of {name} is {n}, past {index.dtype}; see ct.IndexedWithInt64"
                    )
        t = t.detach()
        key = (t.untyped_storage().data_ptr(), t.dtype)
        mem = self._memories.get(key)
        if mem is None:
            mem = self._memories[key] = Memory(t, self._run)
        static_shape = {a % t.ndim for a in getattr(annotation, "static_shape_dims", ())}
        static_strides = {a % t.ndim for a in getattr(annotation, "static_stride_dims", ())}
        return Array(
            mem, dtype, name, t.shape, t.stride(), t.storage_offset(), index, static_shape, static_strides
        )


def _location(error: BaseException) -> str | None:
    """file:line of the innermost frame that is neither ours, nor cuda.tile's, nor torch's."""
    place = None
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith((_OWN_FILES, _CT_FILES, _TORCH_FILES)):
            place = f"{frame.filename}:{frame.lineno} ({frame.name}: {frame.line})"
    return place


def _pick_seed(seed: int | None) -> int:
    forced = os.environ.get("TILEGYM_MAMBA2_INTERPRET_SEED", "").strip()
    if forced:
        try:
            return int(forced)
        except ValueError:
            raise LaunchError(f"TILEGYM_MAMBA2_INTERPRET_SEED must be an integer, got {forced!r}") from None
    return random.SystemRandom().randrange(2**31) if seed is None else seed


def _named_outputs(outputs, names: dict[int, str]) -> list[tuple[str, torch.Tensor]]:
    if outputs is None:
        return []
    if isinstance(outputs, Mapping):
        return list(outputs.items())
    if isinstance(outputs, torch.Tensor) or not isinstance(outputs, Sequence):
        raise TypeError("outputs must be a mapping or a sequence of tensors")
    return [(names.get(id(t), f"#{i}"), t) for i, t in enumerate(outputs)]


def run_launch(grid, kernel, args, *, outputs, seed) -> None:
    function = getattr(kernel, "_pyfunc", None)
    if function is None:
        raise LaunchError(f"expected a @ct.kernel object, got {type(kernel).__name__}")
    name = function.__name__
    seed = _pick_seed(seed)
    try:
        run = Run(_check_grid(grid))
        bound = _Arguments(run)
        converted, names = _bind(kernel, function, args, bound)
    except InterpreterError as error:
        raise error.locate(kernel=name, block=None, seed=None, location=None) from None
    mode = InterpreterMode(run)
    x, y, z = run.grid
    numbers = list(range(x * y * z))
    random.Random(seed).shuffle(numbers)
    exact = (torch.autocast("cpu", enabled=False), _exact_float32_products())
    with torch.no_grad(), _disable_current_modes(), exact[0], exact[1], _one_thread(), mode.as_current():
        for n in numbers:
            run.block = (n % x, n // x % y, n // (x * y))
            run.me = n + 1
            run.synced = False
            try:
                function(*converted)
            except InterpreterError as error:
                place = {"kernel": name, "block": run.block, "seed": seed, "location": _location(error)}
                raise error.locate(**place) from error.__cause__
            except Exception as error:
                crash = KernelCrashError(f"{type(error).__name__}: {error}{_hint(error)}")
                place = {"kernel": name, "block": run.block, "seed": seed, "location": _location(error)}
                raise crash.locate(**place) from error
        try:
            for label, t in _named_outputs(outputs, names):
                check_written(bound.memory_of(t), t, label)
        except InterpreterError as error:
            raise error.locate(kernel=name, block=None, seed=seed, location=None) from None


def _bind(kernel, function, args, bound: _Arguments):
    if not isinstance(args, tuple):
        raise LaunchError(f"kernel arguments must be a tuple, got {type(args).__name__}")
    parameters = list(inspect.signature(function).parameters)
    if len(args) != len(parameters):
        raise LaunchError(
            f"the kernel takes {len(parameters)} arguments ({', '.join(parameters)}), got {len(args)}"
        )
    annotations = kernel._annotated_function.parameter_annotations
    converted = tuple(bound.convert(v, a, p) for p, v, a in zip(parameters, args, annotations, strict=True))
    return converted, {id(v): p for p, v in zip(parameters, args, strict=True)}


def _hint(error: Exception) -> str:
    text = str(error)
    if "cannot be constructed in pure Python" in text:
        return " (write ct.astile(value, dtype=...) or value.astype(...))"
    if isinstance(error, AttributeError) and "module 'cuda.tile'" in text:
        return f" (cuda-tile {ct.__version__})"
    return ""


class _one_thread:
    """Tiles are small: to share one between threads takes longer than the work, on busy cores 7 times."""

    def __enter__(self):
        self._before = torch.get_num_threads()
        if self._before != 1:
            torch.set_num_threads(1)

    def __exit__(self, *exc):
        if self._before != 1:
            torch.set_num_threads(self._before)


class _exact_float32_products:
    """float32 products stay float32, whatever `torch.set_float32_matmul_precision` allows the CPU to do."""

    def __enter__(self):
        backend = getattr(torch.backends, "mkldnn", None)
        self._setting = getattr(backend, "matmul", None)
        self._before = getattr(self._setting, "fp32_precision", None)
        if self._before not in (None, "ieee"):
            self._setting.fp32_precision = "ieee"
        return self

    def __exit__(self, *exc):
        if self._before not in (None, "ieee"):
            self._setting.fp32_precision = self._before
