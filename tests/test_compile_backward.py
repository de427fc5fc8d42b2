"""The backward's kernels as the compiler sees them, without a GPU: they compile, spill nothing, not often."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tilegym_mamba2.backends.cutile import backward_config, inspection
from tilegym_mamba2.backends.cutile.inspection import MODES, name_of, signature_of
from tilegym_mamba2.spec import SPECS, Mamba2ProblemSpec

PUBLISHED = SPECS["published"]
WALKS = ("segment_borders", "pass_borders", "tile_states")
DECAY = ("finish_dt", "sum_heads")
APART = ("compute_dx", "compute_dbc")
SIDES = ("compute_dx_side", "compute_dbc_side")
LARGE = ("tile_states", *APART)
# (arch, mode): the kernels of which no one may spill.
NO_SPILLS = {
    ("sm_90", "bf16"): (*WALKS, "compute_gradients", *DECAY),
    ("sm_90", "fp16"): (*WALKS, *APART, *DECAY),
    ("sm_100", "bf16"): ("tile_states", "compute_gradients"),
    ("sm_100", "fp16"): LARGE,
}
# Bytes a thread that do not fit in its registers: read where a wait times out.
SPILLS = {("compute_gradients", "sm_90"): 8}
COMPILES = {
    ("sm_80", "bf16"): LARGE,
    ("sm_103", "bf16"): ("tile_states", "compute_gradients"),
    ("sm_120", "bf16"): LARGE,
    ("sm_90", "fp32"): LARGE,
}
# No room for the sums of all gradients: two kernels.
WIDE_STATE = replace(PUBLISHED, state_size=512)


def launches(arch: str, mode: str, kernels: tuple[str, ...], spec: Mamba2ProblemSpec = PUBLISHED) -> list:
    dtype, precision = MODES[mode]
    found = inspection.backward_launches(replace(spec, dtype=dtype), arch, precision)
    return [launch for launch in found if name_of(launch) in kernels]


@pytest.mark.parametrize(("arch", "mode"), NO_SPILLS | COMPILES)
def test_kernels_compile(arch: str, mode: str) -> None:
    kernels = (NO_SPILLS | COMPILES)[arch, mode]
    found = launches(arch, mode, kernels)
    assert {name_of(launch) for launch in found} == set(kernels)

    def compile_one(launch: inspection.Launch) -> inspection.Code:
        return inspection.compiled(launch.kernel, signature_of(launch), arch)

    with ThreadPoolExecutor(2) as pool:
        codes = dict(zip(map(name_of, found), pool.map(compile_one, found), strict=True))
    if (arch, mode) in NO_SPILLS:
        assert {name: c.stack for name, c in codes.items() if c.stack > SPILLS.get((name, arch), 0)} == {}
    if arch == "sm_90":
        # x, b, c and dout by the copy engine, products by the tensor cores.
        products = {*LARGE, "compute_gradients"} & set(codes)
        assert all(codes[name].opcodes["UTMALDG"] and codes[name].opcodes["HGMMA"] for name in products)


@pytest.mark.parametrize("changes", [{}, {"side_pairs": False}, {"sides": False}], ids=str)
def test_kernels_apart_compile_for_bf16(monkeypatch: pytest.MonkeyPatch, changes: dict[str, bool]) -> None:
    default = backward_config.default_config
    changed = lambda *problem: replace(default(*problem), **changes)  # noqa: E731
    monkeypatch.setattr(backward_config, "default_config", changed)
    kernels = SIDES if changes.get("sides", True) else APART
    found = launches("sm_90", "bf16", kernels, WIDE_STATE)
    assert {name_of(launch) for launch in found} == set(kernels)
    codes = [inspection.compiled(launch.kernel, signature_of(launch), "sm_90") for launch in found]
    assert {code.stack for code in codes} == {0}
    # A warp of its own for the copy engine: without, every thread may have 255 registers.
    assert {code.registers for code in codes} == {168}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "sizes", [{}, {"batch_size": 1, "num_heads": 64, "num_groups": 8, "state_size": 256}]
)
def test_a_kernel_compiles_twice_over_all_lengths(sizes: dict[str, int], dtype: torch.dtype) -> None:
    seen: dict[str, set[tuple[int, str]]] = {}
    for tokens in (2, 16, 17, 64, 65, 200, 960, 1000, 1024, 4096, 16384, 16400, 100_001):
        spec = replace(PUBLISHED, dtype=dtype, num_tokens=tokens, **sizes)
        for launch in inspection.backward_launches(spec, "sm_90"):
            symbol = signature_of(launch).symbol
            seen.setdefault(name_of(launch), set()).add((id(launch.kernel), symbol))
    allowed = dict.fromkeys(seen, 2)
    # Short sequences cut a group's heads in parts, whose sums are float32.
    allowed["compute_dbc"] = allowed["compute_gradients"] = 4
    assert {name: len(found) for name, found in seen.items() if len(found) > allowed[name]} == {}


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"state_size": 64},
        {"state_size": 64, "num_heads": 80},
        {"state_size": 256},
        {"state_size": 512},
        {"head_size": 80},
    ],
    ids=lambda sizes: "-".join(f"{name}-{size}" for name, size in sizes.items()) or "published",
)
def test_a_warp_of_its_own_loads_ahead_of_the_walks(sizes: dict[str, int]) -> None:
    """Without it N 256 took 1221 us instead of 806, and every thread may have 255 registers."""
    launch, *_ = launches("sm_90", "bf16", ("tile_states",), replace(PUBLISHED, **sizes))
    assert inspection.compiled(launch.kernel, signature_of(launch), "sm_90").registers == 128
