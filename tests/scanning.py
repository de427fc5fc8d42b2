"""Problems for the full scan and what its tests do with them, on every backend that has it."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch.utils._pytree import tree_map

from tests import scan_oracle
from tilegym_mamba2 import interpreter, mamba2_chunk_scan, registry

POSITIONAL = ("x", "dt", "a", "b", "c")
BACKENDS = [name for name in ("torch", "cutile") if name in registry.ops()["mamba2_chunk_scan"].backends]
DIFFERENTIABLE = [n for n in BACKENDS if n in registry.ops()["mamba2_chunk_scan_backward"].backends]
# What a backend computes in here, and how far from float64 that may be.
PRECISION = {"torch": (torch.float64, 1e-11), "cutile": (torch.float32, 2e-5)}


@contextlib.contextmanager
def running(backend: str) -> Iterator[None]:
    with interpreter.interpret() if backend == "cutile" else contextlib.nullcontext():
        yield


@dataclass(frozen=True)
class Shape:
    """Sizes and options of a problem; `values` draws its tensors."""

    tokens: int = 70
    batch: int = 2
    heads: int = 4
    head_size: int = 3
    groups: int = 2
    state_size: int = 5
    lengths: tuple[int, ...] | None = None  # of packed sequences, whose sum may be less than `tokens`
    row_lengths: tuple[int, ...] | None = None  # of padded rows
    d: str | None = None  # "H" or "HP"
    z: bool = False
    dt_bias: bool = False
    dt_softplus: bool = False
    dt_limit: tuple[float, float] = (0.0, math.inf)
    init_state: bool = False
    chunk_size: int = 16

    def values(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Any]:
        """The arguments of `mamba2_chunk_scan` by name."""
        generator = torch.Generator().manual_seed(seed)
        rows = self.batch if self.lengths is None else len(self.lengths)
        token_head = (self.batch, self.tokens, self.heads, self.head_size)
        token_state = (self.batch, self.tokens, self.groups, self.state_size)
        randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        drawn = {
            "x": randn(*token_head),
            "dt": 0.2 * randn(*token_head[:3]),
            "a": -randn(self.heads).abs(),
            "b": randn(*token_state),
            "c": randn(*token_state),
            "d": randn(self.heads) if self.d == "H" else randn(self.heads, self.head_size),
            "z": randn(*token_head),
            "dt_bias": randn(self.heads),
            "init_state": randn(rows, self.heads, self.head_size, self.state_size),
        }
        if not (self.dt_softplus or self.dt_bias):
            # Used as it is, unless limits cut it.
            drawn["dt"] = drawn["dt"].abs()
        absent = [name for name in ("d", "z", "dt_bias", "init_state") if not getattr(self, name)]
        values = {name: t.to(dtype) for name, t in drawn.items() if name not in absent}
        if self.lengths is not None:
            values["cu_seqlens"] = torch.tensor([0, *self.lengths]).cumsum(0).int()
        if self.row_lengths is not None:
            values["seq_lens"] = torch.tensor(self.row_lengths)
        options = {"dt_softplus": self.dt_softplus, "dt_limit": self.dt_limit, "chunk_size": self.chunk_size}
        return values | options


def call(values: dict[str, Any], **options: Any) -> tuple[torch.Tensor, ...]:
    keywords = values | options
    positional = [keywords.pop(name) for name in POSITIONAL]
    return mamba2_chunk_scan(*positional, **keywords)


def with_gradients(
    values: dict[str, Any], dout: torch.Tensor | None, dfinal_state: torch.Tensor | None, **options: Any
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Results, and the gradients of sum(out * dout) + sum(final_state * dfinal_state); none of a backend
    without a backward."""
    if options["backend"] not in DIFFERENTIABLE:
        return call(values, **options), {}
    leaves = {
        name: values[name].detach().clone().requires_grad_()
        for name in scan_oracle.GRADIENTS
        if values.get(name) is not None
    }
    results = call(values | leaves, **options)
    pairs = [(r, g) for r, g in zip(results, (dout, dfinal_state), strict=False) if g is not None]
    found = torch.autograd.grad(
        [r for r, _ in pairs], list(leaves.values()), [g for _, g in pairs], materialize_grads=True
    )
    return results, dict(zip(leaves, found, strict=True))


def cotangents(values: dict[str, Any], seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, b = values["x"], values["b"]
    rows = x.shape[0] if "cu_seqlens" not in values else len(values["cu_seqlens"]) - 1
    final = (rows, *x.shape[2:], b.shape[3])
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(x) for s in (x.shape, final))


def error(got: torch.Tensor, ref: torch.Tensor) -> float:
    assert got.shape == ref.shape
    norm = ref.double().norm().item()
    return (got.double() - ref.double()).norm().item() / (norm or 1.0)


def assert_like_the_token_loop(
    values: dict[str, Any], backend: str, tolerance: float, *, reach: tuple[bool, bool] = (True, True)
) -> None:
    """Forward, chunk states and every gradient, by the backend and by the token loop."""
    dout, dfinal = (g if r else None for g, r in zip(cotangents(values), reach, strict=True))
    with running(backend):
        results, gradients = with_gradients(values, dout, dfinal, return_chunk_states=True, backend=backend)
    out, final_state, chunk_states, offsets = scan_oracle.scan(**values)
    for name, got, ref in zip(
        ("out", "final_state", "chunk_states"), results, (out, final_state, chunk_states), strict=False
    ):
        assert error(got, ref) <= tolerance, name
    assert (results[3].tolist() if len(results) == 4 else None) == offsets
    if not gradients:
        return
    expected = scan_oracle.gradients(values, dout, dfinal)
    scale = scales(values, expected)
    for name, got in gradients.items():
        assert got.dtype == values[name].dtype
        assert (got.double() - expected[name]).norm() <= tolerance * scale[name], name


def scales(values: dict[str, Any], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Norms of the gradients; sums over tokens count as large as their terms, which may cancel."""
    scale = {name: gradient.norm().item() for name, gradient in expected.items() if gradient is not None}
    terms = expected["dt"].norm().item() * math.sqrt(values["dt"].shape[1] + 1)
    for name in ("a", "dt_bias"):
        if name in scale:
            scale[name] = max(scale[name], terms)
    return scale


def shapes(
    max_tokens: int = 150, chunk_sizes: tuple[int, ...] = (1, 2, 5, 16, 33, 64, 150)
) -> st.SearchStrategy:
    """Every option, alone and with others; plain, packed and padded."""

    @st.composite
    def draw_shape(draw: Any) -> Shape:
        tokens = draw(st.sampled_from([0, 1, 15, 16, 17, 40]) | st.integers(0, max_tokens))
        layout = draw(st.sampled_from(["plain", "packed", "padded"]))
        batch = 1 if layout == "packed" else draw(st.integers(1, 3))
        lengths = row_lengths = None
        if layout == "packed":
            cuts = sorted(draw(st.lists(st.integers(0, tokens), min_size=1, max_size=6)))
            lengths = tuple(end - begin for begin, end in zip([0, *cuts], cuts, strict=False))
        if layout == "padded":
            row_lengths = tuple(draw(st.lists(st.integers(0, tokens), min_size=batch, max_size=batch)))
        heads, groups = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (3, 1)]))
        return Shape(
            tokens=tokens,
            batch=batch,
            heads=heads,
            head_size=draw(st.integers(1, 5)),
            groups=groups,
            state_size=draw(st.integers(1, 6)),
            lengths=lengths,
            row_lengths=row_lengths,
            d=draw(st.sampled_from([None, "H", "HP"])),
            z=draw(st.booleans()),
            dt_bias=draw(st.booleans()),
            dt_softplus=draw(st.booleans()),
            dt_limit=draw(st.sampled_from([(0.0, math.inf), (0.05, 0.3), (0.1, math.inf)])),
            init_state=draw(st.booleans()),
            chunk_size=draw(st.sampled_from(chunk_sizes)),
        )

    return draw_shape()


class Wrapper(torch.Tensor):
    """Holds another tensor, and has no memory of its own."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "Wrapper":
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=held.device
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def held(value: Any) -> Any:
            return value.held if isinstance(value, cls) else value

        return func(*tree_map(held, args), **tree_map(held, kwargs or {}))
