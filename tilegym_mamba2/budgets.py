"""How far a result may be from float64, and how far it is.

The distance is ‖got − ref‖ / ‖ref‖ over a whole output. The budgets are data in `ops_registry.toml`, by op,
dtype of x and output; the variant `<dtype>_zero_mean` holds for inputs of mean zero, whose sums cancel, and
`<dtype>_<decay>` for one decay. They were checked against an emulation that rounds exactly what a kernel must
round (`tests/benchmark/budget_emulation.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Below this many elements a norm is not yet an average over roundings, so there is room for their scatter.
AVERAGING_ELEMENTS = 4096
ROUNDING_ROOM = 1.5
ZERO_TOLERANCE = 1e-30

# Outputs in x's dtype: their budgets include the rounding to it. All others are budgeted as float32 results.
_OUTPUTS_LIKE_X = frozenset({"out", "dx", "db", "dc", "dz"})
_BLOCK_ELEMENTS = 2**26


@dataclass(frozen=True)
class Verdict:
    """One output's distance from float64 and what was allowed; `ok` is False for any NaN."""

    output: str
    error: float
    budget: float

    @property
    def ok(self) -> bool:
        return self.error <= self.budget


def relative_error(got: torch.Tensor, ref: torch.Tensor) -> float:
    """‖got − ref‖ / ‖ref‖, summed in float64; the largest |got| where ref is zero throughout.

    A NaN or an infinity in either gives NaN or infinity. Raises ValueError where the shapes differ.
    """
    if got.shape != ref.shape:
        raise ValueError(f"got shape {tuple(got.shape)}, but the reference has shape {tuple(ref.shape)}")
    error = norm = largest = 0.0
    pairs = zip(_blocks(got), _blocks(ref), strict=True)
    for got_block, ref_block in pairs:
        got_block, ref_block = got_block.double(), ref_block.double()
        error += (got_block - ref_block).square().sum().item()
        norm += ref_block.square().sum().item()
        largest = max(largest, got_block.abs().max().item())
    if norm == 0.0:
        return math.nan if math.isnan(error) else largest
    return math.sqrt(error / norm)


def budget_for(
    entry: Any,
    output: str,
    dtype: torch.dtype,
    decay: str | None,
    ref: torch.Tensor,
    output_dtype: torch.dtype | None = None,
) -> float:
    """The largest `relative_error` that an output may have.

    It is the stated budget, and for small results 1.5 times the error of rounding the exact result to x's
    dtype on top. A state or gradient that is stored coarser than float32 (for float64 x, than that) gets the
    error of that rounding too.

    Args:
        entry: the op's registry entry, whose `budgets` map dtype names to outputs to numbers.
        output: one of `entry.outputs`.
        dtype: of x.
        decay: the spec's; anything but "published" means zero-mean inputs. None, for inputs of unknown kind,
            takes the widest of the variants.
        ref: the float64 result.
        output_dtype: what it was rounded to; by default x's dtype for `out, dx, db, dc, dz` and for
            float64, else float32.

    Raises:
        KeyError: the op has no budget for this output and dtype.
    """
    if ref.numel() == 0 or not ref.any():
        return ZERO_TOLERANCE
    budget = _stated_budget(entry, output, dtype, decay)
    like_x = output in _OUTPUTS_LIKE_X
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    output_dtype = output_dtype or (dtype if like_x else exact)
    if not like_x and output_dtype.itemsize < exact.itemsize:
        # Roundings are independent of what was wrong before: the squares add.
        budget = math.hypot(budget, relative_error(ref.to(output_dtype), ref))
    if ref.numel() < AVERAGING_ELEMENTS:
        rounding = relative_error(ref.to(dtype), ref)
        # A state beyond fp16's range rounds to infinity, which would forgive everything.
        budget += ROUNDING_ROOM * rounding if math.isfinite(rounding) else 0.0
    return budget


def check(
    entry: Any,
    results: Mapping[str, torch.Tensor | None],
    references: Mapping[str, torch.Tensor | None],
    *,
    dtype: torch.dtype,
    decay: str | None,
    slack: float = 1.0,
) -> list[Verdict]:
    """A verdict for every output of the op, in its order.

    Args:
        results, references: by output name; an output that is None in the references must be None in both.
        dtype, decay: as in `budget_for`.
        slack: multiplies the budgets, for problems too small and too many for each to be an average.

    Raises:
        KeyError: an output is missing. ValueError: shapes differ, or only one of the two is None.
    """
    verdicts = []
    for output in entry.outputs:
        got, ref = results[output], references[output]
        if got is None and ref is None:
            continue
        if got is None or ref is None:
            raise ValueError(f"{output} is None in the {'results' if got is None else 'references'} alone")
        budget = slack * budget_for(entry, output, dtype, decay, ref, got.dtype)
        verdicts.append(Verdict(output, relative_error(got, ref), budget))
    return verdicts


def _stated_budget(entry: Any, output: str, dtype: torch.dtype, decay: str | None) -> float:
    name = str(dtype).removeprefix("torch.")
    if decay is None:
        keys = [key for key in entry.budgets if key == name or key.startswith(f"{name}_")]
    else:
        keys = [name] if decay == "published" else [f"{name}_{decay}", f"{name}_zero_mean", name]
    stated = [entry.budgets[key][output] for key in keys if output in entry.budgets.get(key, {})]
    if not stated:
        raise KeyError(f"ops.{entry.name}.budgets.{name} has no budget for {output!r}")
    return max(stated) if decay is None else stated[0]


def _blocks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    flat = tensor.detach().reshape(-1)
    return flat.split(_BLOCK_ELEMENTS) if flat.numel() else ()
