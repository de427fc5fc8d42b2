"""Launches in lanes: their order, one after the other and on streams."""

from typing import Any

import pytest
import torch

from tilegym_mamba2.backends.cutile import launch
from tilegym_mamba2.backends.cutile.launch import Lanes, Launch

CUDA = torch.device("cuda", 0)


def named(name: str, chained: bool = False) -> Launch:
    return Launch(name, (1,), (), {}, chained)


class Stream:
    """Writes down what it is told."""

    def __init__(self, name: str, told: list[tuple[str, ...]]) -> None:
        self.cuda_stream, self._told = name, told

    def wait_stream(self, other: "Stream") -> None:
        self._told.append((self.cuda_stream, "waits for", other.cuda_stream))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    told: list[tuple[str, ...]] = []
    main, sides = Stream("main", told), [Stream("side 1", told), Stream("side 2", told)]

    def enqueue(item: Launch, stream: Any) -> None:
        if item.kernel == "broken":
            raise RuntimeError("no such kernel")
        told.append((stream, "runs", item.kernel))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: "main", raising=False)
    monkeypatch.setattr(launch, "_side_streams", lambda device, count: sides[:count])
    monkeypatch.setattr(launch, "_enqueue", enqueue)
    return told


def test_lanes_one_after_the_other() -> None:
    work = [named("before"), Lanes(([named("a1"), named("a2")], [named("b1")])), named("after")]
    assert [item.kernel for item in launch.in_turn(work)] == ["before", "a1", "b1", "a2", "after"]


def test_lanes_wait_for_what_is_before_them_and_what_is_after_them_waits(told: list[tuple[str, ...]]) -> None:
    lanes = Lanes(([named("a1"), named("a2")], [named("b1")], [named("c1"), named("c2")]))
    launch.run([named("before"), lanes, named("after")], CUDA)
    assert told == [
        ("main", "runs", "before"),
        ("side 1", "waits for", "main"),
        ("side 2", "waits for", "main"),
        ("main", "runs", "a1"),
        ("side 1", "runs", "b1"),
        ("side 2", "runs", "c1"),
        ("main", "runs", "a2"),
        ("side 2", "runs", "c2"),
        ("main", "waits for", "side 1"),
        ("main", "waits for", "side 2"),
        ("main", "runs", "after"),
    ]


def test_lanes_are_joined_when_a_launch_fails(told: list[tuple[str, ...]]) -> None:
    lanes = Lanes(([named("a1"), named("broken")], [named("b1"), named("b2")]))
    with pytest.raises(RuntimeError, match="no such kernel"):
        launch.run([lanes, named("after")], CUDA)
    assert told[-1] == ("main", "waits for", "side 1") and ("side 1", "runs", "b1") in told
    assert not any("after" in line for line in told)


@pytest.mark.parametrize("chained", [False, True])
def test_only_chained_launches_go_past_the_module(chained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(launch, "launch_directly", lambda *args, **options: calls.append(("past", options)))
    monkeypatch.setattr(launch.ct, "launch", lambda *args: calls.append(("through", {})))
    launch._enqueue(named("kernel", chained), 0)
    assert calls == [("past", {"programmatic_dependent_launch": True}) if chained else ("through", {})]
