"""The named problems as data: each row is a name, a kind of spec, its fields and its tags."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

Fields = dict[str, Any]
Row = tuple[str, str, Fields, frozenset[str]]

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32

# Layers of published models: (H, P, G, N, chunk). Sources: the configuration classes of transformers 5.3
# (Mamba2Config, NemotronHConfig, BambaConfig, GraniteMoeHybridConfig, FalconH1Config, Zamba2Config) with the
# config.json of each checkpoint, and the table of sizes in transformers' FalconH1 documentation. H is
# num_heads, mamba_num_heads or mamba_n_heads there; the state-spaces and Zamba2 checkpoints give it as
# expand · hidden_size / head size.
MODEL_LAYERS: Mapping[str, tuple[int, int, int, int, int]] = MappingProxyType(
    {
        "mamba2-130m": (24, 64, 1, 128, 256),
        "mamba2-370m": (32, 64, 1, 128, 256),
        "mamba2-780m": (48, 64, 1, 128, 256),
        "mamba2-1.3b": (64, 64, 1, 128, 256),
        "mamba2-2.7b": (80, 64, 1, 128, 256),
        "codestral-mamba-7b": (128, 64, 8, 128, 256),
        "nemotron-h-8b": (128, 64, 8, 128, 128),
        "nemotron-nano-9b-v2": (128, 80, 8, 128, 128),
        "bamba-9b": (128, 64, 1, 128, 256),
        "granite-4-h-350m": (48, 32, 1, 128, 256),
        "granite-4-h-1b": (48, 64, 1, 128, 256),
        "granite-4-h-tiny": (48, 64, 1, 128, 256),
        "granite-4-h-micro": (64, 64, 1, 128, 256),
        "granite-4-h-small": (128, 64, 1, 128, 256),
        "falcon-h1-0.5b": (24, 64, 1, 128, 128),
        "falcon-h1-1.5b": (48, 64, 1, 256, 128),
        "falcon-h1-1.5b-deep": (24, 64, 1, 256, 128),
        "falcon-h1-3b": (32, 128, 1, 256, 128),
        "falcon-h1-7b": (24, 128, 1, 256, 128),
        "falcon-h1-34b": (32, 128, 2, 256, 128),
        "zamba2-1.2b": (64, 64, 1, 128, 256),
        "zamba2-2.7b": (80, 64, 1, 64, 256),
        "zamba2-7b": (112, 64, 2, 64, 256),
    }
)
# The layers whose speed is compared with every peer, at a short and a long prompt.
_COMPARED_MODELS = (
    "mamba2-2.7b",
    "codestral-mamba-7b",
    "nemotron-h-8b",
    "bamba-9b",
    "granite-4-h-small",
    "zamba2-2.7b",
    "zamba2-7b",
)


def rows() -> Iterator[Row]:
    """Every named problem, in the order in which they are listed."""
    for kind, family in (
        ("chunk", _published),
        ("chunk", _models),
        ("chunk", _tests),
        ("chunk", _edges),
        ("chunk", _unpacked),
        ("scan", _scans),
        ("scan", _scan_tests),
        ("step", _steps),
        ("step", _step_tests),
    ):
        for name, fields, tags in family():
            yield name, kind, fields, frozenset(tags.split())


def _sizes(
    *sizes: int, dtype: torch.dtype = _BF16, state_dtype: torch.dtype = _FP32, **fields: Any
) -> Fields:
    """Fields from (B, T, G, H, N, P, chunk)."""
    names = ("batch_size", "num_tokens", "num_groups", "num_heads", "state_size", "head_size", "chunk_size")
    return dict(zip(names, sizes, strict=True), dtype=dtype, state_dtype=state_dtype, **fields)


def _published() -> Iterator[tuple[str, Fields, str]]:
    published = _sizes(4, 16384, 1, 8, 128, 64, 128)
    yield "published", published, "published benchmark"
    yield "published-slow", published | {"decay": "slow"}, "published"
    yield "published-none", published | {"decay": "none"}, "published"
    # What `run` takes where there is no GPU: the published layer, short enough for a second or two on a core.
    yield "cpu", published | {"batch_size": 1, "num_tokens": 2048}, "cpu"
    for kilo_tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        for state_size in (64, 128, 256, 512):
            sizes = {"num_tokens": 1024 * kilo_tokens, "state_size": state_size}
            yield f"published-{kilo_tokens}k-n{state_size}", published | sizes, "published grid"


def _models() -> Iterator[tuple[str, Fields, str]]:
    for model, (heads, head_size, groups, state_size, chunk) in MODEL_LAYERS.items():
        fields = _sizes(1, 8192, groups, heads, state_size, head_size, chunk, decay="slow")
        compared = model in _COMPARED_MODELS
        yield f"{model}-8k", fields, "model compared" if compared else "model"
        if compared:
            yield f"{model}-64k", fields | {"num_tokens": 65536}, "model compared"


def _tests() -> Iterator[tuple[str, Fields, str]]:
    """Small enough for an interpreter that runs blocks one by one: B · H · ⌈T / 64⌉ of at most about 60."""
    for dtype_name, dtype in (("bf16", _BF16), ("fp16", _FP16), ("fp32", _FP32)):
        for decay in ("published", "slow", "none"):
            yield f"{dtype_name}-{decay}", _sizes(2, 200, 2, 4, 64, 32, 64, dtype=dtype, decay=decay), "test"

    base = _sizes(1, 130, 1, 2, 64, 64, 64, decay="slow")
    narrow = base | {"head_size": 32}
    violent = base | {"decay": "violent", "num_heads": 8}
    sliced = {"layout": "sliced"}
    cases = {
        "aligned": base | {"num_tokens": 256},
        "long": narrow | {"num_tokens": 1600},
        "long-fp32": narrow | {"num_tokens": 1100, "dtype": _FP32},
        "p128-n256": base | {"num_tokens": 100, "num_heads": 1, "head_size": 128, "state_size": 256},
        "p96-fp32": base | {"head_size": 96, "state_size": 16, "dtype": _FP32},
        "dt-bf16": base | {"dt_dtype": _BF16},
        "dt-fp16": base | {"dt_dtype": _FP16, "dtype": _FP16},
        "dt-bf16-fp32": base | {"dt_dtype": _BF16, "dtype": _FP32},
        "state-bf16": base | {"state_dtype": _BF16},
    }
    cases |= {f"p{size}": base | {"head_size": size, "state_size": 32} for size in (16, 40, 96, 128, 256)}
    cases |= {f"n{size}": narrow | {"state_size": size} for size in (16, 128, 256, 512)}
    for chunk in (1, 40, 50, 96, 128, 256):
        cases[f"chunk{chunk}"] = narrow | {"chunk_size": chunk, "num_tokens": 300}
    edges = {
        "ragged": base | {"num_tokens": 219, "num_heads": 4, "num_groups": 2},
        "one-token": base | {"batch_size": 2, "num_tokens": 1, "num_heads": 4, "num_groups": 2},
        "one-token-chunk256": base | {"num_tokens": 1, "num_heads": 4, "chunk_size": 256},
        "no-tokens": base | {"batch_size": 2, "num_tokens": 0},
        "shorter-than-chunk": base | {"num_tokens": 17, "num_heads": 8},
        "two-past-a-chunk": base | {"num_tokens": 66, "num_heads": 4},
        "group-per-head": narrow | {"num_heads": 4, "num_groups": 4},
        "three-heads": narrow | {"num_heads": 3},
        "heads-50": base
        | {"num_tokens": 60, "num_heads": 50, "num_groups": 2, "head_size": 16, "state_size": 16},
        "p80": base | {"head_size": 80, "state_size": 32},
        "n96": narrow | {"state_size": 96},
        "p80-n96": base | {"head_size": 80, "state_size": 96, "num_groups": 2},
        "sliced": base | sliced | {"num_heads": 4, "num_groups": 2},
        "sliced-published": base | sliced | {"decay": "published", "head_size": 40},
        "sliced-fp32": narrow | sliced | {"dtype": _FP32},
        "violent": violent,
        "violent-fp16": violent | {"dtype": _FP16},
        "violent-chunk256": violent | {"num_heads": 4, "chunk_size": 256, "num_tokens": 300},
    }
    yield from ((name, fields, "test") for name, fields in cases.items())
    yield from ((name, fields, "test edge") for name, fields in edges.items())


def _edges() -> Iterator[tuple[str, Fields, str]]:
    """Edge cases whose size asks for a GPU."""
    base = _sizes(4, 16383, 1, 8, 128, 64, 128, decay="slow")
    yield "edge-ragged-16383", base, "edge"
    yield "edge-ragged-100001", base | {"batch_size": 1, "num_tokens": 100_001}, "edge"
    yield "edge-p80-n96", base | {"num_tokens": 4097, "head_size": 80, "state_size": 96}, "edge"
    large = {"num_tokens": 2050, "num_heads": 4, "head_size": 256, "state_size": 512}
    yield "edge-p256-n512", base | large, "edge"
    yield "edge-sliced", base | {"layout": "sliced"}, "edge"
    tiny = base | {"head_size": 16, "state_size": 16}
    # One more than the y and z axes of a CUDA grid can count.
    yield "edge-65536-rows", tiny | {"batch_size": 1024, "num_tokens": 65, "num_heads": 64}, "edge"
    many_chunks = {"batch_size": 1, "num_tokens": 64 * 65536 + 1, "num_heads": 1}
    yield "edge-65537-chunks", tiny | many_chunks, "edge"
    # x has 2³¹ + 2048 elements, where a 32-bit offset wraps.
    vast = {"batch_size": 1, "num_tokens": 2**20 + 1, "num_heads": 32, "state_size": 16}
    yield "edge-2g-elements", base | vast, "edge huge"


# All that a Mamba-2 layer puts around the scan.
_LAYER = {"gated": True, "raw_dt": True, "decay": "slow"}


def _unpacked() -> Iterator[tuple[str, Fields, str]]:
    """What `packed-64k` is compared with."""
    yield "unpacked-64k", _sizes(1, 65536, 1, 8, 128, 64, 128, decay="slow"), "scan"


def _scans() -> Iterator[tuple[str, Fields, str]]:
    """The published layer as a model calls it, plain and packed, and what a short one costs on a CPU."""
    published = _sizes(4, 16384, 1, 8, 128, 64, 128, decay="slow")
    yield "gated", published | _LAYER, "scan"
    yield "gated-cpu", published | _LAYER | {"batch_size": 1, "num_tokens": 2048}, "scan"
    row = published | {"batch_size": 1, "num_tokens": 65536}
    yield "packed-64k", row | {"num_sequences": 200}, "scan"
    yield "packed-64k-gated", row | _LAYER | {"num_sequences": 200}, "scan"
    # What mamba_ssm computes too: its packed sequences start from zero.
    training = row | {"num_sequences": 200, "stateless": True}
    yield "packed-64k-training", training, "scan"
    yield "packed-64k-gated-training", training | _LAYER, "scan"
    yield "padded", published | _LAYER | {"padded": True}, "scan"


def _scan_tests() -> Iterator[tuple[str, Fields, str]]:
    base = _sizes(2, 150, 2, 4, 32, 16, 64, decay="slow")
    packed = {"batch_size": 1, "num_tokens": 300, "num_sequences": 7}
    cases = {
        "gated": {"gated": True},
        "raw-dt": {"raw_dt": True},
        "d-per-row": {"d_per_row": True},
        "packed": packed,
        "padded": {"padded": True},
        "layer": _LAYER,
        "layer-fp16": _LAYER | {"dtype": _FP16},
        "layer-fp32": _LAYER | {"dtype": _FP32},
        "layer-sliced": _LAYER | {"layout": "sliced", "dt_dtype": _BF16},
        "layer-published": _LAYER | {"decay": "published"},
        "layer-packed": _LAYER | packed | {"d_per_row": True},
        "layer-packed-fp32": _LAYER | packed | {"dtype": _FP32, "head_size": 20, "state_size": 24},
        "layer-padded": _LAYER | {"padded": True, "state_dtype": _BF16},
    }
    yield from ((f"scan-{name}", base | fields, "scan-test") for name, fields in cases.items())


def _steps() -> Iterator[tuple[str, Fields, str]]:
    """Decoding, one token: a full batch of a large layer, which is all states, and one row of a small one."""
    large = _sizes(256, 1, 8, 128, 128, 64, 1) | _LAYER
    yield "decode-256", large, "step"
    yield "decode-256-bf16", large | {"state_dtype": _BF16}, "step"
    yield "decode-256-pool", large | {"num_slots": 320}, "step"
    yield "decode-1", large | {"batch_size": 1, "num_groups": 1, "num_heads": 80}, "step"
    yield "decode-cpu", large | {"batch_size": 8, "num_groups": 1, "num_heads": 24}, "step"


def _step_tests() -> Iterator[tuple[str, Fields, str]]:
    base = _sizes(3, 1, 2, 4, 32, 16, 1, decay="slow")
    cases = {
        "plain": {},
        "layer": _LAYER,
        "layer-several": _LAYER | {"num_tokens": 3, "d_per_row": True},
        "layer-pool": _LAYER | {"num_slots": 7, "state_dtype": _BF16},
        "layer-fp32": _LAYER | {"dtype": _FP32, "head_size": 20, "state_size": 24},
        "layer-fp16": _LAYER | {"dtype": _FP16, "state_dtype": _FP16},
    }
    yield from ((f"step-{name}", base | fields, "step-test") for name, fields in cases.items())
