"""Problem specs: the shapes, dtypes and inputs that tests, benchmarks and the command line share.

`SPECS` names them; `tags(name)` and `select(tag)` pick among them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from tilegym_mamba2.reference import float64_reference
from tilegym_mamba2.spec_table import rows

DECAYS = ("published", "slow", "none", "violent")
LAYOUTS = ("contiguous", "sliced")
DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
)

# Above this many elements in x, b and c together, drawing on one core and copying takes longer than a run.
DEVICE_DRAW_ELEMENTS = 2**27

# The mean of softplus over standard normals, so that dt of the other decays can be scaled to a chosen mean.
_SOFTPLUS_MEAN = 0.8060591833474399
# A trained model's dt lies in 1e-3…0.1; at 0.05 neither the state's part of `out` hides the skip term's, nor
# the other way round.
_DT_MEAN = 0.05
_MEMORY_TOKENS = (200.0, 5000.0)
_WARM_UP_TOKENS = 32
_STREAMS = ("x", "a", "b", "c", "d", "dt", "init_state", "dout", "dfinal_state")


@dataclass(frozen=True)
class Mamba2ProblemSpec:
    """One Mamba-2 problem: sizes, dtypes and the distribution of its inputs.

    Args:
        batch_size, num_tokens, num_groups, num_heads, state_size, head_size: B, T, G, H, N, P. Everything but
            `num_tokens` is at least 1, and `num_groups` divides `num_heads`.
        chunk_size: the blocking that the call asks for, in tokens, at least 1.
        dtype: of x, b, c and `out`. state_dtype: of the initial and the final state.
        seed: the same seed gives the same bits on every device.
        decay: "published" is the publication's distribution: x, b, c SiLU of normals, dt softplus of a
            normal, a uniform in [−16, −1]; it forgets within a token or two. The others have normal
            (zero-mean) x, b, c: "slow" remembers 200…5000 tokens, log-uniform over the heads; "none" has
            a = 0; "violent" has rates and steps spread over orders of magnitude, up to sums of 1e9 a chunk.
        dt_dtype: of dt; by default `dtype` for "published", as published, and float32 for the others.
        layout: "sliced" makes x, b, c (and dt where its dtype is theirs) slices of one wide projection whose
            other columns, and rows past T, are NaN.

    Raises:
        ValueError: naming the fields, when no such problem exists.
    """

    batch_size: int
    num_tokens: int
    num_groups: int
    num_heads: int
    state_size: int
    head_size: int
    chunk_size: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    seed: int = 0
    decay: str = "published"
    dt_dtype: torch.dtype | None = None
    layout: str = "contiguous"

    def __post_init__(self) -> None:
        for field, least in (
            ("batch_size", 1),
            ("num_tokens", 0),
            ("num_groups", 1),
            ("num_heads", 1),
            ("state_size", 1),
            ("head_size", 1),
            ("chunk_size", 1),
            ("seed", 0),
        ):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{field} must be an integer of at least {least}, got {value!r}")
        if self.num_heads % self.num_groups:
            raise ValueError(
                "num_groups must divide num_heads, "
                f"got num_groups={self.num_groups}, num_heads={self.num_heads}"
            )
        for field in ("dtype", "state_dtype", "dt_dtype"):
            value = getattr(self, field)
            if value not in tuple(DTYPE_NAMES) and not (field == "dt_dtype" and value is None):
                raise ValueError(f"{field} must be one of {_names(DTYPE_NAMES)}, got {value!r}")
        for field, known in (("decay", DECAYS), ("layout", LAYOUTS)):
            if getattr(self, field) not in known:
                raise ValueError(f"{field} must be one of {', '.join(known)}, got {getattr(self, field)!r}")

    @property
    def id(self) -> str:
        """A readable name made of every field; it ends in `-ondevice` where the bits depend on the device."""
        parts = [
            f"B{self.batch_size}-T{self.num_tokens}-H{self.num_heads}-P{self.head_size}",
            f"G{self.num_groups}-N{self.state_size}-L{self.chunk_size}",
            DTYPE_NAMES[self.dtype],
            f"state_{DTYPE_NAMES[self.state_dtype]}",
            f"dt_{DTYPE_NAMES[self.step_dtype]}",
            self.decay,
        ]
        parts += ["sliced"] * (self.layout == "sliced")
        parts += [f"seed{self.seed}"] * (self.seed != 0)
        parts += ["ondevice"] * self.drawn_on_device
        return "-".join(parts)

    @property
    def step_dtype(self) -> torch.dtype:
        """The dtype of dt, after the default is filled in."""
        if self.dt_dtype is not None:
            return self.dt_dtype
        return self.dtype if self.decay == "published" else torch.float32

    @property
    def zero_mean(self) -> bool:
        """Whether x, b and c have mean zero, which lets sums cancel and so needs wider budgets."""
        return self.decay != "published"

    @property
    def drawn_on_device(self) -> bool:
        """True for large specs: inputs are drawn where they are used, so devices differ in the bits."""
        heads_and_groups = self.num_heads * self.head_size + 2 * self.num_groups * self.state_size
        return self.batch_size * self.num_tokens * heads_and_groups > DEVICE_DRAW_ELEMENTS

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of the problem, by argument name."""
        batch, tokens, heads = self.batch_size, self.num_tokens, self.num_heads
        token_state = (batch, tokens, self.num_groups, self.state_size)
        state = (batch, heads, self.head_size, self.state_size)
        token_head = (batch, tokens, heads, self.head_size)
        return {
            "x": token_head,
            "a": (heads,),
            "b": token_state,
            "c": token_state,
            "d": (heads,),
            "dt": (batch, tokens, heads),
            "init_state": state,
            "dout": token_head,
            "dfinal_state": state,
        }

    def flops(self) -> int:
        """Floating-point operations of the forward, 2 per multiply-add.

        Counts the four products in chunks of `chunk_size` (or T, if shorter): C·Bᵀ once per group, (C·Bᵀ)·X,
        C·Hᵀ and the state's update once per head, over whole L×L tiles.
        """
        tokens = self.batch_size * self.num_tokens
        chunk = min(self.chunk_size, max(self.num_tokens, 1))
        per_group = 2 * chunk * self.state_size
        per_head = 2 * chunk * self.head_size + 4 * self.state_size * self.head_size
        return tokens * (self.num_groups * per_group + self.num_heads * per_head)

    def bytes_moved(self) -> int:
        """Bytes of the forward when every input is read once and every output written once."""
        size = {name: math.prod(shape) for name, shape in self.shapes.items()}
        elements = 2 * size["x"] + size["b"] + size["c"]
        bytes_moved = elements * self.dtype.itemsize + size["dt"] * self.step_dtype.itemsize
        return bytes_moved + 2 * size["init_state"] * self.state_dtype.itemsize + 8 * self.num_heads

    def get_sample_inputs(
        self,
        *,
        with_reference: bool = True,
        with_backward: bool = True,
        device: torch.device | str | None = None,
    ) -> dict[str, Any]:
        """Draw the problem's inputs and, if asked, what float64 makes of them.

        The bits depend on the spec alone, not on the device: everything is drawn and rounded on the CPU.
        Large specs (`drawn_on_device`, and `id` says so) are drawn on `device` instead, to save minutes of
        copying; their bits are the same from run to run on one kind of device only.

        Args:
            with_reference: adds float64 `out` and `final_state`, and with `with_backward` the float64
                gradients `dx, da, db, dc, dd, ddt, dinit_state`, each of its input's shape.
            with_backward: adds `dout` (B, T, H, P) in `dtype` and `dfinal_state` (B, H, P, N) in
                `state_dtype`.
            device: where the tensors end up; the current GPU if there is one, else the CPU.

        Returns:
            x (B, T, H, P), b and c (B, T, G, N) in `dtype`, a and d (H,) in float32, dt (B, T, H) in
            `step_dtype`, init_state (B, H, P, N) in `state_dtype`, and chunk_size: with both flags off
            exactly the keyword arguments of `mamba2_chunk_forward`.
        """
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        draw = _Draw(self.seed, device if self.drawn_on_device else torch.device("cpu"))
        inputs = self._draw_forward(draw)
        if with_backward:
            for name, dtype in (("dout", self.dtype), ("dfinal_state", self.state_dtype)):
                inputs[name] = draw.normal(name, self.shapes[name]).to(dtype)
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        if self.layout == "sliced":
            inputs |= _slice_of_projection(inputs)
        inputs["chunk_size"] = self.chunk_size
        if with_reference:
            inputs |= float64_reference(inputs)
        return inputs

    def _draw_forward(self, draw: "_Draw") -> dict[str, torch.Tensor]:
        shapes = self.shapes
        inputs = {name: draw.normal(name, shapes[name]) for name in ("x", "b", "c", "d")}
        if not self.zero_mean:
            for name in ("x", "b", "c"):
                torch.nn.functional.silu(inputs[name], inplace=True)
        inputs |= self._draw_decay(draw, shapes)
        inputs["init_state"] = self._draw_state(draw, inputs["a"])
        dtypes = {"x": self.dtype, "b": self.dtype, "c": self.dtype, "dt": self.step_dtype}
        dtypes["init_state"] = self.state_dtype
        order = ("x", "a", "b", "c", "d", "dt", "init_state")
        return {name: inputs[name].to(dtypes.get(name, torch.float32)) for name in order}

    def _draw_decay(self, draw: "_Draw", shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        """a (H,) ≤ 0 and dt ≥ 0 of the chosen kind, float32."""
        if self.decay == "violent":
            rate = _log_uniform(draw.uniform("a", shapes["a"]), 1e-2, 1e6)
            return {"a": -rate, "dt": _log_uniform(draw.uniform("dt", shapes["dt"]), 1e-3, 20.0)}
        dt = torch.nn.functional.softplus(draw.normal("dt", shapes["dt"]))
        uniform = draw.uniform("a", shapes["a"])
        if self.decay == "published":
            return {"a": -1.0 - 15.0 * uniform, "dt": dt}
        dt *= _DT_MEAN / _SOFTPLUS_MEAN
        if self.decay == "none":
            return {"a": torch.zeros_like(uniform), "dt": dt}
        return {"a": -1.0 / (_DT_MEAN * _log_uniform(uniform, *_MEMORY_TOKENS)), "dt": dt}

    def _draw_state(self, draw: "_Draw", a: torch.Tensor) -> torch.Tensor:
        """A state that a short recurrence of this kind makes from zero, float32 (B, H, P, N)."""
        shapes = replace(self, num_tokens=_WARM_UP_TOKENS).shapes
        x = draw.normal("init_state", shapes["x"])
        b = draw.normal("init_state", shapes["b"])
        if not self.zero_mean:
            x, b = torch.nn.functional.silu(x), torch.nn.functional.silu(b)
        dt = torch.nn.functional.softplus(draw.normal("init_state", shapes["dt"]))
        if self.zero_mean:
            dt *= _DT_MEAN / _SOFTPLUS_MEAN
        b = b.repeat_interleave(self.num_heads // self.num_groups, dim=2)
        state = torch.zeros(self.shapes["init_state"], device=x.device)
        for token in range(_WARM_UP_TOKENS):
            state *= torch.exp(a * dt[:, token])[..., None, None]
            state += (dt[:, token, :, None] * x[:, token])[..., None] * b[:, token, :, None, :]
        return state


class _Draw:
    """Seeded float32 draws, a stream per tensor, so that the size of one never shifts the bits of another."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self._generators = {
            name: torch.Generator(device).manual_seed(seed * len(_STREAMS) + index)
            for index, name in enumerate(_STREAMS)
        }

    def normal(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self._generators[name], device=self.device)

    def uniform(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(shape, generator=self._generators[name], device=self.device)


def _log_uniform(uniform: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return low * torch.exp(uniform * math.log(high / low))


def _names(dtypes: Mapping[torch.dtype, str]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)


def _slice_of_projection(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """x, b, c and dt moved into one (B, T + 8, width) projection, laid out [z | x | b | c | dt]."""
    x = inputs["x"]
    batch, tokens, heads, head_size = x.shape
    names = ["x", "b", "c"] + ["dt"] * (inputs["dt"].dtype == x.dtype)
    gap = heads * head_size
    width = gap + sum(math.prod(inputs[name].shape[2:]) for name in names)
    parent = torch.full((batch, tokens + 8, width), math.nan, dtype=x.dtype, device=x.device)
    slices, start = {}, gap
    for name in names:
        shape = inputs[name].shape[2:]
        stop = start + math.prod(shape)
        slices[name] = parent[:, :tokens, start:stop].unflatten(-1, shape)
        slices[name].copy_(inputs[name])
        start = stop
    return slices


_TAGS = {name: tags for name, _, tags in rows()}
SPECS: Mapping[str, Mamba2ProblemSpec] = MappingProxyType(
    {name: Mamba2ProblemSpec(**fields) for name, fields, _ in rows()}
)
"""Named problems. Tags: published (benchmark, grid), model (compared), test, edge (huge), cpu."""


def tags(name: str) -> frozenset[str]:
    """The tags of a named spec; raises KeyError for a name that `SPECS` lacks."""
    return _TAGS[name]


def select(*wanted: str) -> dict[str, Mamba2ProblemSpec]:
    """The named specs that carry every wanted tag, in the order of `SPECS`; ValueError for an unknown tag."""
    known = frozenset().union(*_TAGS.values())
    for tag in wanted:
        if tag not in known:
            raise ValueError(f"unknown tag {tag!r}; known are {', '.join(sorted(known))}")
    return {name: spec for name, spec in SPECS.items() if _TAGS[name].issuperset(wanted)}
