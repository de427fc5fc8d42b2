"""Each wrong argument, and what the message says."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilegym_mamba2
from tilegym_mamba2 import validate
from tilegym_mamba2.validate import Dims, validate_backward, validate_forward

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def forward_arguments(B=2, T=16, H=4, P=8, G=1, N=32, dtype=torch.float32, **changes):
    arguments = {
        "x": torch.zeros(B, T, H, P, dtype=dtype),
        "a": torch.zeros(H),
        "b": torch.zeros(B, T, G, N, dtype=dtype),
        "c": torch.zeros(B, T, G, N, dtype=dtype),
        "d": torch.zeros(H),
        "dt": torch.zeros(B, T, H),
        "init_state": torch.zeros(B, H, P, N),
        "chunk_size": 64,
    }
    return arguments | changes


def backward_arguments(**changes):
    arguments = forward_arguments()
    arguments |= {
        "dout": torch.zeros_like(arguments["x"]),
        "dfinal_state": torch.zeros_like(arguments["init_state"]),
        "state_dtype": torch.float32,
    }
    return arguments | changes


def z(*shape, dtype=torch.float32, device=None):
    return torch.zeros(*shape, dtype=dtype, device=device)


FORWARD_ERRORS = [
    # shapes
    (
        {"b": z(2, 15, 1, 32)},
        ValueError,
        "b must have shape (B, T, G, N) = (2, 16, 1, 32), got (2, 15, 1, 32)",
    ),
    (
        {"c": z(2, 16, 2, 32)},
        ValueError,
        "c must have shape (B, T, G, N) = (2, 16, 1, 32), got (2, 16, 2, 32)",
    ),
    ({"x": z(2, 16, 4)}, ValueError, "x must have shape (B, T, H, P), got (2, 16, 4)"),
    ({"b": z(2, 16, 32)}, ValueError, "b must have shape (B, T, G, N), got (2, 16, 32)"),
    ({"a": z(3)}, ValueError, "a must have shape (H,) = (4,), got (3,)"),
    ({"a": z(4, 1)}, ValueError, "a must have shape (H,) = (4,), got (4, 1)"),
    ({"d": z(1)}, ValueError, "d must have shape (H,) = (4,), got (1,)"),
    ({"dt": z(2, 16)}, ValueError, "dt must have shape (B, T, H) = (2, 16, 4), got (2, 16)"),
    (
        {"init_state": z(2, 4, 32, 8)},
        ValueError,
        "init_state must have shape (B, H, P, N) = (2, 4, 8, 32), got (2, 4, 32, 8)",
    ),
    (
        {"b": z(2, 16, 3, 32), "c": z(2, 16, 3, 32)},
        ValueError,
        "G (from b) must divide H (from x), got G = 3 and H = 4",
    ),
    ({"b": z(2, 16, 3, 32)}, ValueError, "G (from b) must divide H (from x), got G = 3 and H = 4"),
    (
        {"b": z(2, 3, 16, 32)},
        ValueError,
        "b must have shape (B, T, G, N) = (2, 16, 16, 32), got (2, 3, 16, 32)",
    ),
    ({"x": z(2, 16, 4, 0)}, ValueError, "x must have P of at least 1, got shape (2, 16, 4, 0)"),
    ({"x": z(2, 16, 0, 8)}, ValueError, "x must have H of at least 1, got shape (2, 16, 0, 8)"),
    ({"b": z(2, 16, 0, 32)}, ValueError, "b must have G of at least 1, got shape (2, 16, 0, 32)"),
    ({"b": z(2, 16, 1, 0)}, ValueError, "b must have N of at least 1, got shape (2, 16, 1, 0)"),
    # what is no tensor
    ({"x": None}, TypeError, "x must be a torch.Tensor, got NoneType"),
    ({"x": [1.0]}, TypeError, "x must be a torch.Tensor, got list"),
    ({"a": -0.5}, TypeError, "a must be a torch.Tensor, got float"),
    ({"c": np.zeros((2, 16, 1, 32), np.float32)}, TypeError, "c must be a torch.Tensor, got ndarray"),
    ({"d": 1}, TypeError, "d must be a torch.Tensor or None, got int"),
    ({"init_state": 0}, TypeError, "init_state must be a torch.Tensor or None, got int"),
    # layouts
    (
        {"x": z(2, 16, 4, 8).to_sparse()},
        TypeError,
        "x must be a dense (strided) tensor, got layout torch.sparse_coo",
    ),
    (
        {"dt": z(2, 16, 4).to_sparse_csr()},
        TypeError,
        "dt must be a dense (strided) tensor, got layout torch.sparse_csr",
    ),
    (
        {"d": z(4).to_sparse()},
        TypeError,
        "d must be a dense (strided) tensor, got layout torch.sparse_coo",
    ),
    (
        {"x": torch.nested.nested_tensor([z(16, 4, 8), z(15, 4, 8)], layout=torch.jagged)},
        TypeError,
        "x must be a dense (strided) tensor, got layout torch.jagged",
    ),
    (
        {"b": torch.nested.nested_tensor([z(16, 1, 32), z(15, 1, 32)])},
        TypeError,
        "b must be a dense (strided) tensor, got a nested one",
    ),
    # dtypes
    (
        {"x": z(2, 16, 4, 8, dtype=torch.int64)},
        TypeError,
        "x must have dtype float64, float32, bfloat16 or float16, got int64",
    ),
    (
        {"b": z(2, 16, 1, 32, dtype=torch.bfloat16)},
        TypeError,
        "b must have dtype float32 like x, got bfloat16",
    ),
    ({"a": z(4, dtype=torch.float16)}, TypeError, "a must have dtype float32, got float16"),
    ({"d": z(4, dtype=torch.float64)}, TypeError, "d must have dtype float32, got float64"),
    (
        {"dt": z(2, 16, 4, dtype=torch.int32)},
        TypeError,
        "dt must have dtype float64, float32, bfloat16 or float16, got int32",
    ),
    (
        {"init_state": z(2, 4, 8, 32, dtype=torch.float16)},
        TypeError,
        "init_state must have dtype float64, float32 or bfloat16, got float16",
    ),
    # devices
    ({"b": z(2, 16, 1, 32, device="meta")}, ValueError, "b must be on cpu like x, got meta"),
    ({"init_state": z(2, 4, 8, 32, device="meta")}, ValueError, "init_state must be on cpu like x, got meta"),
    # chunk_size
    ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
    ({"chunk_size": -3}, ValueError, "chunk_size must be at least 1, got -3"),
    ({"chunk_size": 64.0}, TypeError, "chunk_size must be an integer, got float 64.0"),
    ({"chunk_size": True}, TypeError, "chunk_size must be an integer, got bool True"),
    ({"chunk_size": None}, TypeError, "chunk_size must be an integer, got NoneType None"),
    ({"chunk_size": "64"}, TypeError, "chunk_size must be an integer, got str '64'"),
    ({"chunk_size": torch.tensor(64)}, TypeError, "chunk_size must be an integer, got Tensor tensor(64)"),
]

BACKWARD_ERRORS = [
    (
        {"dout": z(2, 16, 4, 7)},
        ValueError,
        "dout must have shape (B, T, H, P) = (2, 16, 4, 8), got (2, 16, 4, 7)",
    ),
    (
        {"dfinal_state": z(2, 4, 8)},
        ValueError,
        "dfinal_state must have shape (B, H, P, N) = (2, 4, 8, 32), got (2, 4, 8)",
    ),
    ({"dout": 1.0}, TypeError, "dout must be a torch.Tensor or None, got float"),
    (
        {"dout": z(2, 16, 4, 8, dtype=torch.bfloat16)},
        TypeError,
        "dout must have dtype float32 like x, got bfloat16",
    ),
    (
        {"dfinal_state": z(2, 4, 8, 32, dtype=torch.float16)},
        TypeError,
        "dfinal_state must have dtype float64, float32 or bfloat16, got float16",
    ),
    ({"dout": z(2, 16, 4, 8, device="meta")}, ValueError, "dout must be on cpu like x, got meta"),
    (
        {"state_dtype": torch.int32},
        TypeError,
        "state_dtype must be float64, float32, bfloat16 or float16, got int32",
    ),
    (
        {"state_dtype": "float32"},
        TypeError,
        "state_dtype must be float64, float32, bfloat16 or float16, got 'float32'",
    ),
    ({"state_dtype": []}, TypeError, "state_dtype must be float64, float32, bfloat16 or float16, got []"),
]


@pytest.mark.parametrize(
    ("changes", "error", "message"), FORWARD_ERRORS, ids=[m for _, _, m in FORWARD_ERRORS]
)
def test_forward_errors(changes, error, message):
    arguments = forward_arguments(**changes)
    with pytest.raises(error) as raised:
        validate_forward(**arguments)
    assert str(raised.value) == message
    with pytest.raises(error) as raised:
        tilegym_mamba2.mamba2_chunk_forward(**arguments)
    assert str(raised.value) == message
    with pytest.raises(error) as raised:
        validate_backward(**backward_arguments(**changes))
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("changes", "error", "message"), BACKWARD_ERRORS, ids=[m for _, _, m in BACKWARD_ERRORS]
)
def test_backward_errors(changes, error, message):
    arguments = backward_arguments(**changes)
    with pytest.raises(error) as raised:
        validate_backward(**arguments)
    assert str(raised.value) == message
    with pytest.raises(error) as raised:
        tilegym_mamba2.mamba2_chunk_backward(**arguments)
    assert str(raised.value) == message


def test_an_error_comes_before_the_choice_of_a_backend():
    with pytest.raises(ValueError, match="a must have shape"):
        tilegym_mamba2.mamba2_chunk_forward(**forward_arguments(a=z(5)), backend="no such backend")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"d": None},
        {"init_state": None},
        {"d": None, "init_state": None},
        {"chunk_size": 1},
        {"chunk_size": np.int32(40)},
        {"chunk_size": np.uint8(1)},
    ],
    ids=str,
)
def test_what_is_accepted(changes):
    assert validate_forward(**forward_arguments(**changes)) == Dims(B=2, T=16, H=4, P=8, G=1, N=32)
    for none in ({}, {"dout": None}, {"dfinal_state": None}, {"dout": None, "dfinal_state": None}):
        assert validate_backward(**backward_arguments(**changes, **none)) == (2, 16, 4, 8, 1, 32)


@pytest.mark.parametrize(
    "sizes", [{"T": 0}, {"B": 0}, {"T": 1}, {"G": 4}, {"H": 50, "G": 25}, {"P": 1, "N": 1}], ids=str
)
def test_sizes_that_are_accepted(sizes):
    expected = {"B": 2, "T": 16, "H": 4, "P": 8, "G": 1, "N": 32} | sizes
    assert validate_forward(**forward_arguments(**sizes)) == Dims(**expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dt_dtype", DTYPES)
def test_dtypes_that_are_accepted(dtype, dt_dtype):
    for rate in {torch.float32, dtype}:
        for state in {torch.float32, torch.bfloat16, torch.float64, dtype}:
            arguments = forward_arguments(
                dtype=dtype,
                a=z(4, dtype=rate),
                d=z(4, dtype=rate),
                dt=z(2, 16, 4, dtype=dt_dtype),
                init_state=z(2, 4, 8, 32, dtype=state),
            )
            assert validate_forward(**arguments).H == 4


def test_numpy_chunk_size_reaches_the_backend_as_an_int():
    arguments = forward_arguments(chunk_size=np.int64(8))
    out, _ = tilegym_mamba2.mamba2_chunk_forward(**arguments, backend="torch")
    assert out.shape == (2, 16, 4, 8)


sizes = st.sampled_from(
    [(), (4,), (2, 16), (2, 16, 4), (2, 16, 4, 8), (2, 4, 8, 32), (2, 16, 1, 32), (2, 16, 2, 32)]
)
tensors = st.builds(lambda shape, dtype: torch.zeros(shape, dtype=dtype), sizes, st.sampled_from(DTYPES))
values = st.one_of(tensors, st.none(), st.integers(-1, 3))


@given(
    st.dictionaries(
        st.sampled_from(["x", "a", "b", "c", "d", "dt", "init_state", "chunk_size", "dout", "dfinal_state"]),
        values,
        max_size=3,
    ),
    st.sampled_from(DTYPES),
)
def test_the_fast_check_passes_only_what_the_careful_one_passes(changes, dtype):
    arguments = forward_arguments(dtype=dtype, **changes)
    fast = validate._fast(**arguments)
    chunk_size = arguments.pop("chunk_size")
    try:
        careful = validate._check(arguments, chunk_size)
    except (TypeError, ValueError):
        careful = None
    assert fast == careful


def test_devices_without_autocast_are_checked_like_others():
    with pytest.raises(ValueError, match="^a must be on meta like x, got cpu$"):
        tilegym_mamba2.mamba2_chunk_forward(**forward_arguments(x=torch.zeros(2, 16, 4, 8, device="meta")))
    arguments = {
        name: value.to("meta") if torch.is_tensor(value) else value
        for name, value in forward_arguments().items()
    }
    out, final_state = tilegym_mamba2.mamba2_chunk_forward(**arguments, backend="torch")
    assert out.is_meta and out.shape == (2, 16, 4, 8)
    assert final_state.is_meta and final_state.shape == (2, 4, 8, 32)


def test_strides_do_not_matter():
    wide = torch.zeros(2, 16, 4 * 8 + 64)
    arguments = forward_arguments(
        x=wide[..., :32].unflatten(-1, (4, 8)),
        b=wide[..., 32:64].unflatten(-1, (1, 32)),
        dt=torch.zeros(1, 1, 1).expand(2, 16, 4),
        init_state=torch.zeros(2, 4, 32, 8).transpose(2, 3),
    )
    assert validate_forward(**arguments) == (2, 16, 4, 8, 1, 32)


@pytest.mark.gpu
def test_message_about_devices_names_both():
    arguments = {
        name: value.cuda() if torch.is_tensor(value) else value for name, value in forward_arguments().items()
    }
    arguments["b"] = arguments["b"].cpu()
    with pytest.raises(ValueError, match="^b must be on cuda:0 like x, got cpu$"):
        validate_forward(**arguments)
