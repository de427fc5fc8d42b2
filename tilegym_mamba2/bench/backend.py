"""A backend under measurement, and how this package's own ops are called for it.

A backend offers one or more *variants* of a pass (a chunk size of its own choosing); each variant is
timed and the best one stands for the backend. A variant turns a set of inputs into a callable whose
results are named as in `passes.OUTPUTS`.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tilegym_mamba2 import registry
from tilegym_mamba2.calls import CALLS

from .passes import CHUNK_BACKWARD, CHUNK_OP, OUTPUTS, PASSES, SCAN_BACKWARD, SCAN_OP, STEP_OP, outputs_of

Inputs = Mapping[str, Any]
Results = dict[str, torch.Tensor]
# None stands for the result of an input that is not there.
Call = Callable[[], Sequence[torch.Tensor | None]]

_CHUNK_ARGUMENTS = ("x", "a", "b", "c", "d", "dt", "init_state")


@dataclass(frozen=True)
class Variant:
    """One way of running a backend: `make(inputs)` gives the callable that is timed.

    The callable leaves `inputs` alone: what an op overwrites is a copy of its own. `note` says what a
    reader must know of it.
    """

    label: str
    make: Callable[[Inputs], Call]
    outputs: tuple[str, ...]
    note: str = ""

    def named(self, results: Sequence[torch.Tensor | None]) -> Results:
        return {k: v for k, v in zip(self.outputs, results, strict=True) if v is not None}


@dataclass
class Search:
    """What a peer searched before its first result: per kernel how many of how many configurations."""

    limit: int | None = None
    kernels: list[dict[str, Any]] = field(default_factory=list)
    off: str = ""

    def as_data(self) -> dict[str, Any] | None:
        if not self.kernels:
            return None
        return {"limit": self.limit, "kernels": self.kernels}

    def sentence(self) -> str:
        if not self.kernels:
            return self.off
        tried = sum(k["searched"] for k in self.kernels)
        total = sum(k["of"] for k in self.kernels)
        seconds = sum(k["seconds"] for k in self.kernels)
        how = f"thinned search, at most {self.limit} a kernel" if self.limit else "full search"
        return f"{how}: {tried} of {total} configurations in {seconds:.0f} s"


class Backend:
    """A backend of the op registry, by name: `cutile`, `torch`, or one that a user's file added."""

    # Whether autograd joins forward and backward; otherwise the two ops are called one after the other.
    autograd = True

    def __init__(self, name: str) -> None:
        self.name = name

    def lacks(self, spec: Any, pass_name: str) -> str:
        """Why the backend has no such pass of the spec's op on any machine; empty where it has."""
        for op in PASSES[spec.op][pass_name]:
            entry = registry.ops().get(op)
            if entry is not None and self.name not in entry.backends:
                return f"{op} has no backend {self.name!r}; it has {', '.join(entry.backends)}"
        return ""

    def status(self, pass_name: str, op: str = CHUNK_OP) -> tuple[bool, str]:
        """Whether the pass of the op can run here at all, and why not."""
        for part in PASSES[op][pass_name]:
            if part not in registry.ops():
                return False, f"no op {part} is registered"
            known = registry.backend_status(part)
            if self.name not in known:
                return False, f"{part} has no backend {self.name!r}; it has {', '.join(known)}"
            ok, reason = known[self.name]
            if not ok:
                return False, reason
        return True, ""

    def variants(self, spec: Any, pass_name: str) -> list[Variant]:
        if spec.op == CHUNK_OP:
            return [self._variant(pass_name, spec.chunk_size, spec.state_dtype)]
        if spec.op == STEP_OP:
            label = "1 token" if spec.num_tokens == 1 else f"{spec.num_tokens} tokens"
            return [Variant(label, self._step, outputs_of(spec, pass_name))]
        make, label = getattr(self, _SCAN_MAKERS[pass_name]), f"chunk {spec.chunk_size}"
        return [Variant(label, make, outputs_of(spec, pass_name))]

    def searching(self) -> contextlib.AbstractContextManager[Search]:
        """Around the first call: records, and may thin, a search that the backend makes in it."""
        return contextlib.nullcontext(Search())

    def _function(self, op: str) -> Callable[..., Any]:
        """The public op with this backend chosen: validation and dispatch are part of what a user pays."""
        import tilegym

        public = getattr(tilegym.ops, op)
        name = self.name
        return lambda *args, **kwargs: public(*args, backend=name, **kwargs)

    def _variant(self, pass_name: str, chunk_size: int, state_dtype: torch.dtype) -> Variant:
        """A pass of `mamba2_chunk_forward` and its backward."""
        ops = PASSES[CHUNK_OP][pass_name]
        functions = {op: self._function(op) for op in ops}

        def make(inputs: Inputs) -> Call:
            args = tuple(inputs[k] for k in _CHUNK_ARGUMENTS)
            forward = functions.get(CHUNK_OP)
            backward = functions.get(CHUNK_BACKWARD)
            if backward is None:
                return lambda: forward(*args, chunk_size)
            back_args = (*args, inputs["dout"], inputs["dfinal_state"], chunk_size, state_dtype)
            if forward is None:
                return lambda: backward(*back_args)
            if not self.autograd:
                return lambda: (*forward(*args, chunk_size), *backward(*back_args))
            return through_autograd(
                lambda leaves: forward(*(leaves[k] for k in _CHUNK_ARGUMENTS), chunk_size),
                inputs,
                OUTPUTS[CHUNK_BACKWARD],
            )

        outputs = tuple(name for op in ops for name in OUTPUTS[op])
        return Variant(f"chunk {chunk_size}", make, outputs)

    def _scan(self, inputs: Inputs) -> Call:
        function, arguments = self._function(SCAN_OP), CALLS[SCAN_OP].arguments(inputs)
        return lambda: function(**arguments)

    def _scan_backward(self, inputs: Inputs) -> Call:
        function = self._function(SCAN_BACKWARD)
        *tensors, options = CALLS[SCAN_OP].resolve_args(inputs)
        needed = tuple(inputs.get(name[1:]) is not None for name in OUTPUTS[SCAN_BACKWARD])
        arguments = (*tensors, inputs["dout"], inputs.get("dfinal_state"), options, needed)
        return lambda: function(*arguments)

    def _scan_both(self, inputs: Inputs) -> Call:
        function, arguments = self._function(SCAN_OP), CALLS[SCAN_OP].arguments(inputs)
        return through_autograd(lambda leaves: function(**arguments | leaves), inputs, OUTPUTS[SCAN_BACKWARD])

    def _step(self, inputs: Inputs) -> Call:
        op = CALLS[STEP_OP]
        function, arguments = self._function(STEP_OP), op.arguments(op.fresh(inputs))
        state = arguments["state"]
        return lambda: (function(**arguments), state)


_SCAN_MAKERS = {"forward": "_scan", "backward": "_scan_backward", "forward+backward": "_scan_both"}


def through_autograd(
    forward: Callable[[dict[str, torch.Tensor]], Sequence[torch.Tensor | None]],
    inputs: Inputs,
    gradients: Sequence[str],
) -> Call:
    """A call of `forward(leaves)` and of autograd, as a training step makes them.

    `forward` returns out and final_state, or None for the latter. Gradients come in the order of
    `gradients`, named as in `passes.OUTPUTS`, and are None for inputs that are not there.
    """
    names = [gradient[1:] for gradient in gradients]
    leaves = {k: inputs[k].detach().requires_grad_() for k in names if inputs.get(k) is not None}
    cotangents = (inputs["dout"], inputs.get("dfinal_state"))

    def call() -> Sequence[torch.Tensor | None]:
        results = forward(leaves)
        pairs = [(r, g) for r, g in zip(results, cotangents, strict=True) if r is not None and g is not None]
        grads = torch.autograd.grad([r for r, _ in pairs], list(leaves.values()), [g for _, g in pairs])
        found = dict(zip(leaves, grads, strict=True))
        return (*(None if r is None else r.detach() for r in results), *map(found.get, names))

    return call
