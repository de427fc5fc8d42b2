"""The forward op of the cutile backend; its kernels are not in this version, and a call says so."""

from typing import Any, NoReturn

from tilegym_mamba2.errors import BackendUnavailable


def supports(op_name: str, *tensors: Any) -> tuple[bool, str]:
    """Whether the backend takes these tensors: not yet."""
    return False, "its kernels are not part of this version of tilegym-mamba2"


def mamba2_chunk_forward(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises BackendUnavailable."""
    raise BackendUnavailable("backend 'cutile': " + supports("mamba2_chunk_forward")[1])
