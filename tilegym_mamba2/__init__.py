"""Mamba-2 ops for TileGym: importing this package registers them as `tilegym.ops.<name>`."""

import importlib
from typing import TYPE_CHECKING, Any

from tilegym_mamba2.errors import BackendUnavailable, RegistryError
from tilegym_mamba2.ops import (
    mamba2_chunk_backward,
    mamba2_chunk_forward,
    mamba2_chunk_scan,
    mamba2_state_update,
)
from tilegym_mamba2.registry import register, unregister, use_backend

if TYPE_CHECKING:
    from tilegym_mamba2 import interpreter
    from tilegym_mamba2.backends.cutile.warmup import warmup
    from tilegym_mamba2.spec import SPECS, Mamba2ProblemSpec

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "Mamba2ProblemSpec",
    "RegistryError",
    "SPECS",
    "interpreter",
    "mamba2_chunk_backward",
    "mamba2_chunk_forward",
    "mamba2_chunk_scan",
    "mamba2_state_update",
    "register",
    "unregister",
    "use_backend",
    "warmup",
]

# Loaded when first asked for: the kernels, and what only tests, benchmarks and the command line need.
_LAZY = {
    "Mamba2ProblemSpec": ("tilegym_mamba2.spec", "Mamba2ProblemSpec"),
    "SPECS": ("tilegym_mamba2.spec", "SPECS"),
    "interpreter": ("tilegym_mamba2.interpreter", None),
    "warmup": ("tilegym_mamba2.backends.cutile.warmup", "warmup"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name, attribute = _LAZY[name]
    module = importlib.import_module(module_name)
    return module if attribute is None else getattr(module, attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register()
