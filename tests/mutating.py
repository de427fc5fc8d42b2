"""Breaks kernels on purpose: runs their modules again with one text replaced."""

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
    """Gives the host module kernels in which `before` says `after` instead, until the test ends.

    Args:
        host: the module that launches the kernels.
        modules: names of the kernels' modules, importers after what they import.
        host_names: module of kernels → the name under which the host has it.
        mutation: (module, before, after).
    """
    changed, before, after = mutation
    for name in modules[modules.index(changed) :]:
        original = importlib.import_module(f"{KERNELS}.{name}")
        source = original.__spec__.loader.get_source(original.__name__)
        if name == changed:
            assert before in source, f"{changed} no longer says {before!r}"
            source = source.replace(before, after)
        mutant = types.ModuleType(original.__name__)
        mutant.__package__, mutant.__file__ = original.__package__, original.__file__
        # The new module stands in for the old one while later ones import it.
        monkeypatch.setitem(sys.modules, original.__name__, mutant)
        exec(compile(source, original.__file__, "exec"), mutant.__dict__)
        if name in host_names:
            monkeypatch.setattr(host, host_names[name], mutant)
