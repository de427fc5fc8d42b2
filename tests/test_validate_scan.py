"""Each wrong argument of the full scan and of the decoding step, and what the message says."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilegym_mamba2 import (
    BackendUnavailable,
    interpreter,
    mamba2_chunk_scan,
    mamba2_state_update,
    validate_scan,
)

INF = math.inf


def z(*shape: int, dtype: torch.dtype = torch.float32, device: str | None = None) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


def i(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def scan_arguments(B: int = 2, dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    """T 16, H 4, P 8, G 1, N 32; with a gate, so that no call is a bare one."""
    arguments = {
        "x": z(B, 16, 4, 8, dtype=dtype),
        "dt": z(B, 16, 4),
        "a": z(4),
        "b": z(B, 16, 1, 32, dtype=dtype),
        "c": z(B, 16, 1, 32, dtype=dtype),
        "z": z(B, 16, 4, 8, dtype=dtype),
    }
    return arguments | changes


def scan(arguments: dict[str, Any]) -> Any:
    arguments = dict(arguments)
    positional = [arguments.pop(name) for name in ("x", "dt", "a", "b", "c")]
    return mamba2_chunk_scan(*positional, **({"backend": "torch"} | arguments))


LIMIT_ERRORS = [
    (
        {"dt_limit": np.array([0.0, 1.0])},
        TypeError,
        "dt_limit must be two numbers (low, high), got array([0., 1.])",
    ),
    (
        {"dt_limit": (np.array([0.0, 1.0]), INF)},
        TypeError,
        "dt_limit must be two numbers (low, high), got numpy.ndarray array([0., 1.]) for low",
    ),
    (
        {"dt_limit": (False, INF)},
        TypeError,
        "dt_limit must be two numbers (low, high), got bool False for low",
    ),
    ({"dt_limit": (0, True)}, TypeError, "dt_limit must be two numbers (low, high), got bool True for high"),
]
NESTED = torch.nested.nested_tensor([z(16, 4, 8), z(15, 4, 8)])
SPARSE_ERRORS = [
    ({"d": z(4).to_sparse()}, TypeError, "d must be a dense (strided) tensor, got layout torch.sparse_coo"),
    ({"z": NESTED}, TypeError, "z must be a dense (strided) tensor, got a nested one"),
    ({"a": z(4).to_sparse()}, TypeError, "a must be a dense (strided) tensor, got layout torch.sparse_coo"),
]
NUMPY_BOOL = f"numpy.{np.bool_.__name__}"
SCAN_ERRORS = [
    ({"x": z(2, 16, 4)}, ValueError, "x must have shape (B, T, H, P), got (2, 16, 4)"),
    ({"dt": z(2, 16)}, ValueError, "dt must have shape (B, T, H) = (2, 16, 4), got (2, 16)"),
    ({"b": None}, TypeError, "b must be a torch.Tensor, got NoneType"),
    ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
    ({"chunk_size": 6.5}, TypeError, "chunk_size must be an integer, got float 6.5"),
    ({"d": z(3)}, ValueError, "d must have shape (H,) = (4,) or (H, P) = (4, 8), got (3,)"),
    ({"d": z(8, 4)}, ValueError, "d must have shape (H,) = (4,) or (H, P) = (4, 8), got (8, 4)"),
    ({"d": 1.0}, TypeError, "d must be a torch.Tensor or None, got float"),
    ({"d": z(4, dtype=torch.float16)}, TypeError, "d must have dtype float32, got float16"),
    ({"z": z(2, 16, 4)}, ValueError, "z must have shape (B, T, H, P) = (2, 16, 4, 8), got (2, 16, 4)"),
    (
        {"z": z(2, 16, 4, 8, dtype=torch.bfloat16)},
        TypeError,
        "z must have dtype float32 like x, got bfloat16",
    ),
    ({"z": z(2, 16, 4, 8, device="meta")}, ValueError, "z must be on cpu like x, got meta"),
    ({"z": np.zeros((2, 16, 4, 8))}, TypeError, "z must be a torch.Tensor or None, got ndarray"),
    ({"dt_bias": z(1)}, ValueError, "dt_bias must have shape (H,) = (4,), got (1,)"),
    ({"dt_bias": z(4, dtype=torch.int64)}, TypeError, "dt_bias must have dtype float32, got int64"),
    ({"dt_softplus": 1}, TypeError, "dt_softplus must be True or False, got int 1"),
    (
        {"dt_softplus": np.False_},
        TypeError,
        f"dt_softplus must be True or False, got {NUMPY_BOOL} {np.False_!r}",
    ),
    ({"dt_softplus": None}, TypeError, "dt_softplus must be True or False, got NoneType None"),
    ({"dt_limit": 0.1}, TypeError, "dt_limit must be two numbers (low, high), got 0.1"),
    ({"dt_limit": (0.1,)}, TypeError, "dt_limit must be two numbers (low, high), got (0.1,)"),
    (
        {"dt_limit": (0.1, None)},
        TypeError,
        "dt_limit must be two numbers (low, high), got NoneType None for high",
    ),
    (
        {"dt_limit": (0.2, 0.1)},
        ValueError,
        "dt_limit must be (low, high) with 0 ≤ low ≤ high, got (0.2, 0.1)",
    ),
    ({"dt_limit": (INF, INF)}, ValueError, "dt_limit must leave finite steps, got (inf, inf)"),
    (
        {"dt_limit": (-0.1, 0.5)},
        ValueError,
        "dt_limit must be (low, high) with 0 ≤ low ≤ high, got (-0.1, 0.5)",
    ),
    (
        {"dt_limit": (-INF, -INF)},
        ValueError,
        "dt_limit must be (low, high) with 0 ≤ low ≤ high, got (-inf, -inf)",
    ),
    (
        {"dt_limit": (-INF, INF)},
        ValueError,
        "dt_limit must be (low, high) with 0 ≤ low ≤ high, got (-inf, inf)",
    ),
    *SPARSE_ERRORS,
    *LIMIT_ERRORS,
    (
        {"dt_limit": (0.0, math.nan)},
        ValueError,
        "dt_limit must be (low, high) with 0 ≤ low ≤ high, got (0.0, nan)",
    ),
    (
        {"init_state": z(1, 4, 8, 32)},
        ValueError,
        "init_state must have shape (B, H, P, N) = (2, 4, 8, 32), got (1, 4, 8, 32)",
    ),
    (
        {"init_state": z(2, 4, 8, 32, dtype=torch.float16)},
        TypeError,
        "init_state must have dtype float64, float32 or bfloat16, got float16",
    ),
    (
        {"state_dtype": torch.float16},
        TypeError,
        "state_dtype must be float64, float32, bfloat16 or None, got float16",
    ),
    (
        {"state_dtype": "float32"},
        TypeError,
        "state_dtype must be float64, float32, bfloat16 or None, got 'float32'",
    ),
    ({"return_chunk_states": 1}, TypeError, "return_chunk_states must be True or False, got int 1"),
    ({"check": "yes"}, TypeError, "check must be True or False, got str 'yes'"),
    ({"seq_lens": i(16)}, ValueError, "seq_lens must have shape (B,) = (2,), got (1,)"),
    ({"seq_lens": z(2)}, TypeError, "seq_lens must have dtype int32 or int64, got float32"),
    ({"seq_lens": [16, 16]}, TypeError, "seq_lens must be a torch.Tensor or None, got list"),
    ({"seq_lens": i(3, 17)}, ValueError, "seq_lens must be from 0 to T = 16, got 17 at index 1"),
    ({"seq_lens": i(-1, 3)}, ValueError, "seq_lens must be from 0 to T = 16, got -1 at index 0"),
    ({"cu_seqlens": i(0, 16)}, ValueError, "cu_seqlens needs x with B of 1, got x of shape (2, 16, 4, 8)"),
]

PACKED_ERRORS = [
    ({"cu_seqlens": i(0)}, ValueError, "cu_seqlens must have shape (S + 1,) with S of at least 1, got (1,)"),
    (
        {"cu_seqlens": z(2, 2, dtype=torch.int32)},
        ValueError,
        "cu_seqlens must have shape (S + 1,) with S of at least 1, got (2, 2)",
    ),
    ({"cu_seqlens": z(3)}, TypeError, "cu_seqlens must have dtype int32 or int64, got float32"),
    (
        {"cu_seqlens": i(0, 16).to("meta")},
        ValueError,
        "cu_seqlens must be on cpu like x, got meta",
    ),
    ({"cu_seqlens": i(1, 16)}, ValueError, "cu_seqlens must begin with 0, got 1"),
    (
        {"cu_seqlens": i(0, 9, 5, 16)},
        ValueError,
        "cu_seqlens must not decrease, got 5 after 9 at index 2",
    ),
    ({"cu_seqlens": i(0, 9, 17)}, ValueError, "cu_seqlens must end at T = 16 or before, got 17"),
    (
        {"cu_seqlens": i(0, 9, 16), "init_state": z(3, 4, 8, 32)},
        ValueError,
        "init_state must have shape (S, H, P, N) = (2, 4, 8, 32), got (3, 4, 8, 32)",
    ),
    (
        {"cu_seqlens": i(0, 16), "seq_lens": i(16)},
        ValueError,
        "cu_seqlens and seq_lens must not both be given: packed rows have no padding",
    ),
]


@pytest.mark.parametrize(("changes", "kind", "message"), SCAN_ERRORS, ids=[m for _, _, m in SCAN_ERRORS])
def test_scan_errors(changes: dict[str, Any], kind: type, message: str) -> None:
    with pytest.raises(kind) as raised:
        scan(scan_arguments(**changes))
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("changes", "kind", "message"), [case for case in SCAN_ERRORS if "z" not in case[0]], ids=str
)
def test_errors_without_another_option(changes: dict[str, Any], kind: type, message: str) -> None:
    """The same, though such calls may be those of `mamba2_chunk_forward`."""
    with pytest.raises(kind) as raised:
        scan(scan_arguments(z=None, **changes))
    assert str(raised.value) == message
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


@pytest.mark.parametrize("options", [{}, {"z": z(2, 16, 4, 8)}], ids=["bare", "gated"])
@pytest.mark.parametrize("backend", ["no such backend", "tilegym"])
def test_a_backend_that_cannot_run_is_refused_by_the_name_of_the_scan(
    backend: str, options: dict[str, Any]
) -> None:
    with pytest.raises(BackendUnavailable, match="^mamba2_chunk_scan(:| has no) backend"):
        scan(scan_arguments(z=None) | options | {"backend": backend, "x": z(2, 16, 4, 8)})


def test_under_autocast_a_wrong_shape_is_what_the_error_is_about() -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError) as raised:
        scan(scan_arguments(z=None, d=z(3), b=z(2, 16, 1, 32, dtype=torch.bfloat16)))
    assert str(raised.value) == "d must have shape (H,) = (4,) or (H, P) = (4, 8), got (3,)"


@pytest.mark.parametrize(("changes", "kind", "message"), PACKED_ERRORS, ids=[m for _, _, m in PACKED_ERRORS])
def test_errors_of_packed_calls(changes: dict[str, Any], kind: type, message: str) -> None:
    with pytest.raises(kind) as raised:
        scan(scan_arguments(B=1, **changes))
    assert str(raised.value) == message


def filled(index: tuple[int, ...], value: float, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = torch.zeros(shape)
    tensor[index] = value
    return tensor


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": filled((2,), 0.5, (4,))}, "a must be ≤ 0, got 0.5 at index 2"),
        ({"a": filled((0,), math.nan, (4,))}, "a must be ≤ 0, got nan at index 0"),
        ({"dt": filled((1, 3, 0), -0.25, (2, 16, 4))}, "dt must be ≥ 0, got -0.25 at index (1, 3, 0)"),
        (
            {"dt": filled((1, 3, 0), math.nan, (2, 16, 4)), "dt_softplus": True},
            "dt as used must be ≥ 0, got nan at index (1, 3, 0)",
        ),
        (
            {"dt": filled((0, 3, 0), -1, (2, 16, 4)), "seq_lens": i(4, 0)},
            "dt must be ≥ 0, got -1 at index (0, 3, 0)",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("bare", [True, False])
def test_values_are_checked_on_request(changes: dict[str, Any], message: str, bare: bool) -> None:
    arguments = scan_arguments(**changes) | ({"z": None} if bare else {})
    scan(arguments)
    scan(arguments | {"check": False})
    with pytest.raises(ValueError) as raised:
        scan(arguments | {"check": True})
    assert str(raised.value) == message


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dt": filled((0, 4, 0), -1.0, (2, 16, 4)), "seq_lens": i(4, 16)},
        {"dt": filled((0, 4, 0), -1.0, (2, 16, 4)), "dt_softplus": True},
        {"dt": filled((0, 4, 0), -1.0, (2, 16, 4)), "dt_bias": torch.ones(4)},
        {"dt": filled((0, 4, 0), -1.0, (2, 16, 4)), "dt_limit": (0.001, 0.1)},
        {"seq_lens": i(0, 16, dtype=torch.int64)},
        {"dt_limit": [0, 1]},
        {"d": z(4, 8), "dt_bias": z(4), "init_state": z(2, 4, 8, 32, dtype=torch.float64)},
        {"chunk_size": np.int64(8), "state_dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_what_passes_every_check(changes: dict[str, Any]) -> None:
    out, final_state = scan(scan_arguments(**changes) | {"check": True})
    assert out.shape == (2, 16, 4, 8) and final_state.shape == (2, 4, 8, 32)


def test_tokens_past_the_last_sequence_are_not_checked() -> None:
    arguments = scan_arguments(B=1, dt=filled((0, 12, 0), -1.0, (1, 16, 4)))
    scan(arguments | {"cu_seqlens": i(0, 5, 12), "check": True})
    with pytest.raises(ValueError, match="dt must be ≥ 0, got -1"):
        scan(arguments | {"cu_seqlens": i(0, 5, 13), "check": True})


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"cu_seqlens": i(0, 9, 5)}, "cu_seqlens must not decrease, got 5 after 9 at index 2"),
        ({"cu_seqlens": i(0, 17)}, "cu_seqlens must end at T = 16 or before, got 17"),
        ({"seq_lens": i(17)}, "seq_lens must be from 0 to T = 16, got 17 at index 0"),
    ],
    ids=str,
)
def test_lengths_are_among_the_values_checked(lengths: dict[str, torch.Tensor], message: str) -> None:
    """What `check=True` calls, and for lengths on a device is the only one to look at them."""
    arguments = {"cu_seqlens": None, "seq_lens": None} | lengths
    with pytest.raises(ValueError) as raised:
        validate_scan.check_scan_values(
            z(1, 16, 4), z(4), None, arguments["cu_seqlens"], arguments["seq_lens"], False, (0.0, INF)
        )
    assert str(raised.value) == message


@pytest.mark.gpu
def test_lengths_on_a_gpu_are_checked_on_request() -> None:
    arguments = scan_arguments(B=1, cu_seqlens=i(0, 9, 5))
    arguments = {name: value.cuda() for name, value in arguments.items()}
    scan(arguments)
    with pytest.raises(ValueError, match="cu_seqlens must not decrease, got 5 after 9 at index 2"):
        scan(arguments | {"check": True})


def test_an_error_comes_before_the_choice_of_a_backend() -> None:
    with pytest.raises(ValueError, match="d must have shape"):
        scan(scan_arguments(d=z(5), backend="no such backend"))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"dt": z(2, 16, 4, dtype=torch.float64)}, "dt"),
        ({"init_state": z(2, 4, 8, 32, dtype=torch.float64)}, "init_state"),
        ({"state_dtype": torch.float64}, "state_dtype"),
        (scan_arguments(dtype=torch.float64), "x, b, c, z"),
    ],
    ids=["dt", "init_state", "state_dtype", "all"],
)
def test_the_kernels_refuse_float64_by_name(changes: dict[str, Any], name: str) -> None:
    with interpreter.interpret(), pytest.raises(TypeError) as raised:
        scan(scan_arguments(**changes) | {"backend": "cutile"})
    takes = "backend 'cutile' takes bfloat16, float16 and float32"
    assert str(raised.value) == f"mamba2_chunk_scan: {takes}, got float64 for {name}; use backend='torch'"
    if name != "state_dtype":
        bare = scan_arguments(**changes) | {"z": None, "backend": "cutile"}
        with interpreter.interpret(), pytest.raises(TypeError) as raised:
            scan(bare)
        name = name.removesuffix(", z")
        assert str(raised.value) == f"mamba2_chunk_scan: {takes}, got float64 for {name}; use backend='torch'"


# ---- the decoding step


def step_arguments(K: int | None = 2, slots: int = 3, **changes: Any) -> dict[str, Any]:
    """B 3, H 4, P 8, G 2, N 16."""
    lead = (3,) if K is None else (3, K)
    arguments = {
        "state": z(slots, 4, 8, 16),
        "x": z(*lead, 4, 8),
        "dt": z(*lead, 4),
        "a": z(4),
        "b": z(*lead, 2, 16),
        "c": z(*lead, 2, 16),
    }
    return arguments | changes


def update(arguments: dict[str, Any]) -> torch.Tensor:
    arguments = dict(arguments)
    positional = [arguments.pop(name) for name in ("state", "x", "dt", "a", "b", "c")]
    return mamba2_state_update(*positional, **({"backend": "torch"} | arguments))


STEP_ERRORS = [
    ({"x": z(3, 8)}, ValueError, "x must have shape (B, H, P) or (B, K, H, P), got (3, 8)"),
    ({"x": None}, TypeError, "x must be a torch.Tensor, got NoneType"),
    ({"x": z(3, 0, 4, 8)}, ValueError, "x must have K of at least 1, got shape (3, 0, 4, 8)"),
    (
        {"x": z(3, 2, 4, 8, dtype=torch.int32)},
        TypeError,
        "x must have dtype float64, float32, bfloat16 or float16, got int32",
    ),
    ({"dt": z(3, 4)}, ValueError, "dt must have shape (B, K, H) = (3, 2, 4), got (3, 4)"),
    ({"a": z(4, 1)}, ValueError, "a must have shape (H,) = (4,), got (4, 1)"),
    (
        {"b": z(3, 2, 16)},
        ValueError,
        "b must have shape (B, K, G, N) beside x of shape (3, 2, 4, 8), got (3, 2, 16)",
    ),
    ({"b": z(3, 1, 2, 16)}, ValueError, "b must have shape (B, K, G, N) = (3, 2, 2, 16), got (3, 1, 2, 16)"),
    ({"b": z(3, 2, 3, 16)}, ValueError, "G (from b) must divide H (from x), got G = 3 and H = 4"),
    ({"c": z(3, 2, 1, 16)}, ValueError, "c must have shape (B, K, G, N) = (3, 2, 2, 16), got (3, 2, 1, 16)"),
    ({"c": z(3, 2, 2, 16, dtype=torch.float16)}, TypeError, "c must have dtype float32 like x, got float16"),
    (
        {"state": z(4, 4, 8, 16)},
        ValueError,
        "state must have shape (B, H, P, N) = (3, 4, 8, 16), got (4, 4, 8, 16)",
    ),
    ({"state": z(3, 4, 8)}, ValueError, "state must have shape (B, H, P, N) = (3, 4, 8, 16), got (3, 4, 8)"),
    (
        {"state": z(9, 4, 8, 15), "state_indices": i(0, 1, 2)},
        ValueError,
        "state must have shape (slots, H, P, N) = (9, 4, 8, 16), got (9, 4, 8, 15)",
    ),
    (
        {"state": z(9, 4), "state_indices": i(0, 1, 2)},
        ValueError,
        "state must have shape (slots, H, P, N), got (9, 4)",
    ),
    (
        {"state": z(3, 4, 8, 16, dtype=torch.int8)},
        TypeError,
        "state must have dtype float64, float32, bfloat16 or float16, got int8",
    ),
    ({"state": z(3, 4, 8, 16, device="meta")}, ValueError, "state must be on cpu like x, got meta"),
    ({"d": z(8)}, ValueError, "d must have shape (H,) = (4,) or (H, P) = (4, 8), got (8,)"),
    ({"z": z(3, 4, 8)}, ValueError, "z must have shape (B, K, H, P) = (3, 2, 4, 8), got (3, 4, 8)"),
    ({"dt_bias": z(2)}, ValueError, "dt_bias must have shape (H,) = (4,), got (2,)"),
    ({"dt_softplus": 0}, TypeError, "dt_softplus must be True or False, got int 0"),
    (
        {"dt_softplus": np.True_},
        TypeError,
        f"dt_softplus must be True or False, got {NUMPY_BOOL} {np.True_!r}",
    ),
    *SPARSE_ERRORS,
    ({"state": NESTED}, TypeError, "state must be a dense (strided) tensor, got a nested one"),
    (
        {"x": z(3, 2, 4, 8).to_sparse()},
        TypeError,
        "x must be a dense (strided) tensor, got layout torch.sparse_coo",
    ),
    *LIMIT_ERRORS,
    ({"dt_limit": (INF, INF)}, ValueError, "dt_limit must leave finite steps, got (inf, inf)"),
    ({"dt_limit": (1, 0)}, ValueError, "dt_limit must be (low, high) with 0 ≤ low ≤ high, got (1, 0)"),
    ({"dt_limit": (-1, 1)}, ValueError, "dt_limit must be (low, high) with 0 ≤ low ≤ high, got (-1, 1)"),
    ({"out": z(3, 4, 8)}, ValueError, "out must have shape (B, K, H, P) = (3, 2, 4, 8), got (3, 4, 8)"),
    (
        {"out": z(3, 2, 4, 8, dtype=torch.bfloat16)},
        TypeError,
        "out must have dtype float32 like x, got bfloat16",
    ),
    ({"state_indices": i(0, 1)}, ValueError, "state_indices must have shape (B,) = (3,), got (2,)"),
    ({"state_indices": z(3)}, TypeError, "state_indices must have dtype int32 or int64, got float32"),
    ({"state_indices": i(0, 3, 1)}, ValueError, "state_indices must be in [-1, 3), got 3 at index 1"),
    ({"state_indices": i(0, 1, -2)}, ValueError, "state_indices must be in [-1, 3), got -2 at index 2"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), STEP_ERRORS, ids=[m for _, _, m in STEP_ERRORS])
def test_step_errors(changes: dict[str, Any], kind: type, message: str) -> None:
    with pytest.raises(kind) as raised:
        update(step_arguments(**changes))
    assert str(raised.value) == message


WRITTEN = [
    (
        {"state": z(1, 4, 8, 16).expand(3, 4, 8, 16)},
        "state is written, and must not repeat elements in memory",
    ),
    (
        {"state": z(2000).as_strided((3, 4, 8, 16), (512, 128, 16, 2))},
        "state is written, and must not repeat",
    ),
    ({"out": z(3, 1, 4, 8).expand(3, 2, 4, 8)}, "out is written, and must not repeat elements in memory"),
]


@pytest.mark.parametrize(("changes", "message"), WRITTEN, ids=[m for _, m in WRITTEN])
def test_what_is_written_must_not_repeat_elements(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        update(step_arguments(**changes))


def test_out_must_not_overlap_state() -> None:
    buffer = torch.randn(3, 512 + 64)
    state = buffer[:, :512].view(3, 4, 8, 16)
    arguments = step_arguments(state=state, x=torch.randn(3, 2, 4, 8), z=torch.randn(3, 2, 4, 8))
    before = buffer.clone()
    inside = [state[:, :2, :4, :8], state[:, 2:, 4:, 8:], buffer.flatten()[-193:-1].view(3, 2, 4, 8)]
    for out in (*inside, buffer[:, 511:575].view(3, 2, 4, 8)):
        with pytest.raises(ValueError, match="^out must not overlap state in memory: both are written$"):
            update(arguments | {"out": out})
    assert torch.equal(buffer, before)
    # Beside each other in every row of one buffer, they do not overlap; nor is x or z a state.
    expected = update(arguments | {"state": state.clone()})
    assert torch.equal(update(arguments | {"out": buffer[:, 512:].view(3, 2, 4, 8)}), expected)
    state.copy_(before[:, :512].view_as(state))
    for name in ("x", "z"):
        assert torch.equal(
            update(arguments | {"state": state.clone(), "out": arguments[name].clone()}), expected
        )
        copy = arguments[name].clone()
        assert torch.equal(update(arguments | {"state": state.clone(), name: copy, "out": copy}), expected)


def test_step_errors_without_k() -> None:
    with pytest.raises(ValueError, match=r"^dt must have shape \(B, H\) = \(3, 4\), got \(3, 2, 4\)$"):
        update(step_arguments(K=None, dt=z(3, 2, 4)))
    message = "b must have shape (B, G, N) beside x of shape (3, 4, 8), got (3, 1, 2, 16)"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        update(step_arguments(K=None, b=z(3, 1, 2, 16)))


@pytest.mark.parametrize("name", ["state", "dt"])
def test_the_kernel_of_the_step_refuses_float64_by_name(name: str) -> None:
    arguments = step_arguments()
    arguments[name] = arguments[name].double()
    with (
        interpreter.interpret(),
        pytest.raises(TypeError, match=f"got float64 for {name}; use backend='torch'"),
    ):
        update(arguments | {"backend": "cutile"})


shapes = st.sampled_from(
    [(), (4,), (3, 4), (4, 8), (3,), (3, 2, 4), (3, 2, 4, 8), (3, 2, 2, 16), (3, 4, 8, 16)]
)
dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int32, torch.int64])
values = st.one_of(
    st.builds(lambda s, t: torch.zeros(s, dtype=t), shapes, dtypes), st.none(), st.integers(0, 2)
)
NAMES = ("state", "x", "dt", "a", "b", "c", "d", "z", "dt_bias", "state_indices", "out")


@given(st.dictionaries(st.sampled_from(NAMES), values, max_size=3), st.sampled_from([None, 2]))
def test_the_fast_check_passes_only_what_the_careful_one_passes(
    changes: dict[str, Any], K: int | None
) -> None:
    arguments = dict.fromkeys(NAMES) | step_arguments(K, **changes)
    try:
        validate_scan._check_step(**arguments)
        careful = True
    except (TypeError, ValueError):
        careful = False
    assert validate_scan._fast_step(**arguments) == careful
