"""The error rule: which distance, which budget, and what never passes."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.benchmark.gradient_errors import ROOM, root_mean_square
from tilegym_mamba2 import registry
from tilegym_mamba2.budgets import Verdict, budget_for, check, relative_error
from tilegym_mamba2.spec import DECAYS

ENTRY = SimpleNamespace(
    name="op",
    outputs=("out", "final_state"),
    budgets={
        "bfloat16": {"out": 2e-3, "final_state": 1e-3},
        "bfloat16_zero_mean": {"out": 3e-3},
        "bfloat16_violent": {"final_state": 4e-3},
    },
)
BF16 = torch.bfloat16


def large(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(64, 64, generator=generator, dtype=torch.float64)


def test_relative_error_is_the_ratio_of_norms() -> None:
    ref = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_error(torch.tensor([3.0, 4.5]), ref) == pytest.approx(0.1)
    assert relative_error(ref.float(), ref) == 0.0
    assert relative_error(torch.zeros(2), ref) == 1.0


def test_relative_error_does_not_lose_small_errors_of_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilegym_mamba2 import budgets

    got = (large() * (1 + 1e-7)).reshape(-1)
    whole = relative_error(got, large().reshape(-1))
    monkeypatch.setattr(budgets, "_BLOCK_ELEMENTS", 100)
    assert relative_error(got, large().reshape(-1)) == pytest.approx(whole, rel=1e-9)
    assert whole == pytest.approx(1e-7, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["got", "ref", "both"])
def test_what_is_not_finite_never_passes(bad: float, where: str) -> None:
    got, ref = large().float(), large()
    for name, tensor in (("got", got), ("ref", ref)):
        if where in (name, "both"):
            tensor[5, 5] = bad
    entry = SimpleNamespace(name="op", outputs=("out",), budgets={"float32": {"out": 1e9}})
    (verdict,) = check(entry, {"out": got}, {"out": ref}, dtype=torch.float32, decay="published")
    assert not verdict.ok


def test_nan_against_a_zero_reference_never_passes() -> None:
    got = torch.zeros(4)
    got[2] = math.nan
    assert not Verdict("out", relative_error(got, torch.zeros(4)), 1e-30).ok


def test_a_zero_reference_has_an_absolute_budget() -> None:
    zero = torch.zeros(4)
    budget = budget_for(ENTRY, "out", BF16, "slow", zero.double())
    assert budget == 1e-30
    assert Verdict("out", relative_error(zero, zero.double()), budget).ok
    assert relative_error(torch.tensor([0.0, -1e-20, 0.0, 0.0]), zero.double()) == pytest.approx(1e-20)
    assert budget_for(ENTRY, "out", BF16, "slow", torch.zeros(0, dtype=torch.float64)) == 1e-30


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"got shape \(1, 4\), but the reference has shape \(4,\)"):
        relative_error(torch.zeros(1, 4), torch.zeros(4))


@pytest.mark.parametrize(
    ("output", "decay", "budget"),
    [
        ("out", "published", 2e-3),
        ("out", "slow", 3e-3),
        ("out", "none", 3e-3),
        ("out", "violent", 3e-3),
        ("out", None, 3e-3),
        ("final_state", "published", 1e-3),
        ("final_state", "slow", 1e-3),
        ("final_state", "violent", 4e-3),
        ("final_state", None, 4e-3),
    ],
)
def test_the_variant_for_the_inputs_wins(output: str, decay: str | None, budget: float) -> None:
    assert budget_for(ENTRY, output, BF16, decay, large()) == budget


def test_small_results_get_room_for_rounding() -> None:
    enough, small = large().reshape(-1), large().reshape(-1)[:4095]
    assert budget_for(ENTRY, "out", BF16, "published", enough) == 2e-3
    rounding = relative_error(small.bfloat16(), small)
    assert budget_for(ENTRY, "out", BF16, "published", small) == pytest.approx(2e-3 + 1.5 * rounding)


def test_states_stored_coarsely_get_their_rounding() -> None:
    ref = large()
    rounding = relative_error(ref.bfloat16(), ref)
    expected = math.hypot(1e-3, rounding)
    assert budget_for(ENTRY, "final_state", BF16, "slow", ref, BF16) == pytest.approx(expected)
    assert budget_for(ENTRY, "final_state", BF16, "slow", ref, torch.float32) == 1e-3
    # out is stored in x's dtype anyway: its budget has that rounding in it.
    assert budget_for(ENTRY, "out", BF16, "slow", ref, BF16) == 3e-3


def test_float32_states_of_float64_problems_get_their_rounding() -> None:
    entry = registry.ops()["mamba2_chunk_forward"]
    ref = large()
    budget = budget_for(entry, "final_state", torch.float64, "slow", ref, torch.float32)
    assert budget == pytest.approx(relative_error(ref.float(), ref))
    assert budget_for(entry, "final_state", torch.float64, "slow", ref, torch.float64) == 1e-12
    assert budget_for(entry, "final_state", torch.float64, "slow", ref) == 1e-12


def test_a_result_beyond_fp16_gives_no_licence() -> None:
    entry = SimpleNamespace(name="op", outputs=("final_state",), budgets={"float16": {"final_state": 1e-3}})
    ref = torch.full((4,), 1e6, dtype=torch.float64)
    assert budget_for(entry, "final_state", torch.float16, "slow", ref) == 1e-3


def test_a_missing_budget_is_named() -> None:
    with pytest.raises(KeyError, match="ops.op.budgets.float16 has no budget for 'out'"):
        budget_for(ENTRY, "out", torch.float16, "slow", large())


def test_check_reports_every_output_in_order() -> None:
    ref = large()
    results = {"out": ref.bfloat16(), "final_state": ref.float() * 1.1}
    verdicts = check(ENTRY, results, {"out": ref, "final_state": ref}, dtype=BF16, decay="slow")
    assert [(verdict.output, verdict.ok) for verdict in verdicts] == [("out", True), ("final_state", False)]
    assert verdicts[1].error == pytest.approx(0.1, rel=1e-3)
    relaxed = check(ENTRY, results, {"out": ref, "final_state": ref}, dtype=BF16, decay="slow", slack=200)
    assert all(verdict.ok for verdict in relaxed)
    assert relaxed[1].budget == 200 * verdicts[1].budget


def test_check_refuses_half_a_pair() -> None:
    ref = large()
    with pytest.raises(ValueError, match="final_state is None in the results alone"):
        check(
            ENTRY,
            {"out": ref, "final_state": None},
            {"out": ref, "final_state": ref},
            dtype=BF16,
            decay="slow",
        )
    with pytest.raises(KeyError):
        check(ENTRY, {"out": ref}, {"out": ref, "final_state": ref}, dtype=BF16, decay="slow")
    both = {"out": ref, "final_state": None}
    assert len(check(ENTRY, both, both, dtype=BF16, decay="slow")) == 1


def measured_errors() -> dict[tuple[str, str], dict[str, float]]:
    """Of the gradients in bfloat16: (decay, gradient) to backend to error."""
    path = Path(__file__).parent / "benchmark" / "results" / "h200-gradient-errors.json"
    errors: dict[tuple[str, str], dict[str, float]] = {}
    for row in json.loads(path.read_text())["rows"]:
        dtype, decay, _ = row["case"].split("-")
        if dtype == "bf16":
            found = errors.setdefault((decay, row["gradient"]), {})
            found[row["backend"]] = root_mean_square(row["errors"])
    assert len(errors) == len(DECAYS) * 7
    return errors


def test_budgets_of_gradients_are_at_most_1_2_times_the_error_of_mamba_ssm() -> None:
    budgets = registry.ops()["mamba2_chunk_backward"].budgets
    for (decay, gradient), found in measured_errors().items():
        variant = "bfloat16" if decay == "published" else f"bfloat16_{decay}"
        assert budgets[variant][gradient] <= ROOM * found["mamba_ssm"], (decay, gradient)
    # No other variant may stand in for these.
    assert {key for key in budgets if key.startswith("bfloat16_")} == {
        f"bfloat16_{decay}" for decay in DECAYS if decay != "published"
    }


def test_measured_gradients_are_at_most_1_2_times_as_wrong_as_those_of_mamba_ssm() -> None:
    # Of dd, a sum of exact products in float32, rounding alone is left.
    rounding = 2**-22
    wrong = {
        key: found
        for key, found in measured_errors().items()
        if not found["cutile"] <= max(ROOM * found["mamba_ssm"], rounding)
    }
    assert wrong == {}


def test_the_shipped_registry_has_a_budget_for_every_output() -> None:
    for entry in registry.load().values():
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            for decay in (*DECAYS, None):
                for output in entry.outputs:
                    assert 0 < budget_for(entry, output, dtype, decay, large()) < 0.01
