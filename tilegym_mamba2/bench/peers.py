"""What can be measured: this package's backends, TileGym's built-in op and mamba_ssm's Triton kernels.

A backend offers one or more *variants* of a pass (a chunk size of its own choosing); each variant is
timed and the best one stands for the backend. A variant turns a set of inputs into a callable whose
results are named as in `OUTPUTS`.
"""

import collections
import contextlib
import importlib
import importlib.util
import itertools
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

FORWARD_OP, BACKWARD_OP = "mamba2_chunk_forward", "mamba2_chunk_backward"
OUTPUTS: dict[str, tuple[str, ...]] = {
    FORWARD_OP: ("out", "final_state"),
    BACKWARD_OP: ("dx", "da", "db", "dc", "dd", "ddt", "dinit_state"),
}
PASSES: dict[str, tuple[str, ...]] = {
    "forward": (FORWARD_OP,),
    "backward": (BACKWARD_OP,),
    "forward+backward": (FORWARD_OP, BACKWARD_OP),
}
DEFAULT_BACKENDS = ("cutile", "torch", "tilegym", "mamba_ssm")
OWN_BACKENDS = ("cutile", "torch")

Inputs = Mapping[str, Any]
Results = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """One way of running a backend: `make(inputs)` gives the callable that is timed."""

    label: str
    make: Callable[[Inputs], Callable[[], Sequence[torch.Tensor]]]
    outputs: tuple[str, ...]

    def named(self, results: Sequence[torch.Tensor]) -> Results:
        return dict(zip(self.outputs, results, strict=True))


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


def _through_autograd(
    forward: Callable[..., Sequence[torch.Tensor]], inputs: Inputs
) -> Callable[[], Sequence[torch.Tensor]]:
    """A call of `forward(x, a, b, c, d, dt, init_state)` and of autograd, as a training step makes them."""
    leaves = [inputs[k].detach().requires_grad_() for k in ("x", "a", "b", "c", "d", "dt", "init_state")]
    gradients = (inputs["dout"], inputs["dfinal_state"])

    def call() -> Sequence[torch.Tensor]:
        results = forward(*leaves)
        grads = torch.autograd.grad(results, leaves, gradients)
        return (*(r.detach() for r in results), *grads)

    return call


class Backend:
    """A backend of the op registry, by name: `cutile`, `torch`, or one that a user's file added."""

    # Whether autograd joins forward and backward; otherwise the two ops are called one after the other.
    autograd = True

    def __init__(self, name: str) -> None:
        self.name = name

    def status(self, pass_name: str) -> tuple[bool, str]:
        """Whether the pass can run here at all, and why not."""
        from tilegym_mamba2 import registry

        for op in PASSES[pass_name]:
            if op not in registry.ops():
                return False, f"no op {op} is registered"
            known = registry.backend_status(op)
            if self.name not in known:
                return False, f"{op} has no backend {self.name!r}; it has {', '.join(known)}"
            ok, reason = known[self.name]
            if not ok:
                return False, reason
        return True, ""

    def variants(self, spec: Any, pass_name: str) -> list[Variant]:
        return [self._variant(pass_name, spec.chunk_size, spec.state_dtype)]

    def searching(self) -> contextlib.AbstractContextManager[Search]:
        """Around the first call: records, and may thin, a search that the backend makes in it."""
        return contextlib.nullcontext(Search())

    def _function(self, op: str) -> Callable[..., Any]:
        """The public op with this backend chosen: validation and dispatch are part of what a user pays."""
        import tilegym

        public = getattr(tilegym.ops, op)
        name = self.name
        return lambda *args: public(*args, backend=name)

    def _variant(self, pass_name: str, chunk_size: int, state_dtype: torch.dtype) -> Variant:
        ops = PASSES[pass_name]
        functions = {op: self._function(op) for op in ops}

        def make(inputs: Inputs) -> Callable[[], Sequence[torch.Tensor]]:
            args = tuple(inputs[k] for k in ("x", "a", "b", "c", "d", "dt", "init_state"))
            forward = functions.get(FORWARD_OP)
            backward = functions.get(BACKWARD_OP)
            if backward is None:
                return lambda: forward(*args, chunk_size)
            back_args = (*args, inputs["dout"], inputs["dfinal_state"], chunk_size, state_dtype)
            if forward is None:
                return lambda: backward(*back_args)
            if not self.autograd:
                return lambda: (*forward(*args, chunk_size), *backward(*back_args))
            return _through_autograd(lambda *leaves: forward(*leaves, chunk_size), inputs)

        outputs = tuple(itertools.chain.from_iterable(OUTPUTS[op] for op in ops))
        return Variant(f"chunk {chunk_size}", make, outputs)


# --- TileGym -------------------------------------------------------------------------------------

# Its kernels hold an L x L float32 tile in registers, so 128 is the largest chunk that serves it.
TILEGYM_LARGEST_CHUNK = 128
_REQUIRED = {"BLOCK_STATE": (64, 128), "persistent": (True, False)}


class TileGym(Backend):
    """TileGym's own implementation, called as it is, past this package's validation and dispatch.

    It searches its configurations again at the first call of every new shape. `thin` bounds that search
    to so many configurations for each kernel, a sample in which every block size and every structure of
    the kernel appears; the rows say so. Compiled candidates stay in cuda-tile's cache on disk, so that a
    second length of the same problem costs only the measuring.
    """

    autograd = False

    def __init__(self, thin: int | None = None, chunks: Sequence[int] = ()) -> None:
        super().__init__("tilegym")
        self.thin = thin
        self.chunks = tuple(chunks)

    def variants(self, spec: Any, pass_name: str) -> list[Variant]:
        chunks = self.chunks or (min(spec.chunk_size, TILEGYM_LARGEST_CHUNK),)
        return [self._variant(pass_name, chunk, spec.state_dtype) for chunk in chunks]

    def searching(self) -> contextlib.AbstractContextManager[Search]:
        return thinned_search(self.thin)

    def _function(self, op: str) -> Callable[..., Any]:
        from tilegym_mamba2 import registry

        return registry.resolve(op, "tilegym")[1]


@contextlib.contextmanager
def thinned_search(limit: int | None) -> Iterator[Search]:
    """While active, TileGym's search sees at most `limit` configurations a kernel (None: all of them).

    The kernel that sums the decay takes 7 of the published benchmark's 292 µs: half as many for it.
    """
    module = importlib.import_module("tilegym.ops.cutile.mamba2")
    record = Search(limit)
    if module.is_autotune_disabled():
        record.off = "no search: TILEGYM_DISABLE_AUTOTUNE is set, so its first configuration is timed"
    original = module.exhaustive_search

    def search(
        configs: Sequence[Any], stream: Any, grid_fn: Any, kernel: Any, *args: Any, **kwargs: Any
    ) -> Any:
        name = kernel._pyfunc.__name__
        bound = limit if limit is None or "cumsum" not in name else max(2, limit // 2)
        chosen = thin(configs, bound)
        start = time.perf_counter()
        result = original(chosen, stream, grid_fn, kernel, *args, **{**kwargs, "quiet": True})
        record.kernels.append(
            {
                "kernel": name,
                "searched": len(chosen),
                "of": len(configs),
                "seconds": round(time.perf_counter() - start, 2),
                "failed": len(result.failures),
                "best": {k: v for k, v in vars(result.best.config).items()},
            }
        )
        return result

    module.exhaustive_search = search
    try:
        yield record
    finally:
        module.exhaustive_search = original


def thin(configs: Sequence[Any], limit: int | None) -> list[Any]:
    """At most `limit` of `configs` (objects with attributes), chosen so that little is missed.

    First every combination of BLOCK_STATE 64 and 128 with persistent and not that the space has, then
    whatever adds most unseen pairs of structural values, then the least used values, latencies counting
    least. Deterministic.
    """
    if limit is None or len(configs) <= limit:
        return list(configs)
    chosen: list[int] = []
    seen: set[tuple] = set()
    used: collections.Counter = collections.Counter()

    def parts(i: int) -> tuple[tuple, list, list]:
        items = list(vars(configs[i]).items())
        structure = [item for item in items if not item[0].endswith(("LAT", "LATENCY"))]
        required = tuple(item for item in structure if item[0] in _REQUIRED)
        return required, structure, items

    def gain(i: int) -> tuple[float, ...]:
        required, structure, items = parts(i)
        first = required not in seen and all(value in _REQUIRED[name] for name, value in required)
        pairs = sum(pair not in seen for pair in itertools.combinations(structure, 2))
        return first, pairs, -sum(used[s] for s in structure), -sum(used[item] for item in items), -i

    while len(chosen) < limit:
        best = max((i for i in range(len(configs)) if i not in chosen), key=gain)
        chosen.append(best)
        required, structure, items = parts(best)
        seen.add(required)
        seen.update(itertools.combinations(structure, 2))
        used.update(items)
    return [configs[i] for i in sorted(chosen)]


# --- mamba_ssm -----------------------------------------------------------------------------------


class MambaSsm(Backend):
    """mamba_ssm's Triton kernels; the better of chunk 128 and 256 stands for it.

    Its kernels are tuned by Triton at the first call of a new P, N and chunk size (T is not in the key).
    """

    def __init__(self, chunks: Sequence[int] = ()) -> None:
        super().__init__("mamba_ssm")
        self.chunks = tuple(chunks) or (128, 256)

    def status(self, pass_name: str) -> tuple[bool, str]:
        if not torch.cuda.is_available():
            return False, "its Triton kernels need a GPU"
        try:
            _ssd_combined()
        except ImportError as error:
            return False, f"cannot be imported: {error}"
        return True, ""

    def variants(self, spec: Any, pass_name: str) -> list[Variant]:
        outputs = tuple(itertools.chain.from_iterable(OUTPUTS[op] for op in PASSES[pass_name]))
        makers = {"forward": _mamba_forward, "backward": _mamba_backward, "forward+backward": _mamba_both}
        make = makers[pass_name]
        return [
            Variant(f"chunk {chunk}", lambda inputs, chunk=chunk: make(inputs, chunk), outputs)
            for chunk in self.chunks
        ]


def _ssd_combined() -> types.ModuleType:
    """mamba_ssm's scan module, also where the package's `__init__` fails on its missing CUDA extension."""
    name = "mamba_ssm.ops.triton.ssd_combined"
    try:
        return importlib.import_module(name)
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
        return importlib.import_module(name)
    except ImportError:
        del sys.modules["mamba_ssm"]
        raise first from None


def _mamba_forward(inputs: Inputs, chunk: int) -> Callable[[], Sequence[torch.Tensor]]:
    scan = _ssd_combined().mamba_chunk_scan_combined
    x, a, b, c, d, dt, init_state = (inputs[k] for k in ("x", "a", "b", "c", "d", "dt", "init_state"))

    def call() -> Sequence[torch.Tensor]:
        with torch.no_grad():
            return scan(x, dt, a, b, c, chunk, D=d, initial_states=init_state, return_final_states=True)

    return call


def _mamba_backward(inputs: Inputs, chunk: int) -> Callable[[], Sequence[torch.Tensor]]:
    backward = _ssd_combined()._mamba_chunk_scan_combined_bwd
    x, a, b, c, d, dt, init_state = (inputs[k] for k in ("x", "a", "b", "c", "d", "dt", "init_state"))
    dout, dfinal_state = inputs["dout"], inputs["dfinal_state"]
    out = _mamba_forward(inputs, chunk)()[0]

    def call() -> Sequence[torch.Tensor]:
        with torch.no_grad():
            dx, ddt, da, db, dc, dd, _, _, dinit_state, *_ = backward(
                dout, x, dt, a, b, c, out, chunk, D=d, initial_states=init_state, dfinal_states=dfinal_state
            )
        return dx, da, db, dc, dd, ddt, dinit_state

    return call


def _mamba_both(inputs: Inputs, chunk: int) -> Callable[[], Sequence[torch.Tensor]]:
    scan = _ssd_combined().mamba_chunk_scan_combined

    def forward(x: torch.Tensor, a: Any, b: Any, c: Any, d: Any, dt: Any, init_state: Any) -> Any:
        return scan(x, dt, a, b, c, chunk, D=d, initial_states=init_state, return_final_states=True)

    return _through_autograd(forward, inputs)


def backends(
    names: Sequence[str],
    *,
    thin_tilegym: int | None = None,
    tilegym_chunks: Sequence[int] = (),
    mamba_chunks: Sequence[int] = (),
) -> list[Backend]:
    """The named backends; names other than the peers' are looked up in the op registry."""
    special = {
        "tilegym": lambda: TileGym(thin_tilegym, tilegym_chunks),
        "mamba_ssm": lambda: MambaSsm(mamba_chunks),
    }
    return [special[name]() if name in special else Backend(name) for name in dict.fromkeys(names)]
