"""The public ops inside the transforms of torch.func: grad, vmap, jvp and what is built of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.scanning import Shape, call, running
from tilegym_mamba2 import (
    BackendUnavailable,
    mamba2_chunk_backward,
    mamba2_chunk_forward,
    mamba2_chunk_scan,
    mamba2_state_update,
)

SHAPES = {
    "bare": Shape(tokens=20, d="H", init_state=True),
    "gated": Shape(tokens=20, d="HP", z=True, dt_bias=True, dt_softplus=True, dt_limit=(0.0, 0.5)),
}
DTYPES = {"torch": torch.float64, "cutile": torch.float32}
# vmap says that it loops over an op.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

before_autograd_or_after = pytest.mark.parametrize("pre_dispatch", [False, True])

Loss = Callable[[torch.Tensor], torch.Tensor]


def loss_of_x(values: dict[str, Any], backend: str) -> Loss:
    def loss(x: torch.Tensor) -> torch.Tensor:
        out, final_state = call(values | {"x": x}, backend=backend)
        return out.square().sum() + final_state.sin().sum()

    return loss


def gradient(loss: Loss, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(loss(x), x)[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", ["torch", "cutile"])
def test_grad_vmap_and_both(shape: str, backend: str) -> None:
    values = SHAPES[shape].values(DTYPES[backend])
    loss, x = loss_of_x(values, backend), values["x"]
    several = torch.stack([x, 0.5 * x])
    with running(backend):
        expected = torch.stack([gradient(loss, one) for one in several])
        for found in (
            torch.stack([torch.func.grad(loss)(one) for one in several]),
            torch.func.vmap(torch.func.grad(loss))(several),
            torch.func.vmap(torch.func.jacrev(loss))(several),
        ):
            torch.testing.assert_close(found, expected)
        losses = torch.func.vmap(loss)(several)
        torch.testing.assert_close(losses, torch.stack([loss(one) for one in several]))


@pytest.mark.parametrize("backend", ["torch", "cutile"])
def test_grad_in_every_input(backend: str) -> None:
    values = SHAPES["gated"].values(DTYPES[backend]) | {"backend": backend}
    names = ("x", "dt", "a", "b", "c", "d", "z", "dt_bias")

    def loss(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return call(values | tensors)[0].square().sum()

    leaves = {name: values[name].clone().requires_grad_() for name in names}
    with running(backend):
        found = torch.func.grad(loss)({name: values[name] for name in names})
        expected = torch.autograd.grad(loss(leaves), list(leaves.values()))
    torch.testing.assert_close([found[name] for name in names], list(expected))


@pytest.mark.parametrize("shape", SHAPES)
def test_second_derivatives_by_torch(shape: str) -> None:
    values = SHAPES[shape].values()
    loss, x = loss_of_x(values, "torch"), values["x"]
    direction = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(3))
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (expected,) = torch.autograd.grad((first * direction).sum(), leaf)
    grad = torch.func.grad(loss)
    torch.testing.assert_close(torch.func.grad(lambda x: (grad(x) * direction).sum())(x), expected)
    torch.testing.assert_close(torch.func.jvp(grad, (x,), (direction,))[1], expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_second_derivatives_by_kernels_are_refused(shape: str) -> None:
    values = SHAPES[shape].values(torch.float32)
    loss = loss_of_x(values, "cutile")
    with running("cutile"), pytest.raises(BackendUnavailable, match="computes no gradients.*backend='torch'"):
        torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(values["x"])
    with running("cutile"), pytest.raises(BackendUnavailable, match="backend='torch'"):
        torch.func.jvp(torch.func.grad(loss), (values["x"],), (values["x"],))


def step(values: dict[str, Any], state: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    if state is None:
        state = torch.zeros(2, 4, 3, 5, dtype=values["x"].dtype)
    at_0 = {name: values[name][:, 0] for name in ("x", "dt", "b", "c")}
    return mamba2_state_update(state, at_0["x"], at_0["dt"], values["a"], at_0["b"], at_0["c"], **options)


@pytest.mark.parametrize("op", ["mamba2_chunk_backward", "mamba2_state_update"])
@pytest.mark.parametrize("traced", [None, False, True], ids=["", "traced", "pre_dispatch"])
def test_kernels_say_that_a_tensor_has_no_memory(op: str, traced: bool | None) -> None:
    values = SHAPES["bare"].values(torch.float32)

    def one(x: torch.Tensor) -> Any:
        if op == "mamba2_state_update":
            return step(values | {"x": x}, backend="cutile")
        arguments = [values[name] for name in ("a", "b", "c", "d", "dt", "init_state")]
        return mamba2_chunk_backward(x, *arguments, x, None, backend="cutile")[0]

    several = torch.func.vmap(one)
    with running("cutile"), pytest.raises(RuntimeError) as raised:
        (several if traced is None else make_fx(several, pre_dispatch=traced))(values["x"][None])
    assert str(raised.value) == (
        f"{op}: backend 'cutile' works on memory, which tensors inside a transform of torch.func "
        "(vmap, grad) do not have; use backend='torch' there"
    )


@pytest.mark.parametrize("backend", ["torch", "cutile"])
def test_the_step_has_no_forward_mode_on_any_backend(backend: str) -> None:
    values = SHAPES["bare"].values(torch.float32)
    with running(backend), pytest.raises(BackendUnavailable) as raised:
        torch.func.jvp(lambda x: step(values | {"x": x}, backend=backend), (values["x"],), (values["x"],))
    assert "it computes no forward-mode derivatives. Backends of this op" in str(raised.value)


@pytest.mark.parametrize("shape", SHAPES)
def test_tensors_from_outside_reach_the_kernels(shape: str) -> None:
    values = SHAPES[shape].values(torch.float32)
    with running("cutile"):
        # Twice: the second call is one whose form is known.
        expected = [call(values, backend="cutile")[0].sum() for _ in range(2)][0]
        found = torch.func.grad(lambda w: w * call(values, backend="cutile")[0].sum())(torch.tensor(2.0))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("op", [mamba2_chunk_forward, mamba2_chunk_scan])
def test_vmap_without_a_choice_of_backend(op: Callable[..., Any]) -> None:
    values = SHAPES["bare"].values(torch.float32)
    names = ("x", "dt", "a", "b", "c", "d", "init_state")
    arguments = {name: values[name] for name in names}
    with running("cutile"):
        found = torch.func.vmap(lambda x: op(**(arguments | {"x": x}))[0])(values["x"][None])
        expected = op(**arguments)[0]
    torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize("backend", ["torch", "cutile"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("training", [False, True])
@before_autograd_or_after
def test_a_traced_call_computes_for_other_inputs(
    shape: str, backend: str, training: bool, pre_dispatch: bool
) -> None:
    first = SHAPES[shape].values(DTYPES[backend])
    names = [name for name, value in first.items() if isinstance(value, torch.Tensor)]
    second = first | {n: 0.5 * first[n] for n in names}

    def traced(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return call(first | dict(zip(names, tensors, strict=True)), backend=backend)[:2]

    with running(backend), torch.set_grad_enabled(training):
        if training:
            first["x"].requires_grad_()
        graph = make_fx(traced, pre_dispatch=pre_dispatch)(*(first[name] for name in names))
        results = graph(*(second[n] for n in names))
        assert torch.is_grad_enabled() == training
        for found, expected in zip(results, call(second, backend=backend), strict=False):
            torch.testing.assert_close(found, expected)


def two_draws(*shapes: tuple[int, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Two times tensors of these shapes, of which (2,) is that of a, which is negative."""
    draw = torch.Generator().manual_seed(0)
    first, second = ([torch.rand(s, generator=draw) - float(s == (2,)) for s in shapes] for _ in range(2))
    return first, second


@pytest.mark.parametrize("backend", ["torch", "cutile"])
@before_autograd_or_after
def test_a_traced_step_computes_for_other_inputs(backend: str, pre_dispatch: bool) -> None:
    shapes = ((1, 2, 4, 8), (1, 2, 4), (1, 2), (2,), (1, 1, 8), (1, 1, 8))
    first, second = two_draws(*shapes)

    def traced(state: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        return mamba2_state_update(state, *tensors, backend=backend)

    with running(backend), torch.no_grad():
        graph = make_fx(traced, pre_dispatch=pre_dispatch)(first[0].clone(), *first[1:])
        states = second[0].clone(), second[0].clone()
        found, expected = graph(states[0], *second[1:]), traced(states[1], *second[1:])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*states)
    assert not torch.equal(states[0], second[0])


LENGTHS = {
    "cu_seqlens": torch.tensor([[0, 2, 20], [0, 20, 20], [0, 0, 11]]),
    "seq_lens": torch.tensor([[20, 3], [0, 20], [7, 1]]),
}


def with_lengths(name: str, backend: str) -> tuple[dict[str, Any], Callable[..., torch.Tensor]]:
    """A problem, and all of a call's results in one tensor, as a function of x and of the lengths `name`."""
    values = Shape(tokens=20, batch=1 if name == "cu_seqlens" else 2, z=True).values(DTYPES[backend])

    def scan(x: torch.Tensor, lengths: torch.Tensor, **options: Any) -> torch.Tensor:
        results = call(values | {"x": x, name: lengths}, backend=backend, **options)
        return torch.cat([result.flatten() for result in results])

    return values, scan


@pytest.mark.parametrize("backend", ["torch", "cutile"])
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("check", [False, True])
@before_autograd_or_after
def test_a_traced_call_computes_for_other_lengths(
    name: str, backend: str, check: bool, pre_dispatch: bool
) -> None:
    values, scan = with_lengths(name, backend)
    x, lengths = values["x"], LENGTHS[name]

    def traced(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return scan(x, lengths, check=check)

    with running(backend):
        graph = make_fx(traced, pre_dispatch=pre_dispatch)(x, lengths[0])
        for other in lengths[1:]:
            torch.testing.assert_close(graph(x, other), scan(x, other))
        with pytest.raises(ValueError, match=f"^{name} must .*, got 21( at index 1)?$"):
            make_fx(traced, pre_dispatch=pre_dispatch)(x, torch.tensor([0, 20, 21][-lengths.shape[1] :]))


@pytest.mark.parametrize("backend", ["torch", "cutile"])
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("check", [False, True])
def test_vmap_over_lengths(name: str, backend: str, check: bool) -> None:
    values, scan = with_lengths(name, backend)
    x, lengths = values["x"], LENGTHS[name]

    def one(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return scan(x, lengths, check=check)

    with running(backend):
        expected = torch.stack([scan(x, row) for row in lengths])
        torch.testing.assert_close(torch.func.vmap(one, (None, 0))(x, lengths), expected)
        torch.testing.assert_close(torch.func.vmap(one, (None, 1))(x, lengths.T.contiguous()), expected)
        several = torch.stack([lengths[:2]] * 2)
        nested = torch.func.vmap(torch.func.vmap(one, (None, 0)))(torch.stack([x, 2 * x]), several)
        torch.testing.assert_close(nested[0], expected[:2])
        of_x = torch.func.grad(lambda x, row: scan(x, row).square().sum())
        found = torch.func.vmap(of_x, (None, 0))(x, lengths)
        torch.testing.assert_close(found, torch.stack([of_x(x, row) for row in lengths]))
        with pytest.raises(ValueError, match=f"^{name} must"):
            torch.func.vmap(one, (None, 0))(x, lengths + 1)


def test_a_wrong_value_in_a_batch_of_vmap_is_told() -> None:
    values, _ = with_lengths("seq_lens", "torch")
    with pytest.raises(ValueError) as raised:
        torch.func.vmap(lambda a: call(values | {"a": a}, backend="torch", check=True)[0])(-values["a"][None])
    assert str(raised.value) == "a must be ≤ 0, and is not somewhere in a batch of vmap"


@before_autograd_or_after
@pytest.mark.parametrize("backend", ["torch", "cutile"])
def test_a_traced_step_computes_for_other_slots(backend: str, pre_dispatch: bool) -> None:
    values = SHAPES["bare"].values(torch.float32)

    def traced(state: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return step(values, state, state_indices=slots, backend=backend)

    pool = torch.randn(5, 4, 3, 5, generator=torch.Generator().manual_seed(0))
    with running(backend):
        graph = make_fx(traced, pre_dispatch=pre_dispatch)(pool.clone(), torch.tensor([0, 4]))
        states, slots = (pool.clone(), pool.clone()), torch.tensor([3, -1])
        torch.testing.assert_close(graph(states[0], slots), traced(states[1], slots))
    torch.testing.assert_close(*states)


def test_vmap_over_steps() -> None:
    values = SHAPES["bare"].values()
    pools = torch.randn(2, 5, 4, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    slots = torch.tensor([[0, 4], [3, -1]])

    def one(state: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor:
        return step(values, state, state_indices=slots, backend="torch")

    for rows, states in ((slots, pools), (None, pools[:, :2])):
        states, expected_states = states.clone(), states.clone()
        pairs = zip(expected_states, slots if rows is not None else (None, None), strict=True)
        expected = torch.stack([one(*pair) for pair in pairs])
        found = torch.func.vmap(one, (0, None if rows is None else 0))(states, rows)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(states, expected_states)


@pytest.mark.parametrize("name", ["x", "state_indices"])
def test_vmap_over_steps_on_one_state_names_it(name: str) -> None:
    values = SHAPES["bare"].values()
    state, given = torch.zeros(2, 4, 3, 5, dtype=torch.float64), {"x": values["x"], "state_indices": None}
    given["state_indices"] = torch.tensor([1, 0])

    def one(mapped: torch.Tensor, written: torch.Tensor, **options: Any) -> torch.Tensor:
        changes = given | {name: mapped}
        slots = changes.pop("state_indices")
        return step(values | changes, written, state_indices=slots, backend="torch", **options)

    mapped = given[name][None]
    with pytest.raises(ValueError) as raised:
        torch.func.vmap(one, (0, None))(mapped, state)
    assert str(raised.value) == (
        f"state is written, and must be a batch of vmap like {name}: put it among the mapped arguments"
    )
    with pytest.raises(ValueError, match="^out is written, and must be a batch of vmap like state: "):
        torch.func.vmap(lambda *both: one(*both, out=torch.zeros_like(values["x"][:, 0])))(
            mapped, state[None]
        )
    assert not state.any()


@before_autograd_or_after
def test_a_traced_backward_computes_for_other_inputs(pre_dispatch: bool) -> None:
    shapes = ((1, 5, 2, 4), (2,), (1, 5, 1, 8), (1, 5, 1, 8), (1, 5, 2), (1, 5, 2, 4))
    first, second = two_draws(*shapes)

    def traced(x: torch.Tensor, a: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        b, c, dt, dout = rest
        results = mamba2_chunk_backward(x, a, b, c, None, dt, None, dout, None, backend="cutile")
        return tuple(gradient for gradient in results if gradient is not None)

    with running("cutile"):
        graph = make_fx(traced, pre_dispatch=pre_dispatch)(*first)
        for found, expected in zip(graph(*second), traced(*second), strict=True):
            torch.testing.assert_close(found, expected)
