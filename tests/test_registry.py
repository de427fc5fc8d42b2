"""Registry files, and registration into TileGym."""

import sys
import threading
from pathlib import Path

import pytest
import tilegym
from tilegym.backend import dispatcher, selector

import tilegym_mamba2
from tests.registering import (
    BACKWARD,
    FORWARD,
    TORCH_FORWARD,
    problem,
    run_python,
    tilegym_state,
)
from tilegym_mamba2 import BackendUnavailable, RegistryError, registry, registry_file

# ---- reading files

pytest_plugins = ["tests.registering_fixtures"]
pytestmark = pytest.mark.usefixtures("fresh_registration")


def test_shipped_file_has_both_ops_and_their_budgets():
    ops = registry.load()
    assert ops[FORWARD].outputs == ("out", "final_state")
    assert ops[FORWARD].backends["torch"] == TORCH_FORWARD
    assert ops[FORWARD].spec == "tilegym_mamba2.spec:Mamba2ProblemSpec"
    for dtype, greatest in {"float64": 1e-12, "float32": 1e-5, "float16": 6e-4, "bfloat16": 3e-3}.items():
        assert set(ops[FORWARD].budgets[dtype]) == {"out", "final_state"}
        assert max(ops[FORWARD].budgets[dtype].values()) <= greatest
    assert ops[BACKWARD].outputs == ("dx", "da", "db", "dc", "dd", "ddt", "dinit_state")
    assert ops[BACKWARD].backends["torch"].endswith(":mamba2_chunk_backward")


NEW_OP = """
schema = 1
[ops.my_op]
summary = "mine"
spec = "tilegym_mamba2.spec:Mamba2ProblemSpec"
outputs = ["out"]
[ops.my_op.backends]
torch = "tilegym_mamba2.backends.torch.chunked:mamba2_chunk_forward"
"""

# name: (text, what the message must hold besides the file's name)
BAD_FILES = {
    "syntax": ("schema = \n", ["not valid TOML", "line 1"]),
    "no schema": ("[ops.a]\n", ["'schema'", "missing, must be 1"]),
    "unknown schema": ("schema = 2\n", ["'schema'", "unknown schema 2, must be 1"]),
    "schema true": ("schema = true\n", ["'schema'", "unknown schema True"]),
    "unknown top key": (NEW_OP.replace("schema = 1", "schema = 1\nextra = 3"), ["'extra'", "unknown key"]),
    "no ops": ("schema = 1\n", ["'ops'", "at least one table"]),
    "op no table": ("schema = 1\n[ops]\nmy_op = 3\n", ["[ops]", "'my_op'", "must be a table, got 3"]),
    "op name": (NEW_OP.replace("my_op", '"my op"'), ["[ops]", "'my op'", "Python identifier"]),
    "unknown key": (
        NEW_OP.replace('summary = "mine"', 'summary = "mine"\nsummery = "x"'),
        ["[ops.my_op]", "'summery'", "unknown key, expected one of summary, spec, outputs"],
    ),
    "summary missing": (NEW_OP.replace('summary = "mine"', ""), ["[ops.my_op]", "'summary'", "missing"]),
    "summary empty": (NEW_OP.replace('"mine"', '""'), ["[ops.my_op]", "'summary'", "not empty, got ''"]),
    "spec missing": (
        NEW_OP.replace('spec = "tilegym_mamba2.spec:Mamba2ProblemSpec"', ""),
        ["[ops.my_op]", "'spec'", "missing"],
    ),
    "spec target": (
        NEW_OP.replace(":Mamba2ProblemSpec", ":NoSuchSpec"),
        ["[ops.my_op]", "'spec'", "missing target", "NoSuchSpec"],
    ),
    "outputs": (NEW_OP.replace('["out"]', "[]"), ["[ops.my_op]", "'outputs'", "got []"]),
    "outputs twice": (NEW_OP.replace('["out"]', '["out", "out"]'), ["'outputs'", "different names"]),
    "no backends": (
        NEW_OP.partition("[ops.my_op.backends]")[0],
        ["[ops.my_op]", "'backends'", "at least one"],
    ),
    "empty backends": (
        NEW_OP.partition("torch = ")[0],
        ["[ops.my_op]", "'backends'", "at least one backend"],
    ),
    "backend name": (NEW_OP.replace("\ntorch =", "\nTorch ="), ["[ops.my_op.backends]", "'Torch'", "a-z"]),
    "reserved name": (
        NEW_OP.replace("\ntorch =", "\ntilegym ="),
        ["[ops.my_op.backends]", "'tilegym'", "is not tilegym or default"],
    ),
    "target form": (
        NEW_OP.replace(":mamba2_chunk_forward", ""),
        ["[ops.my_op.backends]", "'torch'", "'module:function'"],
    ),
    "target no string": (
        NEW_OP.replace(f'"{TORCH_FORWARD}"', "7"),
        ["[ops.my_op.backends]", "'torch'", "'module:function', got 7"],
    ),
    "missing module": (
        NEW_OP.replace("torch.chunked", "torch.nowhere"),
        ["[ops.my_op.backends]", "'torch'", "missing target", "torch.nowhere", "sys.path"],
    ),
    "missing package": (
        NEW_OP.replace(TORCH_FORWARD, "no_such_package.module:f"),
        ["[ops.my_op.backends]", "'torch'", "missing target", "no_such_package"],
    ),
    "missing function": (
        NEW_OP.replace("chunked:mamba2_chunk_forward", "chunked:nothing"),
        ["[ops.my_op.backends]", "'torch'", "missing target", "has no 'nothing'"],
    ),
    "not callable": (
        NEW_OP.replace(TORCH_FORWARD, "math:pi"),
        ["[ops.my_op.backends]", "'torch'", "'math:pi' is not a callable"],
    ),
    "budgets": (NEW_OP.replace('["out"]', '["out"]\nbudgets = 1'), ["[ops.my_op]", "'budgets'", "got 1"]),
    "budget dtype": (
        NEW_OP + "[ops.my_op.budgets.int8]\nout = 0.1\n",
        ["[ops.my_op.budgets]", "'int8'", "must start with a dtype"],
    ),
    "budget no table": (
        NEW_OP + "[ops.my_op.budgets]\nfloat32 = 0.1\n",
        ["[ops.my_op.budgets]", "'float32'", "must be a table, got 0.1"],
    ),
    "budget output": (
        NEW_OP + "[ops.my_op.budgets.float32]\nstate = 0.1\n",
        ["[ops.my_op.budgets.float32]", "'state'", "unknown output, expected one of out"],
    ),
    "budget value": (
        NEW_OP + "[ops.my_op.budgets.float32]\nout = 2\n",
        ["[ops.my_op.budgets.float32]", "'out'", "between 0 and 1, got 2"],
    ),
    "conflict": (
        f'schema = 1\n[ops.{FORWARD}.backends]\ntorch = "math:sqrt"\n',
        [f"[ops.{FORWARD}.backends]", "'torch'", "is 'math:sqrt'", "already says", TORCH_FORWARD],
    ),
    "other outputs": (
        f'schema = 1\n[ops.{FORWARD}]\noutputs = ["y"]\n[ops.{FORWARD}.backends]\nmine = "math:sqrt"\n',
        [f"[ops.{FORWARD}]", "'outputs'", "already says ('out', 'final_state')"],
    ),
    "other budget": (
        f'schema = 1\n[ops.{FORWARD}.backends]\nmine = "math:sqrt"\n'
        f"[ops.{FORWARD}.budgets.float32]\nout = 0.5\n",
        [f"[ops.{FORWARD}.budgets]", "'float32'", "already says"],
    ),
    "not an op": (
        NEW_OP.replace("my_op", "moe_interface"),
        ["[ops]", "'moe_interface'", "tilegym.ops.moe_interface exists and is not an op"],
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file_raises_one_error_and_registers_nothing(case, toml):
    text, parts = BAD_FILES[case]
    # A good op before the bad one: it must not be registered either.
    good = NEW_OP.partition("schema = 1")[2].replace("my_op", "good_op")
    text = text + good if text.startswith("schema = 1\n[ops.") or text.startswith("\nschema = 1") else text
    path = toml(text)
    before, ops = tilegym_state(), registry.ops()
    with pytest.raises(RegistryError) as error:
        tilegym_mamba2.register(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    for part in parts:
        assert part in message
    assert isinstance(error.value, ValueError)
    assert tilegym_state() == before
    assert registry.ops() == ops


def test_missing_file(tmp_path):
    with pytest.raises(RegistryError, match=r"nowhere\.toml: cannot be read: No such file"):
        tilegym_mamba2.register(tmp_path / "nowhere.toml")


def test_targets_are_judged_without_importing_the_module(modules, toml):
    name = modules(
        "unimported_backend",
        """
        raise RuntimeError("imported")
        try:
            from fast_library import fast
        except ImportError:
            fast = None
        LIMIT = 3
        NAMES = ["a"]
        first, second = make()
        if LIMIT:
            def inside(): ...
        with open("x") as handle:
            class Worker: ...
        for loop in range(3):
            bound_in_loop = loop
        short = lambda: 1
        """,
    )
    problems = {
        key: registry_file.target_problem(f"{name}:{key}")
        for key in "fast LIMIT NAMES first inside Worker bound_in_loop short nothing".split()
    }
    assert {key for key, found in problems.items() if found is None} == {
        "fast",
        "first",
        "inside",
        "Worker",
        "bound_in_loop",
        "short",
    }
    assert problems["LIMIT"] == f"target '{name}:LIMIT' is not a callable"
    assert problems["NAMES"] == f"target '{name}:NAMES' is not a callable"
    assert problems["nothing"] == f"missing target '{name}:nothing': module '{name}' has no 'nothing'"
    assert name not in sys.modules


def test_broken_source_is_named(modules):
    name = modules("broken_source_backend", "def f(:\n")
    assert f"the source of module '{name}' cannot be read" in registry_file.target_problem(f"{name}:f")


def test_a_module_that_makes_its_names_on_demand_is_left_to_the_first_call(modules):
    lazy = modules("lazy_backend", "def __getattr__(name): return len\n")
    star = modules("star_backend", "from math import *\n")
    assert registry_file.target_problem(f"{lazy}:anything") is None
    assert registry_file.target_problem(f"{star}:sqrt") is None


def test_target_that_turns_out_wrong_at_the_first_call(modules, toml):
    name = modules("late_backend", "def make(): return 3\nvalue = make()\nfrom math import *\n")
    path = toml(f'schema = 1\n[ops.{FORWARD}.backends]\nvalue = "{name}:value"\ngone = "{name}:gone"\n')
    tilegym_mamba2.register(path)
    inputs = problem()
    with pytest.raises(RegistryError) as error:
        tilegym.ops.mamba2_chunk_forward(**inputs, backend="value")
    assert f"[ops.{FORWARD}.backends]" in str(error.value)
    assert f"'value': target '{name}:value' is not a callable" in str(error.value)
    with pytest.raises(RegistryError, match=rf"'gone': target '{name}:gone' does not exist"):
        tilegym.ops.mamba2_chunk_forward(**inputs, backend="gone")


def test_module_that_cannot_be_imported_at_the_first_call(modules, toml):
    name = modules("needy_backend", "import no_such_dependency\ndef f(*args): ...\n")
    tilegym_mamba2.register(toml(f'schema = 1\n[ops.{FORWARD}.backends]\nneedy = "{name}:f"\n'))
    with pytest.raises(BackendUnavailable, match=r"importing 'needy_backend' failed: .*no_such_dependency"):
        tilegym.ops.mamba2_chunk_forward(**problem(), backend="needy")
    ok, reason = registry.backend_status(FORWARD)["needy"]
    assert not ok and "no_such_dependency" in reason


def test_module_that_raises_when_imported_takes_one_row_of_the_status(modules, toml):
    name = modules("raising_backend", "raise OSError('no licence')\ndef f(*args): ...\n")
    tilegym_mamba2.register(toml(f'schema = 1\n[ops.{FORWARD}.backends]\nraising = "{name}:f"\n'))
    status = registry.backend_status(FORWARD)
    assert status["raising"] == (False, f"{name}:f: OSError: no licence")
    assert status["torch"] == (True, "ready")


# ---- registration


def test_registering_twice_and_unregistering_twice_is_harmless():
    tilegym_mamba2.register()
    first, ops = tilegym_state(), registry.ops()
    tilegym_mamba2.register()
    tilegym_mamba2.register(registry_file.shipped_path())
    assert tilegym_state() == first
    assert registry.ops() == ops
    tilegym_mamba2.unregister()
    gone = tilegym_state()
    tilegym_mamba2.unregister()
    assert tilegym_state() == gone
    tilegym_mamba2.register()
    assert registry.ops() == ops
    assert {op: set(table) for op, table in tilegym_state()[0].items()} == {
        op: set(table) for op, table in first[0].items()
    }


def test_unregister_gives_tilegym_back_exactly():
    out = run_python(
        """
        import sys, tilegym
        from tilegym.backend import dispatcher, selector
        def state():
            return (
                {name: dict(table) for name, table in dispatcher._REGISTRY.items()},
                {k: id(v) for k, v in vars(tilegym.ops).items()},
                {k: id(v) for k, v in vars(sys.modules["tilegym.ops.ops"]).items()},
                sorted(selector._AVAILABLE_BACKENDS), id(selector._CURRENT_BACKENDS),
            )
        before = state()
        import tilegym_mamba2
        assert state() != before
        assert tilegym.get_current_backend() == "cutile"
        tilegym.set_backend("torch")
        tilegym_mamba2.unregister()
        assert state() == before
        try:
            tilegym.set_backend("torch")
        except ValueError as error:
            print("refused", error)
        tilegym_mamba2.register()
        tilegym.set_backend("torch")
        tilegym_mamba2.unregister()
        assert state() == before
        print("same")
        """
    )
    assert "refused Unknown backend: torch" in out and out.endswith("same\n")


def test_unregister_leaves_what_others_put_there_meanwhile():
    def foreign(*args, **kwargs):
        return "foreign"

    dispatcher.register_impl(FORWARD, "elsewhere")(foreign)
    try:
        selector._CURRENT_BACKENDS = "triton"
        tilegym_mamba2.unregister()
        assert dispatcher._REGISTRY[FORWARD]["elsewhere"] is foreign
        assert selector._CURRENT_BACKENDS == "triton"
    finally:
        dispatcher._REGISTRY[FORWARD].pop("elsewhere")


def test_op_called_while_nothing_is_registered():
    ours = tilegym_mamba2.mamba2_chunk_forward
    tilegym_mamba2.unregister()
    with pytest.raises(
        RegistryError, match=r"'mamba2_chunk_forward' is not registered.*tilegym_mamba2\.register\(\)"
    ):
        ours(**problem())
    with pytest.raises(RegistryError, match="is not registered"):
        registry.backend_status(FORWARD)


def test_importing_starts_neither_a_backend_nor_cuda():
    out = run_python(
        """
        import sys, torch
        import tilegym_mamba2, tilegym
        heavy = [m for m in sys.modules if m.startswith("tilegym_mamba2.backends.")]
        print(sorted(heavy))
        print(torch.cuda.is_initialized())
        print([m for m in ("tilegym_mamba2.spec", "tilegym_mamba2.interpreter", "typer") if m in sys.modules])
        print(tilegym_mamba2.Mamba2ProblemSpec.__name__, "SPECS" in dir(tilegym_mamba2))
        try:
            tilegym_mamba2.nothing
        except AttributeError as error:
            print(error)
        """
    ).splitlines()
    assert out[0] == str(
        [
            "tilegym_mamba2.backends.cutile",
            "tilegym_mamba2.backends.cutile.availability",
            "tilegym_mamba2.backends.torch",
        ]
    )
    assert out[1] == "False"
    assert out[2] == "[]"
    assert out[3] == "Mamba2ProblemSpec True"
    assert out[4] == "module 'tilegym_mamba2' has no attribute 'nothing'"


def test_public_ops_are_tilegyms_attributes():
    assert tilegym.ops.mamba2_chunk_forward is tilegym_mamba2.mamba2_chunk_forward
    assert sys.modules["tilegym.ops.ops"].mamba2_chunk_backward is tilegym_mamba2.mamba2_chunk_backward
    assert tilegym.ops.mamba2_chunk_forward._tilegym_op_name == FORWARD
    assert {"cutile", "torch", "tilegym", "default"} <= set(tilegym.get_available_backends_for_op(FORWARD))
    assert tilegym.get_registry_info()[FORWARD]["torch"].endswith("." + FORWARD)


def test_user_file_adds_a_backend_with_one_line(modules, toml, monkeypatch):
    name = modules("third_backend", "def forward(x, *rest): return 'third', x.shape\n")
    path = toml(f'schema = 1\n[ops.{FORWARD}.backends]\nthird = "{name}:forward"\n')
    monkeypatch.chdir(path.parent)
    tilegym_mamba2.register("other.toml")
    tilegym_mamba2.register("other.toml")
    assert name not in sys.modules
    inputs = problem()
    assert tilegym.ops.mamba2_chunk_forward(**inputs, backend="third") == ("third", inputs["x"].shape)
    tilegym.set_backend("third")
    assert tilegym.ops.mamba2_chunk_forward(**inputs)[0] == "third"
    entry = registry.ops()[FORWARD]
    assert list(entry.backends) == ["cutile", "torch", "tilegym", "third"]
    assert entry.summary == registry.load()[FORWARD].summary
    assert registry.backend_status(FORWARD)["third"] == (True, "ready")
    tilegym_mamba2.unregister()
    tilegym_mamba2.register()
    assert "third" not in registry.ops()[FORWARD].backends
    assert "third" not in selector._AVAILABLE_BACKENDS


def test_user_file_adds_an_op(modules, toml):
    name = modules("op_backends", "def plain(x, *, scale=1): return ('plain', x, scale)\ndef fast(x): ...\n")
    tilegym_mamba2.register(
        toml(
            f"""
            schema = 1
            [ops.my_scan]
            summary = "mine"
            spec = "tilegym_mamba2.spec:Mamba2ProblemSpec"
            outputs = ["out"]
            [ops.my_scan.backends]
            plain = "{name}:plain"
            """
        )
    )
    assert tilegym.ops.my_scan(3, scale=2) == ("plain", 3, 2)
    assert tilegym.ops.my_scan(3, backend="plain")[0] == "plain"
    assert tilegym.ops.my_scan.__name__ == "my_scan" and tilegym.ops.my_scan.__doc__.startswith("mine")
    with pytest.raises(BackendUnavailable, match=r"my_scan has no backend 'torch'.*it has: plain$"):
        tilegym.ops.my_scan(3, backend="torch")
    tilegym_mamba2.unregister()
    assert not hasattr(tilegym.ops, "my_scan") and "my_scan" not in dispatcher._REGISTRY


def test_load_registers_nothing(toml):
    before = tilegym_state()
    entries = registry.load(toml(NEW_OP))
    assert list(entries) == ["my_op"]
    assert tilegym_state() == before and "my_op" not in registry.ops()


def test_threads_may_register_at_once():
    errors = []

    def work():
        try:
            for _ in range(20):
                tilegym_mamba2.register()
                tilegym.ops.mamba2_chunk_forward(**problem(), backend="torch")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_shipped_path_is_the_checkouts_or_the_packages_own():
    path = registry_file.shipped_path()
    package = Path(tilegym_mamba2.__file__).parent
    assert path in (package / "ops_registry.toml", package.parent / "ops_registry.toml")
    assert path.exists()
