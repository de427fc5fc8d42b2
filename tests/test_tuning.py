"""Configurations: what a problem's key holds, which table answers, what a table may be, who may search."""

import itertools
import json
import logging
import multiprocessing
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilegym_mamba2 import interpreter
from tilegym_mamba2.backends.cutile import forward, tuning
from tilegym_mamba2.backends.cutile.tuning import ForwardConfig
from tilegym_mamba2.spec import SPECS

KEY = "sm_90/bfloat16/P64/N128/H8/T16384"
SHIPPED = sorted(path.stem for path in (Path(tuning.__file__).parent / "tuned").glob("*.json"))


@pytest.fixture(autouse=True)
def own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and the policy that a user has who set nothing."""
    monkeypatch.setenv(tuning.CACHE_ENV, str(tmp_path))
    for name in (tuning.TUNE_ENV, "TILEGYM_DISABLE_AUTOTUNE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tuning, "_searched", set())
    monkeypatch.setattr(tuning, "_unsaved", {})
    return tmp_path


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Entries of a shipped table that the test writes."""
    entries: dict[str, Any] = {}
    table = {"measured": True, "defaults": {}, "entries": entries}
    monkeypatch.setattr(tuning, "shipped_table", lambda arch: table)
    return entries


def tensors(batch=1, tokens=16384, heads=8, groups=1, p=64, n=128, dtype=torch.bfloat16):
    x = torch.empty(batch, tokens, heads, p, dtype=dtype, device="meta")
    return x, torch.empty(batch, tokens, groups, n, dtype=dtype, device="meta")


# ---- keys


def test_a_key_names_what_decides() -> None:
    assert tuning.problem_key(*tensors()) == KEY
    assert tuning.key_of("sm_100", torch.float32, 1, 1, 80, 96) == "sm_100/float32/P128/N128/H1/T1"


@pytest.mark.parametrize(
    "same", [{"batch": 7}, {"tokens": 16383}, {"tokens": 12000}, {"tokens": 20001}, {"groups": 8}]
)
def test_batch_and_lengths_of_a_bucket_share_a_key(same: dict[str, int]) -> None:
    assert tuning.problem_key(*tensors(**same)) == KEY


def test_strides_are_not_in_a_key() -> None:
    x, b = tensors(heads=32)
    assert tuning.problem_key(x[:, :, ::4], b) == tuning.problem_key(x[:, :, :8].transpose(0, 0), b) == KEY


@pytest.mark.parametrize(
    "other",
    [{"tokens": 4096}, {"heads": 16}, {"p": 128}, {"n": 256}, {"dtype": torch.float16}, {"tokens": 0}],
)
def test_what_changes_the_winner_changes_the_key(other: dict[str, Any]) -> None:
    assert tuning.problem_key(*tensors(**other)) != KEY


def test_a_key_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="key must look like sm_90/bfloat16/P64/N128/H8/T16384, got 'x'"):
        tuning.default_config("x")


@given(
    tokens=st.integers(1, 10**6),
    blocks=st.integers(1, 600),
    config=st.builds(
        ForwardConfig,
        tile_tokens=st.sampled_from([16, 64, 128]),
        segment_blocks=st.integers(1, 600),
        min_segment_tiles=st.integers(1, 20),
    ),
)
def test_segments_cover_the_tokens_and_no_segment_is_empty(
    tokens: int, blocks: int, config: ForwardConfig
) -> None:
    tiles_per_segment, segments = config.segments(tokens, blocks)
    length = tiles_per_segment * config.tile_tokens
    assert (segments - 1) * length < tokens <= segments * length
    tiles = -(-tokens // config.tile_tokens)
    most = max(
        config.segment_blocks,
        min(256, config.segment_blocks * (1 if tiles < 512 else 2 if tiles < 2048 else 4)),
    )
    assert segments == 1 or (
        segments * blocks <= max(blocks, most) and tiles_per_segment >= config.min_segment_tiles
    )


def test_long_rows_are_cut_finer() -> None:
    segments = [ForwardConfig().segments(tokens, 8)[1] for tokens in (32704, 32768, 65536, 2**17, 2**20)]
    assert segments == [8, 16, 16, 32, 32]
    # No fewer than were asked for, and no more where that fills it.
    assert ForwardConfig(segment_blocks=512).segments(65536, 80) == (171, 6)


# ---- which table answers


def entry(**config: int) -> dict[str, Any]:
    return {"config": config}


def test_the_users_table_comes_first_then_the_shipped_one_then_the_nearest(shipped: dict[str, Any]) -> None:
    default = tuning.default_config(KEY)
    assert tuning.lookup(KEY) == (default, "default")

    near = KEY.replace("T16384", "T4096")
    shipped[near] = entry(out_latency=7)
    assert tuning.lookup(KEY) == (replace(default, out_latency=7), f"nearest: {near} (shipped table)")

    shipped[KEY] = entry(out_latency=8)
    assert tuning.lookup(KEY) == (replace(default, out_latency=8), "shipped table")
    # An exact entry is better than a near one, whoever measured it.
    tuning.save_user_entries("sm_90", {near: entry(out_latency=6)})
    assert tuning.lookup(KEY)[1] == "shipped table"
    assert tuning.lookup(near) == (replace(default, out_latency=6), "user table")

    tuning.save_user_entries("sm_90", {KEY: entry(out_latency=9)})
    assert tuning.lookup(KEY) == (replace(default, out_latency=9), "user table")
    with tuning.override(ForwardConfig(out_warps=8)):
        assert tuning.lookup(KEY) == (ForwardConfig(out_warps=8), "override")
    assert tuning.lookup(KEY)[1] == "user table"


def test_the_nearest_is_counted_in_doublings(shipped: dict[str, Any]) -> None:
    def nearest(*keys: str) -> str:
        shipped.clear()
        shipped.update({key: entry(out_latency=5) for key in keys})
        return tuning.lookup(KEY)[1]

    size = "sm_90/bfloat16/P64/N128"
    near, far = f"{size}/H8/T4096", f"{size}/H8/T1024"
    assert nearest(far, near) == f"nearest: {near} (shipped table)"
    # A doubling of H counts as two of T.
    assert nearest(f"{size}/H16/T16384", f"{size}/H8/T32768") == f"nearest: {size}/H8/T32768 (shipped table)"
    assert nearest(f"{size}/H16/T16384", f"{size}/H8/T2048") == f"nearest: {size}/H16/T16384 (shipped table)"
    for other in ("float16/P64/N128", "bfloat16/P128/N128", "bfloat16/P64/N64"):
        assert nearest(f"sm_90/{other}/H8/T16384") == "default"


def test_architectures_of_a_generation_share_a_table() -> None:
    assert tuning.shipped_table("sm_103") == tuning.shipped_table("sm_100")
    assert tuning.shipped_table("sm_121") == tuning.shipped_table("sm_120")
    assert tuning.shipped_table("sm_89") == tuning.shipped_table("sm_80")
    assert tuning.shipped_table("sm_75")["entries"] == {}


# ---- tables


@pytest.mark.parametrize("arch", SHIPPED)
def test_shipped_tables(arch: str) -> None:
    table = tuning.shipped_table(arch)
    assert table["schema"] == tuning.SCHEMA and table["arch"] == arch
    for key in table["entries"]:
        assert key.startswith(f"{arch}/")
        assert tuning.lookup(key)[1] == "shipped table"
    # A table says where its numbers are from, or that there are none.
    assert bool(table["entries"]) == table["measured"]
    assert table["note"] if not table["measured"] else table["device"]


def test_there_is_a_table_for_every_generation() -> None:
    assert SHIPPED == ["sm_100", "sm_120", "sm_80", "sm_90"]
    assert len(tuning.shipped_table("sm_90")["entries"]) >= 10


DAMAGED = {
    "no JSON": "{",
    "nothing": "",
    "a list": "[]",
    "no schema": '{"entries": {}}',
    "an older version": '{"schema": 0, "entries": {}}',
    "a later version": f'{{"schema": {tuning.SCHEMA + 1}, "entries": {{}}}}',
    "no entries": '{"schema": 1}',
    "entries that are a list": '{"schema": 1, "entries": []}',
    "an entry without a configuration": f'{{"schema": 1, "entries": {{"{KEY}": {{}}}}}}',
    "a configuration that is a word": f'{{"schema": 1, "entries": {{"{KEY}": {{"config": "fast"}}}}}}',
    "another key": '{"schema": 1, "entries": {"P64": {"config": {}}}}',
} | {
    f"{field} {value}": json.dumps({"schema": 1, "entries": {KEY: {"config": {field: value}}}})
    for field, value in [
        ("speed", 1),
        ("segments", 1),
        ("out_warps", "8"),
        ("out_warps", 8.0),
        ("out_warps", True),
        ("out_warps", 0),
        ("tile_tokens", 0),
        ("tile_tokens", 48),
        ("tile_tokens", 512),
        ("out_latency", 11),
        ("out_tile_n", -64),
        ("chained", -1),
    ]
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_table_is_ignored_with_a_warning(
    damage: str, shipped: dict[str, Any], own_tables: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = own_tables / "tuned-sm_90.json"
    path.write_text(DAMAGED[damage])
    with caplog.at_level(logging.WARNING, logger="tilegym_mamba2"):
        assert tuning.lookup(KEY) == (tuning.default_config(KEY), "default")
        assert tuning.lookup(KEY)[1] == "default"
    # One warning, not one for each call.
    (record,) = caplog.records
    assert record.getMessage().startswith(f"ignoring the tuning table {path}: ")
    # The next save makes a good one of it.
    tuning.save_user_entries("sm_90", {KEY: entry(out_warps=8)})
    assert tuning.lookup(KEY)[1] == "user table"


def test_a_table_that_is_no_text_or_no_file_is_ignored(shipped: dict[str, Any], own_tables: Path) -> None:
    path = own_tables / "tuned-sm_90.json"
    path.write_bytes(b"\xff\xfe\x00")
    assert tuning.lookup(KEY)[1] == "default"
    path.unlink()
    path.mkdir()
    assert tuning.lookup(KEY)[1] == "default"


def test_a_table_that_changed_is_read_again(shipped: dict[str, Any], own_tables: Path) -> None:
    tuning.save_user_entries("sm_90", {KEY: entry(out_latency=4)})
    assert tuning.lookup(KEY)[0].out_latency == 4
    table = {"schema": tuning.SCHEMA, "entries": {KEY: entry(out_latency=5)}}
    path = own_tables / "tuned-sm_90.json"
    path.write_text(json.dumps(table))
    os.utime(path, (1, 1))
    assert tuning.lookup(KEY)[0].out_latency == 5


def test_what_no_table_may_hold_is_not_saved(own_tables: Path) -> None:
    with pytest.raises(
        ValueError, match="not a field of ForwardConfig with a whole number it takes: speed=1"
    ):
        tuning.save_user_entries("sm_90", {KEY: entry(speed=1)})
    assert not (own_tables / "tuned-sm_90.json").exists()


def save_many(worker: int, count: int) -> None:
    for k in range(count):
        key = f"sm_90/bfloat16/P64/N128/H{2**worker}/T{2**k}"
        tuning.save_user_entries("sm_90", {key: entry(segment_blocks=1 + k)})


def test_processes_that_save_at_once_lose_nothing(own_tables: Path) -> None:
    workers, count = 4, 12
    context = multiprocessing.get_context("fork")
    running = [context.Process(target=save_many, args=(k, count)) for k in range(workers)]
    for process in running:
        process.start()
    path = own_tables / "tuned-sm_90.json"
    seen = 0
    while any(process.is_alive() for process in running):
        if path.exists():
            # Whole at every moment.
            seen = max(seen, len(json.loads(path.read_text())["entries"]))
    for process in running:
        process.join()
        assert process.exitcode == 0
    assert seen > 0
    expected = {f"sm_90/bfloat16/P64/N128/H{2**w}/T{2**k}" for w in range(workers) for k in range(count)}
    assert set(json.loads(path.read_text())["entries"]) == expected
    assert sorted(p.name for p in own_tables.iterdir() if ".lock" not in p.name) == [path.name]


def test_a_save_within_a_tick_of_another_process_keeps_its_entry(own_tables: Path) -> None:
    near, path = KEY.replace("T16384", "T4096"), own_tables / "tuned-sm_90.json"
    tuning.save_user_entries("sm_90", {KEY: entry(out_latency=4)})
    assert set(tuning.user_table("sm_90")) == {KEY}
    modified = path.stat().st_mtime_ns
    path.write_text(json.dumps({"schema": 1, "entries": {KEY: entry(), near: entry()}}))
    os.utime(path, ns=(modified, modified))
    other = KEY.replace("T16384", "T1024")
    tuning.save_user_entries("sm_90", {other: entry()})
    assert set(tuning.user_table("sm_90")) == {KEY, near, other}


def test_a_save_that_fails_leaves_the_table_as_it_was(
    own_tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning.save_user_entries("sm_90", {KEY: entry(out_latency=4)})
    path = own_tables / "tuned-sm_90.json"
    before = path.read_text()

    def full(*paths: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        tuning.save_user_entries("sm_90", {KEY: entry(out_latency=5)})
    assert path.read_text() == before
    assert sorted(p.name for p in own_tables.iterdir() if ".lock" not in p.name) == [path.name]


def test_the_table_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert tuning.user_table_path("sm_90") == tmp_path / "tuned-sm_90.json"
    monkeypatch.delenv(tuning.CACHE_ENV)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert tuning.user_table_path("sm_90").parent.name == "tilegym-mamba2"


# ---- policy


def test_policy_follows_the_environment(shipped: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    shipped[KEY] = entry(out_latency=8)
    assert tuning.tune_mode() == "table"
    for value, source in (("off", "default"), ("table", "shipped table"), (" SEARCH ", "shipped table")):
        monkeypatch.setenv(tuning.TUNE_ENV, value)
        assert tuning.tune_mode() == value.strip().lower()
        assert tuning.lookup(KEY)[1] == source
    monkeypatch.setenv(tuning.TUNE_ENV, "")
    assert tuning.tune_mode() == "table"
    monkeypatch.setenv(tuning.TUNE_ENV, "always")
    with pytest.raises(ValueError, match="TILEGYM_MAMBA2_TUNE must be off, table or search, got 'always'"):
        tuning.lookup(KEY)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Problems that were searched for, each of which finds out_latency 9."""
    keys: list[str] = []

    def found(key: str, x: torch.Tensor, b: torch.Tensor) -> None:
        keys.append(key)
        tuning.save_user_entries("sm_90", {key: entry(out_latency=9)})

    monkeypatch.setattr(tuning, "_search", found)
    return keys


def test_search_is_for_those_who_ask_and_once_for_a_key(
    shipped: dict[str, Any], searches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "_may_search", lambda device: True)
    for mode in ("table", "off"):
        monkeypatch.setenv(tuning.TUNE_ENV, mode)
        assert tuning.config_for(*tensors()) == tuning.default_config(KEY)
    monkeypatch.setenv(tuning.TUNE_ENV, "search")
    monkeypatch.setenv("TILEGYM_DISABLE_AUTOTUNE", "1")
    assert tuning.config_for(*tensors()) == tuning.default_config(KEY)
    assert searches == []

    monkeypatch.setenv("TILEGYM_DISABLE_AUTOTUNE", "0")
    for tokens in (16384, 16383, 15000):
        assert tuning.config_for(*tensors(tokens=tokens)).out_latency == 9
    assert searches == [KEY]
    shipped[KEY.replace("N128", "N64")] = entry(out_latency=8)
    assert tuning.config_for(*tensors(n=64)).out_latency == 8
    assert searches == [KEY]


def test_a_search_that_found_nothing_is_not_repeated(
    shipped: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    monkeypatch.setattr(tuning, "_may_search", lambda device: True)
    monkeypatch.setattr(tuning, "_search", lambda key, x, b: tried.append(key))
    monkeypatch.setenv(tuning.TUNE_ENV, "search")
    for _ in range(3):
        assert tuning.config_for(*tensors()) == tuning.default_config(KEY)
    assert tried == [KEY]


def test_a_search_whose_table_cannot_be_written_holds_for_the_process(
    shipped: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tilegym_mamba2.bench import tune

    best = tuning.ForwardConfig(out_latency=9)

    def search(name: str, spec: Any, **_: Any) -> tune.TuneResult:
        return tune.TuneResult(name, KEY, "default", 2.0, 1.0, best, True, 2, [], 0.1)

    def refuse(*_: Any) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(tune, "search", search)
    monkeypatch.setattr(tuning, "save_user_entries", refuse)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(tuning, "_may_search", lambda device: True)
    monkeypatch.setenv(tuning.TUNE_ENV, "search")
    for tokens in (16384, 15000):
        assert tuning.config_for(*tensors(tokens=tokens)) == best
    assert "for this process only: read-only" in caplog.text


def test_tensors_on_the_cpu_are_never_searched_for(
    shipped: dict[str, Any], searches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tuning.TUNE_ENV, "search")
    tuning.config_for(torch.empty(1, 8, 1, 16), torch.empty(1, 8, 1, 16))
    assert searches == []


# ---- candidates

KEYS = [
    f"{arch}/{dtype}/P64/N{n}/H{heads}/T{tokens}"
    for arch, dtype, n, heads, tokens in itertools.product(
        ("sm_80", "sm_90", "sm_103"), ("bfloat16", "float32"), (64, 512), (8, 128), (1024, 65536)
    )
]


@pytest.mark.parametrize("key", KEYS)
def test_candidates_are_few_different_and_begin_with_the_one_in_use(key: str) -> None:
    found = tuning.candidates(key)
    assert 8 <= len(found) <= 30
    assert len(set(found)) == len(found)
    assert found[0] == tuning.lookup(key)[0]
    for config in found:
        wrong = [field for field, value in asdict(config).items() if not tuning._allowed(field, value)]
        assert not wrong


def test_candidates_begin_with_what_was_found_before() -> None:
    tuning.save_user_entries("sm_90", {KEY: entry(segment_blocks=96, out_latency=5)})
    first, *others = tuning.candidates(KEY)
    assert (first.segment_blocks, first.out_latency) == (96, 5)
    assert {config.segment_blocks for config in others} >= {48, 192}


# ---- results


def test_a_batch_row_does_not_depend_on_its_batch_and_no_run_on_chance() -> None:
    spec = replace(SPECS["bf16-slow"], batch_size=3, num_tokens=300)
    inputs = spec.get_sample_inputs(with_reference=False, with_backward=False, device="cpu")
    row = {name: inputs[name][:1] for name in ("x", "b", "c", "dt", "init_state")}
    with interpreter.interpret():
        first, second = (forward.mamba2_chunk_forward(**inputs) for _ in range(2))
        alone = forward.mamba2_chunk_forward(**inputs | row)
    for whole, again, one in zip(first, second, alone, strict=True):
        assert torch.equal(whole, again)
        assert torch.equal(whole[:1], one)
