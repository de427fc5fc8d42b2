"""How each op is called on the inputs that its specs draw, for the commands that run any of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tilegym
import torch

from tilegym_mamba2.autograd_scan import options_of
from tilegym_mamba2.options import NO_LIMIT
from tilegym_mamba2.reference import float64_reference, float64_scan_reference, float64_step_reference

__all__ = ["CALLS", "OpCall"]

Inputs = Mapping[str, Any]

_CHUNK = ("x", "a", "b", "c", "d", "dt", "init_state")
_SCAN = ("x", "dt", "a", "b", "c", "d", "z", "dt_bias", "init_state", "cu_seqlens", "seq_lens")
_STEP = ("state", "x", "dt", "a", "b", "c", "d", "z", "dt_bias", "state_indices")


@dataclass(frozen=True)
class OpCall:
    """One op: what `registry.resolve` is asked with, the call by keywords, and the float64 results.

    `tensors` are the names of its tensors in the order in which backends take them. `resolve_args` makes what
    `registry.resolve` wants to see; `call(inputs, backend)` returns outputs by name and leaves `inputs` alone
    except where the op works in place (`in_place` names what it overwrites).
    """

    op: str
    tensors: tuple[str, ...]
    reference: Callable[[Inputs], dict[str, torch.Tensor | None]]
    in_place: tuple[str, ...] = ()

    def resolve_args(self, inputs: Inputs) -> tuple[Any, ...]:
        found = tuple(inputs.get(name) for name in self.tensors)
        if self.op != "mamba2_chunk_scan":
            return found
        low, high = inputs.get("dt_limit", NO_LIMIT)
        settings = (inputs.get("dt_softplus", False), low, high, inputs["chunk_size"])
        return (*found, options_of(found, *settings, inputs.get("state_dtype")))

    def call(self, inputs: Inputs, backend: str) -> dict[str, torch.Tensor]:
        results = getattr(tilegym.ops, self.op)(**self.arguments(inputs), backend=backend)
        if self.op == "mamba2_state_update":
            return {"out": results, "final_state": inputs["state"]}
        return dict(zip(("out", "final_state"), results, strict=True))

    def fresh(self, inputs: Inputs) -> dict[str, Any]:
        """The inputs, with copies of what a call overwrites."""
        return dict(inputs) | {name: inputs[name].clone() for name in self.in_place}

    def arguments(self, inputs: Inputs) -> dict[str, Any]:
        """The inputs that are arguments; a spec's other entries are references and their gradients."""
        others = ("chunk_size", "dt_softplus", "dt_limit", "state_dtype")
        return {name: inputs[name] for name in (*self.tensors, *others) if name in inputs}


CALLS: Mapping[str, OpCall] = {
    call.op: call
    for call in (
        OpCall("mamba2_chunk_forward", _CHUNK, float64_reference),
        OpCall("mamba2_chunk_scan", _SCAN, float64_scan_reference),
        OpCall("mamba2_state_update", _STEP, float64_step_reference, in_place=("state",)),
    )
}
"""By the name of the op, as in a spec's `op`."""
