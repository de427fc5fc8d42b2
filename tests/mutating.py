"""Breaks kernels on purpose: runs their modules again, with one text replaced."""

import importlib
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

KERNELS = "tilegym_mamba2.backends.cutile.kernels"


def mutate(
    monkeypatch: pytest.MonkeyPatch,
    host: Any,
    modules: Sequence[str],
    host_names: Mapping[str, str],
    mutation: tuple[str, str, str],
) -> None:
    """Hands the host module kernels in which one text is another, until the test ends.

    Args:
        host: the module that launches the kernels.
        modules: names of the kernels' modules; importers come after what they import, to see its mutant.
        host_names: module of kernels to the name under which the host has it.
        mutation: (module, what its source says, what it says instead); it must say so just once.
    """
    changed, before, after = mutation
    for name in modules[modules.index(changed) :]:
        original: Any = importlib.import_module(f"{KERNELS}.{name}")
        source = original.__spec__.loader.get_source(original.__name__)
        if name == changed:
            assert source.count(before) == 1, f"{changed} says {before!r} {source.count(before)} times"
            source = source.replace(before, after)
        mutant = types.ModuleType(original.__name__)
        mutant.__package__, mutant.__file__ = original.__package__, original.__file__
        # The new module stands in for the old one while later ones import it.
        monkeypatch.setitem(sys.modules, original.__name__, mutant)
        exec(compile(source, original.__file__, "exec"), mutant.__dict__)
        if name in host_names:
            monkeypatch.setattr(host, host_names[name], mutant)
