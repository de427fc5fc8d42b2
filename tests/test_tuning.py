"""Configurations: keys, the order of look-up, the user's table, and that no result depends on the batch."""

import dataclasses
import json
import logging
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from tilegym_mamba2 import interpreter, mamba2_chunk_forward
from tilegym_mamba2.backends.cutile import tuning
from tilegym_mamba2.backends.cutile.tuning import ForwardConfig

KEY = "sm_90/bfloat16/P64/N128/H8/T16384"
ARCHS = ("sm_80", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(tuning.CACHE_ENV, str(tmp_path))
    for name in (tuning.TUNE_ENV, "TILEGYM_DISABLE_AUTOTUNE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def tensors(batch: int = 1, tokens: int = 1000, heads: int = 8, **options: Any) -> tuple[torch.Tensor, ...]:
    x = torch.empty(batch, tokens, heads, 64, dtype=torch.bfloat16, device="meta", **options)
    return x, torch.empty(batch, tokens, 1, 128, dtype=torch.bfloat16, device="meta")


def entry(**config: int) -> dict[str, Any]:
    return {"config": config, "median_us": 1.0, "device": "a GPU"}


# ---- keys


def test_keys_do_not_hold_batch_exact_tokens_or_strides() -> None:
    x, b = tensors()
    key = tuning.problem_key(x, b)
    assert key == "sm_90/bfloat16/P64/N128/H8/T1024"
    assert tuning.problem_key(*tensors(batch=7)) == key
    assert tuning.problem_key(*tensors(tokens=1024)) == tuning.problem_key(*tensors(tokens=1300)) == key
    wide = torch.empty(1, 1000, 8, 200, dtype=torch.bfloat16, device="meta")[..., :64]
    assert tuning.problem_key(wide, b) == key
    assert tuning.problem_key(*tensors(tokens=4096)) != key
    assert tuning.problem_key(*tensors(heads=64)) != key


def test_a_key_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match=r"key must look like sm_90/.*, got 'sm_90/H8'"):
        tuning.default_config("sm_90/H8")


# ---- order of look-up


def test_shipped_tables_are_sound() -> None:
    for arch in ARCHS:
        table = tuning.shipped_table(arch)
        assert table["measured"] is (arch == "sm_90")
        for key in table["entries"]:
            assert tuning.lookup(key)[1] == "shipped table"
    assert tuning.shipped_table("sm_103") == tuning.shipped_table("sm_100")
    assert len(tuning.shipped_table("sm_90")["entries"]) >= 10


def test_user_table_goes_before_the_shipped_one() -> None:
    config, source = tuning.lookup(KEY)
    assert source == "shipped table"
    tuning.save_user_entries("sm_90", {KEY: entry(out_latency=9)})
    mine, source = tuning.lookup(KEY)
    assert source == "user table"
    assert mine.out_latency == 9 != config.out_latency


def test_nearest_entry_of_the_same_sizes_else_default() -> None:
    near, source = tuning.lookup("sm_90/bfloat16/P64/N128/H8/T262144")
    assert source == f"nearest: {KEY} (shipped table)"
    assert near == tuning.lookup(KEY)[0]
    for other in ("sm_90/float16/P64/N128/H8/T16384", "sm_90/bfloat16/P256/N128/H8/T16384"):
        assert tuning.lookup(other) == (tuning.default_config(other), "default")
    tuning.save_user_entries("sm_90", {"sm_90/bfloat16/P64/N128/H8/T131072": entry(out_latency=8)})
    assert tuning.lookup("sm_90/bfloat16/P64/N128/H8/T262144")[1].endswith("T131072 (user table)")


def test_override_goes_before_everything_and_ends() -> None:
    config = ForwardConfig(out_latency=7)
    with tuning.override(config):
        assert tuning.lookup(KEY) == (config, "override")
    assert tuning.lookup(KEY)[1] == "shipped table"


def test_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.save_user_entries("sm_90", {KEY: entry(out_latency=9)})
    monkeypatch.setenv(tuning.TUNE_ENV, "off")
    assert tuning.lookup(KEY) == (tuning.default_config(KEY), "default")
    monkeypatch.setenv(tuning.TUNE_ENV, "search")
    assert tuning.tune_mode() == "search"
    monkeypatch.setenv("TILEGYM_DISABLE_AUTOTUNE", "1")
    assert tuning.tune_mode() == "table"
    monkeypatch.setenv(tuning.TUNE_ENV, "always")
    with pytest.raises(ValueError, match="TILEGYM_MAMBA2_TUNE must be off, table or search, got 'always'"):
        tuning.lookup(KEY)


def test_search_runs_once_for_a_key_that_no_table_has(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    key = "sm_90/bfloat16/P64/N32/H8/T1024"
    x = torch.empty(1, 1024, 8, 64, dtype=torch.bfloat16, device="meta")
    b = torch.empty(1, 1024, 1, 32, dtype=torch.bfloat16, device="meta")

    def search(key: str, x: torch.Tensor, b: torch.Tensor) -> None:
        searched.append(key)
        tuning.save_user_entries("sm_90", {key: entry(out_latency=5)})

    monkeypatch.setattr(tuning, "_search", search)
    monkeypatch.setattr(tuning, "_searched", set())
    monkeypatch.setattr(tuning, "_may_search", lambda device: True)
    assert tuning.config_for(x, b) == tuning.default_config(key)
    assert searched == []
    monkeypatch.setenv(tuning.TUNE_ENV, "search")
    assert tuning.config_for(x, b).out_latency == 5
    assert tuning.config_for(x, b).out_latency == 5
    assert searched == [key]


def test_candidates_start_with_the_one_in_use() -> None:
    for key in (KEY, "sm_90/bfloat16/P64/N512/H8/T1024", "sm_100/float32/P128/N64/H128/T65536"):
        found = tuning.candidates(key)
        assert found[0] == tuning.lookup(key)[0]
        assert len(set(found)) == len(found) <= 30
        for config in found:
            assert all(value >= 0 for value in dataclasses.astuple(config))


# ---- the user's table


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{not json", "Expecting property name"),
        ('{"schema": 99, "entries": {}}', "schema 99, expected 1"),
        ("[]", "schema 'list', expected 1"),
        ('{"schema": 1}', "entries"),
        (json.dumps({"schema": 1, "entries": {KEY: entry(out_speed=3)}}), "out_speed=3"),
        (json.dumps({"schema": 1, "entries": {KEY: entry(out_latency=-1)}}), "out_latency=-1"),
        (json.dumps({"schema": 1, "entries": {"sm_90/x": entry()}}), "key must look like"),
    ],
)
def test_damaged_table_is_ignored_with_a_warning(
    content: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tuning.user_table_path("sm_90")
    path.write_text(content)
    with caplog.at_level(logging.WARNING, "tilegym_mamba2"):
        assert tuning.lookup(KEY)[1] == "shipped table"
    assert f"ignoring the tuning table {path}" in caplog.text
    assert why in caplog.text
    tuning.save_user_entries("sm_90", {KEY: entry(out_latency=9)})
    assert tuning.lookup(KEY)[1] == "user table"


def save_many(folder: str, worker: int) -> None:
    import os

    os.environ[tuning.CACHE_ENV] = folder
    for i in range(10):
        tuning.save_user_entries("sm_90", {f"sm_90/bfloat16/P64/N128/H{2**worker}/T{2**i}": entry()})


def test_processes_do_not_lose_each_others_entries(own_folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=save_many, args=(str(own_folder), worker)) for worker in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert len(tuning.user_table("sm_90")) == 20
    left = {path.name for path in own_folder.iterdir()}
    assert left <= {"tuned-sm_90.json", "tuned-sm_90.json.lock"}


def test_an_entry_that_would_not_load_is_not_saved() -> None:
    with pytest.raises(ValueError, match="out_speed=3"):
        tuning.save_user_entries("sm_90", {KEY: entry(out_speed=3)})
    assert tuning.user_table("sm_90") == {}


# ---- results


def test_segments_cover_the_tokens_and_follow_no_batch() -> None:
    for config in (ForwardConfig(), ForwardConfig(segment_blocks=264, min_segment_tiles=1)):
        for tokens in (1, 63, 64, 65, 1000, 4096, 100_000):
            for blocks in (1, 8, 50, 300):
                tiles, segments = config.segments(tokens, blocks)
                assert tiles * segments * config.tile_tokens >= tokens
                assert (segments - 1) * tiles * config.tile_tokens < tokens


def test_rows_do_not_depend_on_the_batch_and_runs_not_on_chance() -> None:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x, b, c = (normal(3, 600, heads, 32).bfloat16() for heads in (2, 1, 1))
    a, d, dt, init_state = -normal(2).abs(), normal(2), normal(3, 600, 2).abs(), normal(3, 2, 32, 32)
    with interpreter.interpret():
        whole = mamba2_chunk_forward(x, a, b, c, d, dt, init_state, backend="cutile")
        again = mamba2_chunk_forward(x, a, b, c, d, dt, init_state, backend="cutile")
        alone = mamba2_chunk_forward(x[:1], a, b[:1], c[:1], d, dt[:1], init_state[:1], backend="cutile")
    for first, second, row in zip(whole, again, alone, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first[:1], row)
