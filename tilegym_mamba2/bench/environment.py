"""What a measurement was made with: device, driver, versions, date. A part of every row."""

import datetime
import functools
import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

PACKAGES = {
    "torch": "torch",
    "cuda_tile": "cuda-tile",
    "tilegym": "tilegym",
    "mamba_ssm": "mamba-ssm",
    "triton": "triton",
}
# Which versions a backend's result depends on: rows made with others are measured again on --resume.
DEPENDS = {
    "cutile": ("device", "cuda_tile", "tileiras", "code"),
    "torch": ("device", "torch", "code"),
    "tilegym": ("device", "cuda_tile", "tileiras", "tilegym"),
    "mamba_ssm": ("device", "triton", "torch", "mamba_ssm"),
}


def describe(device: torch.device, versions: Mapping[str, str] = {}) -> dict[str, str | None]:  # noqa: B006
    """The environment block of a row; `versions` names those of packages that carry no metadata."""
    import tilegym_mamba2

    block: dict[str, str | None] = {
        "device": device_name(device),
        "driver": _probe().driver if device.type == "cuda" else None,
        "python": platform.python_version(),
        "tilegym_mamba2": tilegym_mamba2.__version__,
        "code": code_hash(),
        "tileiras": _probe().tileiras_version,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    block |= {name: _version(package) for name, package in PACKAGES.items()}
    return block | dict(versions)


def versions_of(backend: str, env: Mapping[str, str | None]) -> tuple[str | None, ...]:
    """What of `env` the result of `backend` depends on."""
    return tuple(env.get(name) for name in DEPENDS.get(backend, ("device", "torch", "code")))


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_model()}, {torch.get_num_threads()} threads"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _probe() -> Any:
    from tilegym_mamba2.backends.cutile.availability import probe

    return probe()


@functools.cache
def code_hash() -> str:
    """Eight digits that change with this package's backends and tuning tables."""
    import tilegym_mamba2

    root = Path(tilegym_mamba2.__file__).parent
    digest = hashlib.sha256()
    backends = root / "backends"
    paths = [*backends.rglob("*.py"), *backends.rglob("*.json")]
    for pattern in ("ops*.py", "validate*.py", "auto*.py", "forms.py", "options.py", "registry.py"):
        paths += root.glob(pattern)
    for path in sorted(paths):
        digest.update(os.fsencode(path.relative_to(root)))
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
