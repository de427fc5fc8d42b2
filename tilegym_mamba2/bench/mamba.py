"""mamba_ssm's Triton kernels as a peer: the same arguments under its names."""

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .backend import Backend, Call, Inputs, Variant, through_autograd
from .passes import CHUNK_BACKWARD, CHUNK_OP, OUTPUTS, SCAN_BACKWARD, STEP_OP, outputs_of

_NAMES = {
    "d": "D",
    "z": "z",
    "dt_bias": "dt_bias",
    "init_state": "initial_states",
    "dt_softplus": "dt_softplus",
    "dt_limit": "dt_limit",
}
# As its backward returns them.
_GRADIENTS = OUTPUTS[SCAN_BACKWARD]


class MambaSsm(Backend):
    """mamba_ssm's Triton kernels; of a scan the better of chunk 128 and 256 stands for it.

    Its kernels are tuned by Triton at the first call of a new P, N and chunk size (T is not in the key).
    """

    def __init__(self, chunks: Sequence[int] = ()) -> None:
        super().__init__("mamba_ssm")
        self.chunks = tuple(chunks) or (128, 256)

    def lacks(self, spec: Any, pass_name: str) -> str:
        if spec.op == STEP_OP and spec.num_tokens > 1:
            return f"its step takes one token a row, not {spec.num_tokens}"
        if getattr(spec, "padded", False):
            return "it has no lengths of padded rows"
        if getattr(spec, "num_sequences", 0) and not spec.stateless:
            return "it has no initial states of packed sequences"
        return ""

    def status(self, pass_name: str, op: str = CHUNK_OP) -> tuple[bool, str]:
        if not torch.cuda.is_available():
            return False, "its Triton kernels need a GPU"
        try:
            triton_module("selective_state_update" if op == STEP_OP else "ssd_combined")
        except ImportError as error:
            return False, f"cannot be imported: {error}"
        return True, ""

    def variants(self, spec: Any, pass_name: str) -> list[Variant]:
        outputs = outputs_of(spec, pass_name)
        if spec.op == STEP_OP:
            return [Variant("1 token", _step, outputs)]
        makers: dict[str, Callable[[Inputs, int, tuple[str, ...]], Call]] = {
            "forward": _forward,
            "backward": _backward,
            "forward+backward": _both,
        }
        make, note = makers[pass_name], ""
        if getattr(spec, "num_sequences", 0) and pass_name == "forward+backward":
            note = "without final states: of packed sequences it gives none where gradients are wanted"
        gradients = OUTPUTS[CHUNK_BACKWARD] if spec.op == CHUNK_OP else _GRADIENTS
        return [
            Variant(
                f"chunk {chunk}", lambda inputs, chunk=chunk: make(inputs, chunk, gradients), outputs, note
            )
            for chunk in self.chunks
        ]


def triton_module(name: str) -> types.ModuleType:
    """A module of its kernels, also where the package's `__init__` fails on its missing CUDA extension."""
    path = f"mamba_ssm.ops.triton.{name}"
    try:
        return importlib.import_module(path)
    except ImportError as error:
        found = importlib.util.find_spec("mamba_ssm")
        if found is None or "mamba_ssm" in sys.modules:
            raise
        first = error
    # the Triton kernels need nothing of what the package's __init__ imports: stand in for it
    package = types.ModuleType("mamba_ssm")
    package.__path__ = list(found.submodule_search_locations or ())
    for stale in [m for m in sys.modules if m.startswith("mamba_ssm.")]:
        del sys.modules[stale]
    sys.modules["mamba_ssm"] = package
    try:
        return importlib.import_module(path)
    except ImportError:
        del sys.modules["mamba_ssm"]
        raise first from None


# ---- the scan


def _arguments(inputs: Inputs) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Its positional tensors, and its keywords but for the lengths."""
    keywords = {theirs: inputs[ours] for ours, theirs in _NAMES.items() if inputs.get(ours) is not None}
    if inputs.get("cu_seqlens") is not None:
        keywords["seq_idx"] = _sequence_of_tokens(inputs["cu_seqlens"], inputs["x"].shape[1])
    return tuple(inputs[k] for k in ("x", "dt", "a", "b", "c")), keywords


def _sequence_of_tokens(borders: torch.Tensor, tokens: int) -> torch.Tensor:
    """seq_idx (1, T) int32: made once and not timed, as a training run makes it once for all layers."""
    positions = torch.arange(tokens, device=borders.device)
    found = torch.searchsorted(borders[1:].contiguous().long(), positions, right=True)
    return found.int()[None]


def _forward(inputs: Inputs, chunk: int, gradients: tuple[str, ...] = ()) -> Call:
    scan = triton_module("ssd_combined").mamba_chunk_scan_combined
    tensors, keywords = _arguments(inputs)
    wanted: dict[str, Any] = {"return_final_states": True}
    if inputs.get("cu_seqlens") is not None:
        wanted = {"return_varlen_states": True, "cu_seqlens": inputs["cu_seqlens"]}

    def call() -> Sequence[torch.Tensor]:
        with torch.no_grad():
            return scan(*tensors, chunk, **keywords, **wanted)

    return call


def _backward(inputs: Inputs, chunk: int, gradients: tuple[str, ...]) -> Call:
    module = triton_module("ssd_combined")
    (x, dt, a, b, c), keywords = _arguments(inputs)
    with torch.no_grad():
        out, before_gate, *_ = module._mamba_chunk_scan_combined_fwd(x, dt, a, b, c, chunk, **keywords)
    out = out if before_gate is None else before_gate
    dout, dfinal_state = inputs["dout"], inputs.get("dfinal_state")

    def call() -> Sequence[torch.Tensor | None]:
        with torch.no_grad():
            found = module._mamba_chunk_scan_combined_bwd(
                dout, x, dt, a, b, c, out, chunk, dfinal_states=dfinal_state, **keywords
            )
        by_name = dict(zip(_GRADIENTS, found, strict=False))
        return tuple(by_name[name] for name in gradients)

    return call


def _both(inputs: Inputs, chunk: int, gradients: tuple[str, ...]) -> Call:
    scan = triton_module("ssd_combined").mamba_chunk_scan_combined
    packed = inputs.get("cu_seqlens") is not None
    lengths = _arguments(inputs)[1].get("seq_idx")

    def forward(leaves: dict[str, torch.Tensor]) -> Sequence[torch.Tensor | None]:
        tensors, keywords = _arguments({**inputs, **leaves, "cu_seqlens": None})
        if packed:
            return scan(*tensors, chunk, **keywords, seq_idx=lengths), None
        return scan(*tensors, chunk, **keywords, return_final_states=True)

    return through_autograd(forward, inputs, gradients)


# ---- the step


def _step(inputs: Inputs) -> Call:
    update = triton_module("selective_state_update").selective_state_update
    state, x = inputs["state"].clone(), inputs["x"]
    rows = x.shape[1:]
    d, bias = inputs.get("d"), inputs.get("dt_bias")
    # Strides of zero tell it that a head has one decay and one dt; it needs a bias for that.
    bias = torch.zeros_like(inputs["a"]) if bias is None else bias
    keywords = {
        "D": d[:, None].expand(rows) if d is not None and d.dim() == 1 else d,
        "z": inputs.get("z"),
        "dt_bias": bias[:, None].expand(rows),
        "dt_softplus": inputs.get("dt_softplus", False),
        "state_batch_indices": inputs.get("state_indices"),
    }
    tensors = (
        state,
        x,
        inputs["dt"][..., None].expand(x.shape),
        inputs["a"][:, None, None].expand(*rows, state.shape[-1]),
        inputs["b"],
        inputs["c"],
    )
    return lambda: (update(*tensors, **keywords), state)
