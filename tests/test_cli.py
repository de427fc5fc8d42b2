"""The command line: what each command prints, its exit status, and one-line errors."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

import tilegym_mamba2
from tilegym_mamba2 import registry
from tilegym_mamba2.cli import app
from tilegym_mamba2.reference import float64_reference
from tilegym_mamba2.spec import SPECS, select

SMALL = (
    "--num-tokens",
    "70",
    "--num-heads",
    "2",
    "--state-size",
    "16",
    "--head-size",
    "16",
    "--device",
    "cpu",
)
TENSORS = ("x", "a", "b", "c", "d", "dt", "init_state")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run_json(*arguments: object) -> dict:
    result = invoke("run", *SMALL, "--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def assert_one_line_error(result: Result, *parts: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    for part in parts:
        assert part in result.stderr


@pytest.fixture
def problem_file(tmp_path: Path) -> Path:
    spec = SPECS["bf16-slow"]
    inputs = spec.get_sample_inputs(with_reference=False, with_backward=False, device="cpu")
    path = tmp_path / "problem.safetensors"
    save_file({name: inputs[name] for name in TENSORS}, path)
    return path


# ---- run


@pytest.mark.skipif(torch.cuda.is_available(), reason="the default differs on a GPU")
def test_run_without_arguments() -> None:
    result = invoke("run")
    assert result.exit_code == 0, result.output
    for part in (
        "cpu on cpu",
        "T 2048",
        "small spec `cpu`",
        "torch",
        "out",
        "final_state",
        "tokens/s",
        "yes",
    ):
        assert part in result.stdout


def test_run_prints_one_json_object() -> None:
    result = run_json("--decay", "slow", "--dtype", "fp32", "--backend", "torch")
    keys = "spec backend device errors budgets ok median_ms tokens_per_s versions"
    assert set(result) == set(keys.split())
    assert result["backend"] == "torch" and result["ok"] is True
    assert result["spec"]["num_tokens"] == 70 and result["spec"]["dtype"] == "float32"
    assert result["spec"]["dt_dtype"] == "float32" and result["spec"]["decay"] == "slow"
    assert set(result["errors"]) == set(result["budgets"]) == {"out", "final_state"}
    assert 0 < result["errors"]["out"] < result["budgets"]["out"]
    assert result["tokens_per_s"] == pytest.approx(70 / result["median_ms"] * 1e3)
    assert result["versions"]["tilegym_mamba2"] == tilegym_mamba2.__version__
    assert result["versions"]["torch"] == torch.__version__


def test_run_takes_a_named_spec_and_every_field() -> None:
    fields = {
        "batch_size": 3,
        "num_tokens": 5,
        "num_groups": 2,
        "num_heads": 4,
        "state_size": 8,
        "head_size": 6,
        "chunk_size": 2,
        "seed": 9,
        "decay": "none",
        "layout": "sliced",
    }
    options = [part for name, value in fields.items() for part in (f"--{name.replace('_', '-')}", value)]
    dtypes = ("--dtype", "fp16", "--state-dtype", "bfloat16", "--dt-dtype", "fp32")
    result = invoke("run", "--json", "--device", "cpu", "--spec", "p80-n96", *options, *dtypes)
    assert result.exit_code == 0, result.output
    spec = json.loads(result.stdout)["spec"]
    expected = {"dtype": "float16", "state_dtype": "bfloat16", "dt_dtype": "float32", "name": "p80-n96"}
    assert spec.items() >= (fields | expected).items()


@pytest.mark.parametrize(
    "name", ["scan-layer-packed", "scan-padded", "step-layer-several", "step-layer-pool"]
)
def test_run_of_other_ops(name: str, tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    result = invoke(
        "run", "--json", "--device", "cpu", "--spec", name, "--backend", "torch", "--output", path
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ok"] is True and report["spec"]["op"] == SPECS[name].op
    assert set(report["errors"]) == {"out", "final_state"}
    tokens = SPECS[name].batch_size * SPECS[name].num_tokens
    assert report["tokens_per_s"] == pytest.approx(tokens / report["median_ms"] * 1e3)
    expected = SPECS[name].get_sample_inputs(device="cpu")
    written = load_file(path)
    # One step from the states as drawn, however often it was timed.
    assert torch.allclose(written["final_state"].double(), expected["final_state"], rtol=1e-2, atol=1e-2)


def test_run_of_no_tokens() -> None:
    result = run_json("--num-tokens", "0")
    assert result["ok"] is True and result["tokens_per_s"] == 0


def test_a_broken_budget_is_exit_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = registry.ops()["mamba2_chunk_forward"]
    for variant in registered.budgets:
        monkeypatch.setitem(registered.budgets[variant], "out", 1e-9)
    result = invoke("run", *SMALL, "--num-tokens", "600", "--json")
    assert result.exit_code == 1
    summary = json.loads(result.stdout)
    assert summary["ok"] is False and summary["budgets"]["out"] == 1e-9
    table = invoke("run", *SMALL, "--num-tokens", "600")
    assert table.exit_code == 1 and "no" in table.stdout.split()


def test_compare_shows_every_backend() -> None:
    result = run_json("--compare")
    rows = {row["backend"]: row for row in result["compare"]}
    assert rows.keys() == registry.ops()["mamba2_chunk_forward"].backends.keys()
    assert rows["torch"]["ok"] is True
    assert "needs them on an NVIDIA GPU" in rows["tilegym"]["failure"]
    assert rows["tilegym"]["median_ms"] is None and rows["tilegym"]["ok"] is False
    table = invoke("run", *SMALL, "--compare")
    assert table.exit_code == 0 and "tilegym did not run: " in table.stdout


def test_run_on_a_users_tensors(problem_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "result.safetensors"
    result = invoke(
        "run", "--input", problem_file, "--output", output, "--chunk-size", 32, "--device", "cpu", "--json"
    )
    assert result.exit_code == 0, result.output
    spec = json.loads(result.stdout)["spec"]
    assert spec["input"] == str(problem_file) and spec["chunk_size"] == 32 and spec["num_tokens"] == 200
    written = load_file(output)
    reference = float64_reference(load_file(problem_file))
    assert written["out"].dtype == torch.bfloat16 and written["final_state"].dtype == torch.float32
    for name, tensor in written.items():
        assert torch.allclose(tensor.double(), reference[name], rtol=1e-2, atol=1e-2)


def test_d_and_init_state_may_be_left_out(problem_file: Path) -> None:
    tensors = load_file(problem_file)
    save_file({name: tensors[name] for name in ("x", "a", "b", "c", "dt")}, problem_file)
    result = invoke("run", "--input", problem_file, "--device", "cpu")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--spec", "publishd"), ("no spec is called 'publishd'; did you mean published",)),
        (("--spec", "qqqq"), ("`tilegym-mamba2 specs` lists them",)),
        (("--num-heads", "3", "--num-groups", "2"), ("num_groups must divide num_heads",)),
        (("--num-tokens", "-1"), ("num_tokens must be an integer of at least 0",)),
        (("--dtype", "int8"), ("--dtype must be one of bf16", "got 'int8'")),
        (("--state-dtype", "f32"), ("--state-dtype must be one of",)),
        (("--decay", "fast"), ("decay must be one of published, slow",)),
        (("--backend", "nix"), ("no backend 'nix'", "cutile, torch, tilegym")),
        (("--backend", "cutile", "--device", "cpu"), ("tensors are on the CPU",)),
        (("--device", "tpu"), ("--device must be cpu, cuda or cuda:N, got 'tpu'",)),
        (("--device", "cuda:99"), ("--device cuda:99: torch finds",)),
        (("--input", "/no/such/file"), ("/no/such/file: no such file",)),
        (("--output", "/no/such/folder/out.safetensors"), ("its folder does not exist",)),
        (("--input", "x.safetensors", "--spec", "cpu", "--seed", "1"), ("leave out --seed, --spec",)),
    ],
)
def test_run_refuses_in_one_line(arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:
    assert_one_line_error(invoke("run", *arguments), *parts)


def test_bad_input_files(tmp_path: Path, problem_file: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no tensors here")
    assert_one_line_error(invoke("run", "--input", text), "cannot be read as safetensors")
    tensors = load_file(problem_file)

    def error_of(changed: dict) -> Result:
        save_file(changed, tmp_path / "changed.safetensors")
        return invoke("run", "--input", tmp_path / "changed.safetensors")

    assert_one_line_error(error_of({"x": tensors["x"]}), "a, b, c, dt missing")
    assert_one_line_error(error_of(tensors | {"z": torch.zeros(1)}), "unknown tensors z; known are x, a")
    shorter = {"b": tensors["b"][:, :-1].contiguous()}
    assert_one_line_error(error_of(tensors | shorter), "b must have shape (B, T, G, N) = (2, 200, 2, 64)")
    assert_one_line_error(error_of(tensors | {"c": tensors["c"].float()}), "c must")
    assert_one_line_error(invoke("run", "--input", problem_file, "--chunk-size", 0), "chunk_size must be")


# ---- specs, backends, doctor


def test_specs_lists_the_table() -> None:
    everything = json.loads(invoke("specs", "--json").stdout)
    assert everything.keys() == SPECS.keys()
    published = everything["published"]
    assert published["flops"] == SPECS["published"].flops() and published["tags"] == [
        "benchmark",
        "published",
    ]
    chosen = json.loads(invoke("specs", "--tag", "test", "--tag", "edge", "--json").stdout)
    assert chosen.keys() == select("test", "edge").keys()
    table = invoke("specs", "--tag", "benchmark").stdout
    assert "published" in table and "16384" in table and "27.9" in table
    assert_one_line_error(invoke("specs", "--tag", "nope"), "unknown tag 'nope'; known are")


def test_backends_says_what_can_run_and_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilegym_mamba2.backends.cutile import availability

    status = json.loads(invoke("backends", "--json").stdout)
    assert status["mamba2_chunk_forward"]["torch"] == {"usable": True, "reason": "ready"}
    table = invoke("backends").stdout
    assert "mamba2_chunk_forward" in table and "tilegym_mamba2.backends.torch" in table
    if not torch.cuda.is_available():
        assert status["mamba2_chunk_forward"]["cutile"]["usable"] is False
        assert "pip install" not in table and "TILEGYM_MAMBA2_INTERPRET=1" in "".join(table.split())
        # The brackets must not be taken for markup.
        availability.forget()
        monkeypatch.setattr(availability, "_installed", lambda package: None)
        assert "tilegym-mamba2[cutile]" in "".join(invoke("backends").stdout.split())
        availability.forget()


def test_doctor_shows_what_was_found(tileiras: str) -> None:
    result = invoke("doctor", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["probe"]["tileiras_path"] == tileiras and found["probe"]["torch"] == torch.__version__
    assert "sm_90" in found["probe"]["tileiras_gpus"]
    table = invoke("doctor").stdout
    for part in ("torch", "driver", "GPU", "cuda-tile", "tileiras", "sm_90", found["verdict"].split(":")[0]):
        assert part in table


def test_doctor_prints_the_kernel_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilegym_mamba2.backends.cutile import inspection

    row = {"op": "forward", "kernel": "compute_out", "arch": "sm_90", "dtype": "bfloat16", "registers": 128}
    asked = []
    monkeypatch.setattr(inspection, "plan", lambda **options: asked.append(options) or [])
    monkeypatch.setattr(inspection, "rows", lambda jobs: iter([row]))
    table = invoke("doctor", "--kernels")
    assert table.exit_code == 0
    assert table.stderr == "0 kernels to compile, a few seconds each\n"
    for part in ("forward", "compute_out", "sm_90", "128", "HGMMA", "UTMALDG"):
        assert part in table.stdout
    rows = json.loads(invoke("doctor", "--kernels", "--arch", "sm_90", "--op", "backward", "--json").stdout)
    assert rows == {"kernels": [row]}
    assert asked == [{}, {"archs": ["sm_90"], "ops": ["backward"]}]
    assert_one_line_error(invoke("doctor", "--op", "forward"), "--op goes with --kernels")
    assert_one_line_error(invoke("doctor", "--arch", "sm_90"), "--arch goes with --kernels")

    broken = {"kernel": "pass_states", "arch": "sm_90", "dtype": "fp16", "error": "no [such] tile"}
    monkeypatch.setattr(inspection, "rows", lambda jobs: iter([row, broken]))
    assert len(json.loads(invoke("doctor", "--kernels", "--json").stdout)["kernels"]) == 2
    table = invoke("doctor", "--kernels")
    assert table.exit_code == 1 and "pass_states for sm_90, fp16: no [such] tile" in table.stdout

    def no_compiler(**options: object) -> None:
        raise RuntimeError("tileiras is not installed")

    monkeypatch.setattr(inspection, "plan", no_compiler)
    assert_one_line_error(invoke("doctor", "--kernels"), "tileiras is not installed")


@pytest.mark.parametrize("as_json", [False, True])
def test_doctor_prints_each_kernel_when_it_is_compiled(
    monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    from tilegym_mamba2.backends.cutile import inspection

    row = {"op": "step", "kernel": "state_update", "arch": "sm_90", "dtype": "bf16", "registers": 60}
    printed: list[str] = []
    seen: list[int] = []

    def rows(jobs: list) -> Iterator[dict]:
        for _ in range(3):
            seen.append(sum("state_update" in text for text in printed))
            yield row

    monkeypatch.setattr(inspection, "plan", lambda **options: [])
    monkeypatch.setattr(inspection, "rows", rows)
    monkeypatch.setattr("typer.echo", lambda text="", **options: printed.append(text))
    assert invoke("doctor", "--kernels", *["--json"] * as_json).exit_code == 0
    assert seen == [0, 1, 2]


def test_doctor_lists_the_architectures_of_the_compiler(tileiras: str) -> None:
    result = invoke("doctor", "--kernels", "--arch", "sm_90", "--arch", "sm_77")
    assert_one_line_error(result, "--arch must be one of sm_80, ", "sm_90, sm_100, ", "got 'sm_77'")


def test_help_and_version() -> None:
    helped = invoke("--help")
    assert helped.exit_code == 0
    for command in ("run", "specs", "backends", "doctor", "bench", "tune"):
        assert command in helped.stdout
    assert invoke("--version").stdout.strip() == tilegym_mamba2.__version__
    assert invoke("run", "--num-tokens", "many").exit_code == 2


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "tilegym_mamba2", "run", *SMALL, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True
