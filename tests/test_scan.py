"""The full scan: against the token loop, what must hold bit for bit, and under what torch puts around it."""

import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tilegym_mamba2
from tests import scan_oracle
from tests.scanning import (
    BACKENDS,
    DIFFERENTIABLE,
    PRECISION,
    Shape,
    assert_like_the_token_loop,
    call,
    cotangents,
    error,
    running,
    shapes,
    with_gradients,
)
from tilegym_mamba2 import BackendUnavailable, autograd_scan, mamba2_chunk_scan, ops_scan, registry
from tilegym_mamba2.backends.torch import scan as torch_scan
from tilegym_mamba2.budgets import check
from tilegym_mamba2.options import ScanOptions
from tilegym_mamba2.spec import SPECS, select

every_backend = pytest.mark.parametrize("backend", BACKENDS)
with_a_backward = pytest.mark.parametrize("backend", DIFFERENTIABLE)
EVERYTHING = Shape(d="HP", z=True, dt_bias=True, dt_softplus=True, dt_limit=(0.3, 1.2), init_state=True)
PACKED = replace(EVERYTHING, batch=1, tokens=90, lengths=(20, 0, 33, 1, 16))
PADDED = replace(EVERYTHING, batch=3, tokens=50, row_lengths=(50, 0, 17))
LAYOUTS = pytest.mark.parametrize("shape", [EVERYTHING, PACKED, PADDED], ids=["plain", "packed", "padded"])
SETTINGS = ("chunk_size", "dt_softplus", "cu_seqlens", "seq_lens")
# Per head or per token, so that each is one sequence's alone.
PER_TOKEN = ("x", "dt", "b", "c", "z")


# ---- against the token loop


@every_backend
@pytest.mark.parametrize(
    "option",
    [
        {},
        {"d": "H"},
        {"d": "HP"},
        {"z": True},
        {"dt_bias": True},
        {"dt_softplus": True},
        {"dt_bias": True, "dt_softplus": True},
        {"dt_limit": (0.1, 0.25)},
        {"init_state": True},
        {"batch": 1, "lengths": (5, 0, 40, 17)},
        {"row_lengths": (70, 33)},
    ],
    ids=str,
)
def test_each_option_alone(backend: str, option: dict[str, Any]) -> None:
    dtype, tolerance = PRECISION[backend]
    values = Shape(**option).values(dtype)
    assert_like_the_token_loop(values, backend, tolerance)


@every_backend
@LAYOUTS
@pytest.mark.parametrize("reach", [(True, True), (True, False), (False, True)], ids=["both", "out", "final"])
def test_all_options_together(backend: str, shape: Shape, reach: tuple[bool, bool]) -> None:
    dtype, tolerance = PRECISION[backend]
    assert_like_the_token_loop(shape.values(dtype), backend, tolerance, reach=reach)


@every_backend
@settings(max_examples=200, derandomize=True, database=None)
@given(shapes(60), st.integers(0, 2**20))
def test_random_problems(backend: str, shape: Shape, seed: int) -> None:
    dtype, tolerance = PRECISION[backend]
    assert_like_the_token_loop(shape.values(dtype, seed), backend, tolerance)


@LAYOUTS
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3), (torch.float16, 6e-4)]
)
def test_the_other_dtypes(shape: Shape, dtype: torch.dtype, tolerance: float) -> None:
    values = shape.values(dtype, seed=3)
    assert_like_the_token_loop(values, "torch", tolerance)


@pytest.mark.parametrize("workspace", [1, 5000])
@LAYOUTS
def test_in_many_segments(shape: Shape, workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_scan, "WORKSPACE", workspace)
    assert_like_the_token_loop(shape.values(), "torch", 1e-11)


@every_backend
@pytest.mark.parametrize("chunk_size", [1, 129, 300])
def test_chunk_states_at_any_chunk_size(backend: str, chunk_size: int) -> None:
    dtype, tolerance = PRECISION[backend]
    shape = Shape(tokens=290, batch=1, heads=1, groups=1, lengths=(131, 3, 150), chunk_size=chunk_size)
    values = shape.values(dtype)
    with running(backend):
        *_, states, offsets = call(values, return_chunk_states=True, backend=backend)
    *_, expected, expected_offsets = scan_oracle.scan(**values)
    assert states.shape == (1, 1, 290 // chunk_size + 3, 3, 5)
    assert error(states, expected) <= tolerance
    assert offsets.dtype == torch.int32 and offsets.tolist() == expected_offsets
    assert not states[:, :, expected_offsets[-1] :].any()


@every_backend
@LAYOUTS
@pytest.mark.parametrize("chunk_size", [sys.maxsize, 2**63, np.uint64(2**63)], ids=str)
def test_a_chunk_may_be_longer_than_any_sequence(backend: str, shape: Shape, chunk_size: Any) -> None:
    values = shape.values(torch.float32)
    options = {"return_chunk_states": True, "backend": backend}
    with running(backend):
        expected = call(values | {"chunk_size": 91}, **options)
        assert expected[0].any() and expected[1].any()
        large = values | {"chunk_size": chunk_size}
        found = [call(large, **options), call(large | {"x": values["x"].clone().requires_grad_()}, **options)]
    for results in found:
        assert all(torch.equal(got, ref) for got, ref in zip(results, expected, strict=True))


def test_a_compiled_call_takes_a_chunk_longer_than_any_sequence() -> None:
    values = EVERYTHING.values(torch.float32) | {"chunk_size": 2**63}
    compiled = torch.compile(lambda v: call(v, backend="torch"), fullgraph=True, backend="eager")
    for got, ref in zip(compiled(values), call(values, backend="torch"), strict=True):
        assert torch.equal(got, ref)
    torch._dynamo.reset()


@every_backend
@pytest.mark.parametrize("name", select("scan-test"))
def test_specs_within_budgets(backend: str, name: str) -> None:
    spec = SPECS[name]
    inputs = spec.get_sample_inputs(device="cpu")
    values = {key: inputs[key] for key in (*spec.shapes, *SETTINGS) if key in inputs}
    dout, dfinal = values.pop("dout"), values.pop("dfinal_state")
    with running(backend):
        results, gradients = with_gradients(values, dout, dfinal, backend=backend)
    found = dict(zip(("out", "final_state"), results, strict=True))
    found |= {f"d{key}": gradient for key, gradient in gradients.items()}
    for op in ("mamba2_chunk_scan", *["mamba2_chunk_scan_backward"] * bool(gradients)):
        entry = registry.ops()[op]
        absent = dict.fromkeys(entry.outputs)
        verdicts = check(entry, absent | found, absent | inputs, dtype=spec.dtype, decay=spec.decay)
        assert len(verdicts) == 2 + (op != "mamba2_chunk_scan") * (5 + spec.gated + spec.raw_dt)
        assert not [v for v in verdicts if not v.ok]


# ---- values


@every_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("dt", "used"), [(12.0, 12.0000061), (100.0, 100.0), (-100.0, 3.7e-44)])
def test_softplus_of_large_values(backend: str, dtype: torch.dtype, dt: float, used: float) -> None:
    # x in float32: 16-bit inputs round dt · x for the product.
    ones = torch.ones(1, 1, 1, 1)
    a = torch.zeros(1)
    with running(backend):
        _, state = mamba2_chunk_scan(
            ones, torch.full((1, 1, 1), dt, dtype=dtype), a, ones, ones, dt_softplus=True, backend=backend
        )
    # With a = 0 the state is dt as used.
    assert state.dtype == torch.float32
    assert state.item() == pytest.approx(used, rel=2e-7, abs=1e-38)


@with_a_backward
def test_bias_then_softplus_then_limits(backend: str) -> None:
    dtype, tolerance = PRECISION[backend]
    dt = torch.tensor([-3.0, -0.5, 0.0, 0.5, 4.0], dtype=dtype).reshape(1, 5, 1).requires_grad_()
    bias = torch.tensor([0.25], dtype=dtype, requires_grad=True)
    ones, zero = torch.ones(1, 5, 1, 1, dtype=dtype), torch.zeros(1, dtype=dtype)
    with running(backend):
        _, state = mamba2_chunk_scan(
            ones, dt, zero, ones, ones,
            dt_bias=bias, dt_softplus=True, dt_limit=(0.2, 1.0), backend=backend,
        )  # fmt: skip
        state.sum().backward()
    raw = [-2.75, -0.25, 0.25, 0.75, 4.25]
    softplus = [math.log1p(math.exp(v)) for v in raw]
    assert softplus[0] < 0.2 and softplus[3] > 1.0
    assert state.item() == pytest.approx(0.2 + softplus[1] + softplus[2] + 1.0 + 1.0, rel=1e-6)
    slopes = [0.0, *(1 / (1 + math.exp(-v)) for v in raw[1:3]), 0.0, 0.0]
    assert dt.grad.flatten().tolist() == pytest.approx(slopes, rel=1e-6)
    assert bias.grad.item() == pytest.approx(sum(slopes), rel=1e-6)


@every_backend
def test_bias_does_not_reach_the_filling_of_a_chunk(backend: str) -> None:
    dtype, tolerance = PRECISION[backend]
    values = Shape(tokens=65, chunk_size=64, dt_bias=True, init_state=True).values(dtype)
    values["dt_bias"] = torch.full_like(values["dt_bias"], 5.0)
    assert_like_the_token_loop(values, backend, tolerance)


@every_backend
@pytest.mark.parametrize("shape", [PACKED, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_lies_past_a_sequence_has_no_influence(backend: str, shape: Shape, bad: float) -> None:
    dtype, _ = PRECISION[backend]
    values = shape.values(dtype)
    ends = [70] if shape.lengths else shape.row_lengths
    spoilt = {name: values[name].clone() for name in PER_TOKEN}
    dout, dfinal = cotangents(values)
    spoilt_dout = dout.clone()
    for row, end in enumerate(ends):
        for tensor in (*spoilt.values(), spoilt_dout):
            tensor[row, end:] = bad
    with running(backend):
        clean = with_gradients(values, dout, dfinal, return_chunk_states=True, backend=backend)
        dirty = with_gradients(
            values | spoilt, spoilt_dout, dfinal, return_chunk_states=True, backend=backend
        )
    for got, expected in zip(dirty[0], clean[0], strict=True):
        assert torch.equal(got, expected)
    for name, gradient in clean[1].items():
        assert torch.equal(dirty[1][name], gradient), name
    for row, end in enumerate(ends):
        assert not clean[0][0][row, end:].any()
        assert not any(clean[1][name][row, end:].any() for name in PER_TOKEN if name in clean[1])


@every_backend
def test_chunk_states_past_a_rows_length_are_its_final_state(backend: str) -> None:
    dtype, _ = PRECISION[backend]
    values = PADDED.values(dtype)
    with running(backend):
        _, final_state, states = call(values, return_chunk_states=True, backend=backend)
    assert states.shape == (3, 4, 4, 3, 5)
    assert torch.equal(states[1], final_state[1][:, None].expand_as(states[1]))
    assert torch.equal(final_state[1], values["init_state"][1])
    assert torch.equal(states[2, :, 2:], final_state[2][:, None].expand_as(states[2, :, 2:]))
    assert not torch.equal(states[2, :, 1], final_state[2])


# ---- packed sequences


@every_backend
@settings(max_examples=12, derandomize=True, database=None)
@given(st.lists(st.sampled_from([0, 1, 15, 16, 17, 53]), min_size=1, max_size=5), st.integers(0, 20))
def test_packed_equals_separate_calls(backend: str, lengths: list[int], spare: int) -> None:
    dtype, tolerance = PRECISION[backend]
    shape = replace(PACKED, tokens=sum(lengths) + spare, lengths=tuple(lengths))
    values = shape.values(dtype, seed=sum(lengths))
    dout, dfinal = cotangents(values)
    with running(backend):
        (out, final), gradients = with_gradients(values, dout, dfinal, backend=backend)
        whole = {"a": 0.0, "d": 0.0, "dt_bias": 0.0}
        borders = values.pop("cu_seqlens").tolist()
        for s, (begin, end) in enumerate(zip(borders, borders[1:], strict=False)):
            alone = values | {name: values[name][:, begin:end] for name in PER_TOKEN}
            alone["init_state"] = values["init_state"][s : s + 1]
            (one_out, one_final), one = with_gradients(
                alone, dout[:, begin:end], dfinal[s : s + 1], backend=backend
            )
            assert error(out[:, begin:end], one_out) <= tolerance
            assert error(final[s : s + 1], one_final) <= tolerance
            if not gradients:
                continue
            for name in PER_TOKEN:
                assert error(gradients[name][:, begin:end], one[name]) <= tolerance, name
            assert error(gradients["init_state"][s : s + 1], one["init_state"]) <= tolerance
            whole = {name: total + one[name] for name, total in whole.items()}
    for name, total in whole.items() if gradients else ():
        assert (gradients[name] - total).norm() <= 50 * tolerance * (1 + total.norm()), name


@every_backend
@pytest.mark.parametrize("bad", [1e3, math.inf, math.nan])
def test_a_sequence_changes_no_bit_of_another(backend: str, bad: float) -> None:
    dtype, _ = PRECISION[backend]
    values = PACKED.values(dtype)
    dout, dfinal = cotangents(values)
    borders = values["cu_seqlens"].tolist()
    with running(backend):
        results, gradients = with_gradients(values, dout, dfinal, backend=backend)
        for changed in (0, 2):
            begin, end = borders[changed], borders[changed + 1]
            moved = {name: values[name].clone() for name in (*PER_TOKEN, "init_state")}
            for name in PER_TOKEN:
                moved[name][:, begin:end] = bad
            moved["init_state"][changed] = bad
            moved_dout, moved_dfinal = dout.clone(), dfinal.clone()
            moved_dout[:, begin:end] = bad
            moved_dfinal[changed] = bad
            other, other_gradients = with_gradients(values | moved, moved_dout, moved_dfinal, backend=backend)
            tokens = torch.ones(90, dtype=torch.bool)
            tokens[begin:end] = False
            rows = [s for s in range(5) if s != changed]
            assert torch.equal(other[0][:, tokens], results[0][:, tokens])
            assert torch.equal(other[1][rows], results[1][rows])
            assert not torch.equal(other[0], results[0])
            if not gradients:
                continue
            for name in PER_TOKEN:
                assert torch.equal(other_gradients[name][:, tokens], gradients[name][:, tokens]), name
            assert torch.equal(other_gradients["init_state"][rows], gradients["init_state"][rows])


@every_backend
@LAYOUTS
def test_a_rate_of_minus_infinity_forgets_everything(backend: str, shape: Shape) -> None:
    dtype, tolerance = PRECISION[backend]
    values = shape.values(dtype)
    dout, dfinal = cotangents(values)
    found = []
    for rate in (-1e6, -math.inf):
        values["a"][1] = rate
        with running(backend):
            results, gradients = with_gradients(values, dout, dfinal, backend=backend)
        found.append((*results, *(gradients[name] for name in gradients)))
    assert all(error(got, ref) <= tolerance for got, ref in zip(*found, strict=True))


@every_backend
def test_padded_rows_equal_shorter_calls(backend: str) -> None:
    dtype, tolerance = PRECISION[backend]
    values = PADDED.values(dtype)
    with running(backend):
        out, final = call(values, backend=backend)
        lengths = values.pop("seq_lens").tolist()
        for row, length in enumerate(lengths):
            alone = values | {name: values[name][row : row + 1, :length] for name in PER_TOKEN}
            alone["init_state"] = values["init_state"][row : row + 1]
            one_out, one_final = call(alone, backend=backend)
            assert error(out[row : row + 1, :length], one_out) <= tolerance
            assert error(final[row : row + 1], one_final) <= tolerance


# ---- results


@every_backend
@pytest.mark.parametrize("packed", [False, True])
def test_dtypes_of_the_states(backend: str, packed: bool) -> None:
    shape = replace(PACKED if packed else EVERYTHING, init_state=True)
    values = shape.values(torch.bfloat16)
    wanted = {None: torch.bfloat16, torch.float32: torch.float32, torch.bfloat16: torch.bfloat16}
    with running(backend):
        for given_dtype, expected in wanted.items():
            out, final, states, *_ = call(
                values, state_dtype=given_dtype, return_chunk_states=True, backend=backend
            )
            assert (out.dtype, final.dtype, states.dtype) == (torch.bfloat16, expected, expected)
        values["init_state"] = None
        assert call(values, backend=backend)[1].dtype == torch.float32
    doubles = {
        n: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for n, v in values.items()
    }
    assert call(doubles, backend="torch")[1].dtype == torch.float64


@every_backend
def test_results_share_no_memory_with_inputs(backend: str) -> None:
    dtype, _ = PRECISION[backend]
    values = replace(PACKED, tokens=0, lengths=(0, 0)).values(dtype)
    with running(backend):
        results = call(values, return_chunk_states=True, backend=backend)
    assert torch.equal(results[1], values["init_state"])
    assert results[1].data_ptr() != values["init_state"].data_ptr()
    assert results[2].shape == (1, 4, 2, 3, 5) and not results[2].any()
    assert results[3].tolist() == [0, 0, 0]


@every_backend
def test_strides_do_not_matter(backend: str) -> None:
    dtype, _ = PRECISION[backend]
    values = EVERYTHING.values(dtype)
    other = dict(values)
    for name in (*PER_TOKEN, "init_state", "d"):
        wide = torch.full((*values[name].shape[:-1], 2 * values[name].shape[-1]), math.nan, dtype=dtype)
        other[name] = wide[..., ::2].copy_(values[name])
    dout, dfinal = cotangents(values)
    with running(backend):
        results, gradients = with_gradients(values, dout, dfinal, backend=backend)
        with torch.no_grad():
            strided = call(other, backend=backend)
        _, again = with_gradients(other, dout.mT.contiguous().mT, dfinal, backend=backend)
    assert all(error(got, ref) < 1e-6 for got, ref in zip(strided, results, strict=True))
    assert all(error(again[name], gradients[name]) < 1e-5 for name in gradients)


# ---- which way a call goes


@pytest.mark.parametrize(
    ("option", "bare"),
    [
        ({}, True),
        ({"d": "H", "init_state": True}, True),
        ({"d": "HP"}, False),
        ({"z": True}, False),
        ({"dt_limit": (0.0, 1.0)}, False),
        ({"dt_limit": [0, math.inf]}, True),
        ({"dt_limit": [0.0, 1.0]}, False),
    ],
    ids=str,
)
def test_a_bare_call_is_the_chunked_forward(
    option: dict[str, Any], bare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    original = ops_scan.mamba2_chunk_forward
    monkeypatch.setattr(
        ops_scan, "mamba2_chunk_forward", lambda *args, **kw: taken.append(1) or original(*args, **kw)
    )
    values = Shape(**option).values()
    with torch.no_grad():
        results = call(values, backend="torch")
    assert taken == [1] * bare
    for got, ref in zip(results, scan_oracle.scan(**values), strict=False):
        assert error(got, ref) < 1e-11


def test_a_backend_without_the_scan_is_refused_by_name() -> None:
    values = EVERYTHING.values()
    with pytest.raises(BackendUnavailable, match="mamba2_chunk_scan has no backend 'tilegym'"):
        call(values, backend="tilegym")


def test_a_backend_of_the_scan_alone_gets_bare_calls_too(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = registry.ops()["mamba2_chunk_scan"]
    mine = replace(entry, backends=entry.backends | {"mine": entry.backends["torch"]})
    monkeypatch.setitem(registry._ops, entry.name, mine)
    values = Shape().values()
    with torch.no_grad():
        got = call(values, backend="mine")
    assert error(got[0], scan_oracle.scan(**values)[0]) < 1e-11
    with pytest.raises(BackendUnavailable, match="mamba2_chunk_scan has no backend 'nobodys'"):
        call(values, backend="nobodys")


def test_without_grad_nothing_goes_through_torch_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd_scan, "scan", None)
    out, _ = call(EVERYTHING.values(), backend="torch")
    assert not out.requires_grad


def test_tilegym_knows_the_op() -> None:
    import tilegym

    assert tilegym.ops.mamba2_chunk_scan is tilegym_mamba2.mamba2_chunk_scan
    values = EVERYTHING.values()
    dout, dfinal = cotangents(values)
    tensors = [values.get(n) for n in (*scan_oracle.GRADIENTS, "cu_seqlens", "seq_lens")]
    options = ScanOptions(True, values["dt_limit"], 16, torch.float64)
    gradients = tilegym.ops.mamba2_chunk_scan_backward(*tensors, dout, dfinal, options, backend="torch")
    expected = scan_oracle.gradients(values, dout, dfinal)
    assert all(error(g, expected[n]) < 1e-11 for n, g in zip(scan_oracle.GRADIENTS, gradients, strict=True))


# ---- autograd and what torch puts around it


@LAYOUTS
def test_first_and_second_derivatives(shape: Shape) -> None:
    small = replace(shape, tokens=7, batch=1, heads=2, head_size=2, groups=1, state_size=2, chunk_size=3)
    small = replace(small, lengths=(3, 0, 3) if shape.lengths else None)
    small = replace(small, row_lengths=(5,) if shape.row_lengths else None, dt_limit=(0.0, 1.0))
    values = small.values(seed=2)
    leaves = {name: values[name].requires_grad_() for name in scan_oracle.GRADIENTS}

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return call(values | dict(zip(leaves, tensors, strict=True)), backend="torch")

    assert torch.autograd.gradcheck(function, tuple(leaves.values()))
    assert torch.autograd.gradgradcheck(function, tuple(leaves.values()))


@pytest.mark.parametrize("name", [n for n in DIFFERENTIABLE if n != "torch"])
def test_second_derivative_elsewhere_is_an_error(name: str) -> None:
    values = EVERYTHING.values(torch.float32)
    values["x"].requires_grad_()
    with running(name):
        out, _ = call(values, backend=name)
        (dx,) = torch.autograd.grad(out.square().sum(), values["x"], create_graph=True)
        with pytest.raises(RuntimeError, match=f"'{name}' has no second derivative"):
            dx.sum().backward()


@with_a_backward
def test_only_what_is_needed_is_computed(backend: str) -> None:
    dtype, tolerance = PRECISION[backend]
    values = PACKED.values(dtype)
    dout, dfinal = cotangents(values)
    expected = scan_oracle.gradients(values, dout, dfinal)
    for name in scan_oracle.GRADIENTS:
        alone = values | {name: values[name].clone().requires_grad_()}
        with running(backend):
            out, final = call(alone, backend=backend)
            torch.autograd.backward((out, final) if final.requires_grad else out,
                                    (dout, dfinal) if final.requires_grad else dout)  # fmt: skip
        assert (alone[name].grad - expected[name]).norm() <= 50 * tolerance * (1 + expected[name].norm()), (
            name
        )


def test_only_inputs_are_saved() -> None:
    values = {
        name: v.requires_grad_() if name in scan_oracle.GRADIENTS else v
        for name, v in PACKED.values(torch.float32).items()
    }
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        results = call(values, return_chunk_states=True, backend="torch")
    inputs = {v.data_ptr() for v in values.values() if torch.is_tensor(v)}
    assert {t.data_ptr() for t in saved} == inputs
    assert [r.requires_grad for r in results] == [True, True, False, False]


@with_a_backward
@LAYOUTS
def test_compiled_equals_eager_in_one_graph(backend: str, shape: Shape) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    options = {"return_chunk_states": True, "backend": backend, "dt_limit": (0, 2)}
    compiled = torch.compile(
        lambda values: call(values, **options), fullgraph=True, dynamic=True, backend=counter
    )
    with running(backend):
        for tokens in (90, 131):
            values = replace(shape, tokens=tokens).values(torch.float32)
            leaves = {
                name: value.clone().requires_grad_()
                for name, value in values.items()
                if name in scan_oracle.GRADIENTS
            }
            dout, dfinal = cotangents(values)
            expected, gradients = with_gradients(values, dout, dfinal, **options)
            results = compiled(values | leaves)
            found = torch.autograd.grad(results[:2], list(leaves.values()), (dout, dfinal))
            assert all(torch.equal(r, e) for r, e in zip(results, expected, strict=True))
            assert all(torch.equal(g, gradients[n]) for n, g in zip(leaves, found, strict=True))
    assert counter.frame_count == 1
    torch._dynamo.reset()


@with_a_backward
@LAYOUTS
def test_opcheck(backend: str, shape: Shape) -> None:
    small = replace(shape, tokens=40, lengths=shape.lengths and (11, 0, 20))
    small = replace(small, row_lengths=shape.row_lengths and (40, 0, 17))
    values = small.values(torch.float32)
    tensors = [values.get(name) for name in (*scan_oracle.GRADIENTS, "cu_seqlens", "seq_lens")]
    with running(backend):
        with_grad = [t.requires_grad_() if t is not None and t.is_floating_point() else t for t in tensors]
        options = (True, 0.3, 1.2, 16, None)
        torch.library.opcheck(autograd_scan.scan, (*with_grad, *options, True, backend))
        # Without grad: a trace of the second derivative would take minutes.
        tensors = [None if t is None else t.detach() for t in tensors]
        needed = [True, True, False, True, True, False, True, True, True]
        arguments = (*tensors, *cotangents(values), *options, backend, needed)
        torch.library.opcheck(autograd_scan.scan_backward, arguments)


@with_a_backward
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(backend: str, reentrant: bool) -> None:
    values = PACKED.values(torch.float32)
    leaves = {name: values[name].clone().requires_grad_() for name in scan_oracle.GRADIENTS}
    dout, dfinal = cotangents(values)
    with running(backend):
        _, expected = with_gradients(values, dout, dfinal, backend=backend)
        function = lambda *ts: call(values | dict(zip(leaves, ts, strict=True)), backend=backend)  # noqa: E731
        out, final = checkpoint(function, *leaves.values(), use_reentrant=reentrant)
        torch.autograd.backward((out, final), (dout, dfinal))
    assert all(torch.equal(leaf.grad, expected[name]) for name, leaf in leaves.items())


@every_backend
def test_autocast(backend: str) -> None:
    values = EVERYTHING.values(torch.float32)
    with running(backend), torch.autocast("cpu", torch.bfloat16):
        out, final = call(values, backend=backend)
    low = {n: v.bfloat16() if n in ("x", "b", "c", "z") else v for n, v in values.items()}
    with running(backend):
        expected, expected_final = call(low, backend=backend)
    assert out.dtype == torch.bfloat16 and final.dtype == torch.float32
    assert torch.equal(out, expected) and torch.equal(final, expected_final)


@every_backend
def test_deterministic_algorithms(backend: str) -> None:
    values = PACKED.values(torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        with running(backend):
            runs = [with_gradients(values, *cotangents(values), backend=backend) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])


class NoValues(TorchDispatchMode):
    """Fails where the host would wait for a value or a shape that depends on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero"}
        assert func.overloadpacket.__name__ not in waits, func
        return func(*args, **(kwargs or {}))


@LAYOUTS
def test_the_host_reads_no_value(shape: Shape) -> None:
    values = shape.values(torch.float32)
    tensors = [values.get(name) for name in (*scan_oracle.GRADIENTS, "cu_seqlens", "seq_lens")]
    options = ScanOptions(True, values["dt_limit"], 16, torch.float32, True)
    dout, dfinal = cotangents(values)
    with NoValues():
        torch_scan.mamba2_chunk_scan(*tensors, options)
        torch_scan.mamba2_chunk_scan_backward(*tensors, dout, dfinal, options, (True,) * 9)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoValues():
        tensors[0].sum().item()


def test_meta_tensors_give_shapes() -> None:
    values = {n: v.to("meta") if torch.is_tensor(v) else v for n, v in PACKED.values().items()}
    shapes_of = [tuple(r.shape) for r in call(values, return_chunk_states=True, backend="torch")]
    assert shapes_of == [(1, 90, 4, 3), (5, 4, 3, 5), (1, 4, 90 // 16 + 5, 3, 5), (6,)]


# ---- on a GPU


@pytest.mark.gpu
@every_backend
@LAYOUTS
def test_the_host_never_waits(backend: str, shape: Shape) -> None:
    values = {n: v.cuda() if torch.is_tensor(v) else v for n, v in shape.values(torch.float32).items()}
    dout, dfinal = cotangents(values)
    expected = with_gradients(values, dout, dfinal, return_chunk_states=True, backend=backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = with_gradients(values, dout, dfinal, return_chunk_states=True, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(g, e) for g, e in zip(got[0], expected[0], strict=True))


@pytest.mark.gpu
@every_backend
@LAYOUTS
def test_a_replayed_graph_follows_new_data_and_lengths(backend: str, shape: Shape) -> None:
    values = {n: v.cuda() if torch.is_tensor(v) else v for n, v in shape.values(torch.float32).items()}
    dout, dfinal = cotangents(values)
    run = lambda: with_gradients(values, dout, dfinal, return_chunk_states=True, backend=backend)  # noqa: E731
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    lengths = replace(
        shape,
        lengths=shape.lengths and tuple(reversed(shape.lengths)),
        row_lengths=shape.row_lengths and tuple(reversed(shape.row_lengths)),
    )
    for name, value in lengths.values(torch.float32, seed=9).items():
        if torch.is_tensor(value):
            values[name].copy_(value)
    graph.replay()
    results, gradients = run()
    assert all(torch.equal(c, r) for c, r in zip(captured[0], results, strict=True))
    assert all(torch.equal(captured[1][name], gradients[name]) for name in gradients)


# ---- rates that are no ordinary numbers


@with_a_backward
def test_a_rate_of_minus_infinity_forgets_at_any_step_but_zero(backend: str) -> None:
    dtype, tolerance = PRECISION[backend]
    shape = Shape(tokens=150, init_state=True, dt_limit=(0.0, math.inf))
    values = shape.values(dtype)
    values["dt"] = values["dt"].abs() + 0.1
    values["dt"][:, 3::7, :2] = 0.0
    values["a"][0] = -math.inf
    dout, dfinal = cotangents(values)
    expected = scan_oracle.scan(**values | {"a": values["a"].nan_to_num(neginf=-1e30)})
    with running(backend):
        results, gradients = with_gradients(values, dout, dfinal, backend=backend)
    for got, ref in zip(results, expected, strict=False):
        assert error(got, ref) <= tolerance
    # What a token gives does not depend on such a rate: its gradients are a steep one's, at a dt above 0.
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    steep = values | {"a": values["a"].nan_to_num(neginf=-1e6)}
    with running(backend):
        _, references = with_gradients(steep, dout, dfinal, backend=backend)
    some = values["dt"] > 0
    for name in ("x", "b", "c", "init_state"):
        assert error(gradients[name], references[name]) <= tolerance
    assert error(gradients["dt"][some], references["dt"][some]) <= tolerance
    # The steps of decoding: the same.
    state, outs = values["init_state"].clone(), []
    with running(backend):
        for t in range(20):
            token = (values[name][:, t] for name in ("x", "dt"))
            row = (values["a"], values["b"][:, t], values["c"][:, t])
            outs.append(tilegym_mamba2.mamba2_state_update(state, *token, *row, backend=backend))
    assert error(torch.stack(outs, 1), expected[0][:, :20]) <= max(tolerance, 2e-6)


@with_a_backward
def test_a_rate_that_is_nan_is_not_lost(backend: str) -> None:
    values = Shape(tokens=150).values(torch.float32)
    values["dt"] = values["dt"].abs() + 0.1
    values["a"][1] = math.nan
    dout, dfinal = cotangents(values)
    with running(backend):
        (out, final_state), gradients = with_gradients(values, dout, dfinal, backend=backend)
        step = tilegym_mamba2.mamba2_state_update(
            torch.ones_like(final_state),
            *(values[name][:, 0] for name in ("x", "dt")),
            values["a"],
            *(values[name][:, 0] for name in ("b", "c")),
            backend=backend,
        )
    # Of the first token what came before it is zero, which no backend need multiply by NaN.
    assert out[:, 1:, 1].isnan().all() and final_state[:, 1].isnan().all() and step[:, 1].isnan().all()
    assert gradients["a"].isnan().tolist() == [False, True, False, False]
    assert gradients["dt"][..., 1].isnan().any() and gradients["x"][:, :, 1].isnan().any()
    for whole in (out, gradients["x"], gradients["dt"]):
        assert not whole[:, :, [0, 2, 3]].isnan().any()
