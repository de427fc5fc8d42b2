"""dt as it is used: bias, then softplus, then limits; shared by the scan and the decoding step."""

import torch

Optional = torch.Tensor | None


def step_size(
    dt: torch.Tensor,
    dt_bias: Optional,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    work: torch.dtype,
) -> torch.Tensor:
    """clamp(softplus(dt + dt_bias), *dt_limit), in `work`; dt (..., H), dt_bias (H,) or None."""
    steps = _biased(dt, dt_bias, work)
    if dt_softplus:
        steps = torch.logaddexp(steps, steps.new_zeros(()))
    return steps.clamp(*dt_limit)


def step_size_slope(
    dt: torch.Tensor,
    dt_bias: Optional,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    work: torch.dtype,
) -> torch.Tensor:
    """The derivative of `step_size` with respect to dt: 0 where it is clamped."""
    steps = _biased(dt, dt_bias, work)
    slope = torch.ones_like(steps)
    if dt_softplus:
        slope, steps = steps.sigmoid(), torch.logaddexp(steps, steps.new_zeros(()))
    low, high = dt_limit
    return slope.masked_fill((steps < low) | (steps > high), 0.0)


def _biased(dt: torch.Tensor, dt_bias: Optional, work: torch.dtype) -> torch.Tensor:
    return dt.to(work) if dt_bias is None else dt.to(work) + dt_bias.to(work)
