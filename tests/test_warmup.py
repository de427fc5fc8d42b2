"""Warming up: after it no call at another number of tokens has anything left to compile."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tilegym_mamba2 import BackendUnavailable, warmup
from tilegym_mamba2.backends.cutile import backward, backward_config, forward, inspection, tuning
from tilegym_mamba2.backends.cutile import warmup as warming
from tilegym_mamba2.backends.cutile.launch import recording
from tilegym_mamba2.spec import SPECS, Mamba2ProblemSpec

ARCH, META = "sm_90", torch.device("meta")
PUBLISHED = SPECS["published"]
CASES = {
    "published": PUBLISHED,
    "fp32": replace(PUBLISHED, dtype=torch.float32, num_tokens=5000),
    "groups": replace(PUBLISHED, batch_size=1, num_heads=64, num_groups=8, state_size=256),
    "one group of 32": replace(PUBLISHED, batch_size=1, num_heads=32, num_tokens=2048),
    "three heads": replace(
        PUBLISHED, num_heads=3, head_size=80, state_size=96, decay="slow", num_tokens=2000
    ),
    "short": replace(PUBLISHED, num_tokens=100, state_size=64),
}
TOKENS = (
    2,
    15,
    16,
    17,
    40,
    64,
    65,
    72,
    128,
    200,
    256,
    257,
    513,
    1000,
    1024,
    1440,
    2048,
    4100,
    6000,
    8200,
    16001,
)


def forms(spec: Mamba2ProblemSpec, tokens: int, call: Callable[[], Any]) -> set[tuple[str, int, str]]:
    """What a call on tensors without memory would compile: kernel, its hinted form, its signature."""
    sizes = (tokens, spec.num_heads, spec.head_size, spec.state_size)
    config, _ = tuning.lookup(tuning.key_of(ARCH, spec.dtype, *sizes))
    precision = forward.precision_of(spec.dtype)
    own = backward_config.default_config(ARCH, precision, sizes[1:3], spec.state_size)
    with tuning.override(config), backward_config.BackwardConfig.override(own), recording() as launches:
        call()
    return {(inspection.name_of(x), id(x.kernel), inspection.signature_of(x).symbol) for x in launches}


def step(spec: Mamba2ProblemSpec, tokens: int, with_states: bool) -> None:
    """A forward and a backward, with an initial state and its gradient or without."""
    inputs = inspection.meta_inputs(replace(spec, num_tokens=tokens, dt_dtype=spec.step_dtype))
    state = inputs["init_state"] if with_states else None
    arguments = [inputs[name] for name in ("x", "a", "b", "c", "d", "dt")] + [state]
    forward.mamba2_chunk_forward(*arguments)
    dfinal_state = None if state is None else torch.empty_like(state)
    backward.mamba2_chunk_backward(*arguments, torch.empty_like(inputs["x"]), dfinal_state)


@pytest.mark.parametrize("name", CASES)
def test_a_training_step_of_any_length_finds_everything_compiled(name: str) -> None:
    spec = CASES[name]
    warm = set()
    for tokens in warming.lengths(spec, ARCH):
        warm |= forms(spec, tokens, lambda tokens=tokens: warming.run(spec, tokens, META, True))
    for tokens in (t for t in TOKENS if t <= max(spec.num_tokens, 100)):
        for with_states in (True, False):
            needed = forms(spec, tokens, lambda: step(spec, tokens, with_states))  # noqa: B023 - called at once
            assert not {kernel for kernel, _, _ in needed - warm}, (tokens, with_states)


def test_the_forward_alone_is_compiled_without_the_backward() -> None:
    found = warming.lengths(PUBLISHED, ARCH)
    assert {tokens % 16 for tokens in found} == {0, 1} and max(found) == PUBLISHED.num_tokens + 1
    aligned = found[-2]
    alone = forms(PUBLISHED, aligned, lambda: warming.run(PUBLISHED, aligned, META, False))
    assert {kernel for kernel, _, _ in alone} == {
        "chunk_rows",
        "segment_states",
        "pass_states",
        "compute_out",
    }


def test_warmup_refuses_what_it_cannot_compile() -> None:
    with pytest.raises(ValueError, match=r"spec must be a name in tilegym_mamba2.SPECS, got 'nix'"):
        warmup("nix")
    with pytest.raises(TypeError, match="spec must be a Mamba2ProblemSpec or the name of one, got int"):
        warmup(3)
    with pytest.raises(BackendUnavailable, match="warmup: backend 'cutile' cannot run on xpu"):
        warmup(PUBLISHED, "xpu", backward=True)


@pytest.mark.gpu
def test_a_warm_training_step_goes_into_a_graph_at_once() -> None:
    spec = replace(SPECS["bf16-slow"], num_tokens=2000)
    warmup(spec, backward=True)
    inputs = replace(spec, num_tokens=700).get_sample_inputs(with_reference=False, device="cuda")
    arguments = [inputs[name] for name in ("x", "a", "b", "c", "d", "dt", "init_state")]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = forward.mamba2_chunk_forward(*arguments)
        captured = backward.mamba2_chunk_backward(*arguments, inputs["dout"], inputs["dfinal_state"])
    graph.replay()
    expected = backward.mamba2_chunk_backward(*arguments, inputs["dout"], inputs["dfinal_state"])
    assert all(torch.equal(got, want) for got, want in zip(captured, expected, strict=True))
    assert not out.isnan().any()
