"""The two torch implementations against each other, closed forms, finite differences and identities."""

import contextlib
import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tilegym_mamba2.backends.torch import chunked, recurrent, segments

NAMES = ("x", "a", "b", "c", "d", "dt", "init_state")
CHUNK_SIZES = (1, 2, 3, 5, 8, 16, 17, 32, 64, 100, 128, 256)
IMPLEMENTATIONS = pytest.mark.parametrize("op", [recurrent, chunked], ids=["recurrent", "chunked"])
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="GPU")]
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small only wait for other threads, minutes of it when the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def blocking(min_chunk=1, workspace=1):
    """Take chunk_size as it is, in segments of `workspace` elements: small problems see every path."""
    return mock.patch.multiple(chunked, MIN_CHUNK=min_chunk, MAX_CHUNK=256, WORKSPACE=workspace)


def error(got, ref):
    assert got.shape == ref.shape
    norm = ref.double().norm().item()
    return (got.double() - ref.double()).norm().item() / (norm or 1.0)


def assert_close(got, ref, tolerance=1e-12):
    for k, (left, right) in enumerate(zip(got, ref, strict=True)):
        assert (left is None) == (right is None)
        if left is not None:
            assert error(left, right) < tolerance, f"result {k}"


def strided(tensor, layout):
    """The same values in another layout: a slice of something wider, other strides, or contiguous."""
    if layout == "slice":
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 3), math.nan, dtype=tensor.dtype)
        wide[..., 1 : 1 + 2 * tensor.shape[-1] : 2] = tensor
        return wide[..., 1 : 1 + 2 * tensor.shape[-1] : 2]
    if layout == "transpose":
        return (
            tensor.permute(*reversed(range(tensor.dim())))
            .contiguous()
            .permute(*reversed(range(tensor.dim())))
        )
    return tensor


def problem(T, *, B=2, H=4, P=3, G=2, N=5, dtype=torch.float64, decay="mixed", layout="contiguous", seed=0):
    """The seven inputs. Decay per token: "mixed" 1 to e^-3, "none" a = 0, "ties" half of all dt are 0."""
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    rand = lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    a = -3 * rand(H) if decay != "none" else torch.zeros(H, dtype=torch.float64)
    dt = rand(B, T, H) * (rand(B, T, H) > 0.5 if decay == "ties" else 1)
    values = (randn(B, T, H, P), a, randn(B, T, G, N), randn(B, T, G, N), randn(H), dt, randn(B, H, P, N))
    return {name: strided(value.to(dtype), layout) for name, value in zip(NAMES, values, strict=True)}


def cotangents(p, layout="contiguous", seed=1):
    generator = torch.Generator().manual_seed(seed)
    dtype = p["x"].dtype
    dout = torch.randn(p["x"].shape, generator=generator, dtype=torch.float64).to(dtype)
    dfinal = torch.randn(p["init_state"].shape, generator=generator, dtype=torch.float64).to(dtype)
    return strided(dout, layout), strided(dfinal, layout)


def leaves(p):
    return {
        name: None if value is None else value.detach().clone().requires_grad_() for name, value in p.items()
    }


def autograd(op, p, dout, dfinal, **kwargs):
    """The seven gradients by autograd through op's forward; zero where no result depends on an input."""
    p = leaves(p)
    out, final_state = op.mamba2_chunk_forward(**p, **kwargs)
    loss = (out * dout).sum() + (final_state * dfinal).sum()
    given_inputs = [value for value in p.values() if value is not None]
    grads = iter(torch.autograd.grad(loss, given_inputs, allow_unused=True, materialize_grads=True))
    return [None if value is None else next(grads) for value in p.values()]


PROBLEMS = st.fixed_dictionaries(
    {
        "T": st.integers(0, 300)
        | st.sampled_from([0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 257]),
        "B": st.integers(1, 3),
        "P": st.integers(1, 6),
        "N": st.integers(1, 9),
        "decay": st.sampled_from(["mixed", "none", "ties"]),
        "layout": st.sampled_from(["contiguous", "slice", "transpose"]),
        "seed": st.integers(0, 2**20),
    }
)
GROUPS = st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2), (4, 2), (6, 3), (6, 2), (5, 5), (8, 1)])
BLOCKINGS = st.sampled_from([contextlib.nullcontext, blocking, lambda: blocking(workspace=20_000)])


@settings(max_examples=250, deadline=None, derandomize=True, database=None)
@given(PROBLEMS, GROUPS, st.integers(1, 256) | st.sampled_from([1, 2, 16, 64, 256]), BLOCKINGS)
def test_forward_equals_the_token_loop(shape, heads_groups, chunk_size, patch):
    p = problem(**shape, H=heads_groups[0], G=heads_groups[1])
    before = {name: value.clone() for name, value in p.items()}
    with patch():
        got = chunked.mamba2_chunk_forward(**p, chunk_size=chunk_size)
    assert_close(got, recurrent.mamba2_chunk_forward(**p))
    assert all(torch.equal(p[name], before[name]) for name in NAMES)


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(
    PROBLEMS, GROUPS, st.integers(1, 256), BLOCKINGS, st.sampled_from([(1, 1), (1, 0), (0, 1)]), st.booleans()
)
def test_backward_equals_the_adjoint_loop_and_autograd(shape, heads_groups, chunk_size, patch, reach, absent):
    p = problem(**{**shape, "T": shape["T"] // 3}, H=heads_groups[0], G=heads_groups[1])
    dout, dfinal = cotangents(p, shape["layout"])
    if absent:
        p["d"] = p["init_state"] = None
    given_dout, given_dfinal = (g if r else None for g, r in zip((dout, dfinal), reach, strict=True))
    before = {name: value.clone() for name, value in p.items() if value is not None}
    with patch():
        got = chunked.mamba2_chunk_backward(
            **p, dout=given_dout, dfinal_state=given_dfinal, chunk_size=chunk_size
        )
        through_forward = autograd(chunked, p, dout * reach[0], dfinal * reach[1], chunk_size=chunk_size)
    loop = recurrent.mamba2_chunk_backward(**p, dout=given_dout, dfinal_state=given_dfinal)
    through_loop = autograd(recurrent, p, dout * reach[0], dfinal * reach[1])
    assert_close(loop, through_loop)
    assert_close(got, through_loop)
    assert_close(through_forward, through_loop)
    assert all(torch.equal(p[name], value) for name, value in before.items())


# The closed form: h <- e^-0.5 h + 1 from 0.
LAST = {1: 1.0, 7: 2.464747611, 8: 2.494944995, 9: 2.513260634, 17: 2.540976969}
ONES = dict(B=1, H=1, P=1, G=1, N=1)


def ones_problem(T, init):
    p = {name: torch.ones_like(value) for name, value in problem(T, **ONES).items()}
    return p | {
        "a": torch.full((1,), -0.5, dtype=torch.float64),
        "d": torch.zeros(1, dtype=torch.float64),
        "init_state": torch.full((1, 1, 1, 1), init, dtype=torch.float64),
    }


@IMPLEMENTATIONS
@pytest.mark.parametrize("patch", [contextlib.nullcontext, blocking], ids=["hint", "exact"])
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_closed_form(op, patch, chunk_size):
    with patch():
        for T, value in LAST.items():
            out, final_state = op.mamba2_chunk_forward(**ones_problem(T, 0.0), chunk_size=chunk_size)
            assert out[0, -1].item() == pytest.approx(value, abs=6e-10)
            assert final_state.item() == pytest.approx(value, abs=6e-10)

        p = ones_problem(5, 1.0)
        one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
        explicit = op.mamba2_chunk_backward(**p, dout=None, dfinal_state=one, chunk_size=chunk_size)
        traced = autograd(op, p, torch.zeros_like(p["x"]), one, chunk_size=chunk_size)
    for grads in (explicit, traced):
        grads = dict(zip(NAMES, grads, strict=True))
        assert grads["init_state"].item() == pytest.approx(0.0820849986, abs=6e-11)
        assert grads["a"].item() == pytest.approx(2.9634461486, abs=6e-11)
        expected = [0.0942927839, 0.1144200192, 0.1476042202, 0.2023157181, 0.2925197286]
        assert grads["dt"].flatten().tolist() == pytest.approx(expected, abs=6e-11)
        assert not grads["c"].any()


class ExplicitBackward(torch.autograd.Function):
    """The forward with its written-out backward, for gradcheck to compare that with finite differences."""

    @staticmethod
    def forward(ctx, op, chunk_size, *inputs):
        ctx.op, ctx.chunk_size = op, chunk_size
        ctx.save_for_backward(*inputs)
        return op.mamba2_chunk_forward(*inputs, chunk_size)

    @staticmethod
    def backward(ctx, dout, dfinal):
        return None, None, *ctx.op.mamba2_chunk_backward(*ctx.saved_tensors, dout, dfinal, ctx.chunk_size)


def gradcheck_problem(T=7, **kwargs):
    p = leaves(problem(T, **(dict(B=2, H=2, P=2, G=1, N=3) | kwargs)))
    # Away from dt = 0, where a finite difference would step onto negative times.
    return p | {"dt": (p["dt"].detach() + 0.1).requires_grad_()}


@IMPLEMENTATIONS
def test_explicit_backward_against_finite_differences(op):
    p = gradcheck_problem()
    with blocking(workspace=700):
        assert torch.autograd.gradcheck(
            lambda *inputs: ExplicitBackward.apply(op, 3, *inputs), tuple(p.values())
        )


@IMPLEMENTATIONS
@pytest.mark.parametrize("result", [0, 1, None], ids=["out", "final_state", "both"])
def test_forward_is_differentiable_twice(op, result):
    assert op.DIFFERENTIABLE is True
    p = gradcheck_problem(T=5, B=1)

    def results(*inputs):
        both = op.mamba2_chunk_forward(*inputs, 2)
        return both if result is None else both[result]

    with blocking(workspace=700):
        assert torch.autograd.gradcheck(results, tuple(p.values()))
        assert torch.autograd.gradgradcheck(results, tuple(p.values()))


def test_a_single_input_may_require_a_gradient():
    full = autograd(chunked, problem(70), *cotangents(problem(70)))
    for name, reference in zip(NAMES, full, strict=True):
        p = problem(70)
        p[name] = p[name].requires_grad_()
        out, final_state = chunked.mamba2_chunk_forward(**p)
        dout, dfinal = cotangents(problem(70))
        torch.autograd.backward([t for t in (out, final_state) if t.requires_grad], [
            g for t, g in ((out, dout), (final_state, dfinal)) if t.requires_grad
        ])  # fmt: skip
        assert error(p[name].grad, reference) < 1e-12, name


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 300), st.floats(0, 1), st.integers(1, 256), BLOCKINGS)
def test_split_and_carry_equals_whole(T, where, chunk_size, patch):
    p = problem(T, decay="mixed")
    cut = round(where * T)
    parts = [{n: v[:, s] if n in ("x", "b", "c", "dt") else v for n, v in p.items()} for s in
             (slice(None, cut), slice(cut, None))]  # fmt: skip
    with patch():
        whole = chunked.mamba2_chunk_forward(**p, chunk_size=chunk_size)
        first, carried = chunked.mamba2_chunk_forward(**parts[0], chunk_size=chunk_size)
        second, final_state = chunked.mamba2_chunk_forward(
            **{**parts[1], "init_state": carried}, chunk_size=chunk_size
        )
    assert_close((torch.cat([first, second], 1), final_state), whole)


@IMPLEMENTATIONS
@pytest.mark.parametrize("name", ["x", "b", "c", "dt"])
@pytest.mark.parametrize("token", [0, 1, 40, 63, 64, 100, 149])
def test_no_token_changes_an_earlier_output(op, name, token):
    p = problem(150)
    out, _ = op.mamba2_chunk_forward(**p)
    changed = p[name].clone()
    changed[:, token] = changed[:, token] * 3 + 1
    moved, _ = op.mamba2_chunk_forward(**{**p, name: changed})
    assert torch.equal(moved[:, :token], out[:, :token])
    assert not torch.equal(moved[:, token], out[:, token])


@IMPLEMENTATIONS
def test_batch_rows_are_independent(op):
    p = problem(150, B=3)
    dout, dfinal = cotangents(p)
    out, final_state = op.mamba2_chunk_forward(**p)
    grads = dict(zip(NAMES, op.mamba2_chunk_backward(**p, dout=dout, dfinal_state=dfinal), strict=True))
    shared = {"a": torch.zeros(4, dtype=torch.float64), "d": torch.zeros(4, dtype=torch.float64)}
    for row in range(3):
        alone = {n: v if n in shared else v[row : row + 1] for n, v in p.items()}
        assert_close(op.mamba2_chunk_forward(**alone), (out[row : row + 1], final_state[row : row + 1]))
        row_grads = op.mamba2_chunk_backward(
            **alone, dout=dout[row : row + 1], dfinal_state=dfinal[row : row + 1]
        )
        for name, grad in zip(NAMES, row_grads, strict=True):
            if name in shared:
                shared[name] += grad
            else:
                assert error(grad, grads[name][row : row + 1]) < 1e-12, name
    assert_close(shared.values(), (grads["a"], grads["d"]))


@IMPLEMENTATIONS
@pytest.mark.parametrize("G", [1, 2, 3, 6])
def test_heads_map_to_groups_in_blocks(op, G):
    p = problem(70, H=6, G=G)
    one_group_a_head = {
        n: v[:, :, [k // (6 // G) for k in range(6)]] for n, v in p.items() if n in ("b", "c")
    }
    assert_close(op.mamba2_chunk_forward(**{**p, **one_group_a_head}), op.mamba2_chunk_forward(**p))
    # Each head alone, with its own group.
    out, final_state = op.mamba2_chunk_forward(**p)
    for k in range(6):
        g = slice(k // (6 // G), k // (6 // G) + 1)
        head = slice(k, k + 1)
        alone = {
            "x": p["x"][:, :, head], "a": p["a"][head], "b": p["b"][:, :, g], "c": p["c"][:, :, g],
            "d": p["d"][head], "dt": p["dt"][:, :, head], "init_state": p["init_state"][:, head],
        }  # fmt: skip
        assert_close(op.mamba2_chunk_forward(**alone), (out[:, :, head], final_state[:, head]))


# Sums are float32 or better, so what is left in 16 bits is the rounding of the results.
@IMPLEMENTATIONS
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.float16, 4e-4), (torch.bfloat16, 3e-3)],
)
def test_dtypes(op, device, dtype, tolerance):
    p = problem(150, dtype=dtype, B=1, H=2, G=1, P=8, N=16)
    dout, dfinal = cotangents(p)
    exact = {name: value.double() for name, value in p.items()}
    reference = recurrent.mamba2_chunk_forward(**exact)
    reference_grads = recurrent.mamba2_chunk_backward(
        **exact, dout=dout.double(), dfinal_state=dfinal.double()
    )
    p = {name: value.to(device) for name, value in p.items()}
    got = op.mamba2_chunk_forward(**p)
    grads = op.mamba2_chunk_backward(**p, dout=dout.to(device), dfinal_state=dfinal.to(device))
    assert [t.dtype for t in got] == [dtype, dtype]
    assert [t.dtype for t in grads] == [dtype] * 7
    assert_close([t.cpu() for t in got], reference, tolerance)
    assert_close([t.cpu() for t in grads], reference_grads, tolerance)


@IMPLEMENTATIONS
def test_mixed_dtypes_follow_each_input(op):
    """16-bit activations with float32 parameters and states, as models have them."""
    p = problem(100)
    for name in ("x", "b", "c"):
        p[name] = p[name].bfloat16()
    for name in ("a", "d", "init_state"):
        p[name] = p[name].float()
    p["dt"] = p["dt"].half()
    dout, dfinal = cotangents(p)
    out, final_state = op.mamba2_chunk_forward(**p)
    assert (out.dtype, final_state.dtype) == (torch.bfloat16, torch.float32)
    exact = {name: value.double() for name, value in p.items()}
    reference = recurrent.mamba2_chunk_forward(**exact)
    assert error(out, reference[0]) < 3e-3
    assert error(final_state, reference[1]) < 2e-6
    grads = op.mamba2_chunk_backward(**p, dout=dout, dfinal_state=dfinal)
    assert [g.dtype for g in grads] == [p[name].dtype for name in NAMES]
    reference = recurrent.mamba2_chunk_backward(**exact, dout=dout.double(), dfinal_state=dfinal.double())
    for name, got, ref in zip(NAMES, grads, reference, strict=True):
        assert (
            error(got, ref) < {torch.float32: 2e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}[got.dtype]
        ), name


@IMPLEMENTATIONS
def test_state_dtype_raises_the_precision(op):
    p = problem(100, dtype=torch.float32)
    dout, dfinal = cotangents(p)
    exact = recurrent.mamba2_chunk_backward(
        **{n: v.double() for n, v in p.items()}, dout=dout.double(), dfinal_state=dfinal.double()
    )
    in_float64 = op.mamba2_chunk_backward(**p, dout=dout, dfinal_state=dfinal, state_dtype=torch.float64)
    in_bfloat16 = op.mamba2_chunk_backward(**p, dout=dout, dfinal_state=dfinal, state_dtype=torch.bfloat16)
    assert_close(in_float64, [g.float() for g in exact], 1e-9)
    assert_close(in_bfloat16, exact, 2e-6)


@IMPLEMENTATIONS
def test_none_stands_for_no_skip_term_and_a_zero_state(op):
    p = problem(80)
    absent = {**p, "d": None, "init_state": None}
    zeros = {**p, "d": torch.zeros_like(p["d"]), "init_state": torch.zeros_like(p["init_state"])}
    got, reference = op.mamba2_chunk_forward(**absent), op.mamba2_chunk_forward(**zeros)
    assert all(torch.equal(left, right) for left, right in zip(got, reference, strict=True))
    dout, dfinal = cotangents(p)
    grads = op.mamba2_chunk_backward(**absent, dout=dout, dfinal_state=dfinal)
    assert grads[4] is None and grads[6] is None
    reference = op.mamba2_chunk_backward(**zeros, dout=dout, dfinal_state=dfinal)
    assert_close([grads[k] for k in (0, 1, 2, 3, 5)], [reference[k] for k in (0, 1, 2, 3, 5)], 1e-15)
    for dtype, state_dtype in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        cast = {n: None if v is None else v.to(dtype) for n, v in absent.items()}
        assert op.mamba2_chunk_forward(**cast)[1].dtype == state_dtype


@IMPLEMENTATIONS
@pytest.mark.parametrize("T", [0, 1])
@pytest.mark.parametrize("chunk_size", [1, 64, 256])
def test_no_token_and_one_token(op, T, chunk_size):
    p = problem(T)
    dout, dfinal = cotangents(p)
    out, final_state = op.mamba2_chunk_forward(**p, chunk_size=chunk_size)
    grads = op.mamba2_chunk_backward(**p, dout=dout, dfinal_state=dfinal, chunk_size=chunk_size)
    assert out.shape == p["x"].shape
    assert [g.shape for g in grads] == [p[name].shape for name in NAMES]
    if T == 0:
        assert torch.equal(final_state, p["init_state"]) and torch.equal(grads[6], dfinal)
        assert (
            final_state.data_ptr() != p["init_state"].data_ptr() and grads[6].data_ptr() != dfinal.data_ptr()
        )
        assert not grads[1].any() and not grads[4].any()
    else:
        b, c = (p[name][:, 0].repeat_interleave(2, dim=1)[:, :, None] for name in ("b", "c"))
        decay = (p["a"] * p["dt"][:, 0]).exp()[..., None, None]
        state = decay * p["init_state"] + (p["dt"][:, 0, :, None] * p["x"][:, 0])[..., None] * b
        y = (state * c).sum(-1) + p["d"][:, None] * p["x"][:, 0]
        assert_close((out[:, 0], final_state), (y, state))


@IMPLEMENTATIONS
def test_zero_stride_gradients(op):
    p = problem(70)
    dout = torch.ones((), dtype=torch.float64).expand(p["x"].shape)
    dfinal = torch.full((4, 1, 1), 0.5, dtype=torch.float64).expand(p["init_state"].shape)
    got = op.mamba2_chunk_backward(**p, dout=dout, dfinal_state=dfinal)
    assert_close(got, autograd(recurrent, p, dout, dfinal))
    broadcast = {
        **p,
        "x": p["x"][:, :, :1, :1].expand(p["x"].shape),
        "dt": p["dt"][:, :1].expand(p["dt"].shape),
    }
    contiguous = {name: value.contiguous() for name, value in broadcast.items()}
    assert_close(op.mamba2_chunk_forward(**broadcast), op.mamba2_chunk_forward(**contiguous))


def all_results(op, p, **kwargs):
    dout, dfinal = cotangents(p)
    forward = op.mamba2_chunk_forward(**p, **kwargs)
    backward = op.mamba2_chunk_backward(**p, dout=dout, dfinal_state=dfinal, **kwargs)
    return *forward, *backward, *autograd(op, p, dout, dfinal, **kwargs)


@pytest.mark.parametrize(
    "dtype, step",
    [(dtype, 10.0) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)]
    # 16 * 1e6 * 64 tokens: a total of 1e9 in a chunk, which float16 cannot express.
    + [(dtype, 1e6) for dtype in (torch.float64, torch.float32, torch.bfloat16)],
)
@pytest.mark.parametrize("chunk_size", [1, 64, 256])
def test_violent_decay_stays_finite(dtype, step, chunk_size):
    p = problem(200, dtype=dtype)
    p |= {"a": torch.full_like(p["a"], -16), "dt": torch.full_like(p["dt"], step)}
    # x as small as the step is large: results of order one in every dtype.
    p["x"] = p["x"] / step
    results = all_results(chunked, p, chunk_size=chunk_size)
    assert all(t.isfinite().all() for t in results)
    exact = {name: value.double() for name, value in p.items()}
    reference = recurrent.mamba2_chunk_forward(**exact)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}[dtype]
    assert_close(results[:2], reference, tolerance)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-6), (torch.float32, 2e-6)])
def test_tokens_after_a_violent_one_keep_their_weights(dtype, tolerance):
    """One token decays by 1e9: the differences of the running sum behind it are still right."""
    p = problem(100, dtype=dtype)
    p["a"] = -torch.linspace(0.01, 1.0, 4, dtype=dtype)
    p["dt"][:, 30] = 1e9
    p["x"][:, 30] *= 1e-9
    dout, dfinal = cotangents(p)
    exact = {name: value.double() for name, value in p.items()}
    reference = recurrent.mamba2_chunk_forward(**exact)
    assert_close(chunked.mamba2_chunk_forward(**p), reference, tolerance)
    reference = recurrent.mamba2_chunk_backward(**exact, dout=dout.double(), dfinal_state=dfinal.double())
    assert_close(chunked.mamba2_chunk_backward(**p, dout=dout, dfinal_state=dfinal), reference, tolerance)


@pytest.mark.parametrize("chunk_size", [1, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_rate_of_minus_infinity_forgets_everything(dtype, chunk_size):
    p = problem(150, dtype=dtype)
    p["dt"] += 0.1
    p["dt"][:, 40] = 1e-12  # forgets as much as any other
    p["a"][1] = -1e20
    reference = all_results(recurrent, p)
    p["a"][1] = -math.inf
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert_close(all_results(chunked, p, chunk_size=chunk_size), reference, tolerance)
    assert_close(recurrent.mamba2_chunk_forward(**p), reference[:2], tolerance)


@pytest.mark.parametrize("heads", [1, 3, 5, 9])
@pytest.mark.parametrize("T", [12, 71, 73, 130])
@pytest.mark.parametrize("idle_from", [7, None])
def test_after_a_rate_of_minus_infinity_the_last_token_is_whole(heads, T, idle_from):
    """Sums of large numbers round differently from row to row: as much as one token of them forgets."""
    p = problem(T, B=1, H=heads, G=1)
    p["dt"] = torch.ones_like(p["dt"])
    if idle_from:
        p["dt"][:, idle_from:] = 0
    p["a"][0], last = -math.inf, (idle_from or T) - 1
    p["init_state"] = p["init_state"] * 1e3
    _, final_state = chunked.mamba2_chunk_forward(**p)
    expected = p["x"][0, last, 0][:, None] * p["b"][0, last, 0][None, :]
    assert (final_state[0, 0] - expected).abs().max() <= 1e-12 * expected.abs().max()
    dout, dfinal = cotangents(p)
    dx = chunked.mamba2_chunk_backward(**p, dout=torch.zeros_like(dout), dfinal_state=dfinal)[0]
    expected = dfinal[0, 0] @ p["b"][0, last, 0]
    assert (dx[0, last, 0] - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize("op", [chunked.mamba2_chunk_forward, recurrent.mamba2_chunk_forward])
def test_a_batch_of_no_rows_has_gradients(op):
    p = leaves(problem(9, B=0))
    out, final_state = op(**p)
    inputs = {name: tensor for name, tensor in p.items() if tensor.requires_grad}
    found = torch.autograd.grad(out.sum() + final_state.sum(), list(inputs.values()), allow_unused=True)
    for (name, tensor), gradient in zip(inputs.items(), found, strict=True):
        assert gradient is None or (gradient.shape == tensor.shape and not gradient.any()), name
    explicit = chunked.mamba2_chunk_backward(
        **{name: tensor.detach() for name, tensor in p.items()},
        dout=torch.zeros_like(out),
        dfinal_state=torch.zeros_like(final_state),
    )
    assert [t.shape for t in explicit] == [p[n].shape for n in ("x", "a", "b", "c", "d", "dt", "init_state")]


def noisy_triangle(L, device):
    """Ones below the diagonal, up to 1e-12: sums as a parallel scan may round them, not monotone at ties."""
    generator = torch.Generator().manual_seed(L)
    return (1 + 1e-12 * torch.randn(L, L, generator=generator, dtype=torch.float64)).tril().to(device)


@pytest.mark.parametrize("op", [chunked.mamba2_chunk_forward, chunked.mamba2_chunk_backward])
def test_no_decay_factor_exceeds_one(op, monkeypatch):
    """Running sums of 1e9 over random steps and ties, which rounding moves up and down."""
    p = problem(256, decay="ties", seed=3)
    p["dt"] = p["dt"] * 1e7
    monkeypatch.setattr(segments, "triangle", noisy_triangle)
    seen = []
    real = segments.cut
    with mock.patch.object(segments, "cut", lambda *args: seen.append(real(*args)) or seen[-1]):
        op(*p.values(), *cotangents(p)[: 2 if op is chunked.mamba2_chunk_backward else 0])
    assert len(seen) > 0
    for segment in seen:
        decay = segments.decay_matrix(segment)
        assert (segment.g.diff(dim=2) <= 0).all()
        for factors in (decay, segment.since_entry(), segment.until_exit(), segment.across()):
            assert (factors <= 1).all() and (factors >= 0).all()
        assert (decay.diagonal(dim1=-2, dim2=-1) == 1).all()


def test_no_decay_is_a_plain_sum():
    p = problem(300, decay="none")
    out, final_state = chunked.mamba2_chunk_forward(**p)
    b, c = (p[name].repeat_interleave(2, dim=2) for name in ("b", "c"))
    states = p["init_state"][:, None] + (
        (p["dt"][..., None] * p["x"])[..., None] * b[:, :, :, None, :]
    ).cumsum(1)  # fmt: skip
    y = (states * c[:, :, :, None, :]).sum(-1) + p["d"][:, None] * p["x"]
    assert_close((out, final_state), (y, states[:, -1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_running_sum_does_not_stop_in_sixteen_bits(dtype):
    """512 steps of 0.01: a 16-bit sum drifts or stops (bfloat16 at 4), and the first state would live on."""
    p = problem(512, dtype=dtype)
    p |= {
        "a": torch.full_like(p["a"], -1),
        "dt": torch.full_like(p["dt"], 0.01),
        "x": torch.zeros_like(p["x"]),
    }
    _, final_state = chunked.mamba2_chunk_forward(**p, chunk_size=256)
    left = math.exp(-512 * p["dt"][0, 0, 0].item())
    assert error(final_state, left * p["init_state"].double()) < 3e-3


@IMPLEMENTATIONS
def test_float16_states_may_pass_65504(op):
    """The carried state reaches 1e6; c brings the outputs back into range."""
    p = problem(100, dtype=torch.float16, G=1)
    p |= {name: torch.ones_like(p[name]) for name in ("b", "dt", "x")}
    p |= {"a": torch.zeros(4), "c": torch.full_like(p["c"], 1e-4), "d": torch.zeros(4)}
    p["init_state"] = torch.full(p["init_state"].shape, 1e6)
    out, final_state = op.mamba2_chunk_forward(**p)
    assert out.dtype == torch.float16 and out.isfinite().all()
    exact = {name: value.double() for name, value in p.items()}
    reference = recurrent.mamba2_chunk_forward(**exact)
    assert_close((out, final_state), reference, 1e-3)
    assert (final_state > 65504).all()
    dfinal = torch.ones_like(final_state)
    dout = torch.full_like(out, 1e-3)
    grads = op.mamba2_chunk_backward(**p, dout=dout, dfinal_state=dfinal)
    reference = recurrent.mamba2_chunk_backward(**exact, dout=dout.double(), dfinal_state=dfinal.double())
    for got, ref in zip(grads, reference, strict=True):
        assert torch.equal(got.isfinite(), ref.to(got.dtype).isfinite())


@pytest.mark.parametrize("triangle", [segments.triangle, noisy_triangle], ids=["exact", "rounded"])
def test_gradients_at_dt_zero_are_not_cut(triangle, monkeypatch):
    """Where dt is 0 neighbours tie in the running sum; capping the decay must not zero their gradient."""
    monkeypatch.setattr(segments, "triangle", triangle)
    p = problem(200, decay="ties", seed=5)
    assert (p["dt"] == 0).float().mean() > 0.4
    dout, dfinal = cotangents(p)
    reference = autograd(recurrent, p, dout, dfinal)
    ties = p["dt"] == 0
    for got in (
        chunked.mamba2_chunk_backward(**p, dout=dout, dfinal_state=dfinal)[5],
        autograd(chunked, p, dout, dfinal)[5],
    ):
        assert error(got[ties], reference[5][ties]) < (1e-12 if triangle is not noisy_triangle else 1e-9)


@IMPLEMENTATIONS
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_deterministic_mode(op, device, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    p = {name: value.to(device) for name, value in problem(150, dtype=torch.float32).items()}
    cot = [t.to(device) for t in cotangents(problem(150, dtype=torch.float32))]
    torch.use_deterministic_algorithms(True)
    try:
        runs = [
            (*op.mamba2_chunk_forward(**p), *op.mamba2_chunk_backward(**p, dout=cot[0], dfinal_state=cot[1]),
             *autograd(op, p, *cot))
            for _ in range(2)
        ]  # fmt: skip
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


@IMPLEMENTATIONS
def test_autocast_does_not_narrow_the_products(op):
    p = problem(100, dtype=torch.float32)
    dout, dfinal = cotangents(p)
    outside = *op.mamba2_chunk_forward(**p), *op.mamba2_chunk_backward(**p, dout=dout, dfinal_state=dfinal)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (p["x"][0, :, 0] @ p["x"][0, :, 0].mT).dtype == torch.bfloat16
        inside = *op.mamba2_chunk_forward(**p), *op.mamba2_chunk_backward(**p, dout=dout, dfinal_state=dfinal)
    assert all(torch.equal(left, right) for left, right in zip(inside, outside, strict=True))


class Results(TorchDispatchMode):
    """Elements that operations allocate: the largest, but for the final concatenation, and all together."""

    def __init__(self):
        super().__init__()
        self.largest = self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.total += result.numel()
            if func is not torch.ops.aten.cat.default:
                self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("chunk_size", [1, 7, 32, 64, 100, 128, 256])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_temporaries_do_not_grow_with_the_sequence(chunk_size, direction):
    largest = []
    for T in (2048, 8192):
        p = problem(T, dtype=torch.float32, B=1, H=4, P=16, G=1, N=16)
        with torch.no_grad(), Results() as measured, mock.patch.object(chunked, "WORKSPACE", 2**18):
            if direction == "forward":
                chunked.mamba2_chunk_forward(**p, chunk_size=chunk_size)
            else:
                dout, dfinal = p["x"], p["init_state"]
                chunked.mamba2_chunk_backward(**p, dout=dout, dfinal_state=dfinal, chunk_size=chunk_size)
        largest.append(measured.largest)
    assert largest[0] == largest[1]
    assert 0 < largest[0] <= 2**18


def test_autograd_is_linear_in_the_tokens():
    """A gradient through slices would fill a whole sequence with zeros for each of them."""
    totals = []
    for T in (2048, 8192):
        p = problem(T, dtype=torch.float32, B=1, H=4, P=16, G=1, N=16)
        with Results() as measured, mock.patch.object(chunked, "WORKSPACE", 2**18):
            autograd(chunked, p, p["x"], p["init_state"])
        totals.append(measured.total)
    assert totals[1] < 4.2 * totals[0]
