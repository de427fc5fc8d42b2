"""Two independent references for the op, for any device that torch runs on.

`recurrent` is the definition, token by token; `chunked` is the same op as batched matrix products and is the
one that the registry names. Neither checks its arguments.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_Rest = ParamSpec("_Rest")
_Result = TypeVar("_Result")

__all__ = ["final_state_dtype", "full_precision", "working_dtype"]


def working_dtype(*tensors: torch.Tensor | None, at_least: torch.dtype = torch.float32) -> torch.dtype:
    """Dtype to compute in: float32, or float64 when one tensor (None is skipped) or `at_least` is float64."""
    wide = at_least == torch.float64 or any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


def final_state_dtype(x: torch.Tensor, init_state: torch.Tensor | None) -> torch.dtype:
    """Dtype of the final state: init_state's, and without one float32 (float64 when x is float64)."""
    return working_dtype(x) if init_state is None else init_state.dtype


def full_precision(op: Callable[_Rest, _Result]) -> Callable[_Rest, _Result]:
    """Run `op` outside autocast, which would cut its products to 16 bits."""

    @functools.wraps(op)
    def wrapped(*args: _Rest.args, **kwargs: _Rest.kwargs) -> _Result:
        if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            return op(*args, **kwargs)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return op(*args, **kwargs)

    return wrapped
