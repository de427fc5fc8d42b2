"""Every kernel compiles for every architecture, spills nowhere that matters, and loads by the copy engine.

No GPU is needed, the compiler is: its absence is a failure. What is compiled is what the op launches, see
`tilegym_mamba2.backends.cutile.inspection`.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from tilegym_mamba2 import cli
from tilegym_mamba2.backends.cutile import inspection, tuning
from tilegym_mamba2.backends.cutile.inspection import ARCHS, MODES, Code, name_of, signature_of
from tilegym_mamba2.backends.cutile.launch import Launch
from tilegym_mamba2.spec import SPECS, Mamba2ProblemSpec, select

pytestmark = pytest.mark.usefixtures("tileiras")

KERNELS = ("chunk_cumsum", "chunk_rows", "rows_of_decay", "segment_states", "pass_states", "compute_out")
PUBLISHED = SPECS["published"]


def problem(mode: str, **changes: int) -> Mamba2ProblemSpec:
    return replace(PUBLISHED, dtype=MODES[mode][0], **changes)


def default_of(spec: Mamba2ProblemSpec, arch: str) -> tuning.ForwardConfig:
    sizes = (spec.num_tokens, spec.num_heads, spec.head_size, spec.state_size)
    return tuning.default_config(tuning.key_of(arch, spec.dtype, *sizes))


def kernels(mode: str, arch: str, **changes: int) -> dict[str, Launch]:
    """The kernels of the published problem in the default configuration of an arch."""
    spec = problem(mode, **changes)
    found = inspection.kernels_of(spec, arch, default_of(spec, arch), MODES[mode][1])
    return {name_of(launch): launch for launch in found}


def wide_kernels() -> dict[str, Launch]:
    """With 64-bit indices: x and dt are slices of projections that reach past 2³¹ elements."""
    spec = replace(PUBLISHED, batch_size=2, num_tokens=2**20)
    slices = {
        "x": torch.empty(2, 2**20, 17, 64, dtype=torch.bfloat16, device="meta")[:, :, :8],
        "dt": torch.empty(2, 2**20, 1032, device="meta")[:, :, :8],
    }
    config = default_of(spec, "sm_90")
    found = inspection.published_launches(spec, "sm_90", config, **slices)
    found += inspection.forward_launches(spec, "sm_90", config, **slices)
    return {f"{name_of(launch)}-wide": launch for launch in found}


def sliced_kernels() -> dict[str, Launch]:
    """With chunks that are cut anywhere, by a chunk size that is no multiple of the tile."""
    spec = replace(PUBLISHED, chunk_size=100)
    found = inspection.published_launches(spec, "sm_90", default_of(spec, "sm_90"))
    sliced = {f"{name_of(launch)}-sliced": launch for launch in found}
    return {name: sliced[name] for name in ("segment_states-sliced", "compute_out-sliced")}


def bare_kernels() -> dict[str, Launch]:
    """Without skip and initial state, dt in x's dtype."""
    spec = replace(PUBLISHED, dt_dtype=torch.bfloat16)
    bare = {"d": None, "init_state": None}
    found = inspection.published_launches(spec, "sm_90", default_of(spec, "sm_90"), **bare)
    found += inspection.forward_launches(spec, "sm_90", default_of(spec, "sm_90"), **bare)
    return {f"{name_of(launch)}-bare": launch for launch in found}


JOBS: dict[tuple[str, str, str], Launch] = {
    (name, arch, mode): launch
    for arch in ARCHS
    for mode in MODES
    for name, launch in kernels(mode, arch).items()
}
NO_SPILLS = [
    (arch, mode, size) for arch in ("sm_90", "sm_100") for mode in ("bf16", "fp16") for size in (64, 128)
]
JOBS |= {
    (f"{name}-n{size}", arch, mode): launch
    for arch, mode, size in NO_SPILLS
    for name, launch in kernels(mode, arch, state_size=size).items()
}
JOBS |= {
    (name, "sm_90", "bf16"): launch
    for name, launch in (wide_kernels() | sliced_kernels() | bare_kernels()).items()
}
SIZES = [(16, 16), (80, 96), (128, 256), (256, 512)]
JOBS |= {
    (f"{name}-p{p}-n{n}", "sm_90", "bf16"): launch
    for p, n in SIZES
    for name, launch in kernels("bf16", "sm_90", head_size=p, state_size=n).items()
}

Compiled = dict[tuple[str, str, str], Future[Code]]


@pytest.fixture(scope="module")
def compiled() -> Iterator[Compiled]:
    """What came out of every job; jobs that differ in nothing the compiler sees are compiled once."""
    with ThreadPoolExecutor(2) as pool:
        futures: dict[tuple[int, str, str], Future[Code]] = {}
        results = {}
        for (name, arch, mode), launch in JOBS.items():
            signature = signature_of(launch)
            key = (id(launch.kernel), signature.symbol, arch)
            if key not in futures:
                futures[key] = pool.submit(inspection.compiled, launch.kernel, signature, arch)
            results[name, arch, mode] = futures[key]
        yield results
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_compiles(compiled: Compiled, arch: str, kernel: str, mode: str) -> None:
    code = compiled[kernel, arch, mode].result()
    assert 0 < code.registers <= 255
    # What a block of that architecture may have, with the KiB of it that the system takes.
    limit = {"sm_80": 164, "sm_120": 100}.get(arch, 228)
    assert code.shared <= limit * 1024


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("arch", "mode", "size"), NO_SPILLS)
def test_no_spills(compiled: Compiled, arch: str, mode: str, size: int, kernel: str) -> None:
    assert compiled[f"{kernel}-n{size}", arch, mode].result().stack == 0


@pytest.mark.parametrize("mode", MODES)
def test_tokens_come_by_the_copy_engine(compiled: Compiled, mode: str) -> None:
    # rows, x and b; rows, x, b and c: at least one instruction each.
    assert compiled["segment_states", "sm_90", mode].result().opcodes["UTMALDG"] >= 3
    assert compiled["compute_out", "sm_90", mode].result().opcodes["UTMALDG"] >= 4
    for kernel in ("segment_states", "compute_out"):
        opcodes = compiled[kernel, "sm_90", mode].result().opcodes
        assert opcodes["HGMMA"] > 0
        # Scalars are left to plain loads. A tile of x alone would take a thread four, one of b or c eight.
        assert opcodes["LDG"] + opcodes["LDGSTS"] <= 4


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_with_64_bit_indices_compile(compiled: Compiled, kernel: str) -> None:
    assert compiled[f"{kernel}-wide", "sm_90", "bf16"].result().registers > 0


def test_64_bit_indices_are_what_the_wide_jobs_have() -> None:
    for kernel in KERNELS:
        wide, narrow = (
            signature_of(JOBS[name, "sm_90", "bf16"]).parameters[0].index_dtype
            for name in (f"{kernel}-wide", kernel)
        )
        assert (str(wide), str(narrow)) == ("int64", "int32")


@pytest.mark.parametrize("kernel", ["segment_states", "compute_out"])
def test_kernels_with_chunks_cut_anywhere_compile(compiled: Compiled, kernel: str) -> None:
    assert compiled[f"{kernel}-sliced", "sm_90", "bf16"].result().stack == 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_without_skip_and_initial_state_compile(compiled: Compiled, kernel: str) -> None:
    assert compiled[f"{kernel}-bare", "sm_90", "bf16"].result().stack == 0


@pytest.mark.parametrize("kernel", ["segment_states", "pass_states", "compute_out"])
@pytest.mark.parametrize(("p", "n"), SIZES)
def test_other_sizes_compile(compiled: Compiled, p: int, n: int, kernel: str) -> None:
    assert compiled[f"{kernel}-p{p}-n{n}", "sm_90", "bf16"].result().stack == 0


# ---- what is compiled is what would be launched


def forms(spec: Mamba2ProblemSpec, **changes: object) -> set[tuple[str, int, str]]:
    launches = inspection.forward_launches(spec, "sm_90", default_of(spec, "sm_90"), **changes)
    return {(name_of(launch), id(launch.kernel), signature_of(launch).symbol) for launch in launches}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"num_heads": 2},
        {"num_heads": 50, "head_size": 80, "state_size": 96},
        {"num_heads": 64, "num_groups": 8, "state_size": 256, "batch_size": 1},
    ],
)
def test_a_kernel_compiles_twice_over_all_lengths(sizes: dict[str, int], dtype: torch.dtype) -> None:
    # 1 is not among them: to the compiler an axis of length 1 is a constant, a third form.
    lengths = (2, 15, 16, 17, 63, 64, 65, 128, 200, 960, 1000, 1008, 1024, 1025, 4096, 16384, 16400, 100_001)
    seen: dict[str, set[tuple[int, str]]] = {}
    for tokens in lengths:
        for name, kernel, symbol in forms(replace(PUBLISHED, dtype=dtype, num_tokens=tokens, **sizes)):
            seen.setdefault(name, set()).add((kernel, symbol))
    assert set(seen) >= {"chunk_rows", "segment_states", "compute_out"}
    forms_allowed = dict.fromkeys(seen, 2)
    if sizes.get("num_heads", 8) % 4:
        # dt's stride from row to row, T · H, divides by 16 bytes at some T that are no multiples of 16.
        forms_allowed["chunk_rows"] = 3
    assert {name: len(found) for name, found in seen.items() if len(found) > forms_allowed[name]} == {}


@pytest.mark.gpu
@pytest.mark.parametrize("name", select("test"))
def test_signatures_are_what_a_launch_compiles_for(name: str) -> None:
    from cuda.tile.compilation import CallingConvention, KernelSignature

    spec = SPECS[name]
    if spec.num_tokens == 0:
        pytest.skip("launches nothing")
    convention = CallingConvention.cutile_python_v2()
    for launches in (inspection.forward_launches, inspection.published_launches):
        for launch in launches(spec, "sm_90"):
            expected = KernelSignature.from_kernel_args(launch.kernel, launch.args, convention)
            assert signature_of(launch).symbol == expected.symbol


# ---- the report


def test_report_has_a_row_for_each_kernel() -> None:
    rows = inspection.report(["sm_90"], ["bf16"], ops=["forward"])
    assert {row["kernel"] for row in rows} == set(KERNELS)
    columns = {"op", "kernel", "arch", "dtype", "registers", "shared", "stack", *inspection.COUNTED}
    assert all(set(row) == columns for row in rows)
    (out,) = [row for row in rows if row["kernel"] == "compute_out"]
    assert (out["arch"], out["dtype"]) == ("sm_90", "bf16")
    assert out["HGMMA"] > 0 and out["UTMALDG"] > 0 and out["registers"] > 64 and out["shared"] > 32768


def test_report_of_forward_and_backward_names_each_kernel_once() -> None:
    rows = inspection.report(["sm_999"], ["bf16"], ops=["forward", "backward"])
    kernels = [row["kernel"] for row in rows]
    launched = inspection.backward_launches(SPECS["published"], "sm_999")
    assert set(kernels) == set(KERNELS) | {name_of(launch) for launch in launched}
    assert len(kernels) == len(set(kernels))
    assert {row["kernel"] for row in rows if row["op"] == "forward"} == set(KERNELS)


def test_report_has_the_kernels_of_the_scan_and_the_step() -> None:
    small = replace(SPECS["published"], num_tokens=1024)
    rows = inspection.report(["sm_999"], ["fp16"], small)
    kernels = {op: [row["kernel"] for row in rows if row["op"] == op] for op in inspection.OPS}
    assert kernels["scan"] == ["scan_rows", "scan_out"] and kernels["step"] == ["state_update"]
    assert kernels["scan-backward"] == ["skip_parts", "sum_skip"]
    packed = {"packed_table", "padded_table", "scan_rows", "carried_states", "pass_carried", "scan_out"}
    assert set(kernels["packed"]) == packed | {"pass_chunks"}
    alone = {"tiles_of_slots", "zero_padding", *kernels["scan-backward"]}
    assert set(kernels["packed-backward"]) == alone | set(kernels["backward"])
    assert all(len(found) == len(set(found)) for found in kernels.values())


def test_report_compiles_a_step() -> None:
    (row,) = inspection.report(["sm_90"], ["bf16"], ops=["step"])
    assert row["kernel"] == "state_update" and row["registers"] > 16 and row["stack"] == 0


def test_report_refuses_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="arch must look like sm_90, got 'hopper'"):
        inspection.report(["hopper"], ["bf16"])
    with pytest.raises(ValueError, match="dtype must be one of bf16, fp16, fp32, tf32, got 'int8'"):
        inspection.report(["sm_90"], ["int8"])
    with pytest.raises(
        ValueError, match="op must be one of forward, backward, scan, .*, step, got 'sideways'"
    ):
        inspection.report(["sm_90"], ["bf16"], ops=["sideways"])
    monkeypatch.setattr(inspection, "find_program", lambda name: None)
    inspection._tool.cache_clear()
    with pytest.raises(RuntimeError, match="cuobjdump, which reads compiled kernels, is not installed: pip"):
        inspection.report(["sm_90"], ["bf16"])
    inspection._tool.cache_clear()


def test_a_kernel_that_does_not_compile_has_a_row_that_says_so() -> None:
    rows = inspection.report(["sm_999"], ["bf16"], ops=["forward"])
    assert {row["kernel"] for row in rows} == set(KERNELS)
    assert all("does not compile for sm_999" in row["error"] for row in rows)


def test_the_command_prints_the_table() -> None:
    done = CliRunner().invoke(cli.app, ["doctor", "--kernels", "--arch", "sm_90", "--op", "forward"])
    assert done.exit_code == 0, done.output
    for word in (*KERNELS, *MODES, "registers", "UTMALDG"):
        assert word in done.stdout
