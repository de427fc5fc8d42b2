"""Specs: their validation, the distributions and bits of their inputs, the table of names."""

import math
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import scan_oracle
from tilegym_mamba2 import reference
from tilegym_mamba2.backends.torch import recurrent
from tilegym_mamba2.reference import float64_reference
from tilegym_mamba2.spec import SPECS, Mamba2ProblemSpec, Mamba2ScanSpec, Mamba2StepSpec, select, tags

FORWARD_KEYS = {"x", "a", "b", "c", "d", "dt", "init_state", "chunk_size"}
GRADIENTS = {"dx", "da", "db", "dc", "dd", "ddt", "dinit_state"}
BASE = Mamba2ProblemSpec(2, 48, 2, 4, 16, 8, 16, torch.bfloat16, torch.float32)


def forward_inputs(spec: Mamba2ProblemSpec, **options) -> dict:
    return spec.get_sample_inputs(with_reference=False, with_backward=False, device="cpu", **options)


def test_fields_start_in_the_published_order() -> None:
    published = "batch_size num_tokens num_groups num_heads state_size head_size chunk_size dtype state_dtype"
    assert [field.name for field in fields(Mamba2ProblemSpec)][:9] == published.split()
    with pytest.raises(FrozenInstanceError):
        BASE.seed = 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"num_tokens": -1}, "num_tokens must be an integer of at least 0, got -1"),
        ({"chunk_size": 2.0}, "chunk_size must be an integer of at least 1, got 2.0"),
        ({"head_size": True}, "head_size must be an integer of at least 1, got True"),
        ({"num_groups": 3}, "num_groups must divide num_heads, got num_groups=3, num_heads=4"),
        ({"dtype": torch.int8}, "dtype must be one of torch.bfloat16, torch.float16, torch.float32"),
        ({"state_dtype": None}, "state_dtype must be one of torch.bfloat16"),
        ({"dtype": []}, "dtype must be one of torch.bfloat16"),
        ({"decay": "fast"}, "decay must be one of published, slow, none, violent, got 'fast'"),
        ({"layout": "strided"}, "layout must be one of contiguous, sliced, got 'strided'"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
    ],
)
def test_impossible_specs_name_the_field(changes: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:
        replace(BASE, **changes)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("with_reference", [False, True])
@pytest.mark.parametrize("with_backward", [False, True])
def test_the_dict_holds_what_was_asked_for(with_reference: bool, with_backward: bool) -> None:
    inputs = BASE.get_sample_inputs(with_reference=with_reference, with_backward=with_backward, device="cpu")
    expected = set(FORWARD_KEYS)
    expected |= {"dout", "dfinal_state"} if with_backward else set()
    expected |= {"out", "final_state"} if with_reference else set()
    expected |= GRADIENTS if with_reference and with_backward else set()
    assert set(inputs) == expected
    for name, shape in BASE.shapes.items():
        if name in inputs:
            assert inputs[name].shape == shape
    assert all(inputs[name].dtype == torch.float64 for name in expected & {"out", "final_state", *GRADIENTS})


def test_dtypes() -> None:
    spec = replace(BASE, state_dtype=torch.bfloat16)
    inputs = spec.get_sample_inputs(with_reference=False, device="cpu")
    found = {name: inputs[name].dtype for name in spec.shapes}
    assert {name for name, dtype in found.items() if dtype == torch.float32} == {"a", "d"}
    assert set(found.values()) == {torch.float32, torch.bfloat16}
    assert forward_inputs(replace(BASE, decay="slow"))["dt"].dtype == torch.float32
    assert forward_inputs(replace(BASE, dt_dtype=torch.float16))["dt"].dtype == torch.float16


def test_a_seed_fixes_the_bits() -> None:
    first, again = (forward_inputs(BASE) for _ in range(2))
    other = forward_inputs(replace(BASE, seed=1))
    for name in BASE.shapes.keys() & FORWARD_KEYS:
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])


def test_one_tensor_does_not_shift_the_bits_of_another() -> None:
    first = forward_inputs(BASE)
    wider = forward_inputs(replace(BASE, state_size=32))
    for name in ("x", "a", "d", "dt"):
        assert torch.equal(first[name], wider[name])


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    forward_inputs(BASE)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.gpu
def test_bits_are_equal_on_every_device() -> None:
    for spec in (BASE, replace(BASE, decay="slow"), replace(BASE, layout="sliced")):
        here = spec.get_sample_inputs(with_reference=False, device="cpu")
        there = spec.get_sample_inputs(with_reference=False, device="cuda")
        for name in spec.shapes:
            assert there[name].is_cuda
            assert torch.equal(here[name], there[name].cpu()), name


def test_published_distribution() -> None:
    spec = replace(BASE, num_tokens=20_000, num_heads=64, num_groups=1, head_size=1, dtype=torch.float32)
    inputs = forward_inputs(spec)
    # Means of SiLU and softplus over standard normals.
    assert inputs["x"].mean().item() == pytest.approx(0.2066, abs=5e-3)
    assert inputs["b"].min().item() == pytest.approx(-0.2785, abs=1e-3)
    assert inputs["dt"].mean().item() == pytest.approx(0.8061, abs=5e-3)
    assert inputs["dt"].min() > 0
    assert -16 <= inputs["a"].min() < -12 and -4 < inputs["a"].max() <= -1


def test_slow_decay_remembers_200_to_5000_tokens() -> None:
    spec = replace(BASE, num_tokens=4000, num_heads=512, num_groups=1, head_size=1, decay="slow")
    inputs = forward_inputs(spec)
    memory = -1 / (inputs["a"] * inputs["dt"].mean((0, 1)))
    assert 190 < memory.min() < 230 and 4400 < memory.max() < 5300
    # Log-uniform: the median is the geometric mean of the ends.
    assert memory.median().item() == pytest.approx(1000, rel=0.25)
    for name in ("x", "b", "c"):
        assert abs(inputs[name].float().mean().item()) < 0.02


def test_no_decay_and_violent_decay() -> None:
    none = forward_inputs(replace(BASE, decay="none", num_tokens=16_384, dtype=torch.float16))
    assert not none["a"].any()
    assert float64_reference(none)["final_state"].abs().max() < 65504
    violent = replace(BASE, decay="violent", num_heads=64, num_tokens=256)
    inputs = forward_inputs(violent)
    sums = (inputs["a"] * inputs["dt"]).abs().sum(1)
    assert sums.max() > 1e7 and sums.min() < 100
    assert (inputs["a"] < 0).all() and (inputs["dt"] > 0).all()


@pytest.mark.parametrize("decay", ["published", "slow"])
def test_sliced_inputs_hold_the_same_numbers(decay: str) -> None:
    spec = replace(BASE, decay=decay)
    plain, sliced = forward_inputs(spec), forward_inputs(replace(spec, layout="sliced"))
    for name in spec.shapes.keys() & FORWARD_KEYS:
        assert torch.equal(plain[name], sliced[name])
    assert not any(sliced[name].is_contiguous() for name in ("x", "b", "c"))
    assert sliced["x"].untyped_storage().data_ptr() == sliced["b"].untyped_storage().data_ptr()
    parent = sliced["x"]._base
    assert parent[:, spec.num_tokens :].isnan().all()
    assert sliced["dt"].is_contiguous() == (decay == "slow")


def test_float64_reference_is_the_recurrence() -> None:
    spec = replace(BASE, num_tokens=37, decay="slow", state_dtype=torch.bfloat16)
    inputs = spec.get_sample_inputs(device="cpu")
    exact = {name: inputs[name].double() for name in spec.shapes}
    arguments = [exact[name] for name in ("x", "a", "b", "c", "d", "dt", "init_state")]
    leaves = [argument.requires_grad_() for argument in arguments]
    out, final_state = recurrent.mamba2_chunk_forward(*leaves, 1)
    gradients = torch.autograd.grad((out, final_state), leaves, (exact["dout"], exact["dfinal_state"]))
    expected = {"out": out, "final_state": final_state}
    expected |= dict(zip(("dx", "da", "db", "dc", "dd", "ddt", "dinit_state"), gradients, strict=True))
    for name, value in expected.items():
        assert torch.allclose(inputs[name], value, rtol=1e-11, atol=1e-11), name


@settings(max_examples=10)
@given(elements=st.integers(1, 2**15), missing=st.sampled_from([(), ("d", "init_state")]))
def test_cut_up_reference_equals_the_whole(elements: int, missing: tuple[str, ...]) -> None:
    inputs = replace(BASE, num_heads=6).get_sample_inputs(with_reference=False, device="cpu")
    inputs |= dict.fromkeys(missing)
    whole = float64_reference(inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "REFERENCE_ELEMENTS", elements)
        cut = float64_reference(inputs)
    assert whole.keys() == cut.keys()
    for name, value in whole.items():
        if value is None:
            assert cut[name] is None and name[1:] in missing
        else:
            assert torch.allclose(value, cut[name], rtol=1e-12, atol=1e-12), name


def test_work_of_the_published_benchmark() -> None:
    published = SPECS["published"]
    # B·T·(G·2·L·N + H·(2·L·P + 4·N·P)), and x, out, b, c, dt in bf16, two states in float32, a and d.
    assert published.flops() == 4 * 16384 * (2 * 128 * 128 + 8 * (2 * 128 * 64 + 4 * 128 * 64))
    states = 2 * 4 * 8 * 64 * 128 * 4
    assert published.bytes_moved() == 4 * 16384 * 2 * (2 * 8 * 64 + 2 * 128 + 8) + states + 2 * 8 * 4
    assert replace(published, num_tokens=0).flops() == 0


def test_large_specs_say_that_their_bits_depend_on_the_device() -> None:
    large = SPECS["published-256k-n512"]
    assert large.drawn_on_device and large.id.endswith("-ondevice")
    assert not SPECS["published"].drawn_on_device
    assert not any(spec.drawn_on_device for spec in select("test").values())


def test_ids_tell_specs_apart() -> None:
    ids = [spec.id for spec in SPECS.values()]
    variants = [
        replace(BASE, seed=1),
        replace(BASE, decay="slow"),
        replace(BASE, decay="slow", dt_dtype=torch.bfloat16),
        replace(BASE, layout="sliced"),
        replace(BASE, state_dtype=torch.bfloat16),
        BASE,
    ]
    assert len({spec.id for spec in variants}) == len(variants)
    assert len(set(ids)) == len(set(SPECS.values()))


def test_the_table_covers_what_it_promises() -> None:
    grid = {(spec.num_tokens, spec.state_size) for spec in select("grid").values()}
    assert grid == {(1024 * 2**k, n) for k in range(9) for n in (64, 128, 256, 512)}
    compared = {(spec.batch_size, spec.num_tokens) for spec in select("model", "compared").values()}
    assert compared == {(1, 8192), (1, 65536)}
    codestral = SPECS["codestral-mamba-7b-8k"]
    assert (codestral.num_heads, codestral.head_size, codestral.num_groups, codestral.state_size) == (
        128,
        64,
        8,
        128,
    )
    tests = select("test")
    covered = {(spec.dtype, spec.decay) for spec in tests.values()}
    assert covered >= {
        (dtype, decay)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for decay in ("published", "slow", "none")
    }
    for spec in tests.values():
        assert spec.batch_size * spec.num_heads * math.ceil(spec.num_tokens / 64) <= 60
    assert {spec.head_size for spec in tests.values()} >= {16, 40, 64, 80, 96, 128, 256}
    assert {spec.state_size for spec in tests.values()} >= {16, 64, 96, 128, 256, 512}
    assert {spec.chunk_size for spec in tests.values()} >= {40, 50, 96, 256}
    assert {spec.num_tokens for spec in tests.values()} >= {0, 1, 17}


def test_tags_are_queryable() -> None:
    assert tags("published") == {"published", "benchmark"}
    assert "edge" in tags("p80-n96") and "p80-n96" in select("test", "edge")
    with pytest.raises(KeyError):
        tags("nothing")
    with pytest.raises(ValueError, match="unknown tag 'tests'; known are benchmark, compared"):
        select("tests")
    with pytest.raises(TypeError):
        SPECS["mine"] = BASE


# ---- specs of the scan and of the step

SCAN = Mamba2ScanSpec(2, 48, 2, 4, 16, 8, 16, torch.float32, torch.float32, decay="slow")
STEP = Mamba2StepSpec(3, 1, 2, 4, 16, 8, 1, torch.float32, torch.float32, decay="slow")
LAYER = {"gated": True, "raw_dt": True, "d_per_row": True}


@pytest.mark.parametrize(
    ("spec", "changes", "message"),
    [
        (SCAN, {"num_sequences": -1}, "num_sequences must be an integer of at least 0, got -1"),
        (SCAN, {"num_sequences": 3}, "num_sequences needs batch_size=1 and padded=False, got batch_size=2"),
        (SCAN, {"num_tokens": -1}, "num_tokens must be an integer of at least 0, got -1"),
        (STEP, {"num_slots": 2}, "num_slots must be 0 or at least batch_size, got num_slots=2, batch_size=3"),
        (STEP, {"num_tokens": 0}, "a step needs num_tokens of at least 1 and no num_sequences, padded"),
        (STEP, {"padded": True}, "a step needs num_tokens of at least 1 and no num_sequences, padded"),
        (STEP, {"stateless": True}, "a step needs num_tokens of at least 1 and no num_sequences, padded"),
    ],
)
def test_impossible_specs_of_other_ops(spec: Mamba2ScanSpec, changes: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:
        replace(spec, **changes)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "changes",
    [LAYER, {"batch_size": 1, "num_sequences": 5} | LAYER, {"padded": True} | LAYER],
    ids=["plain", "packed", "padded"],
)
@pytest.mark.parametrize("elements", [1, 2**28], ids=["cut up", "whole"])
def test_scan_reference_is_the_token_loop(
    changes: dict, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "REFERENCE_ELEMENTS", elements)
    spec = replace(SCAN, **changes)
    inputs = spec.get_sample_inputs(device="cpu")
    names = {*spec.shapes, "cu_seqlens", "seq_lens", "chunk_size", "dt_softplus"} - {"dout", "dfinal_state"}
    values = {name: inputs[name] for name in names if name in inputs}
    for name, expected in zip(("out", "final_state"), scan_oracle.scan(**values), strict=False):
        assert torch.allclose(inputs[name], expected, rtol=1e-11, atol=1e-11), name
    for name, expected in scan_oracle.gradients(values, inputs["dout"], inputs["dfinal_state"]).items():
        assert torch.allclose(inputs[f"d{name}"], expected, rtol=1e-10, atol=1e-10), name


@pytest.mark.parametrize("elements", [1, 2**28], ids=["cut up", "whole"])
@pytest.mark.parametrize("changes", [LAYER, {"num_tokens": 3, "num_slots": 7}], ids=["one", "several"])
def test_step_reference_is_the_token_loop(
    changes: dict, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "REFERENCE_ELEMENTS", elements)
    spec = replace(STEP, **changes)
    inputs = spec.get_sample_inputs(device="cpu")
    slots = inputs.get("state_indices", torch.arange(3))
    values = {n: inputs[n] for n in ("x", "dt", "a", "b", "c", "d", "z", "dt_bias") if n in inputs}
    if spec.num_tokens == 1:
        values |= {n: v[:, None] for n, v in values.items() if n in ("x", "dt", "b", "c", "z")}
    values |= {"init_state": inputs["state"][slots], "dt_softplus": inputs["dt_softplus"]}
    out, final, *_ = scan_oracle.scan(**values)
    assert torch.allclose(inputs["out"], out.reshape(inputs["x"].shape), rtol=1e-12, atol=1e-12)
    expected = inputs["state"].double()
    expected[slots] = final
    assert torch.allclose(inputs["final_state"], expected, rtol=1e-12, atol=1e-12)


def test_raw_dt_is_what_the_decay_says_once_used() -> None:
    plain, raw = forward_inputs(SCAN), forward_inputs(replace(SCAN, raw_dt=True))
    used = torch.nn.functional.softplus(raw["dt"].double() + raw["dt_bias"])
    assert torch.allclose(used, plain["dt"].double(), rtol=1e-4, atol=1e-6)
    assert raw["dt"].std() > 0.5 and raw["dt_softplus"] is True


def test_sequences_fill_the_tokens_with_all_lengths() -> None:
    inputs = forward_inputs(SPECS["packed-64k"])
    borders = inputs["cu_seqlens"]
    assert borders.shape == (201,) and borders.dtype == torch.int32
    assert borders[0] == 0 and borders[-1] == 65536
    lengths = borders.diff()
    assert (lengths >= 0).all() and lengths.min() < 20 and lengths.max() > 1000
    assert inputs["init_state"].shape == (200, 8, 64, 128)
    padded = forward_inputs(replace(SCAN, batch_size=6, padded=True))["seq_lens"]
    assert padded[0] == 48 and padded.min() >= 0 and len(padded.unique()) > 3


def test_a_stateless_problem_starts_from_zero_and_has_no_gradient_of_its_states() -> None:
    spec = replace(SCAN, batch_size=1, num_sequences=3, state_dtype=torch.bfloat16)
    whole = spec.get_sample_inputs(device="cpu")
    stateless = replace(spec, stateless=True)
    inputs = stateless.get_sample_inputs(device="cpu")
    assert whole.keys() - inputs.keys() == {"init_state", "dfinal_state"}
    assert inputs["dinit_state"] is None and inputs["state_dtype"] == torch.bfloat16
    values = {name: inputs[name] for name in ("x", "dt", "a", "b", "c", "d", "cu_seqlens", "chunk_size")}
    for name, expected in zip(("out", "final_state"), scan_oracle.scan(**values), strict=False):
        assert torch.allclose(inputs[name], expected, rtol=1e-11, atol=1e-11), name
    gradients = scan_oracle.gradients(values, inputs["dout"], None)
    assert torch.allclose(inputs["dx"], gradients["x"], rtol=1e-10, atol=1e-10)
    assert spec.bytes_moved() - stateless.bytes_moved() == 3 * 4 * 8 * 16 * 2


def test_an_option_shifts_no_bit_of_the_other_inputs() -> None:
    plain = forward_inputs(BASE)
    layer = forward_inputs(Mamba2ScanSpec(**vars(BASE), gated=True))
    assert all(torch.equal(plain[name], layer[name]) for name in FORWARD_KEYS - {"chunk_size"})


def test_a_sliced_projection_holds_the_gate_too() -> None:
    spec = replace(SCAN, gated=True)
    plain, sliced = forward_inputs(spec), forward_inputs(replace(spec, layout="sliced"))
    assert all(torch.equal(plain[name], sliced[name]) for name in ("x", "z", "b", "c", "dt"))
    assert sliced["z"].untyped_storage().data_ptr() == sliced["x"].untyped_storage().data_ptr()


def test_work_of_steps_and_gates() -> None:
    step = SPECS["decode-256"]
    states = 256 * 128 * 64 * 128
    assert step.flops() == 6 * states
    tokens = 256 * (3 * 128 * 64 * 2 + 2 * 8 * 128 * 2 + 128 * 4) + 2 * 128 * 4
    assert step.bytes_moved() == 2 * states * 4 + tokens
    assert SPECS["decode-256-pool"].bytes_moved() == step.bytes_moved()
    gated = SPECS["gated"]
    assert gated.bytes_moved() - replace(gated, gated=False).bytes_moved() == 4 * 16384 * 8 * 64 * 2


def test_ids_of_other_ops_tell_specs_apart() -> None:
    variants = [BASE, SCAN, STEP, replace(STEP, num_slots=5), replace(SCAN, padded=True)]
    variants += [replace(SCAN, batch_size=1, num_sequences=n) for n in (0, 1, 2)]
    variants += [replace(SCAN, **{name: True}) for name in (*LAYER, "stateless")]
    assert len({spec.id for spec in variants}) == len(variants)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    spec = replace(SPECS["bf16-slow"], num_tokens=4097, num_heads=32, num_groups=1)
    before = torch.get_num_threads()
    drawn = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            drawn.append(spec.get_sample_inputs(with_reference=False, device="cpu"))
    finally:
        torch.set_num_threads(before)
    for other in drawn[1:]:
        assert [n for n, t in other.items() if isinstance(t, torch.Tensor) and not t.equal(drawn[0][n])] == []
