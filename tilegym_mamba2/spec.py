"""Problem specs: the shapes, dtypes and inputs that tests, benchmarks and the command line share.

`SPECS` names them; `tags(name)` and `select(tag)` pick among them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from tilegym_mamba2.reference import float64_reference, float64_scan_reference, float64_step_reference
from tilegym_mamba2.spec_table import rows

DECAYS = ("published", "slow", "none", "violent")
LAYOUTS = ("contiguous", "sliced")
DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
)

# Above this many elements in x, b and c together, drawing on one core and copying takes longer than a run.
DEVICE_DRAW_ELEMENTS = 2**27

# Elements up to which torch does not share an elementwise function between threads; a power of two.
_ONE_THREAD = 2**14
# The mean of softplus over standard normals, so that dt of the other decays can be scaled to a chosen mean.
_SOFTPLUS_MEAN = 0.8060591833474399
# A trained model's dt lies in 1e-3…0.1; at 0.05 neither the state's part of `out` hides the skip term's, nor
# the other way round.
_DT_MEAN = 0.05
_MEMORY_TOKENS = (200.0, 5000.0)
_WARM_UP_TOKENS = 32
_STREAMS = ("x", "a", "b", "c", "d", "dt", "init_state", "dout", "dfinal_state")
# Of the other ops. Seeded apart, so that they shift no bit of those above.
_MORE_STREAMS = ("z", "dt_bias", "lengths", "state", "slots")


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

    op: ClassVar[str] = "mamba2_chunk_forward"

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
    def num_states(self) -> int:
        """How many initial and final states there are."""
        return self.batch_size

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of the problem, by argument name."""
        batch, tokens, heads = self.batch_size, self.num_tokens, self.num_heads
        token_state = (batch, tokens, self.num_groups, self.state_size)
        state = (self.num_states, heads, self.head_size, self.state_size)
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
            inputs |= self._draw_backward(draw)
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        if self.layout == "sliced":
            inputs |= _slice_of_projection(inputs)
        inputs |= self._settings()
        if with_reference:
            inputs |= self._reference(inputs)
        return inputs

    def _settings(self) -> dict[str, Any]:
        """The arguments that are no tensors."""
        return {"chunk_size": self.chunk_size}

    def _reference(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor | None]:
        return float64_reference(inputs)

    def _draw_backward(self, draw: "_Draw") -> dict[str, torch.Tensor]:
        dtypes = {"dout": self.dtype, "dfinal_state": self.state_dtype}
        return {name: draw.normal(name, self.shapes[name]).to(dtype) for name, dtype in dtypes.items()}

    def _draw_forward(self, draw: "_Draw") -> dict[str, torch.Tensor]:
        shapes = self.shapes
        inputs = {name: draw.normal(name, shapes[name]) for name in ("x", "b", "c", "d")}
        if not self.zero_mean:
            for name in ("x", "b", "c"):
                inputs[name] = _elementwise(torch.nn.functional.silu, inputs[name])
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
        dt = _elementwise(torch.nn.functional.softplus, draw.normal("dt", shapes["dt"]))
        uniform = draw.uniform("a", shapes["a"])
        if self.decay == "published":
            return {"a": -1.0 - 15.0 * uniform, "dt": dt}
        dt *= _DT_MEAN / _SOFTPLUS_MEAN
        if self.decay == "none":
            return {"a": torch.zeros_like(uniform), "dt": dt}
        return {"a": -1.0 / (_DT_MEAN * _log_uniform(uniform, *_MEMORY_TOKENS)), "dt": dt}

    def _draw_state(self, draw: "_Draw", a: torch.Tensor) -> torch.Tensor:
        """A state that a short recurrence of this kind makes from zero, float32 (B, H, P, N)."""
        lead = (self.num_states, _WARM_UP_TOKENS)
        x = draw.normal("init_state", (*lead, self.num_heads, self.head_size))
        b = draw.normal("init_state", (*lead, self.num_groups, self.state_size))
        if not self.zero_mean:
            x, b = (_elementwise(torch.nn.functional.silu, tensor) for tensor in (x, b))
        dt = _elementwise(torch.nn.functional.softplus, draw.normal("init_state", (*lead, self.num_heads)))
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
            name: torch.Generator(device).manual_seed(first + seed * len(names) + index)
            for first, names in ((0, _STREAMS), (2**40, _MORE_STREAMS))
            for index, name in enumerate(names)
        }

    def normal(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self._generators[name], device=self.device)

    def uniform(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(shape, generator=self._generators[name], device=self.device)


def _log_uniform(uniform: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return low * _elementwise(torch.exp, uniform * math.log(high / low))


def _elementwise(function: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """function(tensor), on the CPU in pieces that torch leaves to one thread.

    Where the shares of two threads meet, a vectorised function may round otherwise than elsewhere: the bits
    would depend on the number of threads.
    """
    if tensor.device.type != "cpu" or tensor.numel() == 0:
        return function(tensor)
    pieces = tensor.reshape(-1).split(_ONE_THREAD)
    return torch.cat([function(piece) for piece in pieces]).reshape(tensor.shape)


def _names(dtypes: Mapping[torch.dtype, str]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)


def _slice_of_projection(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """x, b, c, dt and z, if any, moved into one (B, T + 8, width) projection: [z | x | b | c | dt]."""
    x = inputs["x"]
    batch, tokens, heads, head_size = x.shape
    names = ["x", "b", "c"] + ["dt"] * (inputs["dt"].dtype == x.dtype)
    gap = heads * head_size
    width = gap + sum(math.prod(inputs[name].shape[2:]) for name in names)
    parent = torch.full((batch, tokens + 8, width), math.nan, dtype=x.dtype, device=x.device)
    slices, start = {}, gap
    if "z" in inputs:
        names, start = ["z", *names], 0
    for name in names:
        shape = inputs[name].shape[2:]
        stop = start + math.prod(shape)
        slices[name] = parent[:, :tokens, start:stop].unflatten(-1, shape)
        slices[name].copy_(inputs[name])
        start = stop
    return slices


@dataclass(frozen=True)
class Mamba2ScanSpec(Mamba2ProblemSpec):
    """A problem of `mamba2_chunk_scan`: a `Mamba2ProblemSpec` with options.

    Args:
        gated: whether there is a gate z, of normals.
        raw_dt: whether dt comes before dt_bias and softplus; as used it is distributed as `decay` says.
        d_per_row: whether d is (H, P).
        num_sequences: packed in so many sequences of random length, which fill T; batch_size is 1 then.
            0: not packed.
        padded: whether rows have random lengths; the first one is whole.
        stateless: as in training: no init_state, and no gradient comes through final_state.
    """

    op: ClassVar[str] = "mamba2_chunk_scan"

    gated: bool = False
    raw_dt: bool = False
    d_per_row: bool = False
    num_sequences: int = 0
    padded: bool = False
    stateless: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_count("num_sequences", self.num_sequences)
        if self.num_sequences and (self.batch_size != 1 or self.padded):
            raise ValueError(
                "num_sequences needs batch_size=1 and padded=False, "
                f"got batch_size={self.batch_size}, padded={self.padded}"
            )

    @property
    def id(self) -> str:
        parts = [super().id]
        parts += [
            name for name in ("gated", "raw_dt", "d_per_row", "padded", "stateless") if getattr(self, name)
        ]
        parts += [f"S{self.num_sequences}"] * (self.num_sequences != 0)
        return "-".join(["scan", *parts])

    @property
    def num_states(self) -> int:
        return self.num_sequences or self.batch_size

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = super().shapes
        if self.d_per_row:
            shapes["d"] = (self.num_heads, self.head_size)
        if self.gated:
            shapes["z"] = shapes["x"]
        if self.raw_dt:
            shapes["dt_bias"] = shapes["a"]
        return shapes

    def bytes_moved(self) -> int:
        """As of the forward, and the gate read once; without an init_state, no state is read."""
        gate = self.batch_size * self.num_tokens * self.num_heads * self.head_size * self.dtype.itemsize
        states = math.prod(self.shapes["init_state"]) * self.state_dtype.itemsize
        return super().bytes_moved() + gate * self.gated - states * self.stateless

    def _settings(self) -> dict[str, Any]:
        settings = super()._settings() | {"dt_softplus": self.raw_dt}
        return settings | ({"state_dtype": self.state_dtype} if self.stateless else {})

    def _reference(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor | None]:
        return float64_scan_reference(inputs)

    def _draw_forward(self, draw: "_Draw") -> dict[str, torch.Tensor]:
        """The keyword arguments of `mamba2_chunk_scan` that are tensors."""
        inputs = super()._draw_forward(draw)
        shapes = self.shapes
        if self.gated:
            inputs["z"] = draw.normal("z", shapes["z"]).to(self.dtype)
        if self.raw_dt:
            inputs["dt_bias"] = draw.normal("dt_bias", shapes["dt_bias"])
            used = inputs["dt"].float().clamp(min=1e-6)
            # ln(e^v - 1), the inverse of softplus.
            raw = used + _elementwise(lambda v: torch.log(-torch.expm1(-v)), used) - inputs["dt_bias"]
            inputs["dt"] = raw.to(self.step_dtype)
        if self.num_sequences:
            inputs["cu_seqlens"] = self._draw_borders(draw)
        if self.stateless:
            del inputs["init_state"]
        if self.padded:
            lengths = (draw.uniform("lengths", (self.batch_size,)) * (self.num_tokens + 1)).int()
            lengths[0] = self.num_tokens
            inputs["seq_lens"] = lengths
        return inputs

    def _draw_backward(self, draw: "_Draw") -> dict[str, torch.Tensor]:
        inputs = super()._draw_backward(draw)
        if self.stateless:
            del inputs["dfinal_state"]
        return inputs

    def _draw_borders(self, draw: "_Draw") -> torch.Tensor:
        """cu_seqlens (S + 1,): uniform cuts, which make lengths of every size and some empty sequences."""
        cuts = draw.uniform("lengths", (self.num_sequences - 1,)) * (self.num_tokens + 1)
        borders = torch.nn.functional.pad(cuts.int().sort().values, (1, 1))
        borders[-1] = self.num_tokens
        return borders


@dataclass(frozen=True)
class Mamba2StepSpec(Mamba2ScanSpec):
    """A problem of `mamba2_state_update`: `num_tokens` is K, and `state_dtype` that of the states.

    Args:
        num_slots: of a pool from which the rows take theirs in random order; at least batch_size.
            0: row r has slot r, and there is no `state_indices`.
    """

    op: ClassVar[str] = "mamba2_state_update"

    num_slots: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_count("num_slots", self.num_slots)
        if self.num_slots and self.num_slots < self.batch_size:
            raise ValueError(
                "num_slots must be 0 or at least batch_size, "
                f"got num_slots={self.num_slots}, batch_size={self.batch_size}"
            )
        if self.num_tokens < 1 or self.num_sequences or self.padded or self.stateless:
            raise ValueError(
                "a step needs num_tokens of at least 1 and no num_sequences, padded or stateless, "
                f"got num_tokens={self.num_tokens}, num_sequences={self.num_sequences}, "
                f"padded={self.padded}, stateless={self.stateless}"
            )

    @property
    def id(self) -> str:
        slots = f"-slots{self.num_slots}" if self.num_slots else ""
        return super().id.replace("scan", "step", 1) + slots

    @property
    def num_states(self) -> int:
        return self.num_slots or self.batch_size

    @property
    def drawn_on_device(self) -> bool:
        return super().drawn_on_device or math.prod(self.shapes["init_state"]) > DEVICE_DRAW_ELEMENTS

    def flops(self) -> int:
        """6 per element of the state and token: forget, add, read."""
        return 6 * self.num_tokens * self.batch_size * self.num_heads * self.head_size * self.state_size

    def bytes_moved(self) -> int:
        """Bytes of a step that reads and writes the state of every row once, whatever K is."""
        unused = self.num_states - self.batch_size
        one_state = self.num_heads * self.head_size * self.state_size * self.state_dtype.itemsize
        return super().bytes_moved() - 2 * unused * one_state

    def get_sample_inputs(
        self,
        *,
        with_reference: bool = True,
        with_backward: bool = False,
        device: torch.device | str | None = None,
    ) -> dict[str, Any]:
        """As of a `Mamba2ProblemSpec`, with the keyword arguments of `mamba2_state_update`.

        Args:
            with_reference: adds float64 `out` and `final_state`, the states afterwards.
            with_backward: has no meaning here, for a step has none.

        Returns:
            state (slots, H, P, N), which a call overwrites, and, with K = 1, x and z (B, H, P), dt (B, H), b
            and c (B, G, N), else with K.
        """
        return super().get_sample_inputs(with_reference=with_reference, with_backward=False, device=device)

    def _settings(self) -> dict[str, Any]:
        return {"dt_softplus": self.raw_dt}

    def _reference(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor | None]:
        return float64_step_reference(inputs)

    def _draw_forward(self, draw: "_Draw") -> dict[str, torch.Tensor]:
        inputs = super()._draw_forward(draw)
        if self.num_tokens == 1:
            for name in ("x", "z", "dt", "b", "c"):
                if name in inputs:
                    inputs[name] = inputs[name].squeeze(1)
        if self.num_slots:
            inputs["state_indices"] = draw.uniform("slots", (self.num_slots,)).argsort()[: self.batch_size]
        return {"state": inputs.pop("init_state")} | inputs

    def _draw_state(self, draw: "_Draw", a: torch.Tensor) -> torch.Tensor:
        """Normals: states can be the bulk of a step, and a recurrence over them would take minutes."""
        return draw.normal("state", self.shapes["init_state"])


def _check_count(field: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{field} must be an integer of at least 0, got {value!r}")


_KINDS = {"chunk": Mamba2ProblemSpec, "scan": Mamba2ScanSpec, "step": Mamba2StepSpec}
_TAGS = {name: tags for name, _, _, tags in rows()}
SPECS: Mapping[str, Mamba2ProblemSpec] = MappingProxyType(
    {name: _KINDS[kind](**fields) for name, kind, fields, _ in rows()}
)
"""Named problems. Tags: published (benchmark, grid), model (compared), test, edge (huge), cpu.

Those of the other ops have tags of their own: scan, scan-test, step, step-test.
"""


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
