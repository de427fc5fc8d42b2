"""The peers: TileGym's built-in op and mamba_ssm's Triton kernels, beside the registry's backends."""

import collections
import contextlib
import importlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .backend import Backend, Inputs, Results, Search, Variant
from .mamba import MambaSsm
from .passes import OUTPUTS, PASSES

__all__ = [
    "DEFAULT_BACKENDS",
    "OUTPUTS",
    "OWN_BACKENDS",
    "PASSES",
    "Backend",
    "Inputs",
    "MambaSsm",
    "Results",
    "Search",
    "TileGym",
    "Variant",
    "backends",
    "thin",
    "thinned_search",
]

DEFAULT_BACKENDS = ("cutile", "torch", "tilegym", "mamba_ssm")
OWN_BACKENDS = ("cutile", "torch")

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
