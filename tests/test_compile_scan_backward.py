"""The backward of the full scan as the compiler sees it, without a GPU: it compiles, spills nothing."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from tilegym_mamba2.backends.cutile import inspection
from tilegym_mamba2.backends.cutile.inspection import MODES, Code, Launch, name_of, signature_of
from tilegym_mamba2.spec import Mamba2ScanSpec

FULL = Mamba2ScanSpec(
    4, 16384, 1, 8, 128, 64, 64, torch.bfloat16, torch.float32, decay="slow", gated=True, raw_dt=True
)
PACKED = replace(FULL, batch_size=1, num_tokens=65536, num_sequences=200)
SPECS = {"plain": FULL, "packed": PACKED, "padded": replace(FULL, padded=True)}
WALKS = ("segment_borders", "pass_borders", "tile_states")
APART = ("compute_dx", "compute_dbc")
ENDS = ("finish_dt", "sum_heads")
RAGGED = ("tiles_of_slots", *WALKS, "zero_padding")
# (layout, arch, mode): kernels of which none may spill.
NO_SPILLS = {
    ("packed", "sm_90", "bf16"): (*RAGGED, "scan_out", "compute_gradients", *ENDS),
    ("plain", "sm_90", "bf16"): ("scan_out", "finish_dt"),
    ("packed", "sm_100", "bf16"): ("tile_states", "compute_gradients"),
}
COMPILES = {
    ("packed", "sm_80", "bf16"): ("tile_states", "compute_dx"),
    ("packed", "sm_120", "bf16"): ("compute_dbc",),
    ("packed", "sm_90", "fp16"): ("tile_states", *APART),
    ("packed", "sm_90", "fp32"): ("compute_dx",),
}
# Bytes a thread that do not fit in its registers: packed, pairs of tiles take a few more than there are.
SPILLS = {("packed", "compute_gradients", "sm_90"): 8, ("d per channel", "compute_gradients", "sm_90"): 40}
PRODUCTS = ("segment_borders", "tile_states", "compute_gradients", *APART)

Job = tuple[str, str, str, str]


scan_backward_launches = inspection.scan_backward_launches


def launches(layout: str, arch: str, mode: str, **changes: Any) -> dict[str, Launch]:
    dtype, precision = MODES[mode]
    spec = replace(SPECS[layout], dtype=dtype)
    return {name_of(launch): launch for launch in scan_backward_launches(spec, arch, precision, **changes)}


JOBS: dict[Job, Launch] = {
    (layout, name, arch, mode): launches(layout, arch, mode)[name]
    for (layout, arch, mode), names in (NO_SPILLS | COMPILES).items()
    for name in names
}
_PER_CHANNEL = launches("packed", "sm_90", "bf16", d=torch.empty(8, 64, device="meta"))
JOBS |= {
    ("d per channel", name, "sm_90", "bf16"): _PER_CHANNEL[name]
    for name in ("compute_gradients", "skip_parts", "sum_skip")
}


@pytest.fixture(scope="module")
def compiled() -> Iterator[dict[Job, Future[Code]]]:
    with ThreadPoolExecutor(2) as pool:
        yield {
            key: pool.submit(inspection.compiled, launch.kernel, signature_of(launch), key[2])
            for key, launch in JOBS.items()
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("job", JOBS, ids="-".join)
def test_kernels_compile(compiled: dict[Job, Future[Code]], job: Job) -> None:
    code = compiled[job].result()
    layout, name, arch, mode = job
    if (layout, arch, mode) not in COMPILES:
        assert code.stack <= SPILLS.get((layout, name, arch), 0)
    if arch == "sm_90" and name in PRODUCTS:
        # Tokens by the copy engine from sliced arrays too, products by the tensor cores.
        assert code.opcodes["UTMALDG"] >= 4 and code.opcodes["HGMMA"]


@pytest.mark.parametrize("layout", SPECS)
def test_a_kernel_compiles_a_few_times_over_all_lengths(layout: str) -> None:
    seen: dict[str, set[tuple[int, str]]] = {}
    for tokens in (2, 16, 17, 64, 65, 200, 960, 1000, 1024, 4096, 16384, 16400, 100_001):
        for sequences in (3, 15, 16, 200) if layout == "packed" else (0,):
            spec = replace(SPECS[layout], num_tokens=tokens, num_sequences=sequences)
            for launch in scan_backward_launches(spec, "sm_90"):
                symbol = signature_of(launch).symbol
                seen.setdefault(name_of(launch), set()).add((id(launch.kernel), symbol))
    # T a multiple of 16 or not; packed, the number of sequences too.
    allowed = dict.fromkeys(seen, 2 + 2 * (layout == "packed"))
    # Short sequences cut a group's heads in parts, whose sums are float32.
    allowed["compute_gradients"] = 2 * allowed["compute_gradients"]
    assert {name: len(found) for name, found in seen.items() if len(found) > allowed[name]} == {}


@pytest.mark.parametrize("tokens", [8192, 65536])
def test_the_gate_of_a_layer_has_blocks_for_the_gpu(tokens: int) -> None:
    # States alone may be walked in one segment a row: a block for each of 80 heads and direction.
    spec = replace(FULL, batch_size=1, num_heads=80, num_tokens=tokens)
    grids = {name_of(launch): launch.grid for launch in scan_backward_launches(spec, "sm_90")}
    assert grids["scan_out"][0] >= 240
    bare = {
        name_of(launch): launch.grid for launch in scan_backward_launches(replace(spec, gated=False), "sm_90")
    }
    assert bare["tile_states"][0] == 80 and "segment_borders" not in bare


def test_packed_sequences_of_the_published_layer_are_walked_at_once() -> None:
    # Their segments are short: in pieces with memory for full ones, 1224 tiles would be four launches.
    launches = scan_backward_launches(PACKED, "sm_90")
    assert [name_of(launch) for launch in launches].count("tile_states") == 1
