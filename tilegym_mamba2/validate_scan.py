"""Checks the arguments of the full scan and of the decoding step; the bare ones are `validate`'s.

Shapes and dtypes beside those of `validate`, for all backends:

    d (H,) or (H, P), dt_bias (H,)         float32 or x's dtype; may be None
    z (B, T, H, P)                         x's dtype; may be None
    cu_seqlens (S + 1,), with B of 1       int32 or int64; may be None
    seq_lens (B,)                          int32 or int64; may be None, and is where cu_seqlens is not
    init_state (B, H, P, N)                packed (S, H, P, N)

and of the decoding step, with or without K:

    state (slots, H, P, N)                 any of the four floating dtypes
    x, z, out (B, K, H, P), dt (B, K, H), b and c (B, K, G, N), state_indices (B,)

Values on the CPU are at hand, so that lengths and slots there are always checked. Others are read only where
the caller asks for it: it makes the host wait for the device.
"""

import math
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch._C import _functorch

from tilegym_mamba2.forms import PLAIN, batch_levels
from tilegym_mamba2.options import is_no_limit
from tilegym_mamba2.validate import (
    Dims,
    check_dense,
    dtype_name,
    dtype_names,
    state_dtypes,
    validate_forward,
)

__all__ = ["check_bool", "check_scan_values", "span", "validate_scan", "validate_state_update"]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTS = (torch.int32, torch.int64)


def validate_scan(
    x: Any,
    dt: Any,
    a: Any,
    b: Any,
    c: Any,
    d: Any,
    z: Any,
    dt_bias: Any,
    init_state: Any,
    cu_seqlens: Any,
    seq_lens: Any,
    dt_softplus: Any,
    dt_limit: Any,
    chunk_size: Any,
    state_dtype: Any,
    return_chunk_states: Any,
) -> Dims:
    """Checks the arguments of `mamba2_chunk_scan`.

    Raises TypeError for what is no tensor, no number or no bool and for dtypes, ValueError for shapes,
    devices and values.
    """
    dims = validate_forward(x, a, b, c, None, dt, None, chunk_size)
    B, T, H, P, _, N = dims
    rate = (torch.float32, x.dtype)
    if d is not None:
        _check_tensor("d", d, x, {"(H,)": (H,), "(H, P)": (H, P)}, rate)
    if z is not None:
        _check_tensor("z", z, x, {"(B, T, H, P)": (B, T, H, P)}, (x.dtype,))
    if dt_bias is not None:
        _check_tensor("dt_bias", dt_bias, x, {"(H,)": (H,)}, rate)
    rows, name = B, "B"
    if cu_seqlens is not None:
        if seq_lens is not None:
            raise ValueError("cu_seqlens and seq_lens must not both be given: packed rows have no padding")
        rows, name = _check_cu_seqlens(cu_seqlens, x), "S"
    elif seq_lens is not None:
        _check_tensor("seq_lens", seq_lens, x, {"(B,)": (B,)}, _INTS)
    if init_state is not None:
        shape = {f"({name}, H, P, N)": (rows, H, P, N)}
        _check_tensor("init_state", init_state, x, shape, state_dtypes(x.dtype))
    _check_pipeline(dt_softplus, dt_limit)
    check_bool("return_chunk_states", return_chunk_states)
    if state_dtype is not None and state_dtype not in state_dtypes(x.dtype):
        expected = dtype_names(state_dtypes(x.dtype), "None")
        got = dtype_name(state_dtype) if isinstance(state_dtype, torch.dtype) else repr(state_dtype)
        raise TypeError(f"state_dtype must be {expected}, got {got}")
    if _at_hand(cu_seqlens) or _at_hand(seq_lens):
        _check_lengths(cu_seqlens, seq_lens, T)
    return dims


def check_scan_values(
    dt: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
) -> None:
    """Checks what only the values tell, of arguments that `validate_scan` passed; the host waits for them.

    Raises ValueError where a > 0, where dt as used is negative or NaN in a token that counts, and for
    `cu_seqlens` or `seq_lens` out of order or range.
    """
    _check_lengths(cu_seqlens, seq_lens, dt.shape[1])
    _check_all("a must be ≤ 0", a, a <= 0)
    piped = dt_softplus or dt_bias is not None or not is_no_limit(dt_limit)
    used = dt
    if piped:
        from tilegym_mamba2.backends.torch.step_size import step_size

        used = step_size(dt, dt_bias, dt_softplus, dt_limit, torch.float64)
    fine = used >= 0
    token = torch.arange(dt.shape[1], device=dt.device)
    if cu_seqlens is not None:
        fine = fine | (token >= cu_seqlens[-1])[:, None]
    if seq_lens is not None:
        fine = fine | (token >= seq_lens[:, None])[..., None]
    _check_all(f"dt{' as used' if piped else ''} must be ≥ 0", used, fine)


def validate_state_update(
    state: Any,
    x: Any,
    dt: Any,
    a: Any,
    b: Any,
    c: Any,
    d: Any,
    z: Any,
    dt_bias: Any,
    state_indices: Any,
    dt_softplus: Any,
    dt_limit: Any,
    out: Any,
) -> None:
    """Checks the arguments of `mamba2_state_update`; raises as `validate_scan` does."""
    if not _fast_step(state, x, dt, a, b, c, d, z, dt_bias, state_indices, out):
        _check_step(state, x, dt, a, b, c, d, z, dt_bias, state_indices, out)
    _check_written(state, out)
    if dt_softplus is not False or not is_no_limit(dt_limit):
        _check_pipeline(dt_softplus, dt_limit)
    if _at_hand(state_indices):
        slots = state.shape[0]
        _check_range(f"state_indices must be in [-1, {slots})", state_indices, -1, slots - 1)


def _fast_step(
    state: Any,
    x: Any,
    dt: Any,
    a: Any,
    b: Any,
    c: Any,
    d: Any,
    z: Any,
    dt_bias: Any,
    state_indices: Any,
    out: Any,
) -> bool:
    """Whether all is well, in a fraction of the time of `_check_step`, which has the names and messages."""
    try:
        x_shape, b_shape = x.shape, b.shape
        several = len(x_shape) == 4
        batch, heads, head_size = x_shape[0], x_shape[-2], x_shape[-1]
        groups, state_size = b_shape[-2], b_shape[-1]
        slots, *state_sizes = state.shape
        for tensor in (state, x, dt, a, b, c, d, z, dt_bias, state_indices, out):
            if tensor is not None and tensor.layout is not torch.strided:
                return False
        dtype, device = x.dtype, x.device
        return bool(
            dtype in _FLOATS
            and (several and x_shape[1] or len(x_shape) == 3)
            and head_size
            and state_size
            and groups
            and heads
            and heads % groups == 0
            and b_shape[:-2] == x_shape[:-2]
            and state_sizes == [heads, head_size, state_size]
            and (slots == batch or state_indices is not None)
            and c.shape == b_shape
            and dt.shape == x_shape[:-1]
            and a.shape == (heads,)
            and b.dtype is dtype
            and c.dtype is dtype
            and (a.dtype is torch.float32 or a.dtype is dtype)
            and dt.dtype in _FLOATS
            and state.dtype in _FLOATS
            and state.device == device
            and dt.device == device
            and a.device == device
            and b.device == device
            and c.device == device
            and (d is None or _fits(d, ((heads,), (heads, head_size)), (torch.float32, dtype), device))
            and (z is None or z.shape == x_shape and z.dtype is dtype and z.device == device)
            and (dt_bias is None or _fits(dt_bias, ((heads,),), (torch.float32, dtype), device))
            and (state_indices is None or _fits(state_indices, ((batch,),), _INTS, device))
            and (out is None or out.shape == x_shape and out.dtype is dtype and out.device == device)
        )
    # RuntimeError: a nested tensor has no shape.
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False


def _fits(tensor: Any, shapes: tuple[Any, ...], dtypes: tuple[Any, ...], device: torch.device) -> bool:
    return tensor.shape in shapes and tensor.dtype in dtypes and tensor.device == device


def _check_step(
    state: Any,
    x: Any,
    dt: Any,
    a: Any,
    b: Any,
    c: Any,
    d: Any,
    z: Any,
    dt_bias: Any,
    state_indices: Any,
    out: Any,
) -> None:
    _check_tensor("x", x, x, None, _FLOATS)
    if x.dim() not in (3, 4):
        _wrong_shape("x", {"(B, H, P)": None, "(B, K, H, P)": None}, x)
    several = x.dim() == 4
    lead, k = tuple(x.shape[:-2]), "K, " if several else ""
    H, P = x.shape[-2:]
    for dim, size in (("K", x.shape[1] if several else 1), ("H", H), ("P", P)):
        if size < 1:
            raise ValueError(f"x must have {dim} of at least 1, got shape {tuple(x.shape)}")
    _check_tensor("b", b, x, None, (x.dtype,))
    token_state = f"(B, {k}G, N)"
    if b.dim() != x.dim():
        _wrong_shape("b", {f"{token_state} beside x of shape {tuple(x.shape)}": None}, b)
    G, N = b.shape[-2:]
    for dim, size in (("G", G), ("N", N)):
        if size < 1:
            raise ValueError(f"b must have {dim} of at least 1, got shape {tuple(b.shape)}")
    if tuple(b.shape[:-2]) != lead:
        _wrong_shape("b", {token_state: (*lead, G, N)}, b)
    if H % G:
        raise ValueError(f"G (from b) must divide H (from x), got G = {G} and H = {H}")
    token_head, rate = {f"(B, {k}H, P)": tuple(x.shape)}, (torch.float32, x.dtype)
    _check_tensor("c", c, x, {token_state: (*lead, G, N)}, (x.dtype,))
    _check_tensor("dt", dt, x, {f"(B, {k}H)": (*lead, H)}, _FLOATS)
    _check_tensor("a", a, x, {"(H,)": (H,)}, rate)
    if state_indices is not None:
        _check_tensor("state_indices", state_indices, x, {"(B,)": lead[:1]}, _INTS)
    _check_tensor("state", state, x, None, _FLOATS)
    # With state_indices any pool will do; without, row i is slot i.
    any_slots = state_indices is not None and state.dim() == 4
    slots = state.shape[0] if any_slots else lead[0]
    first = "B" if state_indices is None else "slots"
    if tuple(state.shape) != (slots, H, P, N):
        expected = None if state_indices is not None and not any_slots else (slots, H, P, N)
        _wrong_shape("state", {f"({first}, H, P, N)": expected}, state)
    if d is not None:
        _check_tensor("d", d, x, {"(H,)": (H,), "(H, P)": (H, P)}, rate)
    if dt_bias is not None:
        _check_tensor("dt_bias", dt_bias, x, {"(H,)": (H,)}, rate)
    for name, tensor in (("z", z), ("out", out)):
        if tensor is not None:
            _check_tensor(name, tensor, x, token_head, (x.dtype,))


_OPTIONAL = ("d", "z", "dt_bias", "init_state", "cu_seqlens", "seq_lens", "state_indices", "out")


def _check_tensor(
    name: str,
    tensor: Any,
    x: torch.Tensor,
    shapes: dict[str, tuple[int, ...]] | None,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """One tensor: its type, one of `shapes` (None: any), one of `dtypes`, and x's device."""
    if not isinstance(tensor, torch.Tensor):
        none = " or None" if name in _OPTIONAL else ""
        raise TypeError(f"{name} must be a torch.Tensor{none}, got {type(tensor).__name__}")
    check_dense(name, tensor)
    if shapes is not None and tuple(tensor.shape) not in shapes.values():
        _wrong_shape(name, shapes, tensor)
    if tensor.dtype not in dtypes:
        why = ""
        if name in ("b", "c", "z", "out"):
            why = " like x"
        elif name in ("a", "d", "dt_bias") and x.dtype != torch.float32:
            why = " (x's)"
        raise TypeError(f"{name} must have dtype {dtype_names(dtypes)}{why}, got {dtype_name(tensor.dtype)}")
    if tensor.device != x.device:
        raise ValueError(f"{name} must be on {x.device} like x, got {tensor.device}")


def _wrong_shape(name: str, shapes: dict[str, tuple[int, ...] | None], tensor: torch.Tensor) -> NoReturn:
    expected = " or ".join(
        layout if shape is None else f"{layout} = {shape}" for layout, shape in shapes.items()
    )
    raise ValueError(f"{name} must have shape {expected}, got {tuple(tensor.shape)}")


def _check_cu_seqlens(cu_seqlens: Any, x: torch.Tensor) -> int:
    """The number of sequences."""
    _check_tensor("cu_seqlens", cu_seqlens, x, None, _INTS)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens must have shape (S + 1,) with S of at least 1, got {tuple(cu_seqlens.shape)}"
        )
    if x.shape[0] != 1:
        raise ValueError(f"cu_seqlens needs x with B of 1, got x of shape {tuple(x.shape)}")
    return cu_seqlens.shape[0] - 1


def _check_pipeline(dt_softplus: Any, dt_limit: Any) -> None:
    check_bool("dt_softplus", dt_softplus)
    if not isinstance(dt_limit, tuple | list) or len(dt_limit) != 2:
        raise TypeError(f"dt_limit must be two numbers (low, high), got {dt_limit!r}")
    for name, value in zip(("low", "high"), dt_limit, strict=True):
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise TypeError(f"dt_limit must be two numbers (low, high), got {_told(value)} for {name}")
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            raise ValueError(f"dt_limit must be numbers that a float can hold, got a larger int for {name}")
    low, high = dt_limit
    # Of a negative dt a state would grow, and the scan computes decay.
    if not 0 <= low <= high:
        raise ValueError(f"dt_limit must be (low, high) with 0 ≤ low ≤ high, got {tuple(dt_limit)!r}")
    if low == math.inf:
        raise ValueError(f"dt_limit must leave finite steps, got {tuple(dt_limit)!r}")


def check_bool(name: str, value: Any) -> None:
    """Raises TypeError for anything but True and False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {_told(value)}")


def _told(value: Any) -> str:
    """Type and value; numpy's bool is called bool too, and is numpy.bool here."""
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return f"{name} {value!r}"


def _check_written(state: torch.Tensor, out: torch.Tensor | None) -> None:
    """What is written may be, and once: no element of state and out lies where another does."""
    # Of other kinds (fake, functional, meta ones) nobody knows the memory.
    given = {name: t for name, t in (("state", state), ("out", out)) if type(t) in PLAIN}
    for name, tensor in given.items():
        # torch says so too, but after the kernel has written.
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"{name} is written, and must not be an inference tensor outside torch.inference_mode(), "
                "got one"
            )
    given = {name: t for name, t in given.items() if not t.is_meta and t.numel()}
    for name, tensor in given.items():
        if tensor.is_neg():
            raise ValueError(f"{name} is written, and must not be a negated view (is_neg()), got one")
        if _repeats(tensor):
            raise ValueError(
                f"{name} is written, and must not repeat elements in memory, got shape {tuple(tensor.shape)} "
                f"with strides {tensor.stride()}"
            )
    # Inside a transform of torch.func tensors have no addresses.
    addressed = not any(map(_functorch.is_functorch_wrapped_tensor, given.values()))
    if len(given) == 2 and addressed and _overlap(state, out):
        raise ValueError("out must not overlap state in memory: both are written")


def _repeats(tensor: torch.Tensor) -> bool:
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def span(tensor: torch.Tensor, first_dim: int = 0) -> int:
    """Bytes from the first element to the end of the last, in the dims from `first_dim` on."""
    sizes = zip(tensor.stride()[first_dim:], tensor.shape[first_dim:], strict=True)
    return (1 + sum((size - 1) * stride for stride, size in sizes)) * tensor.element_size()


def _overlap(state: torch.Tensor, out: torch.Tensor) -> bool:
    distance = out.data_ptr() - state.data_ptr()
    if not -span(out) < distance < span(state):
        return False
    # Both may be columns of one buffer: then they are apart in every row, or in none.
    row = state.stride(0) * state.element_size()
    if row != out.stride(0) * out.element_size() or row == 0:
        return True
    return not span(state, 1) <= distance % row <= row - span(out, 1)


def _at_hand(tensor: Any) -> bool:
    """Whether a tensor's values can be read without waiting: real ones, in the host's memory."""
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu"


def _check_lengths(cu_seqlens: torch.Tensor | None, seq_lens: torch.Tensor | None, T: int) -> None:
    if seq_lens is not None:
        _check_range(f"seq_lens must be from 0 to T = {T}", seq_lens, 0, T)
    if cu_seqlens is not None:
        for borders in _lists(cu_seqlens):
            _check_borders(borders, T)


def _check_borders(borders: list[int], T: int) -> None:
    if borders[0] != 0:
        raise ValueError(f"cu_seqlens must begin with 0, got {borders[0]}")
    for index in range(1, len(borders)):
        if borders[index] < borders[index - 1]:
            raise ValueError(
                f"cu_seqlens must not decrease, got {borders[index]} after {borders[index - 1]} at "
                f"index {index}"
            )
    if borders[-1] > T:
        raise ValueError(f"cu_seqlens must end at T = {T} or before, got {borders[-1]}")


def _check_range(rule: str, values: torch.Tensor, low: int, high: int) -> None:
    for found in _lists(values):
        for index, value in enumerate(found):
            if not low <= value <= high:
                raise ValueError(f"{rule}, got {value} at index {index}")


def _lists(values: torch.Tensor) -> Iterator[list[int]]:
    """The values of a tensor (n,), once for each that vmap makes a batch of.

    Past the dispatcher, where a mode such as that of `make_fx` takes nothing to depend on values.
    """
    if _functorch.is_batchedtensor(values):
        for one in _functorch.get_unwrapped(values).unbind(_functorch.maybe_get_bdim(values)):
            yield from _lists(one)
    elif _functorch.is_functorch_wrapped_tensor(values):
        yield from _lists(_functorch.get_unwrapped(values))
    elif type(values) in PLAIN:
        yield values.tolist()
    else:
        # A subclass may have no memory of its own.
        yield [value.item() for value in values]


def _check_all(rule: str, values: torch.Tensor, fine: torch.Tensor) -> None:
    """Raises with the first value that is not fine, and where it is."""
    if all(verdict for (verdict,) in _lists(fine.all().reshape(1))):
        return
    if batch_levels(fine):
        raise ValueError(f"{rule}, and is not somewhere in a batch of vmap")
    where = tuple((~fine).nonzero()[0].tolist())
    place = where[0] if len(where) == 1 else where
    ((value,),) = _lists(values[where].reshape(1))
    raise ValueError(f"{rule}, got {value:.6g} at index {place}")
