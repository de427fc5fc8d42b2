"""The full scan as the compiler sees it, without a GPU: its kernels compile, spill nothing, not too often."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from tilegym_mamba2.backends.cutile import inspection
from tilegym_mamba2.backends.cutile.inspection import MODES, Code, Launch, name_of, signature_of
from tilegym_mamba2.backends.cutile.tuning import ForwardConfig
from tilegym_mamba2.spec import Mamba2ScanSpec

FULL = Mamba2ScanSpec(
    4, 16384, 1, 8, 128, 64, 64, torch.bfloat16, torch.float32, decay="slow", gated=True, raw_dt=True
)
PACKED = replace(FULL, batch_size=1, num_tokens=65536, num_sequences=200)
SPECS = {"plain": FULL, "packed": PACKED, "padded": replace(FULL, padded=True)}
# Of which the compiler tells nothing new in other layouts.
OWN = {
    "plain": ("scan_rows", "scan_out"),
    "packed": ("packed_table", "scan_rows", "carried_states", "pass_carried", "scan_out"),
    "padded": ("padded_table",),
}
NO_SPILLS = [("sm_90", "bf16"), ("sm_90", "fp16")]
COMPILES = [("sm_80", "bf16"), ("sm_100", "bf16"), ("sm_103", "bf16"), ("sm_120", "bf16"), ("sm_90", "tf32")]


def launches(layout: str, arch: str, mode: str, **changes: Any) -> dict[str, Launch]:
    dtype, precision = MODES[mode]
    spec = replace(SPECS[layout], dtype=dtype)
    found = inspection.scan_launches(spec, arch, precision=precision, **changes)
    return {name_of(launch): launch for launch in found}


JOBS = {
    (layout, name, arch, mode): launches(layout, arch, mode)[name]
    for arch, mode in NO_SPILLS + COMPILES
    for layout, names in OWN.items()
    for name in names
    # Elsewhere only what has loads of sliced arrays and products.
    if (arch, mode) in NO_SPILLS or (layout == "packed" and name in ("carried_states", "scan_out"))
}
_CHUNKS = inspection.scan_launches(PACKED, "sm_90", chunk_states=True)
JOBS |= {
    ("chunks", name_of(launch), "sm_90", "bf16"): launch
    for launch in _CHUNKS[5:]
    if name_of(launch) in ("carried_states", "pass_chunks")
}
JOBS["d per channel", "scan_out", "sm_90", "bf16"] = launches(
    "packed", "sm_90", "bf16", d=torch.empty(8, 64, device="meta"), init_state=None
)["scan_out"]

Compiled = dict[tuple[str, str, str, str], Future[Code]]


@pytest.fixture(scope="module")
def compiled() -> Iterator[Compiled]:
    with ThreadPoolExecutor(2) as pool:
        yield {
            key: pool.submit(inspection.compiled, launch.kernel, signature_of(launch), key[2])
            for key, launch in JOBS.items()
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("job", JOBS, ids="-".join)
def test_kernels_compile(compiled: Compiled, job: tuple[str, str, str, str]) -> None:
    code = compiled[job].result()
    _, name, arch, mode = job
    if (arch, mode) in NO_SPILLS:
        assert code.stack == 0
    if arch == "sm_90" and name in ("scan_out", "carried_states"):
        assert code.opcodes["HGMMA"]
        # Tokens and rows by the copy engine, from sliced arrays too; the table's numbers by plain loads.
        assert code.opcodes["UTMALDG"] >= 3 + 2 * (name == "scan_out")
        assert code.opcodes["LDG"] + code.opcodes["LDGSTS"] <= 24


@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_two_blocks_fit_a_multiprocessor(compiled: Compiled, layout: str) -> None:
    code = compiled[layout, "scan_out", "sm_90", "bf16"].result()
    # Half of the registers for 256 threads; half of 228 KB, of which the system takes one for each block.
    assert code.registers <= 128
    assert code.shared <= 113 * 1024


@pytest.mark.parametrize("layout", SPECS)
def test_a_kernel_compiles_a_few_times_over_all_lengths(layout: str) -> None:
    seen: dict[str, set[tuple[int, str]]] = {}
    for tokens in (2, 16, 17, 64, 65, 200, 960, 1000, 1024, 4096, 16384, 16400, 100_001):
        for sequences in (3, 7, 15, 16, 200) if layout == "packed" else (0,):
            spec = replace(SPECS[layout], num_tokens=tokens, num_sequences=sequences)
            for launch in inspection.scan_launches(spec, "sm_90", ForwardConfig()):
                symbol = signature_of(launch).symbol
                seen.setdefault(name_of(launch), set()).add((id(launch.kernel), symbol))
    # T a multiple of 16 or not; packed, the number of sequences too.
    assert {
        name: len(found) for name, found in seen.items() if len(found) > 2 + 2 * (layout == "packed")
    } == {}
