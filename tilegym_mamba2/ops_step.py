"""The decoding step as a public op, in place, and the `torch.library` op that torch.compile sees."""

from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from tilegym_mamba2 import registry
from tilegym_mamba2.autocast import FULL, KEEP, LOW, autocast
from tilegym_mamba2.autograd import (
    in_transform,
    is_watched,
    modes_are_active,
    refuse_transform,
    transforms_are_active,
)
from tilegym_mamba2.forms import Kept, all_plain, as_read, batch_levels, form_of_step, recogniser
from tilegym_mamba2.options import NO_LIMIT
from tilegym_mamba2.validate_scan import span, validate_state_update

__all__ = ["mamba2_state_update"]

OP = "mamba2_state_update"
# x, state, dt, a, b, c, d, z, dt_bias, state_indices, out
_AUTOCAST = (LOW, KEEP, FULL, FULL, LOW, LOW, FULL, LOW, FULL, KEEP, KEEP)


def mamba2_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *,
    d: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    state_indices: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """One decoding step, or a few: `mamba2_chunk_scan` over 1 or K tokens per row, on states kept in place.

    Args:
        state: (B, H, P, N), or (slots, H, P, N) with state_indices, in float32, bfloat16, float16 or float64;
            overwritten with the states after the last token. Between the K tokens it is not rounded to its
            dtype. No two of its elements may share memory, as those of an expanded tensor do.
        x: (B, H, P), or (B, K, H, P) with K of at least 1, in float64, float32, bfloat16 or float16.
        dt: (B, H) or (B, K, H). b, c: (B, G, N) or (B, K, G, N). z: as x. a, d, dt_bias, dt_softplus,
            dt_limit, and all dtypes: as in `mamba2_chunk_scan`, but dt is always cut to dt_limit.
        state_indices: (B,) int32 or int64, the slot of each row; −1 for a row that reads and writes no state
            and gives zeros. A slot named twice ends up undefined. None: row r uses slot r.
        out: where to write the result, in x's shape and dtype; may be x or z, and may overlap nothing else
            (checked for state alone). None: a new tensor.
        backend: backend of this call; see `mamba2_chunk_forward`.

    Tensors may have any strides and are on one device. Nothing waits for the device. Works under
    torch.compile(fullgraph=True), in CUDA graphs and under autocast, which casts as in `mamba2_chunk_scan`
    and leaves `state` and `out` alone. Not differentiable; under vmap on backend "torch" alone, with a state
    for each element.

    Returns:
        out, in x's shape and dtype.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what was expected and what came.
            state_indices out of range are found on the CPU only.
        RuntimeError: grad mode is on and a tensor requires grad.
        BackendUnavailable: the chosen backend cannot run on these tensors or on this machine.
    """
    compiling = torch.compiler.is_compiling()
    key = None
    if not compiling:
        tensors = (state, x, dt, a, b, c, d, z, dt_bias, state_indices)
        given = [t for t in (*tensors, out) if t is not None]
        options = _options(d, z, dt_bias, dt_softplus, dt_limit, state_indices, out, backend)
        last = _last.get(options)
        fits = last is not None and last.fits(given)
        if fits:
            if out is None:
                result = torch.empty_like(x)
                if last.known.repeat([*given, result]):
                    increment_version(state)
                    return result
            elif last.is_apart(state, out) and last.known.repeat(given):
                increment_version((state, out))
                return out
        key = _key(tensors, options, out)
        seen = _known.get(key)
        if seen is not None:
            if seen is last and not fits:
                # Of the same form, and not like it: inference mode, or another type.
                seen = seen._replace(recognises=recogniser(given))
            _remember(key, seen)
            result = torch.empty_like(x) if out is None else out
            if out is None or seen.is_apart(state, out):
                seen.known(tensors, result)
                increment_version((state, result))
                return result
        x, dt, a, b, c, d, z, dt_bias, state_indices = as_read(tensors[1:])
    tensors = autocast((x, state, dt, a, b, c, d, z, dt_bias, state_indices, out), _AUTOCAST)
    x, state, dt, a, b, c, d, z, dt_bias, state_indices, out = tensors
    if not compiling:
        validate_state_update(state, x, dt, a, b, c, d, z, dt_bias, state_indices, dt_softplus, dt_limit, out)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            f"{OP} works in place and is not differentiable, and an input requires grad: call it under "
            "torch.no_grad() or torch.inference_mode(), and train with mamba2_chunk_scan"
        )
    if out is None:
        out = torch.empty_like(x)
        if not compiling and in_transform():
            # A batch of vmap as soon as one argument is: in place it cannot become one.
            out = sum((t.new_zeros((), dtype=x.dtype) for t in tensors if t is not None), start=out)
    arguments = (state, x, dt, a, b, c, d, z, dt_bias, state_indices, dt_softplus)
    # torch gives ops what a subclass holds, where a kernel would read memory.
    if compiling or not all_plain(tensors) or _is_watched(arguments, backend):
        low, high = dt_limit
        state_update(*arguments, float(low), float(high), out, backend)
    else:
        known = _launch(*arguments, dt_limit, out, backend)
        # Autograd may have kept them for a backward, and sees no kernel.
        increment_version((state, out))
        if key is not None and known is not None:
            _remember(key, _Seen(known, recogniser(given), len(given), span(state), span(out)))
    return out


class _Seen(NamedTuple):
    """A call that was checked and given a backend once: doing that again took 12 µs of 22.

    recognises: whether as many tensors, `count`, are like its own. Spans: bytes of state and of out.
    """

    known: Any
    recognises: Callable[..., bool]
    count: int
    state_span: int
    out_span: int

    def fits(self, tensors: list[Tensor]) -> bool:
        return len(tensors) == self.count and self.recognises(*tensors)

    def is_apart(self, state: Tensor, out: Tensor) -> bool:
        """Where they lie is no part of the form: those close to each other are checked again."""
        return not -self.out_span < out.data_ptr() - state.data_ptr() < self.state_span


# By form, and the last one with the same options: a model's layers are alike.
_known: dict[tuple, _Seen] = Kept()
_last: dict[tuple, _Seen] = Kept()


def _remember(key: tuple, seen: _Seen) -> None:
    form, options = key
    _known[key] = seen
    # Tensors off 16 bytes have other code, and are not told from those that are not.
    if form[-1] == 0:
        _last[options] = seen


def _options(
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    state_indices: Tensor | None,
    out: Tensor | None,
    backend: str | None,
) -> tuple | None:
    """What decides beside the tensors' forms whether a call is valid and who computes it, and which tensors
    there are; None where more than that must be asked."""
    # Of CUDA, which is what it asks about by default, and twice as fast.
    if torch.is_autocast_enabled() or type(dt_softplus) is not bool:
        return None
    if forward_ad._current_level >= 0 or transforms_are_active():
        return None
    if dt_limit is not NO_LIMIT:
        # True equals 1, and is no number to validation.
        if type(dt_limit) is not tuple or any(type(value) not in (int, float) for value in dt_limit):
            return None
    return (
        d is None,
        z is None,
        dt_bias is None,
        state_indices is None,
        out is None,
        torch.is_grad_enabled(),
        dt_softplus,
        dt_limit,
        backend if type(backend) is str else registry.choice(backend)[0],
        registry.generation(),
    )


def _is_watched(arguments: tuple[Any, ...], backend: str | None) -> bool:
    if not modes_are_active():
        return False
    *tensors, _ = arguments
    name, _ = registry.resolve(OP, backend, tuple(tensors))
    refuse_transform(OP, name)
    return is_watched(name)


def _key(tensors: tuple[Tensor | None, ...], options: tuple | None, out: Tensor | None) -> tuple | None:
    """What decides whether a call is valid and who computes it; None where more than that must be asked."""
    # On the CPU the values of state_indices are checked, and whether the interpreter is on decides.
    if options is None or not isinstance(tensors[1], Tensor) or not tensors[1].is_cuda:
        return None
    if not all_plain((*tensors, out)):
        return None
    try:
        if torch.is_grad_enabled():
            for tensor in (*tensors, out):
                if tensor is not None and tensor.requires_grad:
                    return None
        if any(tensor is not None and tensor.is_neg() for tensor in (*tensors, out)):
            return None
        # Of one form with others, and not to be written there.
        if tensors[0].is_inference() or (out is not None and out.is_inference()):
            if not torch.is_inference_mode_enabled():
                return None
        return form_of_step(*tensors, out), options
    except (AttributeError, RuntimeError):  # no tensor, or a sparse or nested one: validation says which
        return None


def _launch(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state_indices: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    out: Tensor,
    backend: str | None,
) -> Callable[..., None] | None:
    """Pick the backend and call it, always with K, unless it has a `by_form`; returns what that gave."""
    tensors = (state, x, dt, a, b, c, d, z, dt_bias, state_indices)
    name, update = registry.resolve(OP, backend, tensors)
    refuse_transform(OP, name)
    if in_transform():
        _refuse_too_small_a_batch(tensors, out)
    by_form = getattr(update, "by_form", None)
    if by_form is not None:
        known = by_form(form_of_step(*tensors, out), tensors, dt_softplus, dt_limit, out)
        known(tensors, out)
        return known
    if x.dim() == 3:
        x, dt, b, c, out = (t.unsqueeze(1) for t in (x, dt, b, c, out))
        z = None if z is None else z.unsqueeze(1)
    update(state, x, dt, a, b, c, d, z, dt_bias, state_indices, dt_softplus, dt_limit, out)
    return None


def _refuse_too_small_a_batch(tensors: tuple[Tensor | None, ...], out: Tensor) -> None:
    """Raises ValueError where vmap makes a batch of an argument, and none of what is written."""
    names = ("state", "x", "dt", "a", "b", "c", "d", "z", "dt_bias", "state_indices")
    for written, to in (("state", tensors[0]), ("out", out)):
        for name, tensor in zip(names, tensors, strict=True):
            if tensor is not None and not batch_levels(tensor) <= batch_levels(to):
                raise ValueError(
                    f"{written} is written, and must be a batch of vmap like {name}: put it among the mapped "
                    "arguments"
                )


@torch.library.custom_op("tilegym_mamba2::state_update", mutates_args=("state", "out"))
def state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Optional[Tensor],  # noqa: UP045 - torch.library reads this form only
    z: Optional[Tensor],  # noqa: UP045
    dt_bias: Optional[Tensor],  # noqa: UP045
    state_indices: Optional[Tensor],  # noqa: UP045
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    out: Tensor,
    backend: Optional[str],  # noqa: UP045
) -> None:
    """Validates, picks the backend and writes `state` and `out`; see `mamba2_state_update`."""
    limit = (dt_min, dt_max)
    validate_state_update(state, x, dt, a, b, c, d, z, dt_bias, state_indices, dt_softplus, limit, out)
    _launch(state, x, dt, a, b, c, d, z, dt_bias, state_indices, dt_softplus, limit, out, backend)


@state_update.register_fake
def _(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state_indices: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    out: Tensor,
    backend: str | None,
) -> None:
    limit = (dt_min, dt_max)
    validate_state_update(state, x, dt, a, b, c, d, z, dt_bias, state_indices, dt_softplus, limit, out)
