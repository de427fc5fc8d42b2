"""Checks the arguments of the chunked ops, once, before a backend is picked; nothing else raises about them.

What the full scan and the decoding step take beside them is in `validate_scan`.

Shapes and dtypes, for all backends:

    x (B, T, H, P), b and c (B, T, G, N)   one dtype: float64, float32, bfloat16 or float16; G divides H
    dt (B, T, H)                           any of those four
    a, d (H,)                              float32 or x's dtype; d may be None
    init_state (B, H, P, N)                float32, bfloat16, float64 or x's dtype; may be None
    dout (B, T, H, P)                      x's dtype; may be None
    dfinal_state (B, H, P, N)              as init_state

B and T may be 0. That a ≤ 0 and dt ≥ 0 is not checked: it would make the host wait for the device.
"""

import operator
from typing import Any, NamedTuple, NoReturn

import torch

__all__ = [
    "Dims",
    "check_dense",
    "dtype_name",
    "dtype_names",
    "state_dtypes",
    "validate_backward",
    "validate_forward",
]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Tuples: `in` finds a dtype by identity there, where a set would hash it first.
_DT = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_RATE = {dtype: (torch.float32, dtype) for dtype in _FLOATS}
_STATE = {dtype: (torch.float32, torch.bfloat16, torch.float64, dtype) for dtype in _FLOATS}


class Dims(NamedTuple):
    """Sizes of a problem: batch, tokens, heads, head size, groups, state size."""

    B: int
    T: int
    H: int
    P: int
    G: int
    N: int


def validate_forward(
    x: Any, a: Any, b: Any, c: Any, d: Any, dt: Any, init_state: Any, chunk_size: Any
) -> Dims:
    """Checks the arguments of `mamba2_chunk_forward`; shapes and dtypes are in the module's docstring.

    Raises TypeError for what is no tensor, for dtypes and for a chunk_size that is no integer, ValueError for
    shapes, devices and a chunk_size below 1.
    """
    dims = _fast(x, a, b, c, d, dt, init_state, chunk_size)
    return dims or _check(
        {"x": x, "a": a, "b": b, "c": c, "d": d, "dt": dt, "init_state": init_state}, chunk_size
    )


def validate_backward(
    x: Any,
    a: Any,
    b: Any,
    c: Any,
    d: Any,
    dt: Any,
    init_state: Any,
    dout: Any,
    dfinal_state: Any,
    chunk_size: Any,
    state_dtype: Any,
) -> Dims:
    """Checks the arguments of `mamba2_chunk_backward`; like `validate_forward`; `state_dtype` is floating."""
    if not isinstance(state_dtype, torch.dtype) or state_dtype not in _DT:
        got = dtype_name(state_dtype) if isinstance(state_dtype, torch.dtype) else repr(state_dtype)
        raise TypeError(f"state_dtype must be {dtype_names(_FLOATS)}, got {got}")
    dims = _fast(x, a, b, c, d, dt, init_state, chunk_size, dout, dfinal_state)
    return dims or _check(
        {
            "x": x,
            "a": a,
            "b": b,
            "c": c,
            "d": d,
            "dt": dt,
            "init_state": init_state,
            "dout": dout,
            "dfinal_state": dfinal_state,
        },
        chunk_size,
    )


def _fast(
    x: Any,
    a: Any,
    b: Any,
    c: Any,
    d: Any,
    dt: Any,
    init_state: Any,
    chunk_size: Any,
    dout: Any = None,
    dfinal_state: Any = None,
) -> Dims | None:
    """The dims if all is well, else None: a tenth of the time of `_check`, with its names and messages."""
    try:
        batch, tokens, heads, head_size = x.shape
        b_batch, b_tokens, groups, state_size = b_shape = b.shape
        dtype, device = x.dtype, x.device
        rate = _RATE[dtype]
        fine = (
            type(chunk_size) is int
            and chunk_size >= 1
            and head_size
            and state_size
            and groups
            and heads
            and heads % groups == 0
            and b_batch == batch
            and b_tokens == tokens
            and c.shape == b_shape
            and a.shape == (heads,)
            and dt.shape == (batch, tokens, heads)
            and b.dtype is dtype
            and c.dtype is dtype
            and a.dtype in rate
            and dt.dtype in _DT
            and b.device == device
            and c.device == device
            and a.device == device
            and dt.device == device
            and (d is None or d.shape == (heads,) and d.dtype in rate and d.device == device)
            and (
                init_state is None
                or init_state.shape == (batch, heads, head_size, state_size)
                and init_state.dtype in _STATE[dtype]
                and init_state.device == device
            )
            and (dout is None or dout.shape == x.shape and dout.dtype is dtype and dout.device == device)
            and (
                dfinal_state is None
                or dfinal_state.shape == (batch, heads, head_size, state_size)
                and dfinal_state.dtype in _STATE[dtype]
                and dfinal_state.device == device
            )
        )
        for tensor in (x, a, b, c, d, dt, init_state, dout, dfinal_state):
            fine = fine and (tensor is None or tensor.layout is torch.strided)
    # RuntimeError: a nested tensor has no shape.
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return None
    return Dims(batch, tokens, heads, head_size, groups, state_size) if fine else None


_OPTIONAL = ("d", "init_state", "dout", "dfinal_state")
_LAYOUTS = {
    "x": "BTHP",
    "a": "H",
    "b": "BTGN",
    "c": "BTGN",
    "d": "H",
    "dt": "BTH",
    "init_state": "BHPN",
    "dout": "BTHP",
    "dfinal_state": "BHPN",
}


def _check(tensors: dict[str, Any], chunk_size: Any) -> Dims:
    for name, tensor in tensors.items():
        if tensor is None and name in _OPTIONAL:
            continue
        if not isinstance(tensor, torch.Tensor):
            none = " or None" if name in _OPTIONAL else ""
            raise TypeError(f"{name} must be a torch.Tensor{none}, got {type(tensor).__name__}")
        check_dense(name, tensor)
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    dims = _check_shapes(given)
    _check_dtypes(given)
    for name, tensor in given.items():
        if tensor.device != given["x"].device:
            raise ValueError(f"{name} must be on {given['x'].device} like x, got {tensor.device}")
    _check_chunk_size(chunk_size)
    return dims


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Raises TypeError for sparse and nested tensors, of which the ops know nothing."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense (strided) tensor, got layout {tensor.layout}")
    if tensor.is_nested:
        raise TypeError(f"{name} must be a dense (strided) tensor, got a nested one")


def _check_shapes(given: dict[str, torch.Tensor]) -> Dims:
    sizes: dict[str, int] = {}
    for name in ("x", "b"):
        if given[name].dim() != 4:
            _wrong_shape(name, None, given[name])
        # x fixes B, T, H and P; of b only G and N are new.
        for dim, size in zip(_LAYOUTS[name], given[name].shape, strict=True):
            sizes.setdefault(dim, size)
        for dim in "HPGN":
            if sizes.get(dim, 1) < 1:
                raise ValueError(
                    f"{name} must have {dim} of at least 1, got shape {tuple(given[name].shape)}"
                )
    for name, tensor in given.items():
        expected = tuple(sizes[dim] for dim in _LAYOUTS[name])
        if tuple(tensor.shape) != expected:
            _wrong_shape(name, expected, tensor)
        # Before c is held against b's G: with a wrong b, c is not to blame.
        if name == "b" and sizes["H"] % sizes["G"]:
            raise ValueError(f"G (from b) must divide H (from x), got G = {sizes['G']} and H = {sizes['H']}")
    return Dims(**sizes)


def _wrong_shape(name: str, expected: tuple[int, ...] | None, tensor: torch.Tensor) -> NoReturn:
    layout = _LAYOUTS[name]
    dims = f"({', '.join(layout)}{',' if len(layout) == 1 else ''})"
    equals = "" if expected is None else f" = {expected}"
    raise ValueError(f"{name} must have shape {dims}{equals}, got {tuple(tensor.shape)}")


def _check_dtypes(given: dict[str, torch.Tensor]) -> None:
    dtype = given["x"].dtype
    if dtype not in _FLOATS:
        raise TypeError(f"x must have dtype {dtype_names(_FLOATS)}, got {dtype_name(dtype)}")
    for name, tensor in given.items():
        if name in ("b", "c", "dout"):
            allowed, why = (dtype,), " like x"
        elif name in ("a", "d"):
            allowed, why = (torch.float32, dtype), " (x's)" if dtype != torch.float32 else ""
        elif name in ("init_state", "dfinal_state"):
            allowed, why = state_dtypes(dtype), ""
        else:
            allowed, why = _FLOATS, ""
        if tensor.dtype not in allowed:
            raise TypeError(
                f"{name} must have dtype {dtype_names(allowed)}{why}, got {dtype_name(tensor.dtype)}"
            )


def _check_chunk_size(chunk_size: Any) -> None:
    # A bool is an int and a tensor has __index__, but True is no size and a GPU tensor would stall the host.
    refused = isinstance(chunk_size, bool | torch.Tensor)
    try:
        value = None if refused else operator.index(chunk_size)
    except TypeError:
        value = None
    if value is None:
        raise TypeError(f"chunk_size must be an integer, got {type(chunk_size).__name__} {chunk_size!r}")
    if value < 1:
        raise ValueError(f"chunk_size must be at least 1, got {value}")


def state_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """What a state may be stored in beside x of `dtype`."""
    return (torch.float64, torch.float32, torch.bfloat16, dtype)


def dtype_name(dtype: Any) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_names(dtypes: tuple[Any, ...], *others: str) -> str:
    """`float32 or bfloat16`, each once; `others` are names of what else may be given, such as None."""
    names = [*dict.fromkeys(map(dtype_name, dtypes)), *others]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
