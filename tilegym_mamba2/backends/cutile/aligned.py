"""Token arrays with rows of whole 16 bytes, which the copy engine can load, for the backward on a GPU.

Where rows are not (P 3, a slice at an odd offset) loads go another way, and there tileiras 13.4 gives
`compute_dx` code whose sums per token are not the same from run to run, with errors as large as da itself
(H200, float32, P 3, N 5; right at P 4, N 8). So the backward copies such arrays first, P and N rounded up
with zeros, and cuts the gradients back.
"""

import math
from collections.abc import Callable, Sequence

import torch

Optional = torch.Tensor | None
_BYTES = 16
# Which axes of an input are P and N.
_HEAD_AXIS = {"x": 3, "z": 3, "dout": 3, "init_state": 2, "dfinal_state": 2}
_TOKENS = ("x", "b", "c", "z", "dout")
_STATE_AXIS = {"b": 3, "c": 3, "init_state": 3, "dfinal_state": 3}


def has_whole_rows(tensor: torch.Tensor) -> bool:
    """Whether each of the tensor's rows begins at a multiple of 16 bytes and is one long."""
    size = tensor.element_size()
    steps = [
        stride for length, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if length > 1
    ]
    return tensor.data_ptr() % _BYTES == 0 and not any(n * size % _BYTES for n in (tensor.shape[-1], *steps))


def must_copy(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the backward has to copy some of these token arrays; never for the interpreter."""
    return tensors[0].is_cuda and not all(map(has_whole_rows, tensors))


def through_copies(
    names: Sequence[str],
    inputs: Sequence[Optional],
    dout: Optional,
    dfinal_state: Optional,
    call: Callable[[Sequence[Optional], Optional, Optional], tuple[Optional, ...]],
) -> tuple[Optional, ...]:
    """`call(inputs, dout, dfinal_state)` on copies with whole rows; its gradients cut to the inputs' sizes.

    names: of the inputs, and so of the gradients that `call` returns. Copies are made of x, b, c, z and dout,
    and where P or N grows of all that has it.
    """
    by_name = dict(zip(names, inputs, strict=True))
    x, b = by_name["x"], by_name["b"]
    step = _BYTES // x.element_size()
    sizes = tuple(math.ceil(tensor.shape[3] / step) * step for tensor in (x, b))
    copies = [_grown(name, tensor, sizes) for name, tensor in by_name.items()]
    results = call(copies, _grown("dout", dout, sizes), _grown("dfinal_state", dfinal_state, sizes))
    return tuple(
        None if result is None else _cut(result, tensor.shape)
        for result, tensor in zip(results, inputs, strict=True)
    )


def _grown(name: str, tensor: Optional, sizes: tuple[int, int]) -> Optional:
    if tensor is None:
        return None
    shape = list(tensor.shape)
    axis = 1 if name == "d" and tensor.ndim == 2 else _HEAD_AXIS.get(name)
    if axis is not None:
        shape[axis] = sizes[0]
    if name in _STATE_AXIS:
        shape[_STATE_AXIS[name]] = sizes[1]
    if shape == list(tensor.shape) and name not in _TOKENS:
        return tensor
    grown = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    grown[tuple(slice(size) for size in tensor.shape)] = tensor
    return grown


def _cut(result: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return result[tuple(slice(size) for size in shape)].contiguous()
