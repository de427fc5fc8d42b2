"""Launches with arguments laid out once: what the binary wants, what the driver is given, and when."""

import ctypes
import gc
import re
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tilegym_mamba2.backends.cutile import inspection, launch, packed
from tilegym_mamba2.backends.cutile.launch import Launch, Seen, hinted
from tilegym_mamba2.backends.cutile.packed import Packed
from tilegym_mamba2.forms import recogniser
from tilegym_mamba2.spec import SPECS

GPU = torch.device("cuda", 0)
_PARAMETER = re.compile(r"Ordinal : 0x(\w+)\s+Offset  : 0x\w+\s+Size    : 0x(\w+)")

STEP = inspection.state_update_launches(replace(SPECS["decode-1"], batch_size=2))[0]
SCAN = replace(
    SPECS["published"], batch_size=1, num_tokens=600, num_heads=2, num_groups=1, state_size=32, head_size=32
)


def example() -> Launch:
    """A step of the decoding kernel on real tensors, without d, z, dt_bias or slots."""
    tensors = [torch.empty(arg.shape, dtype=arg.dtype) for arg in STEP.args if isinstance(arg, torch.Tensor)]
    free = iter(tensors)
    return STEP._replace(
        args=tuple(next(free) if isinstance(arg, torch.Tensor) else arg for arg in STEP.args)
    )


def values_of(item: Launch) -> list[Any]:
    pairs = zip(item.args, inspection.signature_of(item).parameters, strict=True)
    return [value for arg, constraint in pairs for value in packed.binary_values(arg, constraint)]


def sizes_in_binary(item: Launch) -> list[int]:
    """Bytes of each parameter, from the kernel's binary."""
    cubin = inspection.compile_cubin(item.kernel, inspection.signature_of(item), "sm_90")
    found = _PARAMETER.findall(inspection.dump_elf(cubin))
    return [size for _, size in sorted((int(at, 16), int(size, 16)) for at, size in found)]


def of_all_kinds() -> dict[str, Launch]:
    forward = inspection.forward_launches(SCAN, "sm_90")
    found = {inspection.name_of(item): item for item in forward}
    found["state_update"] = STEP
    found["chunk_rows, wide"] = forward[0]._replace(kernel=hinted(forward[0].kernel, wide=True))
    return found


@pytest.mark.parametrize("name", of_all_kinds())
def test_arguments_are_those_of_the_binary(name: str) -> None:
    item = of_all_kinds()[name]
    sizes = [ctypes.sizeof(value) for value in values_of(item)]
    assert sizes == sizes_in_binary(item) and len(sizes) > 10


def test_values_are_address_shape_and_strides_then_scalars() -> None:
    item = example()
    values = [value.value for value in values_of(item)]
    expected: list[Any] = []
    for arg in item.args[:13]:
        if isinstance(arg, torch.Tensor):
            expected += [0, *arg.shape, *arg.stride()]
        else:
            expected.append(arg)
    assert values[: len(expected)] == pytest.approx(expected)
    assert float("inf") in values and not any(isinstance(value, tuple) for value in values)


def test_what_has_no_binary_form_is_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        list(packed.binary_values(3, object()))


class Driver:
    """Notes what a launch would read, when it would read it."""

    def __init__(self, status: int = 0) -> None:
        self.read: list[tuple[Any, ...]] = []
        self.status = status
        self.before = lambda: None

    def cuLaunchKernel(self, function: Any, *rest: Any) -> tuple[int]:  # noqa: N802 - the driver's name
        *sizes, shared, stream, parameters, extra = rest
        self.before()
        pointers = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        addresses = [ctypes.c_uint64.from_address(pointers[i]).value for i in FIRST_OF_ARRAYS]
        self.read.append((function, tuple(sizes), shared, stream, addresses, extra))
        return (self.status,)


# Where among the arguments of `example` those of each array begin.
FIRST_OF_ARRAYS = [i for i, value in enumerate(values_of(STEP)) if type(value) is ctypes.c_uint64]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(packed, "driver", fake)
    return fake


def make(item: Launch) -> Packed:
    return Packed("function", item.grid, item.args, inspection.signature_of(item))


def test_each_launch_has_its_own_addresses(driver: Driver) -> None:
    ready = make(example())
    count = len(FIRST_OF_ARRAYS)
    for start in (1000, 5000):
        assert ready.launch(7, [start + i for i in range(count)])
    grid = (*STEP.grid, 1, 1)
    assert driver.read == [
        ("function", (*grid, 1, 1, 1), 0, 7, [start + i for i in range(count)], 0) for start in (1000, 5000)
    ]


def test_addresses_off_16_bytes_are_told_apart(driver: Driver) -> None:
    ready, count = make(example()), len(FIRST_OF_ARRAYS)
    aligned = [16 * (i + 1) for i in range(count)]
    assert ready.launch_aligned(7, aligned)
    for at in range(count):
        for off in (1, 2, 4, 8, 15):
            assert not ready.launch_aligned(7, [*aligned[:at], aligned[at] + off, *aligned[at + 1 :]])
    assert ready.launch_aligned(7, aligned) and len(driver.read) == 2


def test_two_threads_do_not_share_memory(driver: Driver) -> None:
    ready, inside, go_on = make(example()), threading.Event(), threading.Event()
    count = len(FIRST_OF_ARRAYS)

    def wait() -> None:
        driver.before = lambda: None
        inside.set()
        assert go_on.wait(10)

    driver.before = wait
    first = threading.Thread(target=ready.launch, args=(1, [1] * count))
    first.start()
    assert inside.wait(10)
    ready.launch(2, [2] * count)
    go_on.set()
    first.join()
    assert [(stream, addresses) for _, _, _, stream, addresses, _ in driver.read] == [
        (2, [2] * count),
        (1, [1] * count),
    ]


def test_tensors_do_not_live_on(driver: Driver) -> None:
    item = example()
    first = weakref.ref(item.args[0])
    ready = make(item)
    ready.launch(7, [0] * len(FIRST_OF_ARRAYS))
    del item
    gc.collect()
    assert first() is None


# ---- when a plan's launches are packed


class Gpu:
    """What the launcher asks of torch and of the driver, and what it told them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
        self.driver, self.capturing = driver, False
        self.loaded: list[str] = []
        self.enqueued: list[Launch] = []
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
        monkeypatch.setattr(launch, "signature_of", inspection.signature_of)
        monkeypatch.setattr(launch, "_enqueue", lambda item, stream: self.enqueued.append(item))
        monkeypatch.setattr(launch, "_compiled", set())
        monkeypatch.setattr(packed, "_functions", {})
        monkeypatch.setattr(packed, "export_kernel", self._export)
        driver.cuLibraryLoadData = lambda code, *rest: (0, code)
        driver.cuLibraryGetKernel = lambda library, name: (0, len(self.loaded))
        driver.CUfunction = lambda handle: f"function {handle}"

    def _export(self, kernel: Any, signatures: Any, file: Any, **options: Any) -> None:
        assert options == {"gpu_code": "sm_90", "output_format": "cubin"}
        self.loaded.append(signatures[0].symbol)
        file.write(b"binary")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> Iterator[Gpu]:
    yield Gpu(monkeypatch, driver)


def test_repeated_launches_are_packed_at_once_and_loaded_once(gpu: Gpu) -> None:
    for _ in range(2):
        seen = Seen(repeats=True)
        for _ in range(3):
            launch.run_plan([example()], GPU, "op", seen)
    assert len(gpu.driver.read) == 6 and len(gpu.loaded) == 1 and not gpu.enqueued
    item = example()
    launch.run_plan([item], GPU, "op", seen)
    assert gpu.driver.read[-1][4] == [arg.data_ptr() for arg in item.args if isinstance(arg, torch.Tensor)]


def test_what_does_not_repeat_is_not_packed(gpu: Gpu) -> None:
    seen = Seen()
    for _ in range(2):
        launch.run_plan([example()], GPU, "op", seen)
    assert len(gpu.enqueued) == 2 and not gpu.driver.read and not gpu.loaded


def test_chained_launches_go_through_cuda_tile(gpu: Gpu) -> None:
    seen = Seen(repeats=True)
    for _ in range(2):
        launch.run_plan([example()._replace(chained=True)], GPU, "op", seen)
    assert len(gpu.enqueued) == 2 and not gpu.driver.read


def test_lanes_go_through_cuda_tile(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(launch, "_run_lanes", lambda lanes, device: ran.append(lanes))
    seen, lanes = Seen(repeats=True), launch.Lanes(([example()], [example()]))
    for _ in range(2):
        launch.run_plan([example(), lanes], GPU, "op", seen)
    assert ran == [lanes, lanes] and len(gpu.enqueued) == 2 and not gpu.driver.read


def test_what_the_driver_refuses_goes_through_cuda_tile(gpu: Gpu) -> None:
    seen = Seen(repeats=True)
    gpu.driver.status = 201
    items = [example(), example()]
    for item in items:
        launch.run_plan([item], GPU, "op", seen)
    assert gpu.enqueued == items


def test_a_binary_that_does_not_load_goes_through_cuda_tile(gpu: Gpu) -> None:
    gpu.driver.cuLibraryLoadData = lambda code, *rest: (200, None)
    seen = Seen(repeats=True)
    launch.run_plan([example()], GPU, "op", seen)
    launch.run_plan([example()], GPU, "op", seen)
    assert len(gpu.enqueued) == 2 and not gpu.driver.read


def test_nothing_is_loaded_while_a_graph_is_captured(gpu: Gpu) -> None:
    gpu.capturing = True
    with pytest.raises(RuntimeError, match="warm up first"):
        launch.run_plan([example()], GPU, "op", Seen(repeats=True))
    # Compiled by cuda-tile: its own copy.
    gpu.capturing = False
    launch.run_plan([example()], GPU, "op", Seen())
    gpu.capturing = True
    seen = Seen(repeats=True)
    launch.run_plan([example()], GPU, "op", seen)
    assert len(gpu.enqueued) == 2 and not gpu.loaded
    gpu.capturing = False
    launch.run_plan([example()], GPU, "op", seen)
    assert len(gpu.driver.read) == 1
    gpu.capturing = True
    launch.run_plan([example()], GPU, "op", Seen(repeats=True))
    assert len(gpu.driver.read) == 2 and len(gpu.loaded) == 1


# ---- what it is that repeats


def tensors() -> list[torch.Tensor]:
    return [torch.zeros(2, 3, 4), torch.zeros(3), torch.zeros(2, 4, dtype=torch.bfloat16)]


def test_tensors_of_the_same_form_are_recognised() -> None:
    fits = recogniser(tensors())
    assert fits(*tensors())
    # Of other memory, values and alignment.
    assert fits(torch.ones(2, 3, 4), torch.ones(4)[1:], torch.ones(2, 4, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "other",
    {
        "shape": torch.zeros(4),
        "size 1": torch.zeros(1),
        "rank": torch.zeros(3, 1),
        "strides": torch.zeros(6)[::2],
        "expanded": torch.zeros(1).expand(3),
        "dtype": torch.zeros(3, dtype=torch.float16),
        "device": torch.zeros(3, device="meta"),
        "gradient": torch.zeros(3, requires_grad=True),
        "type": torch.nn.Parameter(torch.zeros(3), requires_grad=False),
        "negative bit": torch._neg_view(torch.zeros(3)),
        "sparse": torch.zeros(3).to_sparse(),
        "no tensor": [0.0, 0.0, 0.0],
        "None": None,
    }.items(),
    ids=lambda pair: pair[0],
)
def test_tensors_of_another_form_are_not(other: tuple[str, Any]) -> None:
    first, _, last = tensors()
    assert not recogniser([first, torch.zeros(3), last])(first, other[1], last)


def test_without_torchs_guards_nothing_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilegym_mamba2.forms._TensorGuards", None)
    assert not recogniser(tensors())(*tensors())
