"""Rules for the whole suite: no silent fallback, NaN in fresh memory, GPU tests only where there is a GPU."""

import functools
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

# Read when TileGym is imported; a parity test must never compare a backend with itself.
os.environ["DISABLE_FALLBACK"] = "1"
# COLUMNS: the width of tables, which several processes of pytest inherit from the first one's readline.
for _name in ("TILEGYM_MAMBA2_BACKEND", "TILEGYM_MAMBA2_INTERPRET", "COLUMNS"):
    os.environ.pop(_name, None)

# Tensors are small here: threads that wait for each other took 2 cores four times as long.
torch.set_num_threads(1)

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    tuning_asked_for = re.search(r"(?<!not )\bfull_tune\b", config.option.markexpr)
    reasons = {}
    if gpus < 1:
        reasons["gpu"] = "no GPU"
    if gpus < 2:
        reasons["two_gpus"] = f"needs two GPUs, found {gpus}"
    if not tuning_asked_for:
        reasons["full_tune"] = "takes minutes: ask for it with -m full_tune"
    for item in items:
        for marker, reason in reasons.items():
            if marker in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def tileiras() -> str:
    """The path of the tile compiler. CI must have it, so its absence is a failure and not a skip."""
    from tilegym_mamba2.backends.cutile.availability import find_tileiras

    path = find_tileiras()
    if path is None:
        pytest.fail("tileiras is not installed: pip install 'tilegym-mamba2[test]'")
    return path


@pytest.fixture(scope="session", autouse=True)
def nan_in_fresh_memory() -> Iterator[None]:
    """Fresh memory is NaN, so that an element that nobody wrote cannot look right by luck."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "empty_strided", "empty_permuted"):
            patch.setattr(torch, name, _filled(getattr(torch, name)))
        for name in ("new_empty", "new_empty_strided"):
            patch.setattr(torch.Tensor, name, _filled(getattr(torch.Tensor, name)))
        yield


def _filled(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(allocate)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        with torch.no_grad():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
            elif tensor.dtype != torch.bool and not tensor.is_complex():
                tensor.fill_(torch.iinfo(tensor.dtype).max)
        return tensor

    return wrapper
