"""Autograd through the public ops: which gradients, by whom, and under what torch puts around them."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import tilegym
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tilegym_mamba2
from tests.scanning import Wrapper
from tilegym_mamba2 import (
    autograd,
    interpreter,
    mamba2_chunk_backward,
    mamba2_chunk_scan,
    ops_chunk,
    use_backend,
)
from tilegym_mamba2.backends.cutile import forward as cutile_forward

NAMES = ("x", "dt", "a", "b", "c", "d", "init_state")
OP_ORDER = ("x", "a", "b", "c", "d", "dt", "init_state")


def leaves(
    tokens: int = 33,
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, ...] = (2, 4, 8, 2, 16),
    requires_grad: bool = True,
) -> dict[str, torch.Tensor]:
    """Random inputs; sizes: (B, H, P, G, N)."""
    batch, heads, head_size, groups, state_size = sizes
    generator = torch.Generator().manual_seed(tokens)
    shapes = {
        "x": (batch, tokens, heads, head_size),
        "dt": (batch, tokens, heads),
        "a": (heads,),
        "b": (batch, tokens, groups, state_size),
        "c": (batch, tokens, groups, state_size),
        "d": (heads,),
        "init_state": (batch, heads, head_size, state_size),
    }
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors["dt"] = 0.1 * tensors["dt"].abs() + 0.01
    tensors["a"] = -tensors["a"].abs()
    return {name: tensor.to(dtype).requires_grad_(requires_grad) for name, tensor in tensors.items()}


def scan(inputs: dict[str, Any], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = inputs | options
    positional = [inputs.pop(name) for name in ("x", "dt", "a", "b", "c")]
    return mamba2_chunk_scan(*positional, **inputs)


def loss(out: torch.Tensor, final_state: torch.Tensor) -> torch.Tensor:
    return out.square().sum() + final_state.sin().sum()


def gradients(inputs: dict[str, Any], run: Callable = scan, **options: Any) -> dict[str, torch.Tensor]:
    for tensor in inputs.values():
        tensor.grad = None
    loss(*run(inputs, **options)).backward()
    return {name: tensor.grad for name, tensor in inputs.items()}


def close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float = 1e-4) -> bool:
    return all((got[n] - e).norm() <= rtol * e.norm() for n, e in expected.items())


# ---- closed forms and cases


@pytest.mark.parametrize("backend", ["torch", "cutile"])
@pytest.mark.parametrize("chunk_size", [2, 64])
def test_closed_form(backend: str, chunk_size: int) -> None:
    # h_5 = e^(5a)·h_0 + Σ_t dt_t e^(a·Σ dt after t).
    ones = torch.ones(1, 5, 1, 1)
    inputs = {"x": ones, "b": ones.clone(), "c": ones.clone(), "dt": torch.ones(1, 5, 1)}
    inputs |= {"a": torch.full((1,), -0.5), "d": torch.zeros(1), "init_state": torch.ones(1, 1, 1, 1)}
    inputs = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    with interpreter.interpret():
        _, final_state = scan(inputs, chunk_size=chunk_size, backend=backend)
        final_state.sum().backward()
    assert inputs["init_state"].grad.item() == pytest.approx(0.0820849986, rel=2e-5)
    assert inputs["a"].grad.item() == pytest.approx(2.9634461486, rel=2e-5)
    expected = [0.0942927839, 0.1144200192, 0.1476042202, 0.2023157181, 0.2925197286]
    assert inputs["dt"].grad.flatten().tolist() == pytest.approx(expected, rel=2e-5)
    assert not inputs["c"].grad.any() and not inputs["d"].grad.any()


@pytest.mark.parametrize("backend", ["torch", "cutile"])
@pytest.mark.parametrize("reached", [("out",), ("final_state",), ("out", "final_state")])
@pytest.mark.parametrize("without", [(), ("d", "init_state")])
def test_gradient_of_one_result_or_both(
    backend: str, reached: tuple[str, ...], without: tuple[str, ...]
) -> None:
    inputs = leaves(70)
    for name in without:
        inputs.pop(name)

    def derive(backend: str) -> dict[str, torch.Tensor]:
        results = dict(zip(("out", "final_state"), scan(inputs, backend=backend), strict=True))
        total = sum(results[name].square().sum() for name in reached)
        found = torch.autograd.grad(total, list(inputs.values()), allow_unused=True)
        return {n: g for n, g in zip(inputs, found, strict=True) if g is not None}

    with interpreter.interpret():
        got = derive(backend)
    doubles = leaves(70, torch.float64)
    inputs = {name: doubles[name] for name in inputs}
    expected = derive("torch")
    assert close(got, expected, rtol=2e-5 if backend == "cutile" else 1e-5)
    assert all(got[name].dtype == torch.float32 for name in got)


def test_only_what_is_needed_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    from tilegym_mamba2.backends.cutile import backward

    original = backward.gradients
    monkeypatch.setattr(backward, "gradients", lambda *args: seen.append(args[-1]) or original(*args))
    inputs = leaves(20, requires_grad=False)
    inputs["b"].requires_grad_()
    inputs["init_state"].requires_grad_()
    with interpreter.interpret():
        loss(*scan(inputs, backend="cutile")).backward()
    assert seen == [tuple(name in ("b", "init_state") for name in OP_ORDER)]
    assert inputs["x"].grad is None and inputs["b"].grad is not None


def test_only_inputs_are_saved() -> None:
    inputs = leaves(200)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        scan(inputs, backend="torch")
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in inputs.values()}


def test_tilegyms_name_is_differentiable_on_cutile() -> None:
    inputs = leaves()
    with interpreter.interpret():
        out, final_state = tilegym.ops.mamba2_chunk_forward(
            *(inputs[name] for name in OP_ORDER), backend="cutile"
        )
        loss(out, final_state).backward()
    got = {name: tensor.grad for name, tensor in inputs.items()}
    assert close(got, gradients(leaves(dtype=torch.float64), backend="torch"), rtol=2e-5)


def test_the_backward_uses_the_backend_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    picked = []
    original = autograd.resolve

    def noting(name: str, *args: Any) -> Any:
        result = original(name, *args)
        picked.append((name, result[0]))
        return result

    monkeypatch.setattr(autograd, "resolve", noting)
    inputs = leaves(16)
    with interpreter.interpret():
        with use_backend("cutile"):
            out, _ = scan(inputs)
        out.sum().backward()
    assert picked == [("mamba2_chunk_forward", "cutile"), ("mamba2_chunk_backward", "cutile")]


def test_without_grad_nothing_goes_through_torch_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd, "chunk_scan", None)
    inputs = leaves(16)
    with torch.no_grad():
        out, _ = scan(inputs, backend="torch")
    assert not out.requires_grad
    scan({name: tensor.detach() for name, tensor in inputs.items()}, backend="torch")


def test_wrong_arguments_are_named() -> None:
    inputs = leaves(16)
    with pytest.raises(ValueError, match=r"dt must have shape \(B, T, H\)"):
        scan(inputs, dt=inputs["dt"][:, 1:])
    with pytest.raises(TypeError, match="chunk_size must be an integer"):
        scan(inputs, chunk_size=2.5)


# ---- second derivatives


def test_first_and_second_derivatives_in_float64() -> None:
    inputs = leaves(5, torch.float64, (1, 2, 2, 1, 3))

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return scan(dict(zip(inputs, tensors, strict=True)), chunk_size=2, backend="torch")

    assert torch.autograd.gradcheck(function, tuple(inputs.values()))
    assert torch.autograd.gradgradcheck(function, tuple(inputs.values()))


def test_second_derivative_on_cutile_is_an_error() -> None:
    inputs = leaves(16)
    with interpreter.interpret():
        out, _ = scan(inputs, backend="cutile")
        (dx,) = torch.autograd.grad(out.square().sum(), inputs["x"], create_graph=True)
        with pytest.raises(RuntimeError, match="'cutile' has no second derivative; use backend='torch'"):
            dx.sum().backward()


def test_a_form_seen_before_goes_past_the_ops_to_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_chunk, "_known", {})
    inputs = leaves(50)
    with interpreter.interpret():
        first = gradients(inputs, backend="cutile")
        assert len(ops_chunk._known) == 1
        for name in ("chunk_scan", "chunk_scan_backward"):
            monkeypatch.setattr(autograd, name, None)
        second = gradients(inputs, backend="cutile")
        assert all(torch.equal(first[name], second[name]) for name in NAMES)
        out, final_state = scan(inputs, backend="cutile")
        (of_state,) = torch.autograd.grad(final_state.sum(), inputs["b"], retain_graph=True)
        (of_out,) = torch.autograd.grad(out.sum(), inputs["b"])
        assert of_state.shape == of_out.shape and not torch.equal(of_state, of_out)
        with torch.no_grad():
            assert not scan(inputs, backend="cutile")[0].requires_grad
        monkeypatch.undo()
        monkeypatch.setattr(ops_chunk, "_known", {})
        scan(inputs, backend="cutile")
        assert len(ops_chunk._known) == 1
        with pytest.raises(TypeError, match="b must have dtype"):
            scan(inputs | {"b": inputs["b"].detach().half()}, backend="cutile")
        assert close(gradients(inputs, backend="torch"), first)
        (dx,) = torch.autograd.grad(scan(inputs, backend="cutile")[0].sum(), inputs["x"], create_graph=True)
        with pytest.raises(RuntimeError, match="'cutile' has no second derivative; use backend='torch'"):
            dx.sum().backward()


# ---- what torch puts around it


@pytest.mark.parametrize("backend", ["torch", "cutile"])
def test_autocast(backend: str) -> None:
    inputs = leaves()
    inputs["b"] = inputs["b"].detach().bfloat16().requires_grad_()
    with interpreter.interpret(), torch.autocast("cpu", torch.bfloat16):
        out, final_state = scan(inputs, backend=backend)
        assert out.dtype == torch.bfloat16
        assert final_state.dtype == torch.float32
    with interpreter.interpret():
        loss(out.float(), final_state).backward()
    assert all(tensor.grad.dtype == tensor.dtype for tensor in inputs.values())
    low = {n: t.detach().bfloat16() if n in ("x", "b", "c") else t.detach() for n, t in inputs.items()}
    with interpreter.interpret():
        expected, _ = scan(low, backend=backend)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backend", ["torch", "cutile"])
def test_activation_checkpointing(backend: str, reentrant: bool) -> None:
    def again(inputs: dict[str, torch.Tensor], **options: Any) -> Any:
        function = lambda *ts: scan(dict(zip(inputs, ts, strict=True)), **options)  # noqa: E731
        return checkpoint(function, *inputs.values(), use_reentrant=reentrant)

    with interpreter.interpret():
        expected = gradients(leaves(), backend=backend)
        got = gradients(leaves(), again, backend=backend)
    assert all(torch.equal(got[name], expected[name]) for name in NAMES)


@pytest.mark.parametrize("backend", ["torch", "cutile"])
def test_deterministic_algorithms(backend: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with interpreter.interpret():
            first, second = (gradients(leaves(), backend=backend) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


@pytest.mark.parametrize("backend", ["torch", "cutile"])
def test_compiled_equals_eager_in_one_graph(backend: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda inputs: scan(inputs, backend=backend), fullgraph=True, dynamic=True, backend=counter
    )
    with interpreter.interpret():
        for tokens in (33, 65):
            expected = gradients(leaves(tokens), backend=backend)
            got = gradients(leaves(tokens), compiled)
            assert all(torch.equal(got[name], expected[name]) for name in NAMES)
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["torch", "cutile"])
def test_opcheck(backend: str) -> None:
    inputs = leaves(20)
    arguments = tuple(inputs[name] for name in OP_ORDER)
    with interpreter.interpret():
        torch.library.opcheck(autograd.chunk_scan, (*arguments, 16, backend))
        # Without grad: a trace of the second derivative would take minutes.
        arguments = tuple(tensor.detach() for tensor in arguments)
        dout, dfinal_state = torch.randn_like(arguments[0]), torch.randn_like(arguments[-1])
        torch.library.opcheck(
            autograd.chunk_scan_backward, (*arguments, dout, dfinal_state, 16, None, backend, [True] * 7)
        )
        needed = [True, False, True, True, False, False, False]
        some = (*arguments[:4], None, arguments[5], None, dout, None, 16, torch.float32, backend, needed)
        torch.library.opcheck(autograd.chunk_scan_backward, some)


def test_the_op_and_the_plain_backward_agree() -> None:
    inputs = {name: tensor.detach() for name, tensor in leaves().items()}
    arguments = [inputs[name] for name in OP_ORDER]
    dout, dfinal_state = torch.randn_like(inputs["x"]), torch.randn_like(inputs["init_state"])
    with interpreter.interpret():
        plain = mamba2_chunk_backward(*arguments, dout, dfinal_state, backend="cutile")
        by_op = autograd.chunk_scan_backward(*arguments, dout, dfinal_state, 64, None, "cutile", [True] * 7)
    assert all(torch.equal(p, o) for p, o in zip(plain, by_op, strict=True))


# ---- on a GPU


@pytest.mark.gpu
def test_cuda_graph_around_forward_and_backward() -> None:
    inputs = {n: t.detach().cuda().requires_grad_() for n, t in leaves(256).items()}
    expected = {n: g.clone() for n, g in gradients(inputs, backend="cutile").items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients(inputs, backend="cutile")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(inputs, backend="cutile")
    for gradient in captured.values():
        gradient.zero_()
    graph.replay()
    assert all(torch.equal(captured[name], expected[name]) for name in NAMES)


@pytest.mark.gpu
def test_automatic_choice_on_a_gpu_trains_with_the_kernels() -> None:
    inputs = {n: t.detach().cuda().requires_grad_() for n, t in leaves(100).items()}
    got = gradients(inputs)
    doubles = {n: t.detach().cuda().requires_grad_() for n, t in leaves(100, torch.float64).items()}
    assert close(got, gradients(doubles, backend="torch"), rtol=2e-5)
    assert (
        tilegym_mamba2.registry.resolve("mamba2_chunk_backward", None, (inputs["x"].detach(),))[0] == "cutile"
    )


# ---- what asks for the ops, at a form that was seen before too


def test_selective_checkpointing_sees_the_op() -> None:
    seen: list[str] = []

    def policy(context: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        ours = "tilegym_mamba2" in str(op)
        seen.extend([str(op)] * ours)
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    inputs = leaves(40)
    with interpreter.interpret():
        expected = gradients(inputs, backend="cutile")
        for _ in range(2):
            seen.clear()
            contexts = partial(create_selective_checkpoint_contexts, policy)
            run = partial(
                checkpoint, partial(scan, backend="cutile"), use_reentrant=False, context_fn=contexts
            )
            assert close(gradients(inputs, run=run), expected)
            assert seen == ["tilegym_mamba2.chunk_scan.default"]


@pytest.mark.parametrize("options", [{}, {"dt_softplus": True}])
def test_a_batch_of_gradients(options: dict[str, Any]) -> None:
    inputs = leaves(20)
    with interpreter.interpret():
        for _ in range(2):
            out, _ = scan(inputs, backend="cutile", **options)
            cotangents = torch.randn(3, *out.shape, generator=torch.Generator().manual_seed(0))
            (batched,) = torch.autograd.grad(
                out, inputs["x"], cotangents, is_grads_batched=True, retain_graph=True
            )
            (second,) = torch.autograd.grad(out, inputs["x"], cotangents[1])
            assert torch.equal(batched[1], second)


@pytest.mark.parametrize("options", [{}, {"dt_softplus": True}])
def test_gradients_with_the_sign_beside_their_memory(options: dict[str, Any]) -> None:
    """As torch makes them behind the conjugate of a complex tensor."""
    inputs, signs = leaves(20), []

    def through_complex(**call: Any) -> torch.Tensor:
        out, final_state = scan(inputs, **call, **options)
        for result in (out, final_state):
            result.register_hook(lambda gradient: signs.append(gradient.is_neg()))
        pairs = [torch.complex(torch.ones_like(t), t).conj() for t in (out, final_state)]
        return torch.autograd.grad(sum((t * t).imag.sum() for t in pairs), list(inputs.values()))

    expected = through_complex(backend="torch")
    with interpreter.interpret():
        got = through_complex(backend="cutile")
    assert signs == [True] * 4
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", OP_ORDER)
@pytest.mark.parametrize("options", [{}, {"dt_softplus": True}], ids=["bare", "softplus"])
def test_inputs_with_the_sign_beside_their_memory(name: str, options: dict[str, Any]) -> None:
    plain = leaves(20)
    with interpreter.interpret():
        # The second time the form is known.
        for _ in range(2):
            results = [
                scan(plain | {name: view(plain[name])}, backend="cutile", **options)
                for view in (torch._neg_view, torch.neg, torch.clone)
            ]
            grads = [torch.autograd.grad(out.square().sum(), list(plain.values())) for out, _ in results]
            assert all(map(torch.equal, results[0], results[1]))
            assert all(map(torch.equal, grads[0], grads[1]))
            assert not all(map(torch.equal, results[0], results[2]))


@pytest.mark.parametrize("name", OP_ORDER)
def test_a_wrapped_tensor_is_read_where_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_plan = cutile_forward.run_plan

    def run(launches: Any, *rest: Any) -> None:
        assert not any(isinstance(arg, Wrapper) for item in launches for arg in item.args)
        run_plan(launches, *rest)

    monkeypatch.setattr(cutile_forward, "run_plan", run)
    plain = leaves(20, requires_grad=False)
    with interpreter.interpret():
        expected = scan(plain, backend="cutile")
        # The second time the form of the plain ones is known.
        got = scan(plain | {name: Wrapper(plain[name])}, backend="cutile")
    assert all(map(torch.equal, got, expected))


class Asked(Wrapper):
    """Keeps what it is asked for."""

    ops: ClassVar[list[Any]] = []

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.ops.append(func)
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("backend", ["torch", "cutile"])
@pytest.mark.parametrize("name", [*OP_ORDER, "dout", "dfinal_state"])
def test_a_wrapped_tensor_sees_the_backward_as_an_op(name: str, backend: str) -> None:
    inputs = leaves(20, requires_grad=False)
    inputs |= {"dout": torch.ones_like(inputs["x"]), "dfinal_state": torch.ones_like(inputs["init_state"])}
    Asked.ops.clear()
    with interpreter.interpret():
        got, expected = (
            mamba2_chunk_backward(*(given[n] for n in (*OP_ORDER, "dout", "dfinal_state")), backend=backend)
            for given in (inputs | {name: Asked(inputs[name])}, inputs)
        )
    assert Asked.ops == [torch.ops.tilegym_mamba2.chunk_scan_backward.default]
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("backend", ["torch", "cutile"])
def test_fake_tensors_outside_their_mode_have_fake_gradients(backend: str) -> None:
    inputs = leaves(20, requires_grad=False)
    mode = FakeTensorMode()
    fake = [mode.from_tensor(inputs[name]) for name in OP_ORDER]
    with interpreter.interpret():
        gradients = mamba2_chunk_backward(*fake, fake[0], None, backend=backend)
    for gradient, tensor in zip(gradients, fake, strict=True):
        assert isinstance(gradient, FakeTensor)
        assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_the_backward_follows_state_dtype_under_a_dispatch_mode_too() -> None:
    inputs = leaves(20, requires_grad=False)
    arguments = [*(inputs[name] for name in OP_ORDER), torch.ones_like(inputs["x"]), None]
    wrapped = [Wrapper(arguments[0]), *arguments[1:]]
    with interpreter.interpret():
        for given, mode in (
            (arguments, contextlib.nullcontext()),
            (arguments, Watching()),
            (wrapped, contextlib.nullcontext()),
        ):
            with mode, pytest.raises(TypeError, match="'cutile' computes no float64 states"):
                mamba2_chunk_backward(*given, state_dtype=torch.float64, backend="cutile")
    wide, narrow, by_op = (
        mamba2_chunk_backward(*given, state_dtype=dtype, backend="torch")
        for given, dtype in ((arguments, torch.float64), (arguments, torch.float32), (wrapped, torch.float64))
    )
    assert all(map(torch.equal, by_op, wide)) and not all(map(torch.equal, narrow, wide))


def test_the_backward_takes_gradients_with_the_sign_beside_their_memory() -> None:
    inputs = leaves(20, requires_grad=False)
    tensors = [inputs[name] for name in OP_ORDER]
    cotangents = [torch.ones_like(inputs[name]) for name in ("x", "init_state")]
    with interpreter.interpret():
        got, expected = (
            mamba2_chunk_backward(*tensors, *given, backend="cutile")
            for given in ([torch._neg_view(t) for t in cotangents], [-t for t in cotangents])
        )
    assert all(map(torch.equal, got, expected))


def test_forward_mode_is_left_to_torch() -> None:
    inputs = leaves(20, requires_grad=False)
    with interpreter.interpret():
        scan(inputs, backend="cutile")
        with forward_ad.dual_level():
            dual = inputs | {"x": forward_ad.make_dual(inputs["x"], torch.ones_like(inputs["x"]))}
            with pytest.raises(tilegym_mamba2.BackendUnavailable, match="no forward-mode derivatives"):
                scan(dual, backend="cutile")
            out, _ = scan(dual)
            assert forward_ad.unpack_dual(out).tangent.abs().max() > 0


@pytest.mark.parametrize("backend", ["torch", "cutile"])
def test_any_chunk_size_from_one_is_a_number_of_tokens(backend: str) -> None:
    inputs = leaves(20)
    with interpreter.interpret():
        expected = gradients(inputs, backend=backend, chunk_size=64)
        for chunk_size in (2**31, 2**63, 10**30):
            assert close(gradients(inputs, backend=backend, chunk_size=chunk_size), expected)
