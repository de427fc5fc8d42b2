"""What a kernel's unavoidable roundings cost, beside the budgets of `ops_registry.toml`.

    python -m tests.benchmark.budget_emulation [--num-tokens 4096] [--seeds 3]

A tensor-core kernel holds decays, sums and states in float32 and rounds, once each, the operands of its
products: the decay-weighted C·Bᵀ, dt∘x (unless dt is folded into that C·Bᵀ, which spares a rounding), the
entry state, the decay-weighted dt∘x of the state's update, and at last the output. This does the same in
torch, product by product, and shows the worst seed; "used" compares the better place for dt with the budget.
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tilegym_mamba2 import registry
from tilegym_mamba2.budgets import budget_for, relative_error
from tilegym_mamba2.reference import float64_reference
from tilegym_mamba2.spec import DTYPE_NAMES, SPECS

LOG2_E = math.log2(math.e)


def round_tf32(x: torch.Tensor) -> torch.Tensor:
    """x with 10 bits of fraction, round to nearest even, as float32."""
    bits = x.float().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def product_for(dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A matrix product as the tensor cores make it: rounded operands, float32 sums.

    bf16 and fp16 operands are rounded to their dtype; float32 ones are split in two tf32 parts and multiplied
    in three products, as at `torch.set_float32_matmul_precision("highest")`.
    """
    if dtype != torch.float32:
        return lambda p, q: p.to(dtype).float() @ q.to(dtype).float()

    def split(p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        high = round_tf32(p)
        return high, round_tf32(p - high)

    def product(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        (p_high, p_low), (q_high, q_low) = split(p), split(q)
        return p_high @ q_high + (p_high @ q_low + p_low @ q_high)

    return product


def emulate(inputs: Mapping[str, Any], chunk: int, fold_dt: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward of one batch row, rounding what a kernel rounds.

    `fold_dt` multiplies dt into the decay-weighted C·Bᵀ, before its rounding; otherwise dt∘x is rounded.
    Returns out (T, H, P) in x's dtype and final_state (H, P, N) in float32.
    """
    x, b, c = (inputs[name][0].transpose(0, 1).float() for name in ("x", "b", "c"))
    dtype, heads = inputs["x"].dtype, x.shape[0]
    b, c = (t.repeat_interleave(heads // t.shape[0], dim=0) for t in (b, c))
    dt = inputs["dt"][0].T.float()
    product = product_for(dtype)
    state = inputs["init_state"][0].float()
    skip = inputs["d"][:, None, None].float()
    out = torch.empty_like(x)
    for start in range(0, x.shape[1], chunk):
        at = slice(start, start + chunk)
        x_chunk, b_chunk, c_chunk, dt_chunk = x[:, at], b[:, at], c[:, at], dt[:, at]
        g = (inputs["a"].float()[:, None] * dt_chunk * LOG2_E).cumsum(1)
        above = torch.ones(g.shape[1], g.shape[1], dtype=torch.bool).triu(1)
        weights = torch.exp2((g[:, :, None] - g[:, None, :]).masked_fill(above, -math.inf))
        scores = product(c_chunk, b_chunk.transpose(1, 2)) * weights
        if fold_dt:
            within = product(scores * dt_chunk[:, None, :], x_chunk)
        else:
            within = product(scores, dt_chunk[..., None] * x_chunk)
        carried = product(c_chunk, state.transpose(1, 2)) * torch.exp2(g)[..., None]
        out[:, at] = within + carried + skip * x_chunk
        update = torch.exp2(g[:, -1:] - g) * dt_chunk
        state = state * torch.exp2(g[:, -1])[:, None, None]
        state = state + product((update[..., None] * x_chunk).transpose(1, 2), b_chunk)
    return out.to(dtype).transpose(0, 1), state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-tokens", type=int, default=4096)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=64)
    arguments = parser.parse_args()

    entry = registry.load()["mamba2_chunk_forward"]
    base = replace(SPECS["published"], batch_size=1, num_tokens=arguments.num_tokens, num_heads=4)
    table = Table("dtype", "decay", "output", "dt∘x rounded", "dt folded", "rounding alone", "budget", "used")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for decay in ("published", "slow", "none"):
            worst: dict[str, list[float]] = {}
            for seed in range(arguments.seeds):
                spec = replace(base, dtype=dtype, decay=decay, seed=seed)
                inputs = spec.get_sample_inputs(with_reference=False, with_backward=False, device="cpu")
                reference = {name: value[0] for name, value in float64_reference(inputs).items()}
                results = [emulate(inputs, arguments.chunk, fold_dt) for fold_dt in (False, True)]
                for index, output in enumerate(("out", "final_state")):
                    ref = reference[output]
                    errors = [relative_error(result[index], ref) for result in results]
                    errors.append(relative_error(ref.to(results[0][index].dtype), ref))
                    errors.append(budget_for(entry, output, dtype, decay, ref))
                    worst[output] = [
                        max(pair) for pair in zip(errors, worst.get(output, errors), strict=True)
                    ]
            for output, (apart, folded, rounding, budget) in worst.items():
                numbers = [f"{value:.2e}" for value in (apart, folded, rounding, budget)]
                used = f"{min(apart, folded) / budget:.0%}"
                table.add_row(DTYPE_NAMES[dtype], decay, output, *numbers, used)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
