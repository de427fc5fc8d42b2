"""The cutile forward on a GPU: what only a device shows. Parity of the named specs is in tests/ops.

Streams, graphs, several GPUs, sizes past 32 bits, compilations, host time, memory. Times and memory are
printed and, if TILEGYM_MAMBA2_TEST_REPORT names a file, written there as JSON.
"""

import concurrent.futures
import itertools
import json
import math
import os
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tilegym
import torch
from cuda.tile import _compile
from cuda.tile._cext import default_tile_context
from cuda.tile.compilation import CallingConvention, KernelSignature

import tilegym_mamba2
from tilegym_mamba2 import registry
from tilegym_mamba2.backends.cutile import forward as cutile
from tilegym_mamba2.backends.cutile import launch as launcher
from tilegym_mamba2.bench import environment, peers, timing
from tilegym_mamba2.budgets import check, relative_error
from tilegym_mamba2.reference import float64_reference
from tilegym_mamba2.spec import SPECS, Mamba2ProblemSpec

from . import common

pytestmark = pytest.mark.gpu

OP = "mamba2_chunk_forward"
DEVICE = "cuda"
# Timed limits are for an idle machine; the suite asks for half of that.
SLACK = 2.0

SMALL = Mamba2ProblemSpec(2, 700, 2, 4, 64, 64, 64, torch.bfloat16, torch.float32, decay="slow")


def inputs_of(spec: Mamba2ProblemSpec, device: str | None = None) -> dict[str, Any]:
    return spec.get_sample_inputs(with_reference=False, with_backward=False, device=device or DEVICE)


def forward(inputs: dict[str, Any], **changes: Any) -> dict[str, torch.Tensor]:
    results = tilegym_mamba2.mamba2_chunk_forward(**(inputs | changes), backend="cutile")
    return dict(zip(("out", "final_state"), results, strict=True))


def assert_within_budget(
    spec: Mamba2ProblemSpec, results: dict[str, torch.Tensor], references: dict[str, torch.Tensor]
) -> dict[str, float]:
    verdicts = check(registry.ops()[OP], results, references, dtype=spec.dtype, decay=spec.decay)
    broken = [f"{v.output}: {v.error:.3e} > {v.budget:.3e}" for v in verdicts if not v.ok]
    assert not broken, f"{spec.id}: " + "; ".join(broken)
    return {v.output: v.error for v in verdicts}


def assert_same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    for output in first:
        assert not first[output].isnan().any(), output
        assert torch.equal(first[output].cpu(), second[output].cpu()), output


def compile_in_parallel(calls: list[Callable[[], Any]]) -> None:
    """Puts what the calls would compile into cuda.tile's disk cache, on all cores: one by one is minutes."""
    found: dict[str, tuple[Any, KernelSignature]] = {}
    convention = CallingConvention.cutile_python_v2()

    def record(launches: Sequence[Any], device: torch.device) -> None:
        for item in launches:
            signature = KernelSignature.from_kernel_args(item.kernel, item.args, convention)
            found.setdefault(f"{id(item.kernel)} {signature.symbol}", (item.kernel, signature))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "run", record)
        for call in calls:
            call()
    assert found
    capability = torch.cuda.get_device_capability()
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        list(
            threads.map(
                lambda pair: pair[0]._compile(pair[1], default_tile_context, capability), found.values()
            )
        )


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """How often each kernel is compiled during the test, from the disk cache included."""
    counted: Counter = Counter()
    compile_tile = _compile.compile_tile

    def counting(function: Any, *args: Any, **kwargs: Any) -> Any:
        counted[function.pyfunc.__name__] += 1
        return compile_tile(function, *args, **kwargs)

    monkeypatch.setattr(_compile, "compile_tile", counting)
    return counted


@pytest.fixture
def plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory as it comes, as outside of the test suite: for times and memory."""
    for owner, names in (
        (torch, ("empty", "empty_like", "empty_strided", "empty_permuted")),
        (torch.Tensor, ("new_empty", "new_empty_strided")),
    ):
        for name in names:
            function = getattr(owner, name)
            monkeypatch.setattr(owner, name, getattr(function, "__wrapped__", function))


_report: dict[str, Any] = {}


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[str, Any], None]:
    """Prints a measurement and adds it to the file that TILEGYM_MAMBA2_TEST_REPORT names."""

    def add(name: str, value: Any) -> None:
        _report.setdefault("environment", environment.describe(torch.device(DEVICE)))
        _report[name] = value
        with capsys.disabled():
            print(f"\n  {name}: {json.dumps(value)}")
        path = os.environ.get("TILEGYM_MAMBA2_TEST_REPORT")
        if path:
            Path(path).write_text(json.dumps(_report, indent=1) + "\n")

    return add


# ---- the published benchmark


@pytest.mark.parametrize("name", ["published", "published-slow", "published-none"])
def test_published_is_no_less_exact_than_mamba_ssm(
    name: str, monkeypatch: pytest.MonkeyPatch, report: Callable[[str, Any], None]
) -> None:
    spec = SPECS[name]
    inputs = inputs_of(spec)
    references = float64_reference(inputs)
    errors = {"cutile": assert_within_budget(spec, forward(inputs), references)}
    available, _ = peers.MambaSsm().status("forward")
    if available:
        variant = peers.MambaSsm((256,)).variants(spec, "forward")[0]
        call = variant.make(inputs)
        _search_nothing(monkeypatch)
        peer = variant.named(call())
        errors["mamba_ssm"] = {key: relative_error(peer[key], references[key]) for key in references}
        for output, error in errors["cutile"].items():
            assert error <= 1.05 * errors["mamba_ssm"][output], (output, errors)
    report(f"error of {name}", errors)


def _search_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of mamba_ssm's kernels in its smallest configuration: its search takes half a minute."""
    for name, module in list(sys.modules.items()):
        if name.startswith("mamba_ssm.ops.triton"):
            for kernel in list(vars(module).values()):
                configs = getattr(kernel, "configs", None)
                if isinstance(configs, list) and len(configs) > 1:
                    smallest = min(configs, key=lambda config: math.prod(config.kwargs.values()))
                    monkeypatch.setattr(kernel, "configs", [smallest])


def test_published_snippet_prints_a_time(
    monkeypatch: pytest.MonkeyPatch, plain_memory: None, report: Callable[[str, Any], None]
) -> None:
    spec = Mamba2ProblemSpec(4, 16384, 1, 8, 128, 64, 128, torch.bfloat16, torch.float32)
    inputs = inputs_of(spec)
    monkeypatch.setattr(tilegym.backend.selector, "_CURRENT_BACKENDS", tilegym.backend.get_current_backend())
    tilegym.set_backend("cutile")
    assert registry.resolve(OP, None, (inputs["x"],))[0] == "cutile"
    result = common.benchmark(lambda: tilegym.ops.mamba2_chunk_forward(**inputs), use_cupti=True)
    median = result["forward"]["median"]
    report("published snippet, ms", {key: round(value, 4) for key, value in result["forward"].items()})
    # 172 MB at the data sheet's 4.8 TB/s take 36 µs, and 5 ms would be slower than torch.
    assert 0.036 < median < 5.0


# ---- devices, streams, graphs


@pytest.mark.two_gpus
def test_tensors_on_another_gpu_than_the_current_one() -> None:
    expected = forward(inputs_of(SMALL, "cuda:0"))
    inputs = inputs_of(SMALL, "cuda:1")
    torch.cuda.synchronize("cuda:1")
    with torch.cuda.device(0):
        results = forward(inputs)
        assert torch.cuda.current_device() == 0
    assert {tensor.device for tensor in results.values()} == {torch.device("cuda:1")}
    assert_same_bits(results, expected)
    side = torch.cuda.Stream("cuda:1")
    with torch.cuda.device(1), torch.cuda.stream(side):
        staged = inputs | {"x": torch.zeros_like(inputs["x"])}
        torch.cuda._sleep(100_000_000)
        staged["x"].copy_(inputs["x"])
        with torch.cuda.device(0):
            results = forward(staged)
    side.synchronize()
    assert_same_bits(results, expected)


@pytest.mark.two_gpus
def test_each_gpu_needs_a_warm_up_of_its_own() -> None:
    spec = replace(SMALL, head_size=56)
    forward(inputs_of(spec, "cuda:0"))
    inputs = inputs_of(spec, "cuda:1")
    with torch.cuda.device(1):
        # torch keeps the stream of its first capture for all others, and this one is of the second GPU.
        stream = torch.cuda.Stream()
        cold = torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream)
        with pytest.raises(RuntimeError, match="warm up first"), cold:
            forward(inputs)
        expected = forward(inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results = forward(inputs)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(results, expected)


def test_side_stream() -> None:
    inputs = inputs_of(SMALL)
    expected = forward(inputs)
    staged = inputs | {name: torch.full_like(inputs[name], 7.0) for name in ("x", "b", "c", "dt")}
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        # Work on any other stream would run before the inputs arrive.
        torch.cuda._sleep(100_000_000)
        for name in ("x", "b", "c", "dt"):
            staged[name].copy_(inputs[name])
        results = forward(staged)
    side.synchronize()
    assert_same_bits(results, expected)


def test_the_current_stream_alone_is_used() -> None:
    inputs = inputs_of(SMALL)
    expected = forward(inputs)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        # So that no allocation for this stream waits for the device below.
        forward(inputs)
    torch.cuda.synchronize()
    started = torch.cuda.Event()
    torch.cuda._sleep(1_000_000_000)
    started.record()
    with torch.cuda.stream(side):
        results = forward(inputs)
    side.synchronize()
    # The side stream is done while the default stream still sleeps, half a second.
    assert not started.query()
    torch.cuda.synchronize()
    assert_same_bits(results, expected)


@pytest.mark.parametrize("tokens", [100, 700])
def test_graph_replay_equals_eager(tokens: int) -> None:
    spec = replace(SMALL, num_tokens=tokens)
    static = inputs_of(spec)
    forward(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward(static)
    for seed in (1, 2):
        new = inputs_of(replace(spec, seed=seed))
        for name, value in new.items():
            if isinstance(value, torch.Tensor):
                static[name].copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(captured, forward(new))


def test_capture_without_warm_up_raises_before_anything_is_enqueued(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of(replace(SMALL, dtype=torch.float16, dt_dtype=torch.bfloat16))
    # Rates in fp16 beside steps in bf16: no other test compiles the kernels for these.
    inputs |= {name: inputs[name].half() for name in ("a", "d")}
    launched = []
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "run", lambda launches, device: launched.append(launches))
        with pytest.raises(RuntimeError, match="warm up first"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            forward(inputs)
    assert launched == []

    expected = forward(inputs)
    spec = replace(SMALL, dtype=torch.float16)
    assert_within_budget(spec, expected, float64_reference(inputs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward(inputs)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(captured, expected)


def test_no_host_synchronisation(plain_memory: None) -> None:
    inputs = inputs_of(SMALL)
    expected = forward(inputs)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1_000_000_000)
        asleep = torch.cuda.Event()
        asleep.record()
        results = forward(inputs)
        # Enqueued while the GPU was still busy: the mode above sees only what torch itself waits for.
        assert not asleep.query()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    torch.cuda.synchronize()
    assert_same_bits(results, expected)


# ---- sizes


def test_more_rows_and_heads_than_a_grid_axis_counts() -> None:
    spec = Mamba2ProblemSpec(1100, 40, 1, 64, 16, 16, 64, torch.bfloat16, torch.float32, decay="slow")
    inputs = inputs_of(spec)
    results = forward(inputs)
    # 1024 · 64 is block 65536.
    rows = [0, 1, 511, 1023, 1024, 1099]
    picked = inputs | {name: inputs[name][rows] for name in ("x", "b", "c", "dt", "init_state")}
    assert_within_budget(spec, {k: v[rows] for k, v in results.items()}, float64_reference(picked))
    assert all(v.isfinite().all() for v in results.values())


@pytest.mark.parametrize("decay", ["slow", "published"])
def test_slices_of_a_parent_past_two_to_the_31(decay: str) -> None:
    spec = replace(SMALL, batch_size=1, num_tokens=33_000, decay=decay)
    inputs = inputs_of(spec)
    names = ["x", "b", "c"] + ["dt"] * (inputs["dt"].dtype == spec.dtype)
    widths = [math.prod(inputs[name].shape[2:]) for name in names]
    # 33,008 rows of 65,536: the slices start near the end of each row, so offsets pass 2**31 too.
    width, tokens = 65_536, spec.num_tokens
    parent = torch.full((1, tokens + 8, width), math.nan, dtype=spec.dtype, device=DEVICE)
    assert parent.numel() > 2**31
    start, slices = width - sum(widths), {}
    for name, size in zip(names, widths, strict=True):
        slices[name] = parent[:, :tokens, start : start + size].unflatten(-1, inputs[name].shape[2:])
        slices[name].copy_(inputs[name])
        start += size
    results = forward(inputs | slices)
    assert_within_budget(spec, results, float64_reference(inputs))


def test_a_batch_past_two_to_the_31_elements() -> None:
    # Two rows of x pass 2**31 elements together, neither alone: the batch stride times the index overflows.
    spec = Mamba2ProblemSpec(3, 33_000, 1, 340, 16, 64, 64, torch.bfloat16, torch.float32, decay="slow")
    zeros = {name: torch.zeros(shape, dtype=spec.dtype, device=DEVICE) for name, shape in _xbc(spec).items()}
    assert zeros["x"].numel() > 2**31
    small = inputs_of(replace(spec, batch_size=1, num_heads=2))
    dt = torch.zeros(3, spec.num_tokens, 340, device=DEVICE)
    a, d = torch.full((340,), -1.0, device=DEVICE), torch.ones(340, device=DEVICE)
    init_state = torch.zeros(spec.shapes["init_state"], device=DEVICE)
    # The last row's last two heads carry a problem; everything else is zero and must stay so.
    place = (slice(2, 3), slice(None), slice(338, 340))
    zeros["x"][place], dt[place], init_state[2:3, 338:] = small["x"], small["dt"], small["init_state"]
    a[338:], d[338:] = small["a"], small["d"]
    for name in ("b", "c"):
        zeros[name][2:3] = small[name]
    results = forward({"a": a, "d": d, "dt": dt, "init_state": init_state, "chunk_size": 64} | zeros)
    got = {"out": results["out"][place], "final_state": results["final_state"][2:3, 338:]}
    assert_within_budget(spec, got, float64_reference(small))
    assert not results["out"][:2].any() and not results["out"][2, :, :338].any()


def _xbc(spec: Mamba2ProblemSpec) -> dict[str, tuple[int, ...]]:
    return {name: spec.shapes[name] for name in ("x", "b", "c")}


# ---- every size and dtype

PAIRS = [
    (16, 16),
    (16, 256),
    (40, 64),
    (64, 64),
    (64, 96),
    (64, 256),
    (64, 512),
    (80, 96),
    (80, 128),
    (128, 128),
    (128, 256),
    (256, 64),
    (256, 512),
]
_SWEEP = replace(SMALL, batch_size=1, num_heads=2, num_groups=1, layout="sliced")


# Two segments, the last one ragged; and one segment.
_SWEEP_TOKENS = (700, 197)


def _sweep() -> dict[str, tuple[Mamba2ProblemSpec, str]]:
    """Name → spec and float32 matmul precision."""
    named = {f"bf16-p{p}-n{n}": (replace(_SWEEP, head_size=p, state_size=n), "highest") for p, n in PAIRS}
    for p, n in ((64, 128), (40, 96)):
        named[f"fp16-p{p}-n{n}"] = (
            replace(_SWEEP, head_size=p, state_size=n, dtype=torch.float16),
            "highest",
        )
    for p, n in ((64, 128), (32, 16)):
        spec = replace(_SWEEP, head_size=p, state_size=n, dtype=torch.float32)
        named |= {f"fp32-{precision}-p{p}-n{n}": (spec, precision) for precision in ("highest", "high")}
    return named


@pytest.fixture
def matmul_precision() -> Iterator[Callable[[str], None]]:
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def test_sizes_and_dtypes(matmul_precision: Callable[[str], None]) -> None:
    sweep = _sweep()
    inputs = {name: inputs_of(spec) for name, (spec, _) in sweep.items()}

    def cut(name: str, tokens: int) -> dict[str, Any]:
        return inputs[name] | {key: inputs[name][key][:, :tokens] for key in ("x", "b", "c", "dt")}

    def run(name: str, tokens: int) -> dict[str, torch.Tensor]:
        matmul_precision(sweep[name][1])
        return forward(cut(name, tokens))

    compile_in_parallel([lambda case=case: run(*case) for case in itertools.product(sweep, _SWEEP_TOKENS)])
    wrong = []
    for name, (spec, precision) in sweep.items():
        for tokens in _SWEEP_TOKENS:
            results = run(name, tokens)
            references = float64_reference(cut(name, tokens))
            try:
                if precision == "high":
                    # One tf32 product: as exact as fp16's, which the budgets of float32 do not know.
                    for key, reference in references.items():
                        assert relative_error(results[key], reference) < 2e-3, key
                else:
                    assert_within_budget(replace(spec, num_tokens=tokens), results, references)
            except AssertionError as error:
                wrong.append(f"{name}, {tokens} tokens: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("chunk_size", [40, 64, 256])
def test_published_kernels_on_their_own(chunk_size: int) -> None:
    assert_published_kernels(SMALL, inputs_of(SMALL), chunk_size)


def assert_published_kernels(spec: Mamba2ProblemSpec, inputs: dict[str, Any], chunk_size: int) -> None:
    x, a, b, c, d, dt, init_state = (inputs[k] for k in ("x", "a", "b", "c", "d", "dt", "init_state"))
    chunks = range(0, spec.num_tokens, chunk_size)

    decay = cutile.chunk_cumsum(a, dt, chunk_size=chunk_size)
    rate = (a.double() * dt.double() * math.log2(math.e)).movedim(1, 2)
    expected = torch.cat([rate[..., t : t + chunk_size].cumsum(-1) for t in chunks], -1)
    assert decay.shape == expected.shape
    assert (decay - expected).abs().max() <= 1e-5 * expected.abs().max()
    for t in chunks:
        assert (decay[..., t : t + chunk_size].diff(dim=-1) <= 0).all()

    states, final = cutile.fwd_pass_state(x, b, dt, decay, init_state, chunk_size=chunk_size)
    entries = [init_state.double()]
    for t in chunks[1:]:
        cut = inputs | {name: inputs[name][:, :t] for name in ("x", "b", "c", "dt")}
        entries.append(float64_reference(cut)["final_state"])
    whole = float64_reference(inputs)
    budget = registry.ops()[OP].budgets["bfloat16_zero_mean"]["final_state"]
    assert relative_error(states, torch.stack(entries, 2)) <= budget
    assert relative_error(final, whole["final_state"]) <= budget

    out = cutile.compute_out(x, b, c, d, dt, decay, states, chunk_size=chunk_size)
    assert_within_budget(spec, {"out": out, "final_state": final}, whole)


# ---- the same bits


def test_ten_runs_give_the_same_bits() -> None:
    inputs = inputs_of(replace(SPECS["published-slow"], num_tokens=4096))
    first = forward(inputs)
    for _ in range(9):
        assert_same_bits(forward(inputs), first)


@pytest.mark.parametrize("tokens", [100, 5000])
def test_a_row_does_not_depend_on_how_many_there_are(tokens: int) -> None:
    inputs = inputs_of(replace(SMALL, batch_size=5, num_tokens=tokens))
    whole = forward(inputs)
    for rows in (1, 3):
        cut = {name: inputs[name][:rows] for name in ("x", "b", "c", "dt", "init_state")}
        results = forward(inputs, **cut)
        assert_same_bits(results, {name: tensor[:rows] for name, tensor in whole.items()})


# ---- compilations and first calls

# Not in any table of configurations, and used by no other test.
_FRESH = Mamba2ProblemSpec(2, 4096, 1, 8, 32, 24, 64, torch.bfloat16, torch.float32, decay="slow")
# Multiples of 16 and others, from one segment to many. One token is a shape of its own to the compiler.
_LENGTHS = [4096, 4093, 2048, 1000, 16384, 1001, 1008, 700, 48, 17, 130, 16]


def test_a_kernel_compiles_at_most_twice_over_the_number_of_tokens(compilations: Counter) -> None:
    for count, tokens in enumerate(_LENGTHS):
        before = compilations.total()
        forward(inputs_of(replace(_FRESH, num_tokens=tokens)))
        assert count < 2 or compilations.total() == before, f"{tokens} tokens compiled again: {compilations}"
    # Kernels that see only dt and the states may be compiled by other tests already.
    assert compilations["compute_out"] > 0
    assert max(compilations.values()) <= 2, compilations


@pytest.mark.parametrize("decay", ["slow", "published"])
def test_warmup_compiles_for_any_number_of_tokens(decay: str, compilations: Counter) -> None:
    # A size each, so that the first of the two leaves the second something to compile.
    sizes = {"state_size": {"slow": 24, "published": 40}[decay], "num_tokens": max(_LENGTHS)}
    spec = replace(_FRESH, **sizes, decay=decay)
    tilegym_mamba2.warmup(spec, DEVICE)
    warm = compilations.total()
    assert warm > 0
    for tokens in _LENGTHS:
        forward(inputs_of(replace(spec, num_tokens=tokens)))
    assert compilations.total() == warm, compilations


_FIRST_CALL = """
import hashlib, json, time
import torch
imports = time.perf_counter()
import tilegym_mamba2
from cuda.tile import _compile
from cuda.tile._cext import default_tile_context
from tilegym_mamba2.spec import Mamba2ProblemSpec
imports = time.perf_counter() - imports
compile_tile, calls = _compile.compile_tile, []
_compile.compile_tile = lambda *args, **kwargs: (calls.append(1), compile_tile(*args, **kwargs))[1]
spec = Mamba2ProblemSpec(4, 4096, 1, 8, 128, 64, 128, torch.bfloat16, torch.float32, decay="slow")
inputs = spec.get_sample_inputs(with_reference=False, with_backward=False, device="cuda")
torch.cuda.synchronize()
start = time.perf_counter()
out, final_state = tilegym_mamba2.mamba2_chunk_forward(**inputs, backend="cutile")
torch.cuda.synchronize()
seconds = time.perf_counter() - start
bits = b"".join(t.cpu().contiguous().view(torch.uint8).numpy().tobytes() for t in (out, final_state))
print(json.dumps({"import_s": imports, "first_call_s": seconds, "compilations": len(calls),
                  "sha256": hashlib.sha256(bits).hexdigest()}))
"""


def first_call(folder: Path) -> dict[str, Any]:
    """A process of its own, with caches in `folder`, calls the op once and says how that was."""
    variables = {"CUDA_TILE_CACHE_DIR": folder / "cubins", "TILEGYM_MAMBA2_CACHE_DIR": folder / "tables"}
    # The CUDA driver caches what it compiled itself.
    variables["CUDA_CACHE_PATH"] = folder / "driver"
    root = Path(tilegym_mamba2.__file__).parents[1]
    paths = [str(root)] + os.environ.get("PYTHONPATH", "").split(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(_FIRST_CALL)],
        env=os.environ
        | {name: str(value) for name, value in variables.items()}
        | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_first_call_in_a_fresh_process(tmp_path: Path, report: Callable[[str, Any], None]) -> None:
    cold, warm = first_call(tmp_path), first_call(tmp_path)
    report("first call, caches empty", cold)
    report("first call, disk cache warm", warm)
    assert cold["first_call_s"] < 15.0
    assert warm["first_call_s"] < 2.0
    # One compilation a kernel: nothing was searched.
    assert 0 < cold["compilations"] <= 5
    assert cold["sha256"] == warm["sha256"]


# ---- host time and memory


def test_host_time(plain_memory: None, report: Callable[[str, Any], None]) -> None:
    inputs = inputs_of(replace(SPECS["published"], num_tokens=1024))

    def call() -> Any:
        return tilegym.ops.mamba2_chunk_forward(**inputs, backend="cutile")

    call()
    host, eager = timing.host_time(call, calls=100), timing.eager_median(call)
    graph = timing.graph_median(call)
    measured = {"host": host.median, "host_min": host.min, "eager": eager.median, "graph": graph.median}
    report("published at 1024 tokens, µs", {key: round(value, 2) for key, value in measured.items()})
    # Measured: 55 to 65 µs on a quiet host, 24 of them in three ct.launch; 130 where others load it.
    assert host.min <= SLACK * 65.0
    assert eager.median <= graph.median + SLACK * 65.0


def test_memory(plain_memory: None, report: Callable[[str, Any], None]) -> None:
    inputs = inputs_of(SPECS["published"])
    forward(inputs)
    _, scratch = timing.peak_memory(lambda: forward(inputs))
    x_bytes = inputs["x"].numel() * inputs["x"].element_size()
    report("scratch at the published size", {"bytes": scratch, "share of x": round(scratch / x_bytes, 4)})
    assert scratch <= 3 / 8 * x_bytes
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(50):
        forward(inputs)
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.memory_reserved() == reserved


def test_new_lengths_keep_no_memory(plain_memory: None) -> None:
    inputs = inputs_of(replace(SMALL, num_tokens=1100))
    forward(inputs)
    allocated = torch.cuda.memory_allocated()
    for tokens in range(1000, 1100):
        forward(inputs, **{name: inputs[name][:, :tokens] for name in ("x", "b", "c", "dt")})
    assert torch.cuda.memory_allocated() == allocated


def test_a_form_seen_before_still_asks_what_may_have_changed() -> None:
    inputs = inputs_of(SMALL)
    expected = forward(inputs)
    assert_same_bits(forward(inputs), expected)
    with pytest.raises(TypeError, match="c must have"):
        forward(inputs | {"c": inputs["c"].float()})
    with pytest.raises(ValueError, match="c must"):
        forward(inputs | {"c": inputs["c"][..., :-1]})
    with pytest.raises(ValueError, match="dt must be on"):
        forward(inputs | {"dt": inputs["dt"].cpu()})
    with pytest.raises(TypeError, match="dt must be a"):
        forward(inputs | {"dt": None})
    torch_results = tilegym_mamba2.mamba2_chunk_forward(**inputs, backend="torch")
    by_torch = dict(zip(("out", "final_state"), torch_results, strict=True))
    assert not torch.equal(by_torch["out"], expected["out"])
    assert_within_budget(SMALL, by_torch, float64_reference(inputs))
    x = inputs["x"].clone().requires_grad_()
    forward(inputs | {"x": x})["out"].sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        assert not forward(inputs | {"x": x})["out"].requires_grad
    with torch.autocast("cuda", torch.float16):
        assert forward(inputs)["out"].dtype is torch.float16
    assert_same_bits(forward(inputs), expected)
