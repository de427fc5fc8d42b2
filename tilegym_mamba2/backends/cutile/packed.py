"""Launches with arguments that are laid out once, for calls that launch the same code again and again.

`ct.launch` asks every array anew for its address, shape and strides, through dlpack: 0.75 µs each. Where a
form of call fixes all but the addresses, they are all that a later launch needs. Binary and order of
arguments are what cuda-tile documents for exported kernels, calling convention `cutile_python_v2`:
https://docs.nvidia.com/cuda/cutile-python/compilation.html
"""

import ctypes
import io
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import cuda.tile as ct
import torch
from cuda.bindings import driver
from cuda.tile.compilation import (
    ArrayConstraint,
    ConstantConstraint,
    KernelSignature,
    ScalarConstraint,
    TupleConstraint,
    export_kernel,
)

_SCALARS = {
    ct.bool_: ctypes.c_bool,
    ct.int32: ctypes.c_int32,
    ct.int64: ctypes.c_int64,
    ct.float32: ctypes.c_float,
    ct.float64: ctypes.c_double,
}

_ADDRESS, _OFF_16 = ctypes.sizeof(ctypes.c_uint64), 15


class Packed:
    """One launch that may be repeated on other arrays of the same form, see `forms`, by any thread."""

    def __init__(self, function: Any, grid: Sequence[int], args: Sequence[Any], signature: KernelSignature):
        self._function = function
        self._grid = (*grid, *(1,) * (3 - len(grid)))
        pairs = zip(args, signature.parameters, strict=True)
        # Numbers alone: the tensors must not live on.
        self._values = [value for arg, constraint in pairs for value in binary_values(arg, constraint)]
        # Those not in use: a launch writes its addresses into one, and the driver reads it without the GIL.
        self._blocks = [_Block(self._values)]
        # Of its addresses, one after the other, the bits that multiples of 16 lack.
        off = _OFF_16.to_bytes(_ADDRESS, sys.byteorder) * len(self._blocks[0].addresses)
        self._off = int.from_bytes(off, sys.byteorder)

    def launch(self, stream: int, addresses: Sequence[int]) -> bool:
        """Enqueues it; `addresses`: of its arrays, in their order. False: the driver refused, and nothing was
        enqueued."""
        return self._enqueue(stream, self._block_of(addresses))

    def launch_aligned(self, stream: int, addresses: Sequence[int]) -> bool:
        """As `launch`; also False where an address is off 16 bytes."""
        block = self._block_of(addresses)
        if int.from_bytes(block.addresses, sys.byteorder) & self._off:
            self._blocks.append(block)
            return False
        return self._enqueue(stream, block)

    def _block_of(self, addresses: Sequence[int]) -> "_Block":
        try:
            block = self._blocks.pop()
        except IndexError:
            block = _Block(self._values)
        block.addresses[:] = addresses
        return block

    def _enqueue(self, stream: int, block: "_Block") -> bool:
        (status,) = driver.cuLaunchKernel(
            self._function, *self._grid, 1, 1, 1, 0, stream, block.parameters, 0
        )
        self._blocks.append(block)
        return not status


# By GPU, kernel and signature.
_functions: dict[tuple[int, int, str], Any] = {}


def pack(
    launches: Sequence[Any], signatures: Sequence[KernelSignature], device: torch.device, loads: bool
) -> list[Packed] | None:
    """Each of the launches, of the form that its signature says; compiles what is not compiled yet.

    None where one cannot be packed: the driver does not take it, or it is not loaded yet and `loads` says
    that nothing may be, since a CUDA graph is being captured.
    """
    packed = []
    for item, signature in zip(launches, signatures, strict=True):
        function = _function(item.kernel, signature, device, loads)
        if function is None:
            return None
        packed.append(Packed(function, item.grid, item.args, signature))
    return packed


def _function(kernel: Any, signature: KernelSignature, device: torch.device, loads: bool) -> Any:
    key = (device.index, id(kernel), signature.symbol)
    if key not in _functions:
        if not loads:
            return None
        # cuda-tile keeps binaries on disk, and takes them from there.
        file = io.BytesIO()
        major, minor = torch.cuda.get_device_capability(device)
        export_kernel(kernel, [signature], file, gpu_code=f"sm_{major}{minor}", output_format="cubin")
        status, library = driver.cuLibraryLoadData(file.getvalue(), [], [], 0, [], [], 0)
        if not status:
            status, function = driver.cuLibraryGetKernel(library, signature.symbol.encode())
        if status:
            return None
        _functions[key] = driver.CUfunction(int(function))
    return _functions[key]


class _Block:
    """Memory that holds the arguments of a launch, one after the other as the driver wants them.

    addresses: those of its arrays, to be written; parameters: where the list of pointers to the arguments is.
    """

    def __init__(self, values: Sequence[Any]):
        self._kept = values
        are_addresses = [type(value) is ctypes.c_uint64 for value in values]
        self.addresses = (ctypes.c_uint64 * sum(are_addresses))()
        following = itertools.count(ctypes.addressof(self.addresses), ctypes.sizeof(ctypes.c_uint64))
        places = [
            next(following) if is_address else ctypes.addressof(value)
            for value, is_address in zip(values, are_addresses, strict=True)
        ]
        self._pointers = (ctypes.c_void_p * len(places))(*places)
        self.parameters = ctypes.addressof(self._pointers)


def binary_values(arg: Any, constraint: Any) -> Iterator[Any]:
    """The arguments that the kernel gets for one of its parameters; c_uint64 stands for an address."""
    if isinstance(constraint, ConstantConstraint):
        return
    if isinstance(constraint, TupleConstraint):
        for item, part in zip(arg, constraint.items, strict=True):
            yield from binary_values(item, part)
    elif isinstance(constraint, ArrayConstraint):
        index = _SCALARS[constraint.index_dtype]
        yield ctypes.c_uint64(0)
        yield from (index(size) for size in (*arg.shape, *arg.stride()))
    elif isinstance(constraint, ScalarConstraint):
        yield _SCALARS[constraint.dtype](arg)
    else:
        raise TypeError(f"no binary form is known for {type(constraint).__name__}")
