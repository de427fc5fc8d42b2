"""The benchmark and the tuner, as far as a machine without a GPU can run them."""

import contextlib
import csv
import dataclasses
import functools
import json
import math
import multiprocessing
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

import tilegym_mamba2  # noqa: F401  registers the ops
from tilegym_mamba2.bench import (
    cli,
    environment,
    mamba,
    measure,
    passes,
    peers,
    plots,
    pool,
    report,
    roofline,
    timing,
    tune,
)
from tilegym_mamba2.bench.pool import run_in_processes
from tilegym_mamba2.spec import SPECS, Mamba2ScanSpec, Mamba2StepSpec

CPU = torch.device("cpu")
CEILINGS = roofline.Ceilings(copy_gbs=4000.0, matrix_tflops=700.0)
ENV = {"device": "NVIDIA Test", "date": "2026-01-02T03:04:05+00:00", "torch": "2.13", "tilegym": "1.5.1"}


@pytest.fixture
def app():
    application = typer.Typer()
    cli.register(application)
    return application


def invoke(app, *arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


class Fake(peers.Backend):
    """The torch backend's results, off by a factor, after a pause."""

    def __init__(self, name, factor=1.0, pause=0.0, reason=""):
        super().__init__(name)
        self.factor, self.pause, self.reason = factor, pause, reason

    def lacks(self, spec, pass_name):
        return ""

    def status(self, pass_name, op=passes.CHUNK_OP):
        return not self.reason, self.reason

    def _function(self, op):
        function = peers.Backend("torch")._function(op)

        def call(*args, **kwargs):
            time.sleep(self.pause)
            results = function(*args, **kwargs)
            if isinstance(results, torch.Tensor):
                return results * self.factor
            return tuple(t if t is None else t * self.factor for t in results)

        return call


def run_group(*backends, spec="aligned", pass_name="forward", **options):
    return measure.measure_group(
        spec,
        SPECS[spec],
        pass_name,
        backends,
        device=CPU,
        ceilings=CEILINGS,
        env=ENV,
        seconds=0.02,
        **options,
    )


def sample_rows(times, name="published-16k-n128", run="r1", search=None, **env):
    """One group with the given graph times by backend; None is a red row."""
    spec = SPECS[name]
    rows = []
    for backend, us in times.items():
        row = measure.new_row(name, spec, "forward", backend, run, ENV | env)
        row |= {"errors": {"out": 1e-3}, "budgets": {"out": 2e-3}}
        if us is None:
            rows.append(row | {"status": "red", "reason": "out 0.5 > 0.002", "errors": {"out": 0.5}})
            continue
        row |= {"status": "ok", "variant": "chunk 128", "variants_us": {"chunk 128": us}, "first_call_s": 1.0}
        for kind, value in (("graph_us", us), ("eager_us", us + 30), ("host_us", 20.0)):
            row[kind] = timing.TimingResult(value, value, value, value, 20)._asdict()
        row |= {"search": search, "note": "", "peak_bytes": 1 << 20, "scratch_bytes": 0, "input_sets": 1}
        measure._add_rates(row, *roofline.work(spec, "forward"), CEILINGS)
        rows.append(row)
    return rows


def grid_rows():
    rows = []
    for i, kilo in enumerate((1, 4, 16, 64, 256)):
        for state in (64, 128, 256, 512):
            ours = 12 + 6.5 * kilo * state / 128
            times = {"cutile": ours, "tilegym": 18 + ours * (2 + 0.1 * i), "mamba_ssm": 25 + ours * 2.9}
            rows += sample_rows(times, f"published-{kilo}k-n{state}", run=f"g{kilo}-{state}")
    for name in ("mamba2-2.7b-8k", "zamba2-2.7b-8k"):
        rows += sample_rows({"cutile": 200.0, "tilegym": 430.0, "mamba_ssm": 610.0}, name, run=name)
    return rows


# --- timing --------------------------------------------------------------------------------------


def test_summary_takes_percentiles_of_sorted_samples():
    result = timing.summarise([5.0, 1.0, 2.0, 4.0, 3.0, 100.0])
    assert result == timing.TimingResult(median=3.5, p20=2.0, p80=5.0, min=1.0, n=6)
    assert timing.summarise([7.0]) == (7.0, 7.0, 7.0, 7.0, 1)


def test_wall_median_measures_a_sleep_in_microseconds():
    result = timing.wall_median(lambda: time.sleep(0.002), seconds=0.05)
    assert 2000 <= result.min <= result.p20 <= result.median <= result.p80
    assert result.median < 20_000
    assert result.n >= timing.MIN_SAMPLES


def test_lanes_take_turns_and_rotate_their_input_sets():
    order = []
    lanes = {
        "a": [lambda: order.append("a0"), lambda: order.append("a1")],
        "b": lambda: order.append("b"),
    }
    results = timing.wall_medians(lanes, seconds=0.01)
    assert set(results) == {"a", "b"}
    sampled = order[2:]  # after one warm-up call of each lane
    a_calls = [c for c in sampled if c.startswith("a")]
    assert a_calls[:4] == ["a0", "a1", "a0", "a1"]
    shortest = min(len(a_calls), sampled.count("b"))
    first = sampled[: 2 * shortest]
    assert abs(first.count("b") - shortest) <= 1


def test_a_settled_lane_stops_early_and_a_noisy_one_goes_on():
    values = iter(range(10**6))
    results = timing.interleaved(
        {"still": lambda: 5.0, "noisy": lambda: float(next(values) % 50)}, seconds=60, max_samples=60
    )
    assert results["still"].n == timing.MIN_SAMPLES
    assert results["noisy"].n == 60


def test_a_slow_lane_does_not_use_up_the_time_of_the_others():
    def slow():
        time.sleep(0.03)
        return 30_000.0

    noise = iter(range(10**6))
    results = timing.interleaved({"slow": slow, "fast": lambda: 1.0 + next(noise) % 3}, seconds=0.01)
    assert 3 <= results["slow"].n < timing.MIN_SAMPLES
    assert results["fast"].n > timing.MIN_SAMPLES


@pytest.mark.parametrize(
    ("call_us", "sets", "calls"),
    [(30.0, 1, 50), (100.0, 1, 20), (5000.0, 1, 1), (100.0, 8, 16), (5000.0, 8, 8), (0.0, 1, 50)],
)
def test_calls_in_a_graph(call_us, sets, calls):
    assert timing.calls_per_replay(call_us, sets) == calls


def test_first_call_returns_seconds_and_result():
    seconds, result = timing.first_call(lambda: (time.sleep(0.01), 7)[1])
    assert seconds >= 0.01 and result == 7


# --- floor ---------------------------------------------------------------------------------------


def test_floor_is_the_larger_of_bytes_and_operations():
    assert CEILINGS.floor_us(nbytes=172e6, flops=1e9) == (pytest.approx(43.0), "memory")
    assert CEILINGS.floor_us(nbytes=1e6, flops=28e9) == (pytest.approx(40.0), "arithmetic")


def test_published_benchmark_has_the_published_counts():
    flops, floor_flops, nbytes = roofline.work(SPECS["published"], "forward")
    assert flops == 65536 * (2 * 128 * 128 + 8 * (2 * 128 * 64 + 4 * 128 * 64))
    assert floor_flops == 65536 * (2 * 64 * 128 + 8 * (2 * 64 * 64 + 4 * 128 * 64))
    assert nbytes == SPECS["published"].bytes_moved()


def test_backward_counts_its_own_tensors_and_both_passes_add_up():
    spec = SPECS["aligned"]
    tensors = {"x": torch.empty(3, 5, dtype=torch.bfloat16), "dx": torch.empty(7), "chunk_size": 64}
    forward, backward, both = (roofline.work(spec, name, tensors) for name in passes.PASS_NAMES)
    assert backward[2] == both[2] == 30 + 28
    assert both[0] == forward[0] + backward[0]
    assert 2 * forward[0] < backward[0] < 4 * forward[0]


def test_rates_of_a_row():
    (row,) = sample_rows({"cutile": 100.0})
    assert row["tflops"] == pytest.approx(row["flops"] / 100e-6 / 1e12)
    assert row["gbs"] == pytest.approx(row["bytes"] / 100e-6 / 1e9)
    assert row["floor_share"] == pytest.approx(row["floor_us"] / 100)
    assert row["floor_bound"] == "memory"


def test_ceilings_of_this_machine_are_positive():
    found = roofline.measure(CPU)
    assert found.copy_gbs > 0.1 and found.matrix_tflops > 1e-4


# --- groups --------------------------------------------------------------------------------------


def test_a_group_times_every_backend_in_one_run():
    rows = run_group(Fake("cutile"), Fake("tilegym", pause=0.02), peers.Backend("torch"))
    assert [row["status"] for row in rows] == ["ok", "ok", "ok"]
    assert len({row["run"] for row in rows}) == 1
    assert all(row["errors"]["out"] <= row["budgets"]["out"] for row in rows)
    assert measure.speed_up(rows[0], rows[1]) > 2
    assert rows[1]["wall_us"]["median"] > 20_000
    assert rows[1]["budgets"]["out"] == pytest.approx(measure.PEER_SLACK * rows[2]["budgets"]["out"])


@pytest.mark.parametrize("pass_name", passes.PASS_NAMES)
def test_every_pass_checks_all_its_outputs(pass_name):
    (row,) = run_group(peers.Backend("torch"), pass_name=pass_name)
    assert row["status"] == "ok", row["reason"]
    assert set(row["errors"]) == set(passes.outputs_of(SPECS["aligned"], pass_name))
    json.dumps(row)


def test_float64_results_are_no_bytes_that_a_pass_moves():
    spec = SPECS["aligned"]
    inputs = spec.get_sample_inputs(with_reference=False, device="cpu")
    backward = passes.outputs_of(spec, "backward")
    gradients = [inputs[name[1:]] for name in backward]
    rows = [
        run_group(peers.Backend("torch"), pass_name="backward", check=check)[0] for check in (True, False)
    ]
    expected = roofline.tensor_bytes(inputs) + roofline.tensor_bytes(gradients)
    assert [row["bytes"] for row in rows] == [expected] * 2


def test_forward_and_backward_go_through_autograd(monkeypatch):
    seen = []
    original = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args: seen.append(len(args[1])) or original(*args))
    (row,) = run_group(peers.Backend("torch"), pass_name="forward+backward")
    assert row["status"] == "ok", row["reason"]
    assert set(seen) == {7}


@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_a_red_row_shows_its_error_and_no_speed_up(factor):
    rows = run_group(Fake("cutile", factor=factor), Fake("tilegym", pause=0.01))
    ours, peer = rows
    assert ours["status"] == "red" and "out" in ours["reason"]
    assert ours["errors"]["out"] is None or ours["errors"]["out"] > ours["budgets"]["out"]
    json.dumps(rows, allow_nan=False)
    assert measure.headline_us(ours) is None
    assert measure.speed_up(ours, peer) is None and measure.speed_up(peer, ours) is None
    text = report.markdown_table(rows)
    assert "wrong" in text and "×" not in text
    assert "×" not in "".join(str(c) for column in report.rich_table(rows).columns for c in column.cells)
    assert plots.speed_up_figure([rows]) is None


def test_without_the_check_there_is_no_speed_up():
    rows = run_group(Fake("cutile"), Fake("tilegym", pause=0.01), check=False)
    assert {row["status"] for row in rows} == {"unchecked"}
    assert rows[0]["errors"] is None and measure.speed_up(*rows) is None


def test_a_backend_that_cannot_run_or_fails_says_why_and_the_others_go_on():
    class Broken(Fake):
        def _function(self, op):
            def call(*args, **kwargs):
                raise ValueError("num_tokens must be divisible\nsecond line")

            return call

    rows = run_group(Fake("cutile", reason="no GPU"), Broken("tilegym"), peers.Backend("torch"))
    assert [row["status"] for row in rows] == ["unavailable", "failed", "ok"]
    assert rows[0]["reason"] == "no GPU"
    assert "ValueError: num_tokens must be divisible" in rows[1]["reason"]
    assert "second line" not in rows[1]["reason"]
    assert any("num_tokens" in note for note in report.notes(rows))


def test_the_better_of_two_variants_stands_for_a_backend():
    class TwoChunks(Fake):
        def variants(self, spec, pass_name):
            found = [self._variant(pass_name, chunk, spec.state_dtype) for chunk in (16, 64)]
            slow = found[0].make

            def make(inputs):
                call = slow(inputs)
                return lambda: (time.sleep(0.02), call())[1]

            return [dataclasses.replace(found[0], make=make), found[1]]

    (row,) = run_group(TwoChunks("tilegym"))
    assert row["variant"] == "chunk 64"
    assert set(row["variants_us"]) == {"chunk 16", "chunk 64"}
    assert row["variants_us"]["chunk 16"] > 20_000


def test_speed_up_needs_the_same_run():
    ours, peer = sample_rows({"cutile": 100.0, "tilegym": 250.0})
    assert measure.speed_up(ours, peer) == pytest.approx(2.5)
    assert measure.speed_up(ours, peer | {"run": "other"}) is None
    without_graph = {k: v for k, v in peer.items() if k != "graph_us"}
    assert measure.speed_up(ours, without_graph) == pytest.approx(280 / 130)


def test_mamba_and_the_cutile_kernels_give_a_reason_here():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    for backend in peers.backends(["cutile", "tilegym", "mamba_ssm"]):
        ok, reason = backend.status("forward")
        assert not ok and len(reason) > 10


# --- TileGym's search ----------------------------------------------------------------------------


def tilegym_space(state_size=128):
    return [
        SimpleNamespace(BLOCK_STATE=block, occupancy=occupancy, persistent=persistent, H_LAT=latency)
        for block in (16, 32, 64, 128)
        if state_size % block == 0
        for occupancy in (1, 2)
        for persistent in (True, False)
        for latency in (3, 4, 5, 6)
    ]


@pytest.mark.parametrize("limit", [4, 6, 10])
def test_a_thinned_search_keeps_large_blocks_persistent_and_not(limit):
    space = tilegym_space()
    chosen = peers.thin(space, limit)
    assert len(chosen) == limit and all(c in space for c in chosen)
    kept = {(c.BLOCK_STATE, c.persistent) for c in chosen}
    assert kept >= {(64, True), (64, False), (128, True), (128, False)}
    assert peers.thin(space, limit) == chosen
    if limit >= 6:
        assert {c.BLOCK_STATE for c in chosen} == {16, 32, 64, 128}
        assert {c.occupancy for c in chosen} == {1, 2}


def test_no_limit_and_a_small_space_are_left_alone():
    space = tilegym_space()
    assert peers.thin(space, None) == space
    assert peers.thin(space[:3], 6) == space[:3]


def test_tilegym_searches_only_the_sample_and_the_row_says_so(monkeypatch):
    module = pytest.importorskip("tilegym.ops.cutile.mamba2")
    seen = []

    def original(configs, stream, grid_fn, kernel, args_fn, hints_fn, *, quiet=False):
        seen.append((len(configs), quiet))
        return SimpleNamespace(best=SimpleNamespace(config=configs[-1]), failures=[])

    monkeypatch.setattr(module, "exhaustive_search", original)
    out = SimpleNamespace(_pyfunc=SimpleNamespace(__name__="compute_out_kernel"))
    cumsum = SimpleNamespace(_pyfunc=SimpleNamespace(__name__="chunk_cumsum_kernel"))
    with peers.thinned_search(6) as search:
        module.exhaustive_search(tilegym_space(), None, None, out, None, None)
        module.exhaustive_search(tilegym_space()[:10], None, None, cumsum, None, None)
    assert module.exhaustive_search is original
    assert seen == [(6, True), (3, True)]
    assert "thinned search, at most 6 a kernel: 9 of 74 configurations" in search.sentence()
    data = search.as_data()
    assert data["limit"] == 6 and data["kernels"][0]["best"]["BLOCK_STATE"] in (16, 32, 64, 128)
    rows = sample_rows({"cutile": 1.0, "tilegym": 3.0}, search=json.loads(json.dumps(data)))
    assert "Searches thinned, configurations a kernel: " in report.markdown_table(rows)


def test_a_search_that_tilegym_skips_is_named(monkeypatch):
    pytest.importorskip("tilegym.ops.cutile.mamba2")
    monkeypatch.setenv("TILEGYM_DISABLE_AUTOTUNE", "1")
    with peers.thinned_search(None) as search:
        pass
    assert "TILEGYM_DISABLE_AUTOTUNE" in search.sentence()
    assert search.as_data() is None


def test_the_spaces_that_are_thinned_are_those_of_the_installed_tilegym():
    module = pytest.importorskip("tilegym.ops.cutile.mamba2")
    spaces = (
        list(module._compute_out_configs(64, 128)),
        list(module._compute_out_swap_configs(64, 128)),
        list(module._fwd_pass_state_autotune_configs(128, 64, 128)),
    )
    for space in spaces:
        chosen = peers.thin(space, 6)
        assert len(chosen) == 6
        for name in ("BLOCK_STATE", "persistent", "SWAP", "BHT", "occupancy"):
            values = {getattr(c, name) for c in space if hasattr(c, name)}
            assert {getattr(c, name) for c in chosen if hasattr(c, name)} == values


# --- files ---------------------------------------------------------------------------------------


def test_rows_survive_the_file_and_a_cut_line_is_dropped(tmp_path):
    path = tmp_path / "sub" / "rows.jsonl"
    rows = sample_rows({"cutile": 100.0, "tilegym": 250.0})
    report.append_rows(path, rows[:1])
    with path.open("a") as file:
        file.write('{"schema": 1, "backend": "til')
    with pytest.warns(UserWarning, match="cut short"):
        assert len(report.load_rows(path)) == 1
    report.append_rows(path, rows[1:])
    assert report.load_rows(path) == json.loads(json.dumps(rows))


def test_a_file_of_something_else_is_refused_with_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"schema": 2}\n{}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl:1: not a benchmark row of schema 1"):
        report.load_rows(path)
    path.write_text("nonsense\n{}\n")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: not JSON"):
        report.load_rows(path)


def test_resume_skips_finished_groups_and_measures_again_with_other_versions():
    backends = [peers.Backend("cutile"), peers.TileGym()]
    rows = sample_rows({"cutile": 100.0, "tilegym": 250.0})
    name, spec = "published-16k-n128", SPECS["published-16k-n128"]

    def done(found, env=ENV, who=backends, pass_name="forward", spec=spec):
        return measure.complete(found, name, spec, pass_name, who, env)

    assert done(rows)
    assert done(rows, ENV | {"date": "2027-01-01"})
    assert done(rows, who=backends[:1])
    assert not done(rows[:1])
    assert not done(rows, ENV | {"tilegym": "1.6"})
    assert not done(rows, ENV | {"code": "changed"})
    assert not done(rows, pass_name="backward")
    assert not done(rows, spec=dataclasses.replace(spec, seed=1))
    assert not done([rows[0], rows[1] | {"run": "another"}])
    assert not done([rows[0], rows[1] | {"status": "failed"}])


def test_bench_command_writes_resumes_and_remakes(app, tmp_path):
    file, table = tmp_path / "rows.jsonl", tmp_path / "rows.csv"
    common = ("bench", "--backend", "torch,cutile", "--device", "cpu", "--seconds", "0.02", "--json", file)
    first = invoke(app, *common, "--spec", "aligned", "--csv", table)
    assert first.exit_code == 0, first.output
    rows = report.load_rows(file)
    assert [(r["spec"], r["backend"]) for r in rows] == [("aligned", "torch"), ("aligned", "cutile")]
    assert rows[0]["status"] == "ok" and rows[0]["wall_us"]["n"] >= 3
    assert {
        "device",
        "driver",
        "torch",
        "cuda_tile",
        "tileiras",
        "tilegym",
        "mamba_ssm",
        "triton",
        "date",
    } <= set(rows[0]["env"])

    refused = invoke(app, *common, "--spec", "ragged")
    assert refused.exit_code != 0 and len(report.load_rows(file)) == 2

    again = invoke(app, *common, "--spec", "aligned", "--spec", "one-token", "--resume")
    assert again.exit_code == 0, again.output
    resumed = report.load_rows(file)
    assert resumed[:2] == rows and [r["spec"] for r in resumed[2:]] == ["one-token", "one-token"]

    remade = invoke(
        app, "bench", "--from", file, "--table", "markdown", "--subject", "torch", "--plot", tmp_path
    )
    assert remade.exit_code == 0, remade.output
    assert "| `aligned` | 1 | 256 | 2 | 64 | 1 | 64 |" in remade.output
    assert (tmp_path / "roofline.png").stat().st_size > 10_000
    with table.open() as opened:
        read = list(csv.DictReader(opened))
    assert float(read[0]["wall_us.median"]) == pytest.approx(rows[0]["wall_us"]["median"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--spec", "nope"), "no spec 'nope'"),
        (
            ("--spec", "decode-1", "--pass", "both"),
            "decode-1 is a spec of mamba2_state_update, which has forward",
        ),
        (("--tag", "nope"), "unknown tag"),
        (("--pass", "sideways"), "forward"),
        (("--resume",), "needs --json"),
        (("--table", "html"), "rich, markdown or none"),
        (("--time", "cpu"), "graph, eager or host"),
        (("--version-of", "mamba_ssm"), "NAME=VERSION"),
        (("--thin-tilegym", "3"), "than or equal to 4"),
        (("--from", "missing.jsonl"), "--from: missing.jsonl cannot be read: No such file or directory"),
        (("--from", "rows.jsonl", "--spec", "aligned"), "--from measures nothing"),
        (("--device", "hammer"), "--device"),
        (("--spec", "one-token", "--backend", "cutlie"), "unknown backend 'cutlie'; there are: cutile"),
    ],
)
def test_bench_refuses_with_a_reason(app, arguments, message):
    result = invoke(app, "bench", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_bench_refuses_a_subject_without_rows(app, tmp_path):
    rows = tmp_path / "rows.jsonl"
    report.append_rows(rows, sample_rows({"tilegym": 250.0, "cutile": 100.0}))
    result = invoke(app, "bench", "--from", rows, "--subject", "nope")
    assert result.exit_code == 2
    assert "no row of 'nope'" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(("option", "name"), [("--csv", "rows.csv"), ("--plot", "plots")])
def test_bench_says_what_it_cannot_write(app, tmp_path, option, name):
    rows, occupied = tmp_path / "rows.jsonl", tmp_path / "occupied"
    report.append_rows(rows, sample_rows({"tilegym": 250.0, "cutile": 100.0}))
    occupied.write_text("a file where a folder is needed")
    result = invoke(app, "bench", "--from", rows, "--table", "none", option, occupied / name)
    assert result.exit_code == 2, result.output
    assert f"{option}:" in result.output and "cannot be written" in " ".join(result.output.split())


def test_a_red_row_of_ours_fails_the_command(app, monkeypatch):
    monkeypatch.setattr(peers, "backends", lambda names, **options: [Fake("cutile", factor=2.0)])
    result = invoke(app, "bench", "--spec", "one-token", "--device", "cpu")
    assert result.exit_code == 1
    assert "red" in result.output


def test_named_versions_reach_the_rows():
    env = environment.describe(CPU, {"mamba_ssm": "9.9"})
    assert env["mamba_ssm"] == "9.9" and env["torch"] == torch.__version__
    assert environment.versions_of("mamba_ssm", env)[-1] == "9.9"


# --- tables and plots ----------------------------------------------------------------------------


def test_markdown_names_shapes_times_speed_ups_and_where_they_come_from():
    rows = sample_rows({"tilegym": 250.0, "cutile": 100.0, "mamba_ssm": None})
    text = report.markdown_table(rows)
    head, rule, line = text.splitlines()[:3]
    assert head.startswith(
        "| spec | B | T | H | P | G | N | cutile µs | tilegym µs | mamba_ssm µs | cutile: of floor |"
    )
    assert head.count("|") == rule.count("|") == line.count("|")
    assert "| 4 | 16384 | 8 | 64 | 1 | 128 | 100 | 250 (2.50×) | wrong (out 0.5) |" in line
    assert "NVIDIA Test; torch 2.13, TileGym 1.5.1; 2026-01-02; medians of CUDA graph times." in text


def test_the_last_of_two_runs_counts():
    old = sample_rows({"cutile": 100.0, "tilegym": 250.0})
    new = sample_rows({"cutile": 90.0, "tilegym": 270.0}, run="r2")
    assert report.groups(old + new) == [new]
    assert report.groups(old + sample_rows({"cutile": 1.0}, run="r3", device="other")) != [new]
    assert len(report.groups(old + sample_rows({"cutile": 1.0}, run="r3", device="other"))) == 2


def test_rich_table_has_a_cell_for_every_column():
    table = report.rich_table(sample_rows({"cutile": 100.0, "tilegym": 250.0, "mamba_ssm": None}))
    cells = [list(column.cells) for column in table.columns]
    assert {len(c) for c in cells} == {3}
    assert cells[-1] == ["–", "2.50×", "–"]
    assert cells[2][:2] == ["100", "250"] and "red" in cells[2][2]


def test_plots_of_a_grid_and_of_layers(tmp_path):
    written = plots.write(grid_rows(), tmp_path / "plots")
    assert [p.name for p in written] == ["speedup.png", "layers.png", "roofline.png"]
    assert all(p.stat().st_size > 10_000 for p in written)
    written = plots.write(grid_rows(), tmp_path / "forward.svg")
    assert [p.name for p in written] == ["forward.svg", "forward-layers.svg", "forward-roofline.svg"]


def test_speed_up_plot_has_a_panel_per_peer_and_a_line_per_state_size():
    found = report.groups(grid_rows())
    figure = plots.speed_up_figure(found)
    panels = figure.axes
    assert [axis.get_title() for axis in panels] == ["against tilegym", "against mamba_ssm"]
    lines = [line for line in panels[0].lines if str(line.get_label()).startswith("N = ")]
    assert [line.get_label() for line in lines] == [f"N = {n}" for n in (64, 128, 256, 512)]
    assert list(lines[0].get_xdata()) == [1024 * k for k in (1, 4, 16, 64, 256)]
    row = {r["backend"]: r for r in grid_rows() if r["run"] == "g16-128"}
    expected = row["tilegym"]["graph_us"]["median"] / row["cutile"]["graph_us"]["median"]
    assert lines[1].get_ydata()[2] == pytest.approx(expected)
    plots.plt.close(figure)


def test_eager_times_are_compared_when_asked_for(tmp_path):
    rows = sample_rows({"cutile": 100.0, "tilegym": 250.0})
    text = report.markdown_table(rows, kinds=("eager_us",))
    assert "| 130 | 280 (2.15×) |" in text and "of floor" not in text and "eager call times" in text
    table = report.rich_table(rows, kinds=("eager_us",))
    assert list(table.columns[-1].cells) == ["–", "2.15×"]
    written = plots.write(grid_rows(), tmp_path, kinds=("eager_us",))
    assert [p.name for p in written] == ["speedup-eager.png", "layers-eager.png"]


def test_memory_of_a_backward_is_told_by_its_operands():
    rows = sample_rows({"cutile": 100.0, "tilegym": 250.0})
    assert "extra memory" not in report.markdown_table(rows)
    for row in rows:
        row |= {"peak_bytes": 3 * 2**20, "operand_bytes": 2 * 2**20}
    assert "| 3.0 MiB (1.50×) |" in report.markdown_table(rows)
    column = next(c for c in report.rich_table(rows).columns if c.header == "extra mem")
    assert list(column.cells) == ["3.0 MiB (1.50×)"] * 2


def test_nothing_to_plot_is_said():
    with pytest.raises(ValueError, match="nothing to plot"):
        plots.write(sample_rows({"cutile": None}), "unused")


# --- the scan and the step -----------------------------------------------------------------------


SCAN = Mamba2ScanSpec(
    1, 40, 1, 2, 16, 8, 16, torch.bfloat16, torch.float32, decay="slow", gated=True, raw_dt=True
)
PACKED = dataclasses.replace(SCAN, num_sequences=3, stateless=True)
STEP = Mamba2StepSpec(3, 1, 2, 4, 16, 8, 1, torch.bfloat16, torch.float32, decay="slow", num_slots=5)
OTHERS = {"scan": SCAN, "packed": PACKED, "step": STEP}
TORCH = peers.Backend("torch")._function


def measure_other(name, *backends, pass_name="forward", **changes):
    spec = dataclasses.replace(OTHERS[name], **changes)
    return measure.measure_group(
        name, spec, pass_name, backends, device=CPU, ceilings=CEILINGS, env=ENV, seconds=0.02
    )


@pytest.mark.parametrize("pass_name", passes.PASS_NAMES)
@pytest.mark.parametrize("name", ["scan", "packed"])
def test_a_scan_is_checked_in_all_that_there_is(name, pass_name):
    (row,) = measure_other(name, peers.Backend("torch"), pass_name=pass_name)
    assert row["status"] == "ok", row["reason"]
    assert row["op"] == passes.SCAN_OP
    absent = {"dinit_state"} if name == "packed" else set()
    assert set(row["errors"]) == set(passes.outputs_of(SCAN, pass_name)) - absent
    json.dumps(row)


def test_a_step_is_timed_on_its_own_states():
    first, second = measure_other("step", Fake("cutile"), peers.Backend("torch"))
    assert (first["status"], second["status"]) == ("ok", "ok"), (first["reason"], second["reason"])
    assert set(first["errors"]) == {"out", "final_state"} and first["errors"] == second["errors"]
    assert first["variant"] == "1 token" and first["bytes"] == STEP.bytes_moved()

    inputs = STEP.get_sample_inputs(with_reference=False, device="cpu")
    before = inputs["state"].clone()
    (variant,) = peers.Backend("torch").variants(STEP, "forward")
    calls = [variant.make(inputs), variant.make(inputs)]
    (out, state), (again, other) = (call() for call in calls)
    assert torch.equal(out, again) and torch.equal(state, other) and torch.equal(inputs["state"], before)
    later, _ = calls[0]()
    assert not torch.equal(later, out) and not torch.equal(state, other)


@pytest.mark.parametrize(("name", "pass_name"), [("step", "forward"), ("packed", "forward+backward")])
def test_a_row_of_a_gpu_has_every_time(name, pass_name, monkeypatch):
    def draw(spec, pass_name, device, check):
        return spec.get_sample_inputs(with_reference=check, device=CPU)

    def graph(lanes, seconds):
        assert all(len(lane) == measure.MAX_INPUT_SETS for lane in lanes.values())
        return timing.wall_medians(lanes, seconds=seconds), {}

    monkeypatch.setattr(measure, "_inputs", draw)
    monkeypatch.setattr(measure, "_collect", lambda device: None)
    monkeypatch.setattr(timing, "graph_medians", graph)
    monkeypatch.setattr(
        timing, "eager_median", lambda lane: timing.wall_medians({"": lane}, seconds=0.02)[""]
    )
    monkeypatch.setattr(timing, "host_time", lambda call: timing.wall_median(call, seconds=0.02))
    monkeypatch.setattr(timing, "peak_memory", lambda call: (2, 1))
    properties = SimpleNamespace(L2_cache_size=60 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    (row,) = measure.measure_group(
        name,
        OTHERS[name],
        pass_name,
        [peers.Backend("torch")],
        device=torch.device("cuda"),
        ceilings=CEILINGS,
        env=ENV,
        seconds=0.02,
    )
    assert row["status"] == "ok", row["reason"]
    assert row["graph_us"]["n"] and row["eager_us"]["n"] and row["host_us"]["n"]
    assert row["gbs"] == pytest.approx(row["bytes"] / row["graph_us"]["median"] / 1e3)
    assert row["note"].startswith("inputs stay in the L2 cache: 16 sets")
    assert ("operand_bytes" in row) == (name == "packed")


def test_states_that_leave_their_range_are_told():
    class Growing(Fake):
        def variants(self, spec, pass_name):
            (variant,) = super().variants(spec, pass_name)

            def make(inputs):
                call = variant.make(inputs)
                count = iter(range(10**6))
                return lambda: (lambda r: r if next(count) < 2 else (r[0], r[1] * torch.inf))(call())

            return [dataclasses.replace(variant, make=make)]

    row = {"op": passes.STEP_OP, "note": "x"}
    (variant,) = Growing("cutile").variants(STEP, "forward")
    call = variant.make(STEP.get_sample_inputs(with_reference=False, device="cpu"))
    measure._check_states(row, [call])
    assert row["note"] == "x"
    call(), measure._check_states(row, [call])
    assert row["note"] == "x; states are no longer finite after timing"


def test_inputs_that_stay_in_the_cache_are_told(monkeypatch):
    inputs = {"x": torch.zeros(1 << 18)}
    for mib, sets, note in ((1, 1, ""), (4, 9, ""), (60, 16, "16 sets, 16 MiB of 60 MiB")):
        properties = SimpleNamespace(L2_cache_size=mib << 20)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, p=properties: p)
        found, text = measure._input_sets(inputs, CPU)
        assert len(found) == sets and text.endswith(note) and bool(text) == bool(note)


def test_backends_without_an_op_are_unsupported_and_no_worse():
    rows = measure_other("scan", peers.Backend("torch"), peers.TileGym())
    assert [row["status"] for row in rows] == ["ok", "unsupported"]
    assert rows[1]["reason"] == "mamba2_chunk_scan has no backend 'tilegym'; it has cutile, torch"
    assert any("unsupported: mamba2_chunk_scan" in note for note in report.notes(rows))
    backends = [peers.Backend("torch"), peers.TileGym()]
    assert measure.complete(rows, "scan", SCAN, "forward", backends, ENV)


# A stand-in for mamba_ssm: the torch backend behind its signatures, and what they do not take is refused.


def mamba_scan(
    x, dt, A, B, C, chunk, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
    dt_softplus=False, dt_limit=(0.0, math.inf),
    return_final_states=False, return_varlen_states=False,
):  # fmt: skip
    assert (cu_seqlens is not None) == return_varlen_states
    if seq_idx is not None:
        assert seq_idx.shape == x.shape[:2] and seq_idx.dtype == torch.int32 and initial_states is None
        counts = torch.bincount(seq_idx[0].long(), minlength=3)
        borders = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        if cu_seqlens is not None:
            assert torch.equal(borders, cu_seqlens)
    else:
        borders = None
    options = {"d": D, "z": z, "dt_bias": dt_bias, "init_state": initial_states, "cu_seqlens": borders}
    found = TORCH(passes.SCAN_OP)(
        x, dt, A, B, C, **options, dt_softplus=dt_softplus, dt_limit=dt_limit, chunk_size=chunk
    )
    return found if return_final_states or return_varlen_states else found[0]


def mamba_scan_fwd(x, dt, A, B, C, chunk, D=None, z=None, **keywords):
    before = mamba_scan(x, dt, A, B, C, chunk, D=D, **keywords)
    return (before if z is None else before * torch.nn.functional.silu(z)), (None if z is None else before)


def mamba_scan_bwd(dout, x, dt, A, B, C, out, chunk, dfinal_states=None, **keywords):
    tensors = {"x": x, "dt": dt, "A": A, "B": B, "C": C}
    tensors |= {k: keywords.pop(k) for k in ("D", "z", "dt_bias", "initial_states") if k in keywords}
    leaves = {k: v.detach().requires_grad_() for k, v in tensors.items()}
    with torch.enable_grad():
        assert torch.allclose(out, mamba_scan(**leaves | {"z": None}, chunk=chunk, **keywords), atol=0.1)
        results = mamba_scan(**leaves, chunk=chunk, return_final_states=True, **keywords)
        pairs = [(r, g) for r, g in zip(results, (dout, dfinal_states), strict=True) if g is not None]
        grads = torch.autograd.grad([r for r, _ in pairs], list(leaves.values()), [g for _, g in pairs])
    found = dict(zip(leaves, grads, strict=True))
    order = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")
    return (*map(found.get, order), "more")


def mamba_step(
    state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None
):
    rows = x.shape[1:]
    assert dt.shape == x.shape and A.shape == (*rows, state.shape[-1]) and dt_bias.shape == D.shape == rows
    assert A.stride()[1:] == (0, 0) and dt.stride(-1) == dt_bias.stride(-1) == 0
    return TORCH(passes.STEP_OP)(
        state, x, dt[..., 0], A[:, 0, 0], B, C, d=D, z=z, dt_bias=dt_bias[:, 0], dt_softplus=dt_softplus,
        state_indices=state_batch_indices,
    )  # fmt: skip


@pytest.fixture
def mamba_ssm(monkeypatch):
    module = SimpleNamespace(
        mamba_chunk_scan_combined=mamba_scan,
        _mamba_chunk_scan_combined_fwd=mamba_scan_fwd,
        _mamba_chunk_scan_combined_bwd=mamba_scan_bwd,
        selective_state_update=mamba_step,
    )
    monkeypatch.setattr(mamba, "triton_module", lambda name: module)
    monkeypatch.setattr(peers.MambaSsm, "status", lambda self, pass_name, op="": (True, ""))
    return peers.MambaSsm((16,))


@pytest.mark.parametrize("pass_name", passes.PASS_NAMES)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("scan", {}),
        ("scan", {"gated": False, "raw_dt": False, "d_per_row": True}),
        ("packed", {}),
        ("packed", {"d_per_row": True}),
    ],
    ids=str,
)
def test_mamba_gets_the_same_scan(name, changes, pass_name, mamba_ssm):
    (row,) = measure_other(name, mamba_ssm, pass_name=pass_name, **changes)
    assert row["status"] == "ok", row["reason"]
    spec = dataclasses.replace(OTHERS[name], **changes)
    expected = set(passes.outputs_of(spec, pass_name))
    expected -= set() if spec.gated else {"dz"}
    expected -= set() if spec.raw_dt else {"ddt_bias"}
    if spec.stateless:
        expected -= {"dinit_state"}
        told = pass_name == "forward+backward"
        expected -= {"final_state"} if told else set()
        assert ("without final states" in row["note"]) == told
    assert set(row["errors"]) == expected


@pytest.mark.parametrize("pass_name", passes.PASS_NAMES)
def test_mamba_gets_the_same_chunked_forward_and_backward(pass_name, mamba_ssm):
    (row,) = run_group(mamba_ssm, spec="two-past-a-chunk", pass_name=pass_name)
    assert row["status"] == "ok", row["reason"]
    assert set(row["errors"]) == set(passes.outputs_of(SPECS["aligned"], pass_name))


@pytest.mark.parametrize(
    "changes",
    [{}, {"gated": True, "raw_dt": True}, {"num_slots": 0, "d_per_row": True, "state_dtype": torch.bfloat16}],
    ids=str,
)
def test_mamba_gets_the_same_step(changes, mamba_ssm):
    (row,) = measure_other("step", mamba_ssm, **changes)
    assert row["status"] == "ok", row["reason"]
    assert set(row["errors"]) == {"out", "final_state"}


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("packed", {"stateless": False}, "no initial states of packed sequences"),
        ("scan", {"padded": True}, "no lengths of padded rows"),
        ("step", {"num_tokens": 2}, "one token a row, not 2"),
    ],
)
def test_mamba_lacks_some_options(name, changes, reason, mamba_ssm):
    (row,) = measure_other(name, mamba_ssm, **changes)
    assert row["status"] == "unsupported" and reason in row["reason"]


def other_rows():
    rows = sample_rows({"cutile": 100.0, "mamba_ssm": 400.0}, "published-slow", run="p")
    rows += sample_rows({"cutile": 120.0, "mamba_ssm": 401.0}, "gated", run="g")
    rows += sample_rows({"cutile": 115.0, "mamba_ssm": None}, "padded", run="x")
    rows += sample_rows({"cutile": 560.0, "mamba_ssm": 614.0}, "decode-256", run="d")
    return rows + sample_rows({"cutile": 9.0, "mamba_ssm": 14.0}, "decode-1", run="d1")


def test_plots_of_scans_and_steps_have_names_of_their_own(tmp_path):
    written = plots.write(other_rows(), tmp_path)
    names = ["layers.png", "roofline.png", "layers-scan.png", "roofline-scan.png"]
    assert [p.name for p in written] == [*names, "layers-step.png", "bandwidth-step.png"]
    found = report.groups(other_rows())
    figure = plots.bandwidth_figure(found[3:])
    shares = [text.get_text().strip() for text in figure.axes[0].texts]
    assert shares[0] == f"{SPECS['decode-256'].bytes_moved() / 560e-6 / 1e9 / CEILINGS.copy_gbs:.0%}"
    assert "step" in figure.get_suptitle() and plots.bandwidth_figure(found[3:], kinds=("eager_us",)) is None
    plots.plt.close(figure)


def test_a_layer_of_another_op_is_no_part_of_a_sweep_over_tokens():
    found = report.groups(other_rows())
    assert plots._sweep(found) is None
    shorter = []
    for tokens in (8192, 4096):
        rows = sample_rows({"cutile": 1.0}, "gated", run=str(tokens))
        for row in rows:
            row["fields"] |= {"num_tokens": tokens}
        shorter.append(rows)
    # Two lengths of a layer are no curve.
    assert plots._sweep([*found, shorter[0]]) is None
    assert plots._sweep([*found, *shorter])[1] == [found[1], *shorter]


def test_bench_command_takes_scans_and_steps(app, tmp_path):
    file = tmp_path / "rows.jsonl"
    common = ("bench", "--backend", "torch", "--device", "cpu", "--seconds", "0.02", "--json", file)
    first = invoke(app, *common, "--spec", "step-layer-pool,scan-gated")
    assert first.exit_code == 0, first.output
    rows = report.load_rows(file)
    assert [(r["spec"], r["op"], r["status"]) for r in rows] == [
        ("step-layer-pool", passes.STEP_OP, "ok"),
        ("scan-gated", passes.SCAN_OP, "ok"),
    ]
    again = invoke(app, *common, "--spec", "step-layer-pool,scan-gated", "--resume", "--table", "none")
    assert again.exit_code == 0 and report.load_rows(file) == rows
    table = tmp_path / "rows.csv"
    remade = invoke(app, "bench", "--from", file, "--table", "markdown", "--subject", "torch", "--csv", table)
    assert remade.exit_code == 0, remade.output
    assert "| `step-layer-pool` | 3 | 1 | 4 | 16 | 2 | 32 |" in remade.output
    with table.open() as opened:
        assert [line["fields.num_slots"] for line in csv.DictReader(opened)] == ["7", ""]


# --- tuning --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    pause_ms: int
    factor: float = 1.0
    raises: bool = False


class FakeTuning:
    """A tuning module whose configurations only differ in how long they sleep."""

    def __init__(self, *configs):
        self.configs, self.active, self.saved = list(configs), None, {}

    def problem_key(self, x, b):
        return f"P{x.shape[-1]}-N{b.shape[-1]}"

    def lookup(self, key):
        return self.configs[0], "default"

    def candidates(self, key):
        return self.configs

    @contextlib.contextmanager
    def override(self, config):
        self.active = config
        yield
        self.active = None

    def save_user_entries(self, arch, entries):
        self.saved[arch] = entries

    def op(self, *args):
        config = self.active
        if config.raises:
            raise RuntimeError("does not compile")
        time.sleep(config.pause_ms / 1e3)
        out = torch.full((5000,), config.factor)
        return out, out


def search(tuning, **options):
    spec = dataclasses.replace(SPECS["one-token"], dtype=torch.float32)
    return tune.search("tiny", spec, device=CPU, tuning=tuning, op=tuning.op, **options)


def test_search_finds_the_fastest_right_candidate_and_saves_it():
    tuning = FakeTuning(Config(6), Config(1, factor=1.5), Config(2), Config(0, raises=True), Config(4))
    stages = set()
    result = search(tuning, on_step=lambda stage, done, total: stages.add(stage))
    assert result.changed and result.config == Config(2)
    assert result.before_us > 6000 > result.after_us > 2000
    assert 0.4 < result.gain < 0.8
    assert result.tried == 3 and result.key == "P64-N64" and result.source == "default"
    assert "wrong out" in dict(result.failed)[Config(1, factor=1.5)]
    assert "does not compile" in dict(result.failed)[Config(0, raises=True)]
    assert stages == {"check and time", "finals"}
    tune.save(tuning, "sm_90", result, "NVIDIA Test")
    entry = tuning.saved["sm_90"]["P64-N64"]
    assert entry["config"] == dataclasses.asdict(Config(2)) and entry["device"] == "NVIDIA Test"
    assert entry["median_us"] == pytest.approx(result.after_us, abs=0.01)


def test_search_keeps_what_is_in_use_when_nothing_is_faster():
    result = search(FakeTuning(Config(1), Config(5)))
    assert not result.changed and result.config == Config(1)
    assert result.gain == 0.0 and result.after_us == result.before_us


def test_search_raises_when_the_configuration_in_use_fails():
    with pytest.raises(RuntimeError, match="does not compile"):
        search(FakeTuning(Config(1, raises=True), Config(1)))


@pytest.mark.parametrize("interpreted", ["0", "1"])
def test_tune_without_a_gpu_says_what_is_missing(app, monkeypatch, interpreted):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setenv("TILEGYM_MAMBA2_INTERPRET", interpreted)
    result = invoke(app, "tune", "--spec", "published")
    assert result.exit_code == 2
    assert "cutile cannot run here" in result.output and "there is no GPU" in result.output
    assert "pip install" not in result.output


def test_tune_command_saves_each_key_once_and_shows_what_it_gained(app, monkeypatch, tmp_path):
    from tilegym_mamba2.backends import cutile
    from tilegym_mamba2.backends.cutile import availability

    tuning = FakeTuning(Config(3), Config(1))
    tuning.user_table_path = lambda arch: tmp_path / f"{arch}.json"
    searched = []

    def fake_search(name, spec, **options):
        searched.append(name)
        if name == "ragged":
            raise RuntimeError("the configuration in use fails: no reason")
        key = tuning.problem_key(**{k: v for k, v in inputs(spec).items() if k in "xb"})
        failed = [(Config(9), "RuntimeError: does not compile")]
        return tune.TuneResult(name, key, "default", 30.0, 24.0, Config(1), True, 2, failed, 1.5)

    def inputs(spec):
        return spec.get_sample_inputs(with_reference=False, with_backward=False, device="cpu")

    sample = type(SPECS["aligned"]).get_sample_inputs
    monkeypatch.setattr(
        type(SPECS["aligned"]),
        "get_sample_inputs",
        lambda self, **options: sample(self, **(options | {"device": "cpu"})),
    )
    monkeypatch.setattr(cli, "_device", lambda name: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(availability, "gpu_available", lambda device: (True, ""))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    monkeypatch.setattr(cutile, "tuning", tuning, raising=False)
    monkeypatch.setitem(sys.modules, "tilegym_mamba2.backends.cutile.tuning", tuning)
    monkeypatch.setattr(tune, "search", fake_search)

    result = invoke(app, "tune", "--spec", "aligned,ragged", "--spec", "bf16-slow")
    assert result.exit_code == 0, result.output
    assert searched == ["aligned", "bf16-slow"]
    for text in ("30.0", "24.0", "20.0%", "does not compile", "sm_90.json"):
        assert text in result.output
    assert tuning.saved["sm_90"].keys() == {"P32-N64"}

    failed = invoke(app, "tune", "--spec", "ragged", "--dry-run")
    assert failed.exit_code == 1
    assert "ragged: not tuned" in failed.output and "nothing written" in failed.output


def test_a_task_that_raises_dies_or_hangs_fails_alone():
    # partial(exec) runs each task as Python; unlike a function of this file it costs the child no import
    tasks = ["pass", "int('x')", "import os; os._exit(3)", "pass", "import time; time.sleep(60)"]
    results = dict(run_in_processes(functools.partial, (exec,), tasks, workers=1, task_seconds=3))
    assert results[0] == results[3] == ""
    assert results[1].startswith("ValueError: invalid literal")
    assert "status 3" in results[2]
    assert "no end after 3 s" in results[4]


def test_a_worker_that_cannot_start_says_so():
    ours, theirs = multiprocessing.Pipe()
    pool._serve(theirs, functools.partial, (3,))
    assert ours.recv().startswith("the worker could not start: TypeError")


def test_tasks_past_the_deadline_are_not_reached():
    late = time.monotonic() - 1
    results = dict(run_in_processes(functools.partial, (exec,), ["pass", "pass"], workers=2, deadline=late))
    assert set(results.values()) == {"not reached before the time limit"}
