"""What autocast does to the arguments of the public ops."""

import torch

__all__ = ["FULL", "KEEP", "LOW", "autocast"]

# A tensor goes to autocast's dtype, to float32, or stays as it is.
LOW, FULL, KEEP = "low", "full", "keep"


def autocast(
    tensors: tuple[torch.Tensor | None, ...], kinds: tuple[str, ...]
) -> tuple[torch.Tensor | None, ...]:
    """The tensors in the dtypes that autocast asks for, each by its kind; with a float64 one all are left.

    Whether autocast is on is asked for the first tensor's device; what is no tensor is left to validation.
    """
    first = tensors[0]
    try:
        if not isinstance(first, torch.Tensor) or not torch.is_autocast_enabled(first.device.type):
            return tensors
    except RuntimeError:  # devices without autocast, such as "meta"
        return tensors
    if any(isinstance(t, torch.Tensor) and t.dtype == torch.float64 for t in tensors):
        return tensors
    dtypes = {LOW: torch.get_autocast_dtype(first.device.type), FULL: torch.float32}
    return tuple(
        t.to(dtypes[kind]) if kind in dtypes and isinstance(t, torch.Tensor) else t
        for t, kind in zip(tensors, kinds, strict=True)
    )
