"""The floor under a problem: fewest bytes over copy bandwidth, or fewest operations over the matrix rate."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import timing

FLOOR_CHUNK = 64


@dataclass(frozen=True)
class Ceilings:
    """What the device was measured to do in this run.

    copy_gbs: GB/s of a large device-to-device copy, bytes read plus bytes written.
    matrix_tflops: TFLOP/s of a large matrix product (bf16 on a GPU, float32 on a CPU), random data.
    """

    copy_gbs: float
    matrix_tflops: float

    def floor_us(self, nbytes: float, flops: float) -> tuple[float, str]:
        """Microseconds that no version runs much below, and what sets them: "memory" or "arithmetic"."""
        memory_us = nbytes / (self.copy_gbs * 1e3)
        arithmetic_us = flops / (self.matrix_tflops * 1e6)
        return max((memory_us, "memory"), (arithmetic_us, "arithmetic"))


def measure(device: torch.device) -> Ceilings:
    """Measure both ceilings on `device`: about 0.2 s on a GPU, 0.5 s on a CPU."""
    on_gpu = device.type == "cuda"
    copy_bytes = 1 << 26
    side = 512
    dtype = torch.float32
    if on_gpu:
        free, _ = torch.cuda.mem_get_info(device)
        copy_bytes = min(1 << 30, free // 8) // 4 * 4
        side, dtype = 8192, torch.bfloat16
    median = timing.eager_median if on_gpu else timing.wall_median

    # random data: on zeros a matrix product draws less power and runs faster than it ever will in use
    source = torch.rand(copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    copy_us = median(functools.partial(target.copy_, source), seconds=0.1).median
    source = target = None  # give the memory back before the product
    left = torch.randn(side, side, device=device).to(dtype)
    right = torch.randn(side, side, device=device).to(dtype)
    product = torch.empty(side, side, device=device, dtype=dtype)
    matrix_us = median(functools.partial(torch.mm, left, right, out=product), seconds=0.1).median
    return Ceilings(copy_gbs=2 * copy_bytes / copy_us / 1e3, matrix_tflops=2 * side**3 / matrix_us / 1e6)


def tensor_bytes(values: Any) -> int:
    """Bytes of the tensors in a dict or sequence, each counted once by its own size."""
    items = values.values() if isinstance(values, dict) else values
    return sum(t.numel() * t.element_size() for t in items if isinstance(t, torch.Tensor))


def work(spec: Any, name: str, tensors: Mapping[str, Any] | None = None) -> tuple[int, int, int]:
    """Operations, the floor's operations and bytes of pass `name` on `spec`.

    `flops` are counted at the spec's own chunk size and serve TFLOP/s, the same count for every backend.
    The floor's are counted at chunks of at most 64, the shortest that fills a tensor core's tile: a
    backend may block finer than the spec asks, and the floor must lie under it too. `tensors` are the
    pass's inputs and outputs; without them the bytes of a backward are left at the forward's.
    """
    flops = _flops(spec, name)
    floor_flops = _flops(replace(spec, chunk_size=min(spec.chunk_size, FLOOR_CHUNK)), name)
    nbytes = spec.bytes_moved() if name == "forward" or tensors is None else tensor_bytes(tensors)
    return flops, floor_flops, nbytes


def _flops(spec: Any, name: str) -> int:
    parts = {
        "forward": spec.flops,
        "backward": lambda: backward_flops(spec),
        "forward+backward": lambda: spec.flops() + backward_flops(spec),
    }
    return parts[name]()


def backward_flops(spec: Any) -> int:
    """Matrix operations of the backward at the spec's chunk size, states recomputed, 2 per multiply-add.

    Over whole L x L tiles, as the forward's count: C B^T and its gradient into b and c are shared by a
    group (three L x L x N products); per head dY X^T and its use for dx (two L x L x P), and six
    products of L x P x N (local states, their gradients, and the states' share of dx, db, dc and the decay).
    """
    tokens = spec.batch_size * spec.num_tokens
    chunk = min(spec.chunk_size, max(spec.num_tokens, 1))
    per_group = 3 * 2 * chunk * spec.state_size
    per_head = 2 * 2 * chunk * spec.head_size + 6 * 2 * spec.head_size * spec.state_size
    return tokens * (spec.num_groups * per_group + spec.num_heads * per_head)
