"""The scan and the step on a GPU against mamba_ssm's Triton kernels, where they are installed."""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.scanning import BACKENDS, call, error, with_gradients
from tilegym_mamba2 import mamba2_state_update, registry
from tilegym_mamba2.bench import peers
from tilegym_mamba2.spec import Mamba2ScanSpec, Mamba2StepSpec

pytestmark = pytest.mark.gpu

# mamba_ssm rounds the operands of its products to bf16 and, for float32, to tf32.
TOLERANCE = 1e-2
SCAN = Mamba2ScanSpec(
    2, 600, 2, 8, 64, 64, 128, torch.bfloat16, torch.float32, decay="slow", gated=True, raw_dt=True
)
STEP = Mamba2StepSpec(
    6, 1, 2, 8, 64, 64, 1, torch.bfloat16, torch.float32, decay="slow", gated=True, raw_dt=True
)


@pytest.fixture(scope="module")
def mamba_ssm() -> Any:
    """Its module of Triton kernels."""
    available, reason = peers.MambaSsm().status("forward")
    if not available:
        pytest.skip(f"mamba_ssm {reason}")
    return lambda name: importlib.import_module(f"mamba_ssm.ops.triton.{name}")


def keywords(values: dict[str, Any]) -> dict[str, Any]:
    """The same arguments under mamba_ssm's names."""
    names = {
        "d": "D",
        "z": "z",
        "dt_bias": "dt_bias",
        "init_state": "initial_states",
        "dt_softplus": "dt_softplus",
    }
    return {theirs: values[ours] for ours, theirs in names.items() if values.get(ours) is not None}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "changes",
    [{}, {"d_per_row": True}, {"gated": False}, {"raw_dt": False}, {"batch_size": 1, "num_sequences": 9}],
    ids=str,
)
def test_scan_agrees_with_mamba_ssm(backend: str, changes: dict[str, Any], mamba_ssm: Any) -> None:
    spec = replace(SCAN, **changes)
    inputs = spec.get_sample_inputs(with_reference=False, device="cuda")
    dout, dfinal = inputs.pop("dout"), inputs.pop("dfinal_state")
    packed = spec.num_sequences > 0
    if packed:
        # Its states are of a row and not of a sequence.
        inputs.pop("init_state")
        dfinal = None
    (out, final), gradients = with_gradients(inputs, dout, dfinal, backend=backend)

    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in gradients}
    values = inputs | leaves
    theirs = keywords(values)
    if packed:
        index = torch.arange(spec.num_sequences, device="cuda", dtype=torch.int32)
        lengths = inputs["cu_seqlens"].diff()
        theirs["seq_idx"] = index.repeat_interleave(lengths)[None]
    results = mamba_ssm("ssd_combined").mamba_chunk_scan_combined(
        *(values[name] for name in ("x", "dt", "a", "b", "c")), 128, return_final_states=True, **theirs
    )
    assert error(out, results[0]) <= TOLERANCE
    if not packed:
        assert error(final, results[1]) <= TOLERANCE
    kept = results[:1] if packed else results
    found = torch.autograd.grad(kept, list(leaves.values()), [dout] if packed else [dout, dfinal])
    for (name, gradient), peer in zip(gradients.items(), found, strict=True):
        assert error(gradient, peer) <= 2 * TOLERANCE, name


@pytest.mark.parametrize("backend", registry.ops()["mamba2_state_update"].backends)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_step_agrees_with_mamba_ssm(backend: str, state_dtype: torch.dtype, mamba_ssm: Any) -> None:
    spec = replace(STEP, state_dtype=state_dtype)
    values = spec.get_sample_inputs(with_reference=False, device="cuda")
    ours, theirs = values["state"].clone(), values["state"].clone()
    arguments = {name: values[name] for name in ("d", "z", "dt_bias", "dt_softplus")}
    positional = [values[name] for name in ("x", "dt", "a", "b", "c")]
    out = mamba2_state_update(ours, *positional, **arguments, backend=backend)

    x, dt, a, b, c = positional
    per_row = (*x.shape[1:],)
    peer = mamba_ssm("selective_state_update").selective_state_update(
        theirs,
        x,
        dt[..., None].expand(-1, *per_row),
        a[:, None, None].expand(*per_row, spec.state_size),
        b,
        c,
        D=values["d"][:, None].expand(per_row),
        z=values["z"],
        dt_bias=values["dt_bias"][:, None].expand(per_row),
        dt_softplus=True,
    )
    assert error(out, peer) <= TOLERANCE
    assert error(ours, theirs) <= TOLERANCE


def test_published_layer_is_within_budget() -> None:
    from tilegym_mamba2.budgets import check
    from tilegym_mamba2.spec import SPECS

    spec, entry = SPECS["packed-64k-gated"], registry.ops()["mamba2_chunk_scan"]
    inputs = spec.get_sample_inputs(with_backward=False, device="cuda")
    references = {name: inputs.pop(name) for name in ("out", "final_state")}
    results = dict(zip(("out", "final_state"), call(inputs), strict=True))
    absent = dict.fromkeys(entry.outputs)
    verdicts = check(entry, absent | results, absent | references, dtype=spec.dtype, decay=spec.decay)
    assert len(verdicts) == 2 and not [v for v in verdicts if not v.ok]
