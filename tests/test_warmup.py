"""Warming up: after it no call at another number of tokens has anything left to compile."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tilegym_mamba2 import BackendUnavailable, warmup
from tilegym_mamba2.backends.cutile import (
    backward,
    backward_config,
    forward,
    inspection,
    scan,
    scan_backward,
    state_update,
    tuning,
)
from tilegym_mamba2.backends.cutile import warmup as warming
from tilegym_mamba2.backends.cutile.launch import recording
from tilegym_mamba2.calls import CALLS
from tilegym_mamba2.spec import SPECS, Mamba2ProblemSpec, Mamba2ScanSpec, Mamba2StepSpec

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


SCAN = Mamba2ScanSpec(
    1, 2048, 1, 8, 128, 64, 64, torch.bfloat16, torch.float32, decay="slow", gated=True, raw_dt=True
)
SCANS = {
    "plain": SCAN,
    "per row": replace(SCAN, d_per_row=True, gated=False, dtype=torch.float32, num_tokens=500),
    "packed": replace(SCAN, num_sequences=40),
    "packed, three heads": replace(SCAN, num_heads=3, head_size=80, state_size=96, num_sequences=9),
    "training": replace(SCAN, num_sequences=20, stateless=True),
    "padded": replace(SCAN, batch_size=4, padded=True),
}


@pytest.mark.parametrize("name", SCANS)
def test_a_scan_of_any_length_finds_everything_compiled(name: str) -> None:
    spec = SCANS[name]
    for training in (False, True):
        warm = set()
        for case in warming.scan_cases(spec, ARCH):
            warm |= forms(case, case.num_tokens, lambda case=case: warming.run_scan(case, META, training))  # noqa: B023
        counts = [s for s in (1, 2, 5, 15, 16, 31, 33, 40) if s <= spec.num_sequences] or [0]
        for tokens, count in itertools.product(TOKENS[::2], counts):
            if tokens <= spec.num_tokens:
                case = replace(spec, num_tokens=tokens, num_sequences=count)
                needed = forms(case, tokens, lambda case=case: warming.run_scan(case, META, training))  # noqa: B023
                assert not {kernel for kernel, _, _ in needed - warm}, (tokens, count, training)


def on_meta(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: t.to(META) if isinstance(t, torch.Tensor) else t for name, t in inputs.items()}


STEPS = {
    "batch": SPECS["decode-256"],
    "pool of 16 bits": replace(SPECS["decode-256-pool"], state_dtype=torch.bfloat16),
    "one": SPECS["decode-1"],
    "several tokens": replace(SPECS["decode-1"], batch_size=20, num_tokens=3, d_per_row=True),
    "few heads": Mamba2StepSpec(70, 1, 1, 4, 96, 80, 1, torch.float32, torch.float32, decay="slow"),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_any_rows_finds_everything_compiled(name: str) -> None:
    spec, warm = STEPS[name], set()
    for batch in warming.batches(spec):
        warm |= forms(spec, 1, lambda batch=batch: warming.run_step(spec, batch, META))
    assert warm
    for batch in range(1, spec.batch_size + 1):
        needed = forms(spec, 1, lambda batch=batch: warming.run_step(spec, batch, META))
        assert not needed - warm, batch


@pytest.mark.parametrize("name", SCANS)
def test_what_is_warmed_up_is_what_a_scan_launches(name: str) -> None:
    spec = SCANS[name]
    inputs = on_meta(spec.get_sample_inputs(with_reference=False, device="cpu"))
    arguments = CALLS[spec.op].resolve_args(inputs)
    *tensors, options = arguments
    cotangents = inputs["dout"], inputs.get("dfinal_state")

    def call() -> None:
        scan.mamba2_chunk_scan(*arguments)
        scan_backward.mamba2_chunk_scan_backward(*tensors, *cotangents, options)

    needed = forms(spec, spec.num_tokens, call)
    warm = forms(spec, spec.num_tokens, lambda: warming.run_scan(spec, META, True))
    assert len(needed) > 5 and not {kernel for kernel, _, _ in needed - warm}


@pytest.mark.parametrize("name", ["several tokens", "pool of 16 bits", "few heads"])
def test_what_is_warmed_up_is_what_a_step_launches(name: str) -> None:
    step = replace(STEPS[name], batch_size=9, num_slots=25 if "few" not in name else 0)
    arguments = CALLS[step.op].resolve_args(
        on_meta(step.get_sample_inputs(with_reference=False, device="cpu"))
    )
    out = torch.empty_like(arguments[1])
    limit = (0.0, torch.inf)
    needed = forms(step, 1, lambda: state_update.mamba2_state_update(*arguments, step.raw_dt, limit, out))
    assert needed and needed <= forms(step, 1, lambda: warming.run_step(step, 9, META))


def test_warmup_refuses_what_it_cannot_compile() -> None:
    with pytest.raises(ValueError, match=r"spec must be a name in tilegym_mamba2.SPECS, got 'nix'"):
        warmup("nix")
    with pytest.raises(TypeError, match="Mamba2StepSpec or the name of one, got int"):
        warmup(3)
    with pytest.raises(ValueError, match="backward must be False for a Mamba2StepSpec"):
        warmup("decode-1", backward=True)
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


@pytest.mark.gpu
def test_a_warm_scan_and_a_warm_step_go_into_a_graph_at_once() -> None:
    spec = replace(SCANS["packed"], num_tokens=1500)
    warmup(spec)
    shorter = replace(spec, num_tokens=700, num_sequences=12)
    inputs = shorter.get_sample_inputs(with_reference=False, with_backward=False, device="cuda")
    arguments = CALLS[spec.op].resolve_args(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = scan.mamba2_chunk_scan(*arguments)[:2]
    graph.replay()
    expected = scan.mamba2_chunk_scan(*arguments)[:2]
    assert all(torch.equal(got, want) for got, want in zip(captured, expected, strict=True))

    step = replace(STEPS["few heads"], num_slots=90)
    warmup(step)
    inputs = replace(step, batch_size=7).get_sample_inputs(with_reference=False, device="cuda")
    results = []
    for replayed in (True, False):
        state, *others = CALLS[step.op].resolve_args(CALLS[step.op].fresh(inputs))
        out = torch.empty_like(inputs["x"])
        arguments = (state, *others, step.raw_dt, (0.0, torch.inf), out)
        if replayed:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                state_update.mamba2_state_update(*arguments)
            graph.replay()
        else:
            state_update.mamba2_state_update(*arguments)
        results.append((out, state))
    assert all(torch.equal(got, want) for got, want in zip(*results, strict=True))
