"""What the wheel holds, and that the package works from it, outside the checkout."""

import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import tilegym_mamba2

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, "-w", folder, ROOT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("tilegym_mamba2-*.whl")
    return path


def test_wheel_holds_the_registry_file_the_licence_and_every_module(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert archive.read("tilegym_mamba2/ops_registry.toml") == (ROOT / "ops_registry.toml").read_bytes()
    package = ROOT / "tilegym_mamba2"
    modules = {str(path.relative_to(ROOT)) for path in package.rglob("*.py")}
    assert modules <= names
    assert "tilegym_mamba2/LICENSE" in names
    info = f"tilegym_mamba2-{tilegym_mamba2.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"tilegym_mamba2", info}


def test_wheel_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        info = f"tilegym_mamba2-{tilegym_mamba2.__version__}.dist-info"
        text = archive.read(f"{info}/METADATA").decode()
        assert "tilegym-mamba2 = tilegym_mamba2.cli:app" in archive.read(f"{info}/entry_points.txt").decode()
    for line in (
        "Name: tilegym-mamba2",
        f"Version: {tilegym_mamba2.__version__}",
        "License-Expression: MIT",
        "Requires-Python: >=3.11",
        "Requires-Dist: tilegym>=1.5.0",
        "Requires-Dist: cuda-tile",
        "Requires-Dist: torch>=2.9.1",
        "Requires-Dist: cuda-tile[tileiras]; extra == 'cutile'",
        "Provides-Extra: test",
        "Provides-Extra: bench",
    ):
        assert line in text.splitlines()


def test_wheel_works_outside_the_checkout(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    source = f"""
import sys
sys.path.insert(0, {str(tmp_path / "site")!r})
import tilegym, torch, tilegym_mamba2
from tilegym_mamba2 import registry_file
print(tilegym_mamba2.__file__)
print(registry_file.shipped_path())
one = torch.ones(1)
shape = torch.ones(1, 9, 1, 1)
out, state = tilegym.ops.mamba2_chunk_forward(
    x=shape, a=-0.5 * one, b=shape, c=shape, d=0 * one, dt=shape[..., 0], init_state=None, chunk_size=4
)
print(round(state.item(), 5))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", source],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    package = tmp_path / "site" / "tilegym_mamba2"
    assert done.stdout.splitlines() == [
        str(package / "__init__.py"),
        str(package / "ops_registry.toml"),
        "2.51326",
    ]


def test_installed_version_and_command():
    assert metadata.version("tilegym-mamba2") == tilegym_mamba2.__version__
    (command,) = metadata.entry_points(group="console_scripts", name="tilegym-mamba2")
    assert command.value == "tilegym_mamba2.cli:app"


def test_every_public_name_exists():
    for name in tilegym_mamba2.__all__:
        assert getattr(tilegym_mamba2, name) is not None


def test_readme_shows_the_two_commands_that_ci_runs():
    text = (ROOT / "README.md").read_text()
    assert "python3 -m pip install -e . && tilegym-mamba2 run" in text
    assert "python3 -m pip install -e '.[test]' && python3 -m pytest -q" in text
    ci = (ROOT / ".ci" / "run").read_text()
    assert "python3 -m pytest -q" in ci and "-e '.[test]'" in ci
