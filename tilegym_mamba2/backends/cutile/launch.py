"""Launching a kernel: on the current CUDA stream, or block by block through the tile interpreter.

Also what a launch needs to know beforehand: which form of a kernel (hints, 64-bit indices), and whether it is
compiled, since nothing may compile while a CUDA graph is captured.
"""

import contextlib
import functools
import itertools
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import cuda.tile as ct
import torch
from cuda.tile._cext import launch as launch_directly
from cuda.tile.compilation import CallingConvention, KernelSignature

from .availability import interpreter_active
from .packed import Packed, pack

# Past this many elements from its first, an element cannot be reached with 32-bit indices.
INT32_REACH = 2**31


class Launch(NamedTuple):
    """One kernel launch, ready to go: the kernel's hinted form, its grid and its arguments.

    `chained`: its blocks may start before the kernel before it has ended, for whose results it waits itself.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    outputs: Mapping[str, torch.Tensor]
    chained: bool = False


class Lanes(NamedTuple):
    """Sequences of launches of which none needs another: on a GPU they run side by side.

    One fills the multiprocessors that another leaves idle while its blocks end and begin.
    """

    lanes: tuple[list[Launch], ...]

    def in_turn(self) -> Iterator[tuple[int, Launch]]:
        """All launches, each with its lane, in an order in which they may run one after the other."""
        for launches in itertools.zip_longest(*self.lanes):
            yield from ((lane, item) for lane, item in enumerate(launches) if item is not None)


_NO_OUTPUTS: Mapping[str, torch.Tensor] = types.MappingProxyType({})


@dataclass(frozen=True)
class Step:
    """A kernel in its hinted form with its grid and the constants that follow its arrays."""

    kernel: Any
    grid: tuple[int, ...]
    constants: tuple[Any, ...]
    chained: bool = False

    def launch(self, arrays: tuple[Any, ...], outputs: Mapping[str, torch.Tensor] = _NO_OUTPUTS) -> Launch:
        return Launch(self.kernel, self.grid, arrays + self.constants, outputs, self.chained)


def refuse_float64(op_name: str, names: tuple[str, ...], arguments: Sequence[Any]) -> NoReturn:
    """Raises the TypeError about float64 that names the arguments which have it."""
    wide = [
        name
        for name, value in zip(names, arguments, strict=False)
        if isinstance(value, torch.Tensor) and value.dtype is torch.float64
    ]
    raise TypeError(
        f"{op_name}: backend 'cutile' takes bfloat16, float16 and float32, got float64 for "
        f"{', '.join(wide) or 'state_dtype'}; use backend='torch'"
    )


@functools.cache
def hinted(kernel: Any, wide: bool = False, hints: tuple[tuple[str, int], ...] = ()) -> Any:
    """The kernel with compiler hints; `wide`: with 64-bit shapes, strides and indices of its arrays.

    Kept, because each hinted form is an object with a compilation cache of its own.
    """
    if wide:
        kernel = ct.kernel(_with_wide_arrays(kernel._pyfunc))
    return kernel.replace_hints(**dict(hints)) if hints else kernel


def _with_wide_arrays(function: types.FunctionType) -> types.FunctionType:
    copy = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__doc__, copy.__module__, copy.__qualname__ = (
        function.__doc__,
        function.__module__,
        function.__qualname__,
    )
    # Parameters without an annotation are the arrays.
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    arrays = {name: ct.IndexedWithInt64 for name in names if name not in function.__annotations__}
    copy.__annotations__ = function.__annotations__ | arrays
    return copy


def reach(tensor: torch.Tensor) -> int:
    """How many elements lie between the tensor's first and last, in memory."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1


def needs_wide(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether some tensor reaches past what 32-bit indices reach."""
    return any(t is not None and reach(t) >= INT32_REACH for t in tensors)


class _Recorder(threading.local):
    launches: list[Launch] | None = None


_recorder = _Recorder()


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Within it, on this thread, launches on tensors without memory (device "meta") go to the list."""
    before, _recorder.launches = _recorder.launches, []
    try:
        yield _recorder.launches
    finally:
        _recorder.launches = before


def run(launches: Sequence[Launch | Lanes], device: torch.device) -> None:
    """Enqueues the launches in order on the device's current stream (or interprets them, on CPU tensors)."""
    if device.type == "meta" and _recorder.launches is not None:
        _recorder.launches += in_turn(launches)
        return
    if device.type == "cpu" and interpreter_active():
        from tilegym_mamba2 import interpreter

        for item in in_turn(launches):
            interpreter.launch(item.grid, item.kernel, item.args, outputs=item.outputs)
        return
    # The handle alone: making a Stream object costs 5 us.
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    for item in launches:
        if type(item) is Lanes:
            _run_lanes(item, device)
        else:
            _enqueue(item, stream)


def _enqueue(item: Launch, stream: int) -> None:
    # TileGym replaces `ct.launch`, and its form takes no option, so it is called through the module, and past
    # it only for chained launches.
    if item.chained:
        launch_directly(stream, item.grid, item.kernel, item.args, programmatic_dependent_launch=True)
    else:
        ct.launch(stream, item.grid, item.kernel, item.args)


def in_turn(launches: Sequence[Launch | Lanes]) -> Iterator[Launch]:
    """The launches, those in lanes one after the other."""
    for item in launches:
        if isinstance(item, Lanes):
            yield from (launch for _, launch in item.in_turn())
        else:
            yield item


def _run_lanes(work: Lanes, device: torch.device) -> None:
    """The first lane on the current stream, each of the others on one of its own, which the current one waits
    for. A CUDA graph that is being captured takes them up as branches."""
    current = torch.cuda.current_stream(device)
    others = _side_streams(device, len(work.lanes) - 1)
    for stream in others:
        stream.wait_stream(current)
    handles = [stream.cuda_stream for stream in (current, *others)]
    try:
        for lane, item in work.in_turn():
            _enqueue(item, handles[lane])
    finally:
        # Also when a launch fails: the memory of those before it goes back to the current stream.
        for stream in others:
            current.wait_stream(stream)


class _SideStreams(threading.local):
    """Each thread has its own, as another's CUDA graph capture would take up what this one enqueues.

    As far as torch can tell: its streams are 32 a device, handed out in turn, so that a program that makes
    more of them may get one of these again. That is harmless but for such a capture.
    """

    def __init__(self) -> None:
        self.of_device: dict[int, list[torch.cuda.Stream]] = {}


_side = _SideStreams()


def _side_streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    streams = _side.of_device.setdefault(device.index, [])
    while len(streams) < count:
        streams.append(torch.cuda.Stream(device))
    return streams[:count]


@dataclass
class Seen:
    """What a plan's earlier runs have left for its next one.

    repeats: its launches are always the same, on arrays of the same form, so that they can be packed.
    """

    repeats: bool = False
    compiled: bool = False
    packed: Sequence[Packed] | None = None


_compiled: set[tuple[int, int, str]] = set()


def run_plan(launches: Sequence[Launch | Lanes], device: torch.device, op_name: str, seen: Seen) -> None:
    """As `run`, on any GPU, whichever is current.

    If such launches have not run before, and a CUDA graph is being captured, it raises before anything is
    enqueued if one would have to compile: a first compilation loads a module and waits for the device, which
    breaks the capture.
    """
    if device.type != "cuda":
        run(launches, device)
        return
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            run_plan(launches, device, op_name, seen)
        return
    if seen.packed is not None:
        _run_packed(launches, seen.packed, device)
    elif seen.compiled:
        run(launches, device)
    else:
        _run_first(launches, device, op_name, seen)


def _run_packed(launches: Sequence[Any], packed: Sequence[Packed], device: torch.device) -> None:
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    for item, ready in zip(launches, packed, strict=True):
        repeat(item, ready, stream)


def repeat(item: Launch, packed: Packed, stream: int) -> None:
    """Enqueues a launch of which `packed` was made, or one like it in all but addresses."""
    addresses = [arg.data_ptr() for arg in item.args if isinstance(arg, torch.Tensor)]
    # What the driver refuses is left to cuda-tile, which says why.
    if not packed.launch(stream, addresses):
        _enqueue(item, stream)


def _run_first(launches: Sequence[Launch | Lanes], device: torch.device, op_name: str, seen: Seen) -> None:
    items = list(in_turn(launches))
    forms = [signature_of(item) for item in items]
    # Each GPU loads its own copy.
    names = {(device.index, id(item.kernel), form.symbol) for item, form in zip(items, forms, strict=True)}
    capturing = torch.cuda.is_current_stream_capturing()
    if capturing and not names <= _compiled:
        raise RuntimeError(
            f"{op_name}: warm up first: a kernel for these shapes, dtypes and strides is not compiled yet, "
            "and nothing may compile inside CUDA graph capture. Call the op once with such tensors before "
            f"the capture, or tilegym_mamba2.warmup(spec{', backward=True' if 'backward' in op_name else ''})"
        )
    plain = not any(item.chained for item in items) and Lanes not in map(type, launches)
    if seen.repeats and plain:
        seen.packed = pack(items, forms, device, not capturing)
    if seen.packed is not None:
        _run_packed(items, seen.packed, device)
    else:
        run(launches, device)
    # What is captured is packed at the next call.
    seen.compiled = not capturing
    _compiled.update(names)


def signature_of(item: Launch) -> KernelSignature:
    """What `ct.launch` compiles the kernel for, given these arguments."""
    return KernelSignature.from_kernel_args(item.kernel, item.args, CallingConvention.cutile_python_v2())
