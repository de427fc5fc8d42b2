"""A clean registration, and modules and files to register; test modules name this file in pytest_plugins."""

import sys
import textwrap

import pytest
from tilegym.backend import selector

import tilegym_mamba2
from tilegym_mamba2 import registry


@pytest.fixture
def fresh_registration(monkeypatch):
    """Each test starts with the package's own ops and no choice made, and leaves it so."""
    monkeypatch.delenv(registry.ENV, raising=False)
    monkeypatch.delenv(registry.TILEGYM_ENV, raising=False)
    tilegym_mamba2.unregister()
    selector._CURRENT_BACKENDS = "cutile"
    tilegym_mamba2.register()
    yield
    tilegym_mamba2.unregister()
    selector._CURRENT_BACKENDS = "cutile"
    tilegym_mamba2.register()


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Writes modules that can be imported during the test."""
    monkeypatch.syspath_prepend(tmp_path)
    written = []

    def write(name, source):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)
        for target in [t for t in registry._loaded if t.startswith(f"{name}:")]:
            del registry._loaded[target]


@pytest.fixture
def toml(tmp_path):
    def write(text, name="other.toml"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write
