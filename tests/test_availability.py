"""What keeps cuda.tile kernels from running here, and whether the answer says it."""

import ctypes
import subprocess
import sys
import types
from dataclasses import replace

import pytest
import torch

from tests.registering import problem
from tilegym_mamba2 import BackendUnavailable, registry
from tilegym_mamba2.backends.cutile import availability
from tilegym_mamba2.backends.cutile.availability import INSTALL, WITHOUT_GPU, Probe

H200 = Probe(
    torch="2.13.0",
    torch_cuda="13.0",
    gpu_name="NVIDIA H200",
    capability=(9, 0),
    driver="580.95.05",
    cuda_driver=13000,
    cuda_tile="1.7.0",
    tileiras_path="/bin/tileiras",
    tileiras_version="13.4.92",
    tileiras_gpus=("sm_80", "sm_90", "sm_100"),
)


@pytest.fixture(autouse=True)
def nothing_remembered():
    availability.forget()
    yield
    availability.forget()


def test_a_whole_machine_is_ready():
    assert availability.judge_probe(H200) is None
    assert H200.arch == "sm_90"
    assert replace(H200, capability=None).arch is None


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"cuda_driver": 12040, "driver": "550.54.15", "gpu_name": None, "capability": None},
            ["driver is too old", "found 550.54.15 (CUDA 12.4)", "needed R580 or newer (CUDA 13)", INSTALL],
        ),
        ({"cuda_driver": 12080, "driver": None}, ["driver is too old", "found CUDA 12.8", "R580", INSTALL]),
        (
            {"gpu_name": None, "capability": None},
            ["no GPU", "found torch", "needs an NVIDIA GPU", WITHOUT_GPU],
        ),
        ({"gpu_name": None, "capability": None, "cuda_tile": None}, ["no GPU", INSTALL, WITHOUT_GPU]),
        ({"gpu_name": None, "capability": None, "tileiras_path": None}, ["no GPU", INSTALL, WITHOUT_GPU]),
        ({"cuda_tile": None}, ["cuda-tile is not installed", INSTALL]),
        (
            {"tileiras_path": None, "tileiras_version": None, "tileiras_gpus": ()},
            ["tileiras", "is absent", "nvidia-cuda-tileiras", "PATH", "CUDA_HOME", INSTALL],
        ),
        (
            {"tileiras_version": "13.2.51", "tileiras_gpus": ("sm_100", "sm_120")},
            [
                "tileiras is too old for this GPU",
                "found 13.2.51 at /bin/tileiras",
                "knows sm_100, sm_120",
                "NVIDIA H200 is sm_90",
                "needs 13.3 or newer",
                INSTALL,
            ],
        ),
        (
            {"tileiras_version": None, "tileiras_gpus": ()},
            ["too old", "found an unknown version", "knows no GPU by name", INSTALL],
        ),
        ({"tileiras_version": "13.2.51", "tileiras_gpus": ()}, ["found 13.2.51", "needs 13.3 or newer"]),
        (
            {"gpu_name": "Next", "capability": (13, 0)},
            ["found 13.4.92", "the Next is sm_130", "needs 13.1 or newer"],
        ),
    ],
)
def test_each_lack_is_named_with_what_was_found(changes, parts):
    text = availability.judge_probe(replace(H200, **changes))
    for part in parts:
        assert part in text


def test_a_version_is_enough_where_tileiras_lists_no_gpus():
    assert availability.judge_probe(replace(H200, tileiras_gpus=())) is None


def test_no_gpu_says_what_torch_is(monkeypatch):
    nothing = replace(H200, gpu_name=None, capability=None, cuda_driver=None, driver=None)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert f"torch {torch.__version__}, which is built without CUDA" in availability.judge_probe(nothing)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "with CUDA 13.0, and no NVIDIA driver" in availability.judge_probe(nothing)
    driver = replace(nothing, cuda_driver=13000)
    assert "a driver, but no device that torch can use" in availability.judge_probe(driver)


def test_tensors_on_the_cpu(monkeypatch):
    ok, reason = availability.available(torch.device("cpu"))
    assert not ok
    assert reason.startswith("the tensors are on the CPU and it needs them on an NVIDIA GPU (found: ")
    availability.forget()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ok, reason = availability.available(torch.device("cpu"))
    assert not ok and "2 NVIDIA GPUs that torch can use: move the tensors there" in reason
    assert WITHOUT_GPU not in reason
    assert "the tensors are on meta" in availability.available(torch.device("meta"))[1]


def test_only_what_is_missing_is_to_be_installed(monkeypatch, tileiras):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    nothing = replace(H200, gpu_name=None, capability=None)
    reason = availability.available(torch.device("cpu"))[1]
    for text in (reason, availability.judge_probe(nothing)):
        assert "pip install" not in text and "no GPU" in text
        for part in ("'torch'", "tilegym_mamba2.interpreter.interpret()", "TILEGYM_MAMBA2_INTERPRET=1"):
            assert part in text
    availability.forget()
    monkeypatch.setattr(availability, "_installed", lambda package: None)
    assert INSTALL in availability.available(torch.device("cpu"))[1]


def test_the_error_of_a_call_holds_the_reason():
    inputs = tuple(problem().values())
    with pytest.raises(BackendUnavailable) as error:
        registry.resolve("mamba2_chunk_forward", "cutile", inputs)
    text = str(error.value)
    assert "backend 'cutile' (chosen by backend=) cannot run: the tensors are on the CPU" in text
    assert torch.cuda.is_available() or WITHOUT_GPU in text
    assert isinstance(error.value, RuntimeError)


def test_the_answer_is_kept_until_forgotten(monkeypatch):
    asked = []
    monkeypatch.setattr(availability, "probe", lambda device: asked.append(device) or H200)
    device = torch.device("cuda:0")
    assert [availability.available(device) for _ in range(3)] == [(True, "ready")] * 3
    assert asked == [device]
    availability.forget()
    assert availability.gpu_available(device) == (True, "ready")
    assert asked == [device, device]
    monkeypatch.setattr(availability, "probe", lambda device: replace(H200, cuda_tile=None))
    assert not availability.available(torch.device("cuda:1"))[0]


def test_the_interpreter_makes_cpu_tensors_fine(monkeypatch):
    module = types.ModuleType("tilegym_mamba2.interpreter")
    module.is_active = lambda: True
    monkeypatch.setitem(sys.modules, "tilegym_mamba2.interpreter", module)
    assert availability.available(torch.device("cpu")) == (True, "tile interpreter, on CPU tensors")
    assert availability.available() == (True, "tile interpreter, on CPU tensors")
    assert not availability.gpu_available(torch.device("cpu"))[0]
    module.is_active = lambda: False
    assert not availability.available(torch.device("cpu"))[0]


def test_the_interpreters_environment_variable_counts(monkeypatch):
    monkeypatch.delenv("TILEGYM_MAMBA2_INTERPRET", raising=False)
    monkeypatch.delitem(sys.modules, "tilegym_mamba2.interpreter", raising=False)
    assert not availability.interpreter_active()
    assert "tilegym_mamba2.interpreter" not in sys.modules
    monkeypatch.setenv("TILEGYM_MAMBA2_INTERPRET", "1")
    assert availability.interpreter_active()


def test_probe_finds_the_compiler_of_this_environment(tileiras):
    found = availability.probe(torch.device("cpu"))
    assert found.tileiras_path == tileiras
    assert found.tileiras_version.startswith("13.")
    assert {"sm_90", "sm_100"} <= set(found.tileiras_gpus)
    assert found.cuda_tile and found.torch == torch.__version__
    assert found.gpu_name is None and found.arch is None


def test_tileiras_that_does_not_answer(tmp_path):
    silent = tmp_path / "tileiras"
    silent.write_text("#!/bin/sh\nexit 1\n")
    silent.chmod(0o755)
    assert availability.tileiras_facts(str(silent)) == (None, ())
    assert availability.tileiras_facts(str(tmp_path / "nowhere")) == (None, ())


def test_search_without_cuda_tiles_help(tmp_path, monkeypatch):
    compiler = tmp_path / "cuda" / "bin" / "tileiras"
    compiler.parent.mkdir(parents=True)
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setitem(sys.modules, "nvidia.cu13", None)
    monkeypatch.setitem(sys.modules, "cuda.tile._compile", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert availability.find_tileiras() == str(compiler)
    monkeypatch.setenv("PATH", str(compiler.parent))
    monkeypatch.delenv("CUDA_HOME")
    assert availability.find_tileiras() == str(compiler)


def test_an_absent_compiler_is_no_error(monkeypatch):
    import cuda.tile._compile as compile_module

    def absent():
        raise FileNotFoundError("'tileiras' compiler not found")

    monkeypatch.setattr(compile_module, "_find_compiler_bin", absent)
    assert availability.find_tileiras() is None


def test_driver_versions(monkeypatch, tmp_path):
    class Library:
        def cuDriverGetVersion(self, pointer):
            pointer._obj.value = 13020
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    assert availability.cuda_driver() == 13020

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert availability.cuda_driver() is None
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release\nGCC 12.2.0\n"
    monkeypatch.setattr(availability.Path, "read_text", lambda self: text)
    assert availability.display_driver() == "580.95.05"
    monkeypatch.setattr(availability.Path, "read_text", lambda self: missing("none"))
    assert availability.display_driver() is None


def test_asking_about_cpu_tensors_starts_no_cuda():
    source = (
        "import torch\nfrom tilegym_mamba2.backends.cutile import availability\n"
        "availability.available(torch.device('cpu'))\nprint(torch.cuda.is_initialized())\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", source], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.gpu
def test_this_gpu_is_ready():
    assert availability.available(torch.device("cuda", 0)) == (True, "ready")
    found = availability.probe()
    assert found.gpu_name and found.arch in found.tileiras_gpus and found.cuda_driver >= 13000
