"""Whether cuda.tile kernels can run here, and if not, what is missing, what was found and what to install.

Imports no kernel. Creates no CUDA context for tensors on the CPU; for a GPU it asks once per device.
"""

import ctypes
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

INSTALL = "pip install 'tilegym-mamba2[cutile]'"
WITHOUT_GPU = (
    "Without a GPU there are backend 'torch' and, for the kernels of 'cutile' on CPU tensors, the tile "
    "interpreter: tilegym_mamba2.interpreter.interpret() or TILEGYM_MAMBA2_INTERPRET=1"
)
# CUDA 13.0 is the first that loads what tileiras makes; it came with the R580 drivers.
MIN_CUDA_DRIVER = 13000
MIN_TILEIRAS = (13, 1)
# Targets that tileiras learned later than its first release.
MIN_TILEIRAS_FOR = {"sm_90": (13, 3)}


@dataclass(frozen=True)
class Probe:
    """What was found on this machine. None or empty where there is nothing.

    `capability` is (major, minor); `driver` the display driver's version ("580.95.05") where the system
    tells; `cuda_driver` the CUDA version that the driver speaks, 1000 × major + 10 × minor (13000 for 13.0).
    """

    torch: str
    torch_cuda: str | None
    gpu_name: str | None
    capability: tuple[int, int] | None
    driver: str | None
    cuda_driver: int | None
    cuda_tile: str | None
    tileiras_path: str | None
    tileiras_version: str | None
    tileiras_gpus: tuple[str, ...]

    @property
    def arch(self) -> str | None:
        """The GPU as tileiras names it: "sm_90"."""
        return None if self.capability is None else "sm_{}{}".format(*self.capability)


_verdicts: dict[torch.device, tuple[bool, str]] = {}


def available(device: torch.device | None = None) -> tuple[bool, str]:
    """Whether the cutile backend can run on tensors of `device` (None: on the current GPU), and the reason.

    Tensors on the CPU are fine while the tile interpreter is active. Cheap when repeated.
    """
    verdict = _verdicts.get(device)
    if verdict is not None and verdict[0]:
        return verdict
    # The interpreter is switched at run time, so its answer is never kept.
    if (device is None or device.type == "cpu") and interpreter_active():
        return True, "tile interpreter, on CPU tensors"
    return gpu_available(device)


def gpu_available(device: torch.device | None = None) -> tuple[bool, str]:
    """As `available`, for code that the tile interpreter does not run."""
    verdict = _verdicts.get(device)
    if verdict is None:
        verdict = _verdicts[device] = _judge(device)
    return verdict


def forget() -> None:
    """Drops what was found out, so that the next question looks again (after an installation, say)."""
    _verdicts.clear()
    tileiras_facts.cache_clear()


def interpreter_active() -> bool:
    """Whether the tile interpreter stands in for the GPU."""
    module = sys.modules.get("tilegym_mamba2.interpreter")
    if module is None:
        if "TILEGYM_MAMBA2_INTERPRET" not in os.environ:
            return False
        from tilegym_mamba2 import interpreter as module
    return module.is_active()


def probe(device: torch.device | None = None) -> Probe:
    """Looks at the GPU (`device`, or the current one), its driver, cuda-tile and tileiras.

    Starts tileiras twice (once per process and path) and, where torch finds a GPU, CUDA.
    """
    name, capability = None, None
    if torch.cuda.is_available() and (device is None or device.type == "cuda"):
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    path = find_tileiras()
    version, gpus = tileiras_facts(path) if path else (None, ())
    return Probe(
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        gpu_name=name,
        capability=capability,
        driver=display_driver(),
        cuda_driver=cuda_driver(),
        cuda_tile=_installed("cuda-tile"),
        tileiras_path=path,
        tileiras_version=version,
        tileiras_gpus=gpus,
    )


def _judge(device: torch.device | None) -> tuple[bool, str]:
    if device is not None and device.type != "cuda":
        place = "the CPU" if device.type == "cpu" else device.type
        # Not by find_tileiras, which imports cuda.tile: too long for a call that ends in the torch backend.
        whole = _installed("cuda-tile") is not None and find_program("tileiras") is not None
        return False, (
            f"the tensors are on {place} and it needs them on an NVIDIA GPU (found: {_gpu_text()})"
            f"{_advice(whole, torch.cuda.device_count() > 0)}"
        )
    problem = judge_probe(probe(device))
    return (False, problem) if problem else (True, "ready")


def judge_probe(found: Probe) -> str | None:
    """What keeps cuda.tile kernels from running on the probed machine; None if nothing does."""
    # The driver first: torch reports a GPU behind an old driver as no GPU at all.
    if found.cuda_driver is not None and found.cuda_driver < MIN_CUDA_DRIVER:
        return (
            f"the NVIDIA driver is too old: found {_driver_text(found)}, needed R580 or newer (CUDA 13). "
            f"Update the driver, then: {INSTALL}"
        )
    if found.gpu_name is None:
        whole = found.cuda_tile is not None and found.tileiras_path is not None
        return (
            f"it needs an NVIDIA GPU and there is no GPU: found {_no_gpu_text(found)}{_advice(whole, False)}"
        )
    if found.cuda_tile is None:
        return f"cuda-tile is not installed. Install: {INSTALL}"
    if found.tileiras_path is None:
        return (
            "tileiras, the compiler of cuda-tile, is absent: looked for the nvidia-cuda-tileiras package, "
            f"then on PATH, in CUDA_HOME and in /usr/local/cuda*. Install: {INSTALL}"
        )
    if not _knows(found):
        needed = ".".join(map(str, MIN_TILEIRAS_FOR.get(found.arch, MIN_TILEIRAS)))
        return (
            f"tileiras is too old for this GPU: found {found.tileiras_version or 'an unknown version'} at "
            f"{found.tileiras_path}, which knows {', '.join(found.tileiras_gpus) or 'no GPU by name'}; the "
            f"{found.gpu_name} is {found.arch} and needs {needed} or newer. Install: {INSTALL}"
        )
    return None


def _advice(installed: bool, gpu: bool) -> str:
    """What to do about tensors that are on no GPU."""
    install = "" if installed else f". Install: {INSTALL}"
    return install if gpu else f"{install}. {WITHOUT_GPU}"


def _knows(found: Probe) -> bool:
    if found.tileiras_gpus:
        return found.arch in found.tileiras_gpus
    if found.tileiras_version is None:
        return False
    version = tuple(int(part) for part in found.tileiras_version.split(".")[:2])
    return version >= MIN_TILEIRAS_FOR.get(found.arch, MIN_TILEIRAS)


def _gpu_text() -> str:
    # torch counts devices without creating a context.
    count = torch.cuda.device_count()
    if count:
        return f"{count} NVIDIA GPU{'s' if count > 1 else ''} that torch can use: move the tensors there"
    return f"no GPU, {_no_gpu_text(None)}"


def _no_gpu_text(found: Probe | None) -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__}, which is built without CUDA"
    driver = found.cuda_driver if found else cuda_driver()
    rest = "no NVIDIA driver" if driver is None else "a driver, but no device that torch can use"
    return f"torch {torch.__version__} with CUDA {torch.version.cuda}, and {rest}"


def _driver_text(found: Probe) -> str:
    speaks = f"CUDA {found.cuda_driver // 1000}.{found.cuda_driver % 1000 // 10}"
    return f"{found.driver} ({speaks})" if found.driver else speaks


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cuda_driver() -> int | None:
    """CUDA version of the installed driver as 1000 × major + 10 × minor, None without a driver."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        version = ctypes.c_int()
        # This call works without cuInit, hence without a context.
        status = library.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value if status == 0 and version.value else None


def display_driver() -> str | None:
    """Version of the NVIDIA kernel module ("580.95.05"), None where the system does not tell."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return match.group() if match else None


def find_tileiras() -> str | None:
    """Path of the tileiras that cuda.tile will start."""
    try:
        from cuda.tile._compile import _find_compiler_bin
    except ImportError:
        return find_program("tileiras")
    try:
        return _find_compiler_bin().path
    except OSError:
        return None


def find_program(name: str) -> str | None:
    """Path of a program of the CUDA toolkit, searched where cuda.tile searches tileiras, in its order."""
    places = [os.environ.get("PATH", os.defpath)]
    try:
        import nvidia.cu13

        places.insert(0, os.path.join(nvidia.cu13.__path__[0], "bin"))
    except ImportError:
        pass
    if home := os.environ.get("CUDA_HOME"):
        places.append(os.path.join(home, "bin"))
    places += sorted(map(str, Path("/usr/local").glob("cuda*/bin")), reverse=True)
    return next((path for place in places if (path := shutil.which(name, path=place))), None)


@cache
def tileiras_facts(path: str) -> tuple[str | None, tuple[str, ...]]:
    """Version of the tileiras at `path` ("13.4.92", None if it does not say) and the GPUs it knows."""
    version = re.search(r"\bV(\d+\.\d+(?:\.\d+)*)", _output(path, "--version"))
    gpus = re.findall(r"=(sm_\d+[a-z]?)\b", _output(path, "--help"))
    return (version.group(1) if version else None), tuple(dict.fromkeys(gpus))


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout + done.stderr
