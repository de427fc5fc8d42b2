"""Registers the ops of the registry file into TileGym and picks the backend of every call.

The one place that touches TileGym's internals: `dispatcher._REGISTRY` (op → backend → function),
`selector._AVAILABLE_BACKENDS` (the names that `tilegym.set_backend` takes), `selector._CURRENT_BACKENDS`
(the name that was set) and the op's attribute on `tilegym.ops` and `tilegym.ops.ops`.
"""

import contextlib
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import tilegym
import torch
from tilegym.backend import dispatcher, selector
from torch.autograd import forward_ad

from tilegym_mamba2 import registry_file
from tilegym_mamba2.backends.cutile import availability
from tilegym_mamba2.errors import BackendUnavailable, RegistryError
from tilegym_mamba2.registry_file import OpEntry

ENV = "TILEGYM_MAMBA2_BACKEND"
TILEGYM_ENV = "CUTILE_TUTORIALS_BACKEND"
_SET_BACKEND = f"tilegym.set_backend or {TILEGYM_ENV}"

logger = logging.getLogger("tilegym_mamba2")

_MISSING = object()
_lock = threading.RLock()
_preferred: ContextVar[str | None] = ContextVar("tilegym_mamba2_backend", default=None)


class _Loaded(NamedTuple):
    function: Callable[..., Any]
    supports: Callable[..., tuple[bool, str]] | None
    differentiable: bool


class _Saved(NamedTuple):
    """What TileGym had under an op's name before us, and what we put there."""

    table: dict[str, Any]
    attributes: dict[str, Any]
    entries: dict[str, Any]
    public: Callable[..., Any]


# Replaced, never edited: a call in another thread sees the old or the new table.
_ops: dict[str, OpEntry] = {}
_generation = 0
# By target, "module:function"; filled at the first call, and kept after unregister.
_loaded: dict[str, _Loaded] = {}
_saved: dict[str, _Saved] = {}
_added_backends: set[str] = set()
# Stands in selector._CURRENT_BACKENDS while nobody has chosen: equal to the name there, yet its own object.
_unchosen: str | None = None
_tilegym_initial: str = selector._CURRENT_BACKENDS
_logged: set[tuple[str, ...]] = set()


# ---- reading and registering


def load(path: str | Path | None = None) -> dict[str, OpEntry]:
    """Reads and checks a registry file (by default the package's own) and registers nothing.

    Ops of `path` that are registered already come merged with their registered entry.
    Raises RegistryError naming file, table and key.
    """
    shipped = registry_file.shipped_path()
    if path is None:
        return registry_file.read(shipped, {})
    return registry_file.read(path, _ops or registry_file.read(shipped, {}))


def ops() -> dict[str, OpEntry]:
    """What is registered now: op → entry. TileGym's own implementation is listed as backend "tilegym"."""
    return dict(_ops)


def generation() -> int:
    """Changes with every `register` and `unregister`: what was resolved before holds while this does."""
    return _generation


def register(path: str | Path | None = None) -> None:
    """Registers the package's ops into TileGym, then those of the registry file at `path`, if given.

    A file adds ops, or backends to ops that exist (then [ops.NAME.backends] alone is enough). Registering
    the same again changes nothing. Raises RegistryError for a bad file and for a backend that exists with
    another target; then nothing is registered.
    """
    global _ops, _generation
    with _lock:
        wanted = dict(_ops) or registry_file.read(registry_file.shipped_path(), {})
        if path is not None:
            wanted |= registry_file.read(path, wanted)
        for name in wanted:
            _refuse_foreign_name(name, path)
        # Ours first, TileGym's second: a call that reaches us finds its op.
        _ops = {name: _save_tilegyms(entry) for name, entry in wanted.items()}
        _generation += 1
        for entry in _ops.values():
            _install(entry)
        _install_backend_names({backend for entry in _ops.values() for backend in entry.backends})


def unregister() -> None:
    """Gives TileGym back as it was before `register`: ops, attributes and backend names.

    A backend set since stays set if TileGym itself knows it; one that only we brought ("torch") goes back
    to what was set before us. What others registered into TileGym meanwhile stays. Harmless when nothing
    is registered.
    """
    global _ops, _unchosen, _generation
    with _lock:
        for name, saved in _saved.items():
            _uninstall(name, saved)
        _saved.clear()
        for backend in _added_backends:
            selector._AVAILABLE_BACKENDS.discard(backend)
        if selector._CURRENT_BACKENDS is _unchosen or selector._CURRENT_BACKENDS in _added_backends:
            selector._CURRENT_BACKENDS = _tilegym_initial
        _unchosen = None
        _added_backends.clear()
        _logged.clear()
        _ops = {}
        _generation += 1


def _tilegym_modules() -> dict[str, ModuleType]:
    return {"tilegym.ops": tilegym.ops, "tilegym.ops.ops": sys.modules["tilegym.ops.ops"]}


def _refuse_foreign_name(name: str, path: str | Path | None) -> None:
    path = path or registry_file.shipped_path()
    taken = name not in _saved and name not in dispatcher._REGISTRY and hasattr(tilegym.ops, name)
    if taken:
        raise RegistryError(f"{path}: table [ops], key {name!r}: tilegym.ops.{name} exists and is not an op")


def _save_tilegyms(entry: OpEntry) -> OpEntry:
    """Keeps what TileGym has under the op's name; the entry with TileGym's implementation as a backend."""
    name = entry.name
    if name not in _saved:
        _saved[name] = _Saved(
            table=dict(dispatcher._REGISTRY.get(name, {})),
            attributes={key: vars(m).get(name, _MISSING) for key, m in _tilegym_modules().items()},
            entries={},
            public=_public_op(entry),
        )
    builtin = _saved[name].table.get("cutile")
    if builtin is None:
        return entry
    target = f"{getattr(builtin, '__module__', 'tilegym')}:{getattr(builtin, '__name__', name)}"
    _loaded[target] = _Loaded(builtin, _tilegym_supports, differentiable=False)
    return replace(entry, backends=entry.backends | {"tilegym": target})


def _install(entry: OpEntry) -> None:
    name, saved = entry.name, _saved[entry.name]
    table = dispatcher._REGISTRY.setdefault(name, {})
    # "cutile" always: it is where TileGym's dispatcher ends up when it finds nothing else.
    for backend in {**entry.backends, "cutile": None}:
        if backend not in saved.entries:
            saved.entries[backend] = _dispatcher_entry(name, backend, saved.public)
        table[backend] = saved.entries[backend]
    for module in _tilegym_modules().values():
        setattr(module, name, saved.public)


def _uninstall(name: str, saved: _Saved) -> None:
    table = dispatcher._REGISTRY.get(name, {})
    for backend, ours in saved.entries.items():
        if table.get(backend) is ours:
            if backend in saved.table:
                table[backend] = saved.table[backend]
            else:
                del table[backend]
    if not table:
        dispatcher._REGISTRY.pop(name, None)
    for key, module in _tilegym_modules().items():
        if vars(module).get(name) is saved.public:
            if saved.attributes[key] is _MISSING:
                delattr(module, name)
            else:
                setattr(module, name, saved.attributes[key])


def _install_backend_names(names: set[str]) -> None:
    global _unchosen, _tilegym_initial
    new = names - {"tilegym"} - selector._AVAILABLE_BACKENDS
    _added_backends.update(new)
    selector._AVAILABLE_BACKENDS.update(new)
    if _unchosen is None:
        _tilegym_initial = selector._CURRENT_BACKENDS
        _unchosen = _own_copy(_tilegym_initial)
        # "cutile" without the environment variable is TileGym's start value, which nobody chose.
        if _tilegym_initial == "cutile" and TILEGYM_ENV not in os.environ:
            selector._CURRENT_BACKENDS = _unchosen


def _own_copy(text: str) -> str:
    return text.encode().decode()


def _public_op(entry: OpEntry) -> Callable[..., Any]:
    from tilegym_mamba2 import ops as public_ops

    op = vars(public_ops).get(entry.name) if entry.name in public_ops.__all__ else None
    if op is None:
        op = _generic_op(entry)
    # TileGym's own tools read this to find the registry entry of a public op.
    op._tilegym_op_name = entry.name
    return op


def _generic_op(entry: OpEntry) -> Callable[..., Any]:
    name = entry.name

    def op(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        _, function = resolve(name, backend, args + tuple(kwargs.values()))
        return function(*args, **kwargs)

    op.__name__ = op.__qualname__ = name
    op.__doc__ = (
        f"{entry.summary}\n\nArguments are the backend's own; `backend` names the backend of this call."
    )
    return op


def _dispatcher_entry(name: str, backend: str, public: Callable[..., Any]) -> Callable[..., Any]:
    """What TileGym's dispatcher finds under `backend`; reached by callers who took its wrapper before us."""

    def entry(*args: Any, **kwargs: Any) -> Any:
        return public(*args, backend=_asked_for(sys._getframe(1), backend), **kwargs)

    entry.__name__ = entry.__qualname__ = name
    entry.__doc__ = public.__doc__
    return entry


def _asked_for(caller: FrameType, key: str) -> str | None:
    """The `backend=` that a call through TileGym's dispatcher was given.

    The dispatcher takes the argument away before it calls us, and it may have fallen back to another key;
    only its local still tells a choice from a default.
    """
    if caller.f_globals.get("__name__") != dispatcher.__name__:
        return key
    default = None if key == selector._CURRENT_BACKENDS else key
    return caller.f_locals.get("explicit_backend", default)


# ---- picking a backend


@contextlib.contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Within the block (or decorated function), our ops use `backend`, unless a call names its own.

    Goes before `tilegym.set_backend`, and leaves TileGym's other ops alone. Local to the thread or task.
    Raises BackendUnavailable if no registered op has such a backend.
    """
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a string, got {type(backend).__name__}")
    names = dict.fromkeys(name for entry in _ops.values() for name in entry.backends)
    if backend not in names:
        raise BackendUnavailable(f"no op has a backend {backend!r}; there are: {', '.join(names)}")
    token = _preferred.set(backend)
    try:
        yield
    finally:
        _preferred.reset(token)


def resolve(op_name: str, backend: str | None = None, args: tuple[Any, ...] = ()) -> tuple[str, Callable]:
    """The backend of one call and its function.

    Args:
        op_name: a registered op.
        backend: the call's own choice, which goes before all others.
        args: the call's tensors by position (None where there is none), from which is decided what can run.

    The first of these that made a choice decides: `backend`, `use_backend`, `tilegym.set_backend`, the
    environment variable TILEGYM_MAMBA2_BACKEND. Without any: "cutile" if it can run on `args`, else "torch",
    else the op's other backends; the reason is logged once.

    Raises BackendUnavailable if the chosen backend cannot run, RegistryError for an unknown op.
    """
    entry = _ops.get(op_name)
    if entry is None:
        known = ", ".join(_ops) or "none: call tilegym_mamba2.register()"
        raise RegistryError(f"op {op_name!r} is not registered; registered ops: {known}")
    backend, origin = choice(backend)
    if backend is None:
        return _automatic(entry, args)
    if backend not in entry.backends:
        raise BackendUnavailable(_no_such_backend(entry, backend, origin))
    function, reason = _try(entry, backend, args)
    if function is None:
        raise BackendUnavailable(
            f"{op_name}: backend {backend!r} (chosen by {origin}) cannot run: {reason}. "
            f"Backends of this op: {', '.join(entry.backends)}"
        )
    return backend, function


def choice(backend: str | None = None) -> tuple[str | None, str]:
    """The backend that somebody chose, and by what (see `resolve`); (None, "") where it is automatic."""
    if backend is not None:
        if not isinstance(backend, str):
            raise TypeError(f"backend must be a string or None, got {type(backend).__name__}")
        return backend, "backend="
    preferred = _preferred.get()
    if preferred is not None:
        return preferred, "use_backend"
    current = selector._CURRENT_BACKENDS
    if current is not _unchosen:
        return current, _SET_BACKEND
    named = os.environ.get(ENV)
    return (named, ENV) if named else (None, "")


def only_in(backend: str, op_name: str, other: str) -> bool:
    """Whether `op_name` has this backend and `other` has not."""
    return _has(op_name, backend) and not _has(other, backend)


def _has(op_name: str, backend: str) -> bool:
    entry = _ops.get(op_name)
    return entry is not None and backend in entry.backends


def backend_status(op_name: str) -> dict[str, tuple[bool, str]]:
    """For each backend of the op, whether it can run on this machine, and why (not)."""
    if op_name not in _ops:
        raise RegistryError(f"op {op_name!r} is not registered; registered ops: {', '.join(_ops)}")
    entry = _ops[op_name]
    status = {}
    for backend in entry.backends:
        requirement = _REQUIREMENTS.get(backend)
        ok, reason = requirement(None) if requirement else (True, "ready")
        if ok:
            try:
                _load(entry, backend)
            except (BackendUnavailable, RegistryError) as error:
                ok, reason = False, str(error)
            except Exception as error:  # a user's module may raise anything; the other rows still stand
                ok, reason = False, f"{entry.backends[backend]}: {type(error).__name__}: {error}"
        status[backend] = (ok, reason)
    return status


def _no_such_backend(entry: OpEntry, backend: Any, origin: str) -> str:
    return (
        f"{entry.name} has no backend {backend!r} (chosen by {origin}); it has: {', '.join(entry.backends)}"
    )


def _automatic(entry: OpEntry, args: tuple[Any, ...]) -> tuple[str, Callable]:
    reasons = [] if "cutile" in entry.backends else ["cutile: the op has no such backend"]
    for backend in entry.order:
        try:
            function, reason = _try(entry, backend, args)
        except (BackendUnavailable, TypeError, ValueError) as error:
            function, reason = None, str(error)
        if function is not None:
            if (entry.name, backend, *reasons) not in _logged:
                _logged.add((entry.name, backend, *reasons))
                why = "; ".join(reasons) or f"{backend}: can run on these tensors"
                _log_choice(entry.name, backend, why, args)
            return backend, function
        reasons.append(f"{backend}: {reason}")
    raise BackendUnavailable(f"{entry.name}: no backend can run. " + "; ".join(reasons))


def _log_choice(op_name: str, backend: str, reason: str, args: tuple[Any, ...]) -> None:
    device = _device(args)
    # On the CPU torch is what one expects; tensors on a GPU that miss the kernels deserve a warning.
    missed = backend == "torch" and device is not None and device.type == "cuda"
    level = logging.WARNING if missed else logging.INFO
    logger.log(level, "%s: backend %r chosen automatically (%s)", op_name, backend, reason)


def _try(entry: OpEntry, backend: str, args: tuple[Any, ...]) -> tuple[Callable | None, str]:
    """The backend's function if it can run on `args`, else None and the reason."""
    requirement = _REQUIREMENTS.get(backend)
    if requirement is not None:
        ok, reason = requirement(_device(args))
        if not ok:
            return None, reason
    loaded = _loaded.get(entry.backends[backend]) or _load(entry, backend)
    if not loaded.differentiable and forward_ad._current_level >= 0:
        for arg in args:
            if isinstance(arg, torch.Tensor) and forward_ad.unpack_dual(arg).tangent is not None:
                advice = " (use backend='torch')" if _torch_differentiates(entry) else ""
                return None, f"it computes no forward-mode derivatives{advice}"
    if not loaded.differentiable and torch.is_grad_enabled():
        for arg in args:
            if arg is not None and getattr(arg, "requires_grad", False):
                advice = "backend='torch', " if _torch_differentiates(entry) else ""
                return None, (
                    "it computes no gradients and an input requires grad "
                    f"(use {advice}torch.no_grad(), or detach the inputs)"
                )
    if loaded.supports is not None:
        ok, reason = loaded.supports(entry.name, *args)
        if not ok:
            return None, reason
    return loaded.function, ""


def _torch_differentiates(entry: OpEntry) -> bool:
    return "torch" in entry.backends and _load(entry, "torch").differentiable


def _device(args: tuple[Any, ...]) -> torch.device | None:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg.device
    return None


def _load(entry: OpEntry, backend: str) -> _Loaded:
    """Imports a backend's module, once, and checks what could not be checked without importing it."""
    target = entry.backends[backend]
    if target in _loaded:
        return _loaded[target]
    module_name, name = target.split(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise BackendUnavailable(
            f"{entry.name}: backend {backend!r}: importing {module_name!r} failed: {error}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        what = "is not a callable" if hasattr(module, name) else "does not exist"
        raise RegistryError(f"table [ops.{entry.name}.backends], key {backend!r}: target {target!r} {what}")
    differentiable = getattr(function, "DIFFERENTIABLE", getattr(module, "DIFFERENTIABLE", False))
    loaded = _Loaded(function, getattr(module, "supports", None), bool(differentiable))
    return _loaded.setdefault(target, loaded)


def _tilegym_supports(op_name: str, *args: Any) -> tuple[bool, str]:
    """TileGym's two Mamba-2 ops take no None, and say so only with an AttributeError from within."""
    if op_name in _PUBLISHED and any(arg is None for arg in args):
        return False, "TileGym's own implementation needs every tensor, and one is None"
    return True, ""


_PUBLISHED = ("mamba2_chunk_forward", "mamba2_chunk_backward")
_REQUIREMENTS: dict[str, Callable[[torch.device | None], tuple[bool, str]]] = {
    "cutile": availability.available,
    "tilegym": availability.gpu_available,
}
