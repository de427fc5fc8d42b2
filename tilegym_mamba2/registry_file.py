"""Reads and checks registry files; knows nothing of TileGym and imports no backend.

A target such as "package.module:function" is checked without running the module: the module must be
findable, and its source must bind the name at top level to something that is not plainly a value.
What the source cannot tell (a name that is imported or computed) is checked at the first call.
"""

import ast
import importlib.util
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tilegym_mamba2.errors import RegistryError

SCHEMA = 1
OP_KEYS = ("summary", "spec", "outputs", "backends", "budgets")
# "tilegym" is TileGym's own implementation and "default" the key of its error stub.
RESERVED_BACKENDS = ("tilegym", "default")

_BACKEND_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_BUDGET_NAME = re.compile(r"(float64|float32|bfloat16|float16)(_[a-z0-9_]+)?")
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_VALUES = (
    ast.Constant,
    ast.List,
    ast.Tuple,
    ast.Dict,
    ast.Set,
    ast.JoinedStr,
    ast.ListComp,
    ast.DictComp,
    ast.SetComp,
)


@dataclass(frozen=True)
class OpEntry:
    """One op: what its table in the registry file says.

    `backends` maps a backend's name to "module:function"; `budgets` maps a dtype's name, alone
    ("bfloat16") or with the kind of inputs ("bfloat16_zero_mean"), to the greatest allowed
    ‖y − ref‖ / ‖ref‖ of each output against float64.
    """

    name: str
    summary: str
    spec: str
    outputs: tuple[str, ...]
    backends: dict[str, str] = field(default_factory=dict)
    budgets: dict[str, dict[str, float]] = field(default_factory=dict)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """In which order the backends are tried where nobody has chosen."""
        first = tuple(backend for backend in ("cutile", "torch") if backend in self.backends)
        return first + tuple(backend for backend in self.backends if backend not in first)


def shipped_path() -> Path:
    """The registry file of the package: inside it in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "ops_registry.toml"
    return inside if inside.exists() else package.parent / "ops_registry.toml"


def read(path: str | Path, known: Mapping[str, OpEntry]) -> dict[str, OpEntry]:
    """Reads one file: its ops, each merged with the op of the same name in `known`.

    Raises RegistryError, naming file, table and key, for anything that is wrong in it.
    """
    path = Path(path).expanduser()
    try:
        with open(path, "rb") as file:
            data = tomllib.load(file)
    except OSError as error:
        raise RegistryError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RegistryError(f"{path}: not valid TOML: {error}") from error
    return _File(path, known).entries(data)


@dataclass(frozen=True)
class _File:
    path: Path
    known: Mapping[str, OpEntry]

    def wrong(self, table: str, key: str, problem: str) -> RegistryError:
        return RegistryError(f"{self.path}: table [{table}], key {key!r}: {problem}")

    def entries(self, data: dict[str, Any]) -> dict[str, OpEntry]:
        if "schema" not in data:
            raise RegistryError(f"{self.path}: top level, key 'schema': missing, must be {SCHEMA}")
        if data["schema"] != SCHEMA or isinstance(data["schema"], bool):
            raise RegistryError(
                f"{self.path}: top level, key 'schema': unknown schema {data['schema']!r}, must be {SCHEMA}"
            )
        for key in data:
            if key not in ("schema", "ops"):
                raise RegistryError(f"{self.path}: top level, key {key!r}: unknown key, expected schema, ops")
        ops = data.get("ops")
        if not isinstance(ops, dict) or not ops:
            raise RegistryError(f"{self.path}: top level, key 'ops': must hold at least one table [ops.NAME]")
        return {name: self.entry(name, table) for name, table in ops.items()}

    def entry(self, name: str, data: Any) -> OpEntry:
        if not name.isidentifier():
            raise self.wrong("ops", name, "an op's name must be a Python identifier")
        if not isinstance(data, dict):
            raise self.wrong("ops", name, f"must be a table, got {data!r}")
        table = f"ops.{name}"
        for key in data:
            if key not in OP_KEYS:
                raise self.wrong(table, key, f"unknown key, expected one of {', '.join(OP_KEYS)}")
        old = self.known.get(name)
        summary = self.text(table, data, "summary", old.summary if old else None)
        spec = self.text(table, data, "spec", old.spec if old else None)
        self.check_target(table, "spec", spec)
        outputs = self.outputs(table, data, old)
        backends = self.backends(table, data.get("backends"), old)
        budgets = self.budgets(table, data.get("budgets", {}), outputs, old)
        new = OpEntry(name, summary, spec, outputs, backends, budgets)
        if old is None:
            return new
        return replace(old, backends=old.backends | backends, budgets=old.budgets | budgets)

    def text(self, table: str, data: dict[str, Any], key: str, old: str | None) -> str:
        value = data.get(key, old)
        if value is None:
            raise self.wrong(table, key, "missing (only an op that is registered already can leave it out)")
        if not isinstance(value, str) or not value:
            raise self.wrong(table, key, f"must be a string that is not empty, got {value!r}")
        self.same(table, key, value, old)
        return value

    def same(self, table: str, key: str, value: Any, old: Any) -> None:
        if old is not None and value != old:
            raise self.wrong(table, key, f"is {value!r}, but what is registered already says {old!r}")

    def outputs(self, table: str, data: dict[str, Any], old: OpEntry | None) -> tuple[str, ...]:
        if "outputs" not in data and old is not None:
            return old.outputs
        value = data.get("outputs")
        named = isinstance(value, list) and value and all(isinstance(v, str) and v for v in value)
        if not named or len(set(value)) != len(value):
            raise self.wrong(table, "outputs", f"must be a list of different names, got {value!r}")
        self.same(table, "outputs", tuple(value), old.outputs if old else None)
        return tuple(value)

    def backends(self, table: str, data: Any, old: OpEntry | None) -> dict[str, str]:
        if not isinstance(data, dict) or not data:
            raise self.wrong(table, "backends", "an op needs at least one backend, NAME = 'module:function'")
        table += ".backends"
        for key, target in data.items():
            if not _BACKEND_NAME.fullmatch(key) or key in RESERVED_BACKENDS:
                raise self.wrong(
                    table,
                    key,
                    "a backend's name is made of a-z, 0-9, '_' and '-', and is not "
                    + " or ".join(RESERVED_BACKENDS),
                )
            self.check_target(table, key, target)
            self.same(table, key, target, old.backends.get(key) if old else None)
        return dict(data)

    def budgets(
        self, table: str, data: Any, outputs: tuple[str, ...], old: OpEntry | None
    ) -> dict[str, dict[str, float]]:
        if not isinstance(data, dict):
            raise self.wrong(table, "budgets", f"must be a table of tables, got {data!r}")
        table += ".budgets"
        for name, limits in data.items():
            if not _BUDGET_NAME.fullmatch(name):
                raise self.wrong(
                    table, name, "must start with a dtype: float64, float32, bfloat16 or float16"
                )
            if not isinstance(limits, dict):
                raise self.wrong(table, name, f"must be a table, got {limits!r}")
            for output, limit in limits.items():
                if output not in outputs:
                    raise self.wrong(
                        f"{table}.{name}", output, f"unknown output, expected one of {', '.join(outputs)}"
                    )
                if not isinstance(limit, int | float) or isinstance(limit, bool) or not 0 < limit < 1:
                    raise self.wrong(
                        f"{table}.{name}", output, f"must be a number between 0 and 1, got {limit!r}"
                    )
            self.same(table, name, limits, old.budgets.get(name) if old else None)
        return {name: {output: float(v) for output, v in limits.items()} for name, limits in data.items()}

    def check_target(self, table: str, key: str, target: Any) -> None:
        if not isinstance(target, str) or not _TARGET.fullmatch(target):
            raise self.wrong(table, key, f"must be of the form 'module:function', got {target!r}")
        problem = target_problem(target)
        if problem:
            raise self.wrong(table, key, problem)


def target_problem(target: str) -> str | None:
    """Why "module:function" cannot be called, as far as can be told without importing the module."""
    module, name = target.split(":")
    loaded = sys.modules.get(module)
    if loaded is not None and hasattr(loaded, name):
        return None if callable(getattr(loaded, name)) else _not_callable(target)
    try:
        # This imports the packages above the module, never the module itself.
        spec = importlib.util.find_spec(module)
    except (ImportError, AttributeError, ValueError) as error:
        return f"missing target {target!r}: module {module!r} cannot be found ({error})"
    if spec is None:
        return f"missing target {target!r}: module {module!r} cannot be found on sys.path"
    get_source: Callable[[str], str | None] | None = getattr(spec.loader, "get_source", None)
    if get_source is None:
        return None
    try:
        source = get_source(module)
        names = None if source is None else _top_level(source)
    except (ImportError, OSError, SyntaxError) as error:
        return f"target {target!r}: the source of module {module!r} cannot be read ({error})"
    if names is None or "__getattr__" in names or ("*" in names and name not in names):
        return None
    if name not in names:
        return f"missing target {target!r}: module {module!r} has no {name!r}"
    return None if names[name] else _not_callable(target)


def _not_callable(target: str) -> str:
    return f"target {target!r} is not a callable"


@cache
def _top_level(source: str) -> dict[str, bool]:
    """The names that a module's source binds at top level, and whether each may be callable."""
    names: dict[str, bool] = {}
    _collect(ast.parse(source).body, names)
    return names


def _collect(body: list[Any], names: dict[str, bool]) -> None:
    # A name bound twice counts as callable if one binding may be: `except ImportError: f = None` is common.
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = True
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = True
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                value = isinstance(target, ast.Name) and isinstance(node.value, _VALUES)
                for leaf in ast.walk(target):
                    if isinstance(leaf, ast.Name):
                        names[leaf.id] = names.get(leaf.id, False) or not value
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for inner in (node.body, *(getattr(node, part, []) for part in ("orelse", "finalbody"))):
                _collect(inner, names)
            for handler in getattr(node, "handlers", []):
                _collect(handler.body, names)
        else:
            # Loops and the like: whatever they bind anywhere may be a callable.
            for leaf in ast.walk(node):
                if isinstance(leaf, ast.Name) and isinstance(leaf.ctx, ast.Store):
                    names[leaf.id] = True
