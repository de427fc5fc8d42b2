"""Which backend a call gets: precedence, what can run, gradients, and what the errors say."""

import logging
import threading

import pytest
import tilegym
import torch
from tilegym.backend import dispatcher

import tilegym_mamba2
from tests.registering import (
    BACKWARD,
    FORWARD,
    problem,
    run_python,
    tensors,
)
from tilegym_mamba2 import BackendUnavailable, RegistryError, registry

# ---- precedence

pytest_plugins = ["tests.registering_fixtures"]
pytestmark = pytest.mark.usefixtures("fresh_registration")


@pytest.fixture
def marked(modules, toml):
    """Backends one, two, three and four whose forward returns their own name."""
    name = modules(
        "marked_backends",
        "".join(f"def {n}(*args): return '{n}'\n" for n in ("one", "two", "three", "four")),
    )
    lines = "".join(f'{n} = "{name}:{n}"\n' for n in ("one", "two", "three", "four"))
    tilegym_mamba2.register(toml(f"schema = 1\n[ops.{FORWARD}.backends]\n{lines}"))
    inputs = problem()
    return lambda **choice: tilegym.ops.mamba2_chunk_forward(**inputs, **choice)


def test_precedence(marked, monkeypatch):
    assert torch.is_tensor(marked()[0])
    monkeypatch.setenv(registry.ENV, "four")
    assert marked() == "four"
    tilegym.set_backend("three")
    assert marked() == "three"
    with tilegym_mamba2.use_backend("two"):
        assert marked() == "two"
        assert marked(backend="one") == "one"
        with tilegym_mamba2.use_backend("one"):
            assert marked() == "one"
        assert marked() == "two"
    assert marked() == "three"


def test_use_backend_is_a_decorator_and_local_to_the_thread(marked):
    seen = {}

    @tilegym_mamba2.use_backend("two")
    def decorated():
        seen["inside"] = marked()
        thread = threading.Thread(target=lambda: seen.update(thread=marked()))
        thread.start()
        thread.join()

    decorated()
    assert seen["inside"] == "two"
    assert torch.is_tensor(seen["thread"][0])


def test_use_backend_ends_with_an_error_inside(marked):
    with pytest.raises(KeyError), tilegym_mamba2.use_backend("two"):
        raise KeyError
    assert torch.is_tensor(marked()[0])


def test_use_backend_refuses_unknown_names():
    with pytest.raises(
        BackendUnavailable, match=r"no op has a backend 'nix'; there are: cutile, torch, tilegym"
    ):
        with tilegym_mamba2.use_backend("nix"):
            pass
    with pytest.raises(TypeError, match="backend must be a string, got NoneType"):
        with tilegym_mamba2.use_backend(None):
            pass


def test_only_a_choice_somebody_made_counts(monkeypatch):
    inputs = problem()
    assert tilegym.get_current_backend() == "cutile"
    assert registry.resolve(FORWARD, None, tensors(inputs))[0] == "torch"
    before = tilegym.get_current_backend()
    tilegym.set_backend("cutile")
    with pytest.raises(BackendUnavailable, match=r"'cutile' \(chosen by tilegym\.set_backend"):
        tilegym.ops.mamba2_chunk_forward(**inputs)
    # What a save-and-restore puts back is again no choice.
    tilegym.set_backend(before)
    assert registry.resolve(FORWARD, None, tensors(inputs))[0] == "torch"


def test_the_start_value_counts_where_somebody_chose_before_us(monkeypatch):
    tilegym_mamba2.unregister()
    monkeypatch.setenv(registry.TILEGYM_ENV, "cutile")
    tilegym_mamba2.register()
    with pytest.raises(
        BackendUnavailable, match=r"chosen by tilegym\.set_backend or CUTILE_TUTORIALS_BACKEND"
    ):
        tilegym.ops.mamba2_chunk_forward(**problem())
    monkeypatch.delenv(registry.TILEGYM_ENV)
    tilegym_mamba2.unregister()
    tilegym.set_backend("triton")
    tilegym_mamba2.register()
    with pytest.raises(BackendUnavailable, match=r"no backend 'triton'.*it has: cutile, torch, tilegym$"):
        tilegym.ops.mamba2_chunk_forward(**problem())


def test_set_backend_taken_before_the_import_is_seen():
    out = run_python(
        """
        from tilegym import set_backend, ops
        from tilegym.ops import mamba2_chunk_forward as early
        import torch, tilegym_mamba2
        from tilegym_mamba2 import registry
        set_backend("torch")
        print(registry.resolve("mamba2_chunk_forward")[0])
        set_backend("cutile")
        try:
            registry.resolve("mamba2_chunk_forward", None, (torch.ones(1),))
        except tilegym_mamba2.BackendUnavailable as error:
            print(error)
        """
    ).splitlines()
    assert out[0] == "torch"
    assert "the tensors are on the CPU" in out[1]


def test_set_backend_torch_is_refused_by_tilegym_without_us_and_works_with_us():
    tilegym_mamba2.unregister()
    with pytest.raises(ValueError, match="Unknown backend: torch"):
        tilegym.set_backend("torch")
    tilegym_mamba2.register()
    tilegym.set_backend("torch")
    out, state = tilegym.ops.mamba2_chunk_forward(**problem())
    assert out.shape == (2, 6, 4, 3) and state.shape == (2, 4, 3, 5)


def test_environment_choice(monkeypatch):
    monkeypatch.setenv(registry.ENV, "cutile")
    with pytest.raises(BackendUnavailable, match=r"'cutile' \(chosen by TILEGYM_MAMBA2_BACKEND\)"):
        tilegym.ops.mamba2_chunk_forward(**problem())
    monkeypatch.setenv(registry.ENV, "nix")
    with pytest.raises(BackendUnavailable, match=r"no backend 'nix' \(chosen by TILEGYM_MAMBA2_BACKEND\)"):
        tilegym.ops.mamba2_chunk_forward(**problem())
    monkeypatch.setenv(registry.ENV, "")
    assert torch.is_tensor(tilegym.ops.mamba2_chunk_forward(**problem())[0])


# ---- TileGym's own dispatcher, taken before our import


@pytest.fixture
def early():
    """TileGym's wrappers, as somebody holds them who imported them before us."""
    tilegym_mamba2.unregister()
    wrappers = tilegym.ops.mamba2_chunk_forward, tilegym.ops.mamba2_chunk_backward
    tilegym_mamba2.register()
    assert tilegym.ops.mamba2_chunk_forward is not wrappers[0]
    return wrappers


def test_early_wrapper_follows_the_same_rule(early, marked, monkeypatch):
    inputs = problem()
    old = early[0]
    assert torch.is_tensor(old(**inputs)[0])
    assert old(*tensors(inputs), 2, backend="one") == "one"
    monkeypatch.setenv(registry.ENV, "four")
    assert old(**inputs) == "four"
    tilegym.set_backend("three")
    assert old(**inputs) == "three"
    with tilegym_mamba2.use_backend("two"):
        assert old(**inputs) == "two"
        assert old(**inputs, backend="three") == "three"
        assert torch.is_tensor(old(**inputs, backend="torch")[0])


def test_early_wrapper_never_falls_back(early, monkeypatch):
    # TileGym refuses to fall back by itself where this is set.
    monkeypatch.delenv("DISABLE_FALLBACK", raising=False)
    inputs = problem()
    for backend, text in {
        "cutile": "the tensors are on the CPU",
        "tilegym": "the tensors are on the CPU",
        "nix": "no backend 'nix'",
    }.items():
        with pytest.raises(BackendUnavailable, match=text):
            early[0](**inputs, backend=backend)
    with pytest.raises(BackendUnavailable, match=r"mamba2_chunk_backward has no backend 'nix'"):
        early[1](**inputs, dout=None, dfinal_state=None, backend="nix")
    tilegym.set_backend("triton")
    with pytest.raises(BackendUnavailable, match=r"no backend 'triton'"):
        early[0](**inputs)


def test_an_entry_called_without_the_dispatcher_means_its_own_backend():
    entries = dispatcher._REGISTRY[FORWARD]
    assert torch.is_tensor(entries["torch"](**problem())[0])
    with pytest.raises(BackendUnavailable, match="'cutile'"):
        entries["cutile"](**problem())


# ---- automatic choice, what can run, gradients


def test_automatic_choice_is_logged_once_with_its_reason(caplog):
    caplog.set_level(logging.INFO, "tilegym_mamba2")
    for _ in range(3):
        tilegym.ops.mamba2_chunk_forward(**problem())
    records = [r for r in caplog.records if r.name == "tilegym_mamba2"]
    assert len(records) == 1
    assert records[0].levelno == logging.INFO
    assert "mamba2_chunk_forward: backend 'torch' chosen automatically" in records[0].getMessage()
    assert "the tensors are on the CPU" in records[0].getMessage()


@pytest.fixture
def fake_gpu(modules, monkeypatch, toml):
    """An op whose cutile backend finds everything it needs."""
    monkeypatch.setitem(registry._REQUIREMENTS, "cutile", lambda device: (True, "ready"))

    def register(source, op="fake_op"):
        name = modules("fake_cutile", source)
        tilegym_mamba2.register(
            toml(
                f"""
                schema = 1
                [ops.{op}]
                summary = "fake"
                spec = "tilegym_mamba2.spec:Mamba2ProblemSpec"
                outputs = ["out"]
                [ops.{op}.backends]
                torch = "{name}:slow"
                cutile = "{name}:fast"
                """
            )
        )
        return getattr(tilegym.ops, op)

    return register


FAKE = """
def slow(*args): return "slow"
slow.DIFFERENTIABLE = True
def fast(*args): return "fast"
"""


def test_automatic_prefers_cutile_where_it_can_run(fake_gpu, caplog):
    caplog.set_level(logging.INFO, "tilegym_mamba2")
    op = fake_gpu(FAKE)
    assert [op(torch.ones(2)) for _ in range(2)] == ["fast", "fast"]
    assert ["backend 'cutile' chosen automatically" in r.getMessage() for r in caplog.records] == [True]


def test_supports_decides_too(fake_gpu, caplog):
    caplog.set_level(logging.INFO, "tilegym_mamba2")
    op = fake_gpu(
        FAKE
        + """
def supports(op_name, x, *rest):
    assert op_name == "fake_op"
    if x.dtype.is_complex: raise TypeError("x must be real")
    return x.dim() == 1, "x has %d dimensions, not 1" % x.dim()
"""
    )
    # `supports` belongs to the module, which here holds both backends.
    assert op(torch.ones(2)) == "fast"
    with pytest.raises(
        BackendUnavailable, match=r"'cutile' \(chosen by backend=\) cannot run: x has 2 dim.*Backends"
    ):
        op(torch.ones(2, 2), backend="cutile")
    with pytest.raises(TypeError, match="x must be real"):
        op(torch.ones(2) * 1j, backend="cutile")
    with pytest.raises(BackendUnavailable, match=r"no backend can run\. cutile: x has 2.*; torch: x has 2"):
        op(torch.ones(2, 2))
    with pytest.raises(BackendUnavailable, match="no backend can run. cutile: x must be real"):
        op(torch.ones(2) * 1j)


def test_no_detached_result_from_a_backend_without_autograd(fake_gpu, caplog):
    caplog.set_level(logging.INFO, "tilegym_mamba2")
    op = fake_gpu(FAKE)
    leaf = torch.ones(2, requires_grad=True)
    assert op(leaf) == "slow"
    assert "computes no gradients" in caplog.text
    with pytest.raises(
        BackendUnavailable, match=r"computes no gradients and an input requires grad.*no_grad"
    ):
        op(leaf, backend="cutile")
    with torch.no_grad():
        assert op(leaf) == op(leaf, backend="cutile") == "fast"


def test_module_wide_differentiable(fake_gpu):
    op = fake_gpu(FAKE + "DIFFERENTIABLE = True\n")
    assert op(torch.ones(2, requires_grad=True)) == "fast"


def test_torch_backend_carries_gradients_through_the_public_op():
    inputs = problem()
    inputs["x"].requires_grad_()
    out, _ = tilegym.ops.mamba2_chunk_forward(**inputs)
    out.sum().backward()
    assert inputs["x"].grad.shape == inputs["x"].shape


def test_tilegyms_own_refuses_none(monkeypatch):
    monkeypatch.setitem(registry._REQUIREMENTS, "tilegym", lambda device: (True, "ready"))
    with pytest.raises(BackendUnavailable, match=r"'tilegym'.*needs every tensor, and one is None"):
        tilegym.ops.mamba2_chunk_forward(**problem(d=None), backend="tilegym")


def test_tilegyms_own_is_the_function_that_tilegym_registered():
    from tilegym.ops.cutile import mamba2

    entry = registry.ops()[FORWARD]
    assert entry.backends["tilegym"] == "tilegym.ops.cutile.mamba2:mamba2_chunk_forward"
    assert registry._load(entry, "tilegym").function is mamba2.mamba2_chunk_forward


def test_backend_without_an_implementation_of_the_op():
    backward = registry.ops()[BACKWARD]
    with pytest.raises(BackendUnavailable) as error:
        tilegym.ops.mamba2_chunk_backward(**problem(), dout=None, dfinal_state=None, backend="nix")
    assert str(error.value) == (
        "mamba2_chunk_backward has no backend 'nix' (chosen by backend=); "
        f"it has: {', '.join(backward.backends)}"
    )


def test_status_lists_every_backend():
    status = registry.backend_status(FORWARD)
    assert list(status) == ["cutile", "torch", "tilegym"]
    assert status["torch"] == (True, "ready")
    with pytest.raises(RegistryError, match="'nix' is not registered; registered ops: mamba2_chunk_forward"):
        registry.backend_status("nix")


@pytest.mark.parametrize("backend", [["torch"], 3, True])
def test_a_backend_that_is_no_name(backend):
    message = f"backend must be a string or None, got {type(backend).__name__}"
    with pytest.raises(TypeError, match=message):
        tilegym.ops.mamba2_chunk_forward(**problem(), backend=backend)
