"""The tile interpreter: its results against torch, its typing against the cuda.tile compiler, every report.

What the interpreter runs is compiled to Tile IR as well (no GPU, 15 ms a kernel), so that it accepts nothing
that cuda.tile refuses; and what it refuses, cuda.tile refuses too.
"""

import contextlib
import importlib.util
import io
import itertools
import sys
import threading
import types

import cuda.tile as ct
import pytest
import torch
from cuda.tile import compilation as cc
from torch.utils._python_dispatch import TorchDispatchMode

from tilegym_mamba2 import interpreter
from tilegym_mamba2.interpreter.tile import Tile, dtype_of

DTYPES = {
    torch.float32: ct.float32,
    torch.float64: ct.float64,
    torch.float16: ct.float16,
    torch.bfloat16: ct.bfloat16,
    torch.int8: ct.int8,
    torch.int32: ct.int32,
    torch.int64: ct.int64,
    torch.uint8: ct.uint8,
    torch.uint32: ct.uint32,
    torch.bool: ct.bool_,
}
NAN = float("nan")


@pytest.fixture(autouse=True)
def fixed_order(monkeypatch):
    monkeypatch.delenv("TILEGYM_MAMBA2_INTERPRET", raising=False)
    monkeypatch.delenv("TILEGYM_MAMBA2_INTERPRET_SEED", raising=False)


def constraint(value, annotation):
    """The compiler's view of one argument."""
    if isinstance(value, torch.Tensor):
        array = getattr(annotation, "array", None)
        static = () if array is None else array.static_shape_dims
        return cc.ArrayConstraint(
            DTYPES[value.dtype],
            value.ndim,
            index_dtype=ct.int32 if array is None else array.index_dtype,
            stride_lower_bound_incl=0,
            alias_groups=(),
            may_alias_internally=False,
            stride_constant=[1 if s == 1 else None for s in value.stride()],
            shape_constant=[n if i in static else None for i, n in enumerate(value.shape)]
            if static
            else None,
        )
    if isinstance(value, tuple):
        inner = getattr(annotation, "items", None) or [getattr(annotation, "each", annotation)] * len(value)
        return cc.TupleConstraint([constraint(v, a) for v, a in zip(value, inner, strict=True)])
    if annotation.constant:
        return cc.ConstantConstraint(value)
    if isinstance(value, bool):
        return cc.ScalarConstraint(ct.bool_)
    if isinstance(value, int):
        return cc.ScalarConstraint(annotation.scalar.dtype if annotation.scalar else ct.int32)
    return cc.ScalarConstraint(ct.float32)


def compile_kernel(kernel, *args):
    """Compiles for sm_90 to Tile IR; raises a cuda.tile error where cuda.tile refuses the kernel."""
    annotations = kernel._annotated_function.parameter_annotations
    parameters = [constraint(v, a) for v, a in zip(args, annotations, strict=True)]
    convention = cc.CallingConvention.cutile_python_v2()
    cc.export_kernel(
        kernel,
        [cc.KernelSignature(parameters, convention)],
        io.BytesIO(),
        gpu_code="sm_90",
        output_format="tileir_bytecode",
    )


def run(grid, kernel, *args, outputs=None, seed=None):
    """Interprets a kernel and checks that cuda.tile compiles it."""
    interpreter.launch(grid, kernel, args, outputs=outputs, seed=seed)
    compile_kernel(kernel, *args)


def refused(kernel, *args, match, grid=(1,)):
    """Both the interpreter and the compiler refuse the kernel."""
    with pytest.raises(interpreter.RefusedError, match=match):
        interpreter.launch(grid, kernel, args)
    with pytest.raises(ct.TileError):
        compile_kernel(kernel, *args)


# ---- expressions: values against torch, types against the compiler ---------------------------------------

PRELUDE = """
    f = ct.load(x, (0, 0), (4, 8))
    q = ct.load(x, (0, 0), (1, 8))
    h = f.astype(ct.bfloat16)
    e = f.astype(ct.float16)
    d = f.astype(ct.float64)
    t = f.astype(ct.tfloat32)
    i = ct.arange(8, dtype=ct.int32, start=1)
    l = ct.arange(8, dtype=ct.int64, start=1)
    j = ct.arange(8, dtype=ct.int8, start=1)
    u = ct.arange(8, dtype=ct.uint8, start=1)
    b = i > 3
    z = ct.sum(f)
    k = ct.bid(0) + 1
"""
X = torch.arange(32.0).reshape(4, 8) / 3 - 4.6
N, S = 5, 1.5


def round_to_tf32(v):
    """10 mantissa bits, to nearest even, by way of frexp: independent of the interpreter's bit twiddling."""
    mantissa, exponent = torch.frexp(v.double())
    return torch.ldexp(torch.round(mantissa * 2**11), exponent - 11).float()


def torch_values():
    v = types.SimpleNamespace(
        torch=torch, f=X, q=X[:1], h=X.bfloat16(), e=X.half(), d=X.double(), n=N, s=S, k=1
    )
    v.t = round_to_tf32(X)
    v.i = torch.arange(1, 9, dtype=torch.int32)
    v.l, v.j, v.u = v.i.long(), v.i.to(torch.int8), v.i.to(torch.uint8)
    v.b, v.z = v.i > 3, X.sum()
    return v


_generated = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


def kernels_of(folder, bodies):
    """One kernel (x, n, s) per body, from a source file, since the compiler reads the source."""
    name = f"generated_{next(_generated)}"
    lines = ["import math", "import cuda.tile as ct", "SEEN = []"]
    for number, body in enumerate(bodies):
        lines.append(f"@ct.kernel\ndef kernel{number}(x, n, s):{PRELUDE}{body}")
    path = folder / f"{name}.py"
    path.write_text("\n".join(lines))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, [getattr(module, f"kernel{n}") for n in range(len(bodies))]


def evaluate(folder, expressions):
    """For each expression the interpreter's value, or its error."""
    module, kernels = kernels_of(folder, [f"    SEEN.append({e})" for e in expressions])
    out = []
    for kernel in kernels:
        module.SEEN.clear()
        try:
            interpreter.launch((1,), kernel, (X.clone(), N, S))
            out.append(module.SEEN[0])
        except interpreter.InterpreterError as error:
            out.append(error)
    return out


def type_assertions(value, name):
    if isinstance(value, tuple):
        return "".join(type_assertions(v, f"{name}[{i}]") for i, v in enumerate(value))
    if isinstance(value, (bool, int, float, str, ct.DType)) or value is None:
        return ""
    lines = f"    ct.static_assert({name}.dtype == ct.{dtype_of(value)}, str({name}.dtype))\n"
    return lines + f"    ct.static_assert({name}.shape == {value.shape}, str({name}.shape))\n"


def compare_with_compiler(folder, expressions):
    """Complains where one of the two refuses an expression, or where they differ in dtype or shape."""
    values = evaluate(folder, expressions)
    bodies = []
    for expression, value in zip(expressions, values, strict=True):
        # The print keeps the expression alive: the compiler drops unused ones before it checks everything.
        body = f"    r = {expression}\n"
        if isinstance(value, Exception) or isinstance(value, Tile):
            body += "    ct.print(r)\n"
        if not isinstance(value, Exception):
            body += type_assertions(value, "r")
        bodies.append(body)
    differences = []
    for expression, value, kernel in zip(expressions, values, kernels_of(folder, bodies)[1], strict=True):
        try:
            compile_kernel(kernel, X, N, S)
            compiler = None
        except ct.TileError as error:
            compiler = error
        refused = isinstance(value, interpreter.RefusedError)
        if isinstance(value, Exception) and not refused:
            differences.append(f"{expression}: {value!r}")
        elif refused != (compiler is not None):
            differences.append(f"{expression}: interpreter {value!r}, compiler {compiler!r}"[:400])
    assert not differences, "\n".join(differences)


VALUES = {
    # Python constants take the tile's dtype, rounded to it.
    "f * 2.5 + 1": lambda v: v.f * 2.5 + 1,
    "h * 0.1": lambda v: v.h * torch.tensor(0.1).bfloat16(),
    "0.1 - h": lambda v: torch.tensor(0.1).bfloat16() - v.h,
    "i * 0.5": lambda v: v.i.float() * 0.5,
    "i / 3": lambda v: v.i.float() / 3,
    "h * e.astype(ct.float32)": lambda v: v.h.float() * v.e.float(),
    "h + n": lambda v: v.h + 5,
    "h * (2.5 * n)": lambda v: v.h.float() * 12.5,
    "h * s": lambda v: v.h.float() * 1.5,
    # 16-bit arithmetic rounds after every operation.
    "(h + h * 0.5) - h": lambda v: (v.h + v.h * 0.5) - v.h,
    "h * h + h": lambda v: (v.h * v.h) + v.h,
    "i // 3": lambda v: v.i // 3,
    "(i - 5) // 3": lambda v: torch.div(v.i - 5, 3, rounding_mode="floor"),
    "(i - 5) % 3": lambda v: torch.remainder(v.i - 5, 3),
    "f // 0.7": lambda v: torch.floor(v.f / 0.7),
    "f % 0.75": lambda v: torch.remainder(v.f, 0.75),
    "f ** 2": lambda v: v.f**2,
    "ct.abs(f) ** 0.5": lambda v: v.f.abs() ** 0.5,
    "divmod(i, 3)[1]": lambda v: v.i % 3,
    "ct.cdiv(i, 3)": lambda v: (v.i + 2) // 3,
    "-f": lambda v: -v.f,
    "abs(-3) + ct.abs(f)": lambda v: v.f.abs() + 3,
    "f > 0": lambda v: v.f > 0,
    "(f > 0) & (f < 2.0)": lambda v: (v.f > 0) & (v.f < 2),
    "~b | (i == 8)": lambda v: ~v.b | (v.i == 8),
    "(i << 2) ^ 5": lambda v: (v.i << 2) ^ 5,
    "i >> 1": lambda v: v.i >> 1,
    "u - 2": lambda v: v.u - 2,
    "i.astype(ct.uint32) - 2": lambda v: (v.i.long() - 2) % 2**32,
    "ct.where(b, f, 0.0)": lambda v: torch.where(v.b, v.f, 0.0),
    "ct.where(b[None, :], 1.0, h)": lambda v: torch.where(v.b[None], torch.tensor(1.0).bfloat16(), v.h),
    "ct.minimum(f, h.astype(ct.float32) * math.nan)": lambda v: v.f,
    "ct.maximum(f, f * math.nan, propagate_nan=True)": lambda v: v.f * NAN,
    "ct.maximum(i, 4)": lambda v: v.i.clamp(min=4),
    "ct.exp(f)": lambda v: v.f.exp(),
    "ct.exp2(i)": lambda v: v.i.float().exp2(),
    "ct.exp2(h)": lambda v: v.h.exp2(),
    "ct.exp2(f - 125.0, flush_to_zero=True)": lambda v: torch.where(v.f >= -1, (v.f - 125).exp2(), 0.0),
    "ct.log(ct.abs(f))": lambda v: v.f.abs().log(),
    "ct.log2(i)": lambda v: v.i.float().log2(),
    "ct.sqrt(ct.abs(f)) + ct.rsqrt(ct.abs(f))": lambda v: v.f.abs().sqrt() + v.f.abs().rsqrt(),
    "ct.tanh(f) * ct.sin(f) - ct.cos(f)": lambda v: v.f.tanh() * v.f.sin() - v.f.cos(),
    "ct.floor(f) + ct.ceil(h)": lambda v: v.f.floor() + v.h.ceil().float(),
    "ct.isnan(ct.where(b, f, math.nan))": lambda v: ~v.b.expand(4, 8),
    # conversions
    "f.astype(ct.tfloat32).astype(ct.float32)": lambda v: round_to_tf32(v.f),
    "f.astype(ct.int32)": lambda v: v.f.to(torch.int32),
    "(i * 100).astype(ct.int8)": lambda v: (v.i * 100).to(torch.int8),
    "(i - 3).astype(ct.bool_)": lambda v: v.i != 3,
    "b.astype(ct.float32)": lambda v: v.b.float(),
    "d.astype(ct.bfloat16)": lambda v: v.d.bfloat16(),
    "ct.bitcast(f, ct.int32)": lambda v: v.f.view(torch.int32),
    "ct.bitcast(j, ct.uint8) + u": lambda v: v.u + v.u,
    "n.astype(ct.int64) * 4000000000 + l": lambda v: 20_000_000_000 + v.l,
    # shapes
    "f[:, None, :]": lambda v: v.f[:, None],
    "f.transpose()": lambda v: v.f.T,
    "ct.permute(f[None], (2, 0, 1))": lambda v: v.f[None].permute(2, 0, 1),
    "f.reshape((2, -1))": lambda v: v.f.reshape(2, 16),
    "ct.expand_dims(f, -1)": lambda v: v.f[..., None],
    "ct.cat((f, f * 2), axis=1)": lambda v: torch.cat((v.f, v.f * 2), 1),
    "ct.broadcast_to(q, (4, 8))": lambda v: v.q.expand(4, 8),
    "ct.extract(f, (1, k), (2, 4))": lambda v: v.f[2:4, 4:8],
    "ct.extract(i, 3, ()).item()": lambda v: v.i[3],
    "ct.insert(f, (2, 0), q)": lambda v: torch.cat((v.f[:2], v.f[:1], v.f[3:])),
    "ct.full((2, 4), n, ct.float16)": lambda v: torch.full((2, 4), 5.0).half(),
    "ct.arange(4, dtype=ct.bfloat16, start=2, step=3)": lambda v: torch.tensor([2, 5, 8, 11]).bfloat16(),
    "ct.astile(((k, 2), (n, 4)), dtype=ct.float32)": lambda v: torch.tensor([[1.0, 2], [5, 4]]),
    # reductions and scans
    "ct.sum(f, axis=1)": lambda v: v.f.sum(1),
    # As a tree of bf16 additions; summed in float32 it would be 264.
    "ct.sum(ct.where(i == 1, 256.0, 1.0).astype(ct.bfloat16))": lambda v: torch.tensor(262.0).bfloat16(),
    "ct.sum(b)": lambda v: torch.tensor(5, dtype=torch.int32),
    "ct.sum(f, axis=(0, 1), keepdims=True)": lambda v: v.f.sum().reshape(1, 1),
    "ct.prod(f, axis=-1)": lambda v: v.f.double().prod(1).float(),
    "ct.max(h, axis=0)": lambda v: v.h.amax(0),
    "ct.min(ct.where(b, f, math.nan), axis=1)": lambda v: v.f[:, 3:].amin(1),
    "ct.max(ct.where(b, f, math.nan), axis=1, propagate_nan=True)": lambda v: torch.full((4,), NAN),
    "ct.argmax(ct.where(i == 5, 100.0, f), axis=1)": lambda v: torch.full((4,), 4, dtype=torch.int32),
    "ct.argmin(ct.where(b, f * 0, math.nan), axis=1)": lambda v: torch.full((4,), 3, dtype=torch.int32),
    "ct.argmax(f)": lambda v: torch.tensor(31, dtype=torch.int32),
    "ct.reduce(f, 1, lambda p, q: p + q, 0)": lambda v: v.f.sum(1),
    "ct.reduce((f, b), 1, lambda p, q, r, s: (p + r, q | s), (0, False))[1]": lambda v: torch.ones(4) > 0,
    "ct.cumsum(f, axis=1)": lambda v: v.f.cumsum(1),
    "ct.cumsum(f, axis=0, reverse=True)": lambda v: v.f.flip(0).cumsum(0).flip(0),
    "ct.cumsum(i)": lambda v: v.i.cumsum(0).to(torch.int32),
    "ct.cumprod(f * 0.5, axis=1)": lambda v: (v.f.double() * 0.5).cumprod(1).float(),
    "ct.scan(f, 1, lambda p, q: ct.maximum(p, q), -math.inf)": lambda v: v.f.cummax(1).values,
    # products
    "ct.mma(h, h.transpose(), ct.ones((4, 4), ct.float32))": lambda v: 1 + v.h.float() @ v.h.float().T,
    "ct.mma(t, t.transpose(), ct.zeros((4, 4), ct.float32))": lambda v: v.t @ v.t.T,
    "ct.mma(e, e.transpose(), ct.zeros((4, 4), ct.float16))": lambda v: (v.e.float() @ v.e.float().T).half(),
    "ct.mma(d, d.transpose(), ct.zeros((4, 4), ct.float64))": lambda v: v.d @ v.d.T,
    "ct.mma(j[None], j[:, None], ct.zeros((1, 1), ct.int32))": lambda v: (v.i @ v.i).reshape(1, 1),
    "ct.mma(ct.cat((f[None], f[None]), 0), f.transpose(), ct.zeros((2, 4, 4), ct.float32))": lambda v: (
        v.f @ v.f.T
    ).expand(2, 4, 4),
    "ct.matmul(h, h.transpose())": lambda v: (v.h.float() @ v.h.float().T).bfloat16(),
    "f @ q.reshape((8,))": lambda v: v.f @ v.q[0],
    # scalars
    "n * 3 + k": lambda v: 16,
    "(n - 7) // 2 + (n - 7) % 2": lambda v: -1,
    "n / 2": lambda v: torch.tensor(2.5),
    "min(n, 3) + max(n, k)": lambda v: 8,
    "x.shape[0] * x.strides[0]": lambda v: 32,
    "ct.num_tiles(x, 1, (4, 2))": lambda v: 4,
    "ct.num_tiles(x, 0, (4, 2), order='F')": lambda v: 2,
    "ct.cdiv(n, 2) + ct.num_blocks(0)": lambda v: 4,
    "3 if (n > 3 and k > 0) else 4": lambda v: 3,
    "3 if n else 4": lambda v: 3,
    # memory
    "ct.load(x, (1, 0), (2, 4), order=(1, 0))": lambda v: v.f.T[2:4, :4],
    "ct.load(x, (n - 3, 1), (), latency=3, allow_tma=False)": lambda v: v.f[2, 1],
    "ct.load(x, (0, 1), (4, 4), check_bounds=False)": lambda v: v.f[:, 4:],
    "ct.load(x.slice(1, 2, n), (0, 0), (4, 4), padding_mode=ct.PaddingMode.ZERO)": lambda v: (
        torch.nn.functional.pad(v.f[:, 2:5], (0, 1))
    ),
    "x.tiled_view((2, 4)).load((1, 1))": lambda v: v.f[2:, 4:],
    "x.tiled_view((2, 8), traversal_steps=(1, 8)).load((1, 0))": lambda v: v.f[1:3],
    "ct.gather(x, (i[:, None] % 4, i[None, :] - 1))": lambda v: v.f[v.i.long() % 4],
    "ct.gather(x, (i - 2, 0), padding_value=7.0)": lambda v: torch.tensor([7.0, *v.f[:, 0], 7, 7, 7]),
    "ct.gather(x, (0, i - 1), mask=b)": lambda v: torch.where(v.b, v.f[0], 0.0),
    "x.slice(0, 1, 3).get_raw_memory().load_offset(i, mask=b)": lambda v: torch.where(
        v.b, v.f.flatten()[8 + v.i.long()], 0.0
    ),
    "ct.load_advanced_indexing(x, (ct.arange(2, dtype=ct.int32) * 2, ct.Slice(k, 4)))": lambda v: v.f[
        ::2, 1:5
    ],
}


def test_expressions_compute_what_torch_computes(folder):
    for expression, value, formula in zip(
        VALUES, evaluate(folder, list(VALUES)), VALUES.values(), strict=True
    ):
        if isinstance(value, Exception):
            raise AssertionError(expression) from value
        want = formula(torch_values())
        if not isinstance(want, torch.Tensor):
            assert int(value.__index__()) == want, expression
            continue
        assert tuple(value.shape) == tuple(want.shape), expression
        got = value.t
        assert got.dtype is want.dtype, (expression, got.dtype, want.dtype)
        close = {"rtol": 2e-6, "atol": 1e-6} if got.is_floating_point() else {"rtol": 0, "atol": 0}
        if got.dtype in (torch.bfloat16, torch.float16):
            close = {"rtol": 0, "atol": 0}
        torch.testing.assert_close(
            got, want, equal_nan=True, **close, msg=lambda m, e=expression: f"{e}: {m}"
        )


def test_expressions_compile_with_the_same_types(folder):
    compare_with_compiler(folder, list(VALUES))


@pytest.mark.parametrize("operation", ["{} + {}", "{} / {}", "{} < {}", "{} & {}", "ct.where(b, {}, {})"])
def test_binary_typing_is_the_compilers(folder, operation):
    names = "f h e d t i j b k s 2.5 300".split()
    pairs = [(p, q) for p in names for q in names if not (p[0].isdigit() and q[0].isdigit())]
    compare_with_compiler(folder, [operation.format(p, q) for p, q in pairs])


def test_typing_of_functions_is_the_compilers(folder):
    tiles = "f h t i j b k s".split()
    functions = "exp2 floor abs negative isnan bitwise_not sum max argmax cumsum".split()
    compare_with_compiler(
        folder, [f"ct.{fn}({v})" for fn in functions for v in tiles if v != "t" or fn in ("sum", "max")]
    )


def test_mma_typing_is_the_compilers(folder):
    names = "f h e d t".split()
    product = "ct.mma({}, {}.transpose(), ct.zeros((4, 4), ct.{}))"
    accumulators = ("float32", "float16", "bfloat16")
    compare_with_compiler(
        folder, [product.format(p, q, a) for p in names for q in names for a in accumulators]
    )
    compare_with_compiler(folder, [f"ct.matmul({p}, {q}.transpose())" for p in names for q in names])


REFUSED = """
ct.full((3,), 0.0, ct.float32)
ct.full((n,), 0.0, ct.float32)
ct.zeros((x.shape[0], 4), ct.float32)
ct.arange(6, dtype=ct.int32)
ct.load(x, (0, 0), (4, 6))
ct.load(x, (0,), (4, 8))
ct.load(x, (0, 0), (4,))
ct.load(x, (0.5, 0), (4, 8))
ct.load(x, (i, 0), (4, 8))
ct.load(x, (0, 0), (4, 8), order=(0, 0))
ct.load(x, (0, 0), (4, 8), order="X")
ct.load(x, (0, 0), (4, 8), latency=11)
ct.load(x, (0, 0), (4, 8), padding_mode=0)
ct.load(x, (0, 0), (4, 8), memory_order=ct.MemoryOrder.ACQUIRE)
ct.load(3, (0, 0), (4, 8))
ct.gather(x, i)
ct.gather(x, (i, f))
ct.gather(x, (i, i), mask=i)
ct.gather(x, (i, i), padding_value=d)
ct.mma(f, f, ct.zeros((4, 4), ct.float32))
ct.mma(f, f.transpose(), ct.zeros((4, 8), ct.float32))
ct.mma(i, i, z)
ct.mma(h, h.transpose(), ct.zeros((4, 4), ct.bfloat16))
ct.mma(f, f.transpose(), ct.zeros((4, 4), ct.float32), use_fast_acc=True)
f + ct.zeros((8, 4), ct.float32)
t + t
b + b
f & f
f[0]
f[..., ...]
f.reshape((3, -1))
f.reshape((n, -1))
f.reshape(-1)
ct.broadcast_to(f, (8, 8))
f.permute((0, 0))
f[None].transpose()
ct.cat((f, f, f), 0)
ct.cat((f, h), 0)
ct.cat((ct.cat((f, f), 0), f), 0)
ct.extract(f, (4, 0), (1, 8))
ct.insert(f, (0, 0), h)
ct.bitcast(f, ct.int8)
ct.floor(i)
ct.exp(h, rounding_mode=ct.RoundingMode.APPROX)
ct.exp2(h, flush_to_zero=True)
ct.sum(f, axis=(0, 0))
ct.sum(f, axis=2)
ct.bid(3)
ct.bid(n)
ct.ensure_constant(n)
1 if b else 2
int(n)
float(z)
len(f)
x[0, 0]
i ** 2
ct.divmod(f, f)
j + 300
ct.atomic_max(x, (i, i), 1.0)
""".strip().splitlines()


def test_refusals_are_the_compilers(folder):
    values = evaluate(folder, REFUSED)
    accepted = [
        e for e, v in zip(REFUSED, values, strict=True) if not isinstance(v, interpreter.RefusedError)
    ]
    assert not accepted
    compare_with_compiler(folder, REFUSED)


# ---- rounding ---------------------------------------------------------------------------------------------


def products(dtype):
    @ct.kernel
    def kernel(x, y, out):
        a = ct.load(x, (0, 0), (16, 64)).astype(dtype)
        b = ct.load(y, (0, 0), (64, 32)).astype(dtype)
        ct.store(out, (0, 0), ct.mma(a, b, ct.full((16, 32), 1.0, ct.float32)))

    return kernel


@pytest.mark.parametrize(
    "dtype, rounded",
    [(ct.tfloat32, round_to_tf32), (ct.bfloat16, lambda t: t.bfloat16().float()), (ct.float32, lambda t: t)],
)
@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_mma_rounds_its_operands_and_nothing_else(dtype, rounded, precision):
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 64, generator=g), torch.randn(64, 32, generator=g)
    out = torch.full((16, 32), NAN)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    backend = torch.backends.mkldnn.matmul.fp32_precision
    try:
        run((1,), products(dtype), x, y, out, outputs=[out])
        assert torch.get_float32_matmul_precision() == precision
        assert torch.backends.mkldnn.matmul.fp32_precision == backend
    finally:
        torch.set_float32_matmul_precision(before)
    want = rounded(x).double() @ rounded(y).double() + 1
    assert (out - want).abs().max() < 2e-5
    # Rounding in any other format would be seen.
    for other in (round_to_tf32, lambda t: t.bfloat16().float(), lambda t: t):
        if not torch.equal(other(x), rounded(x)):
            assert (out - (other(x).double() @ other(y).double() + 1)).abs().max() > 1e-4


def test_tf32_keeps_what_is_not_finite(folder):
    special = torch.tensor(
        [NAN, float("inf"), -float("inf"), -0.0, 1 + 2**-11, 1 + 3 * 2**-11, 3.4028e38, 1e-40]
    )
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)
    seen = []

    @ct.kernel
    def kernel(x):
        seen.append(ct.load(x, 0, 8).astype(ct.tfloat32))

    interpreter.launch((1,), kernel, (special,))
    got = seen[0].t
    assert got[0].isnan() and torch.equal(got[1:3], special[1:3]) and got[3] == 0 and got[3].signbit()
    # Ties go to even, and the largest float32 rounds up to infinity.
    assert got[4] == 1 and got[5] == 1 + 2**-9 and got[6] == float("inf")
    interpreter.launch((1,), kernel, (torch.cat((bits, torch.ones(6))),))
    assert seen[1].t[:2].isnan().all()


@ct.kernel
def running_sum(x, out):
    ct.store(out, (0,), ct.cumsum(ct.load(x, (0,), (256,)), axis=0).astype(ct.float32))


def test_sums_keep_the_precision_of_the_tile():
    x = torch.full((256,), 0.01)
    low, high = torch.full((256,), NAN), torch.full((256,), NAN)
    run((1,), running_sum, x.bfloat16(), low)
    run((1,), running_sum, x, high)
    exact = torch.arange(1, 257) * 0.01
    assert (high - exact).abs().max() < 1e-5
    # torch's own cumsum of bf16 accumulates in float32, and would be off by one rounding only.
    assert (low - x.bfloat16().double().cumsum(0)).abs().max() > 0.01


def test_a_scan_is_not_monotone_where_sums_are_large():
    g = torch.Generator().manual_seed(1)
    x, out = -30 * torch.rand(256, generator=g), torch.full((256,), NAN)
    x[0] = -1e9
    run((1,), running_sum, x, out)
    assert (out.diff() > 0).any()


# ---- memory -----------------------------------------------------------------------------------------------


@ct.kernel
def copy_tiles(x, y):
    index = (ct.bid(0), ct.bid(1))
    ct.store(y, index, ct.load(x, index, (4, 8)))


@pytest.mark.parametrize("shape", [(8, 16), (7, 13), (1, 1), (4, 9)])
def test_tiles_cover_an_array_of_any_size(shape):
    x = torch.randn(shape)
    y = torch.full(shape, NAN)
    grid = (-(-shape[0] // 4), -(-shape[1] // 8))
    run(grid, copy_tiles, x, y, outputs=[y])
    assert torch.equal(x, y)


def padded(mode):
    @ct.kernel
    def kernel(x, y):
        ct.store(y, (0, 0), ct.load(x, (0, 0), (4, 8), padding_mode=mode))

    return kernel


@pytest.mark.parametrize(
    "mode, value",
    [("UNDETERMINED", NAN), ("ZERO", 0.0), ("NEG_ZERO", -0.0), ("NAN", NAN), ("POS_INF", 1e400)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padding_modes(mode, value, dtype):
    x = torch.ones(3, 5, dtype=dtype)
    y = torch.full((4, 8), 9.0, dtype=dtype)
    run((1,), padded(ct.PaddingMode[mode]), x, y)
    want = torch.full((4, 8), value, dtype=dtype)
    want[:3, :5] = 1
    torch.testing.assert_close(y, want, equal_nan=True, rtol=0, atol=0)
    assert torch.equal(y.signbit(), want.signbit())


def test_integers_are_padded_with_something_odd():
    x, y = torch.ones(3, 5, dtype=torch.int32), torch.zeros(4, 8, dtype=torch.int32)
    run((1,), padded(ct.PaddingMode.UNDETERMINED), x, y)
    assert (y[3:].abs() > 1000).all() and (y[:3, :5] == 1).all()


def test_strided_and_overlapping_views_are_used_in_place():
    parent = torch.randn(6, 40)
    x = parent[1:5, 3:19:2]
    y_parent = torch.full((8, 4), NAN)
    y = y_parent.T
    run((1, 1), copy_tiles, x, y, outputs=[y])
    assert torch.equal(y, x)
    # Rows past the slice are never seen, whatever they hold.
    parent[5:] = NAN
    run((1,), padded(ct.PaddingMode.ZERO), parent[1:4, :8], y)
    assert torch.equal(y[:3], parent[1:4, :8]) and (y[3] == 0).all()
    repeated = torch.randn(1, 8).expand(4, 8)
    run((1, 1), copy_tiles, repeated, y, outputs=[y])
    assert torch.equal(y, repeated)


@ct.kernel
def permuted(x, y):
    tile = ct.load(x, (ct.bid(0), 1, 0), (8, 2, 4), order=(2, 0, 1), padding_mode=ct.PaddingMode.ZERO)
    ct.store(y, (ct.bid(0), 0, 0), tile)
    ct.store(y, (ct.bid(0) + 2, 1, 0), ct.transpose(tile, 0, 2), order="F")


def test_order_permutes_the_axes_of_the_array():
    x, y = torch.randn(3, 4, 13), torch.full((16, 4, 32), NAN)
    run((2,), permuted, x, y)
    view = torch.nn.functional.pad(x, (0, 3, 0, 0, 0, 1)).permute(2, 0, 1)
    assert torch.equal(y[:, :2, :4], view[:, 2:, :])
    assert torch.equal(y[:8, 2:, 8:12], view[:8, 2:, :]) and torch.equal(y[:8, 2:, 12:16], view[8:, 2:, :])
    assert y[:, :, 16:].isnan().all() and y[8:, 2:].isnan().all()


@ct.kernel
def scalars(x, y, n, flag, values: tuple[int, float]):
    i = ct.bid(0)
    element = ct.load(x, (i,), ())
    if flag:
        element = element + n
    if element > 4.0:
        element = element * values[1]
    ct.store(y, (i,), element)
    ct.store(y, (i + 4,), values[0])


def test_scalar_loads_branches_and_parameters():
    x, y = torch.arange(4.0), torch.full((8,), NAN)
    run((4,), scalars, x, y, 2, True, (3, 0.5), outputs=[y])
    assert y.tolist() == [2, 3, 4, 2.5, 3, 3, 3, 3]


@ct.kernel
def element_wise(x, out, total, counts):
    i = ct.arange(16, dtype=ct.int32) + ct.bid(0) * 16
    values = ct.gather(x, i, padding_value=-1.0)
    ct.scatter(out, i, values, mask=values >= 0)
    ct.atomic_add(total, 0, ct.sum(ct.where(values >= 0, values, 0.0)))
    ct.atomic_add(counts, i % 4, 1)
    ct.atomic_max(counts, 4, ct.bid(0))


def test_gather_scatter_and_atomics():
    x, out, total = torch.rand(40), torch.zeros(40), torch.zeros(1)
    counts = torch.zeros(5, dtype=torch.int32)
    run((3,), element_wise, x, out, total, counts, outputs={"out": out})
    assert torch.equal(out, x)
    torch.testing.assert_close(total[0], x.sum())
    assert counts.tolist() == [12, 12, 12, 12, 2]


@ct.kernel
def atomics_return_old_values(x, out):
    i = ct.arange(4, dtype=ct.int32)
    ct.store(out, (0, 0), ct.atomic_xchg(x, i, 7).reshape((1, 4)))
    ct.store(out, (1, 0), ct.atomic_cas(x, i, 7, i).reshape((1, 4)))
    ct.store(out, (2, 0), x.get_raw_memory().atomic_or_offset(i, ct.full((4,), 4, ct.int32)).reshape((1, 4)))
    ct.store(out, (3, 0), ct.atomic_min(x, i + 2, 0).reshape((1, 4)))


def test_atomics_return_what_was_there():
    x, out = torch.tensor([10, 11, 12, 13], dtype=torch.int32), torch.zeros(4, 4, dtype=torch.int32)
    run((1,), atomics_return_old_values, x, out, outputs=[out])
    # Where an index is out of bounds nothing happens.
    assert out.tolist()[:3] == [[10, 11, 12, 13], [7, 7, 7, 7], [0, 1, 2, 3]]
    assert out[3, :2].tolist() == [6, 7] and x.tolist() == [4, 5, 0, 0]


@ct.kernel
def last_block_adds(parts, done, out, n: ct.Constant[int]):
    ct.store(parts, (ct.bid(0),), ct.bid(0).astype(ct.float32))
    ticket = ct.atomic_add(done, 0, 1)
    if ticket == n - 1:
        ct.store(out, (0,), ct.sum(ct.load(parts, (0,), (n,))))


def test_reading_after_an_acquiring_atomic_is_no_race():
    parts, done, out = torch.zeros(8), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    run((8,), last_block_adds, parts, done, out, 8)
    assert out.item() == 28


@ct.kernel
def views_and_advanced(x, y):
    view = x.tiled_view((2, 8), padding_mode=ct.PaddingMode.ZERO)
    for r in range(view.num_tiles(0)):
        y.tiled_view((2, 8)).store((r, 0), view.load((r, 0)))
    rows = ct.arange(4, dtype=ct.int32) * 2
    tile = ct.load_advanced_indexing(y, (rows, ct.Slice(0, 8)), padding_mode=ct.PaddingMode.ZERO)
    ct.store_advanced_indexing(y, (rows, ct.Slice(0, 8)), tile * 2)


def test_tiled_views_and_advanced_indexing():
    x, y = torch.randn(7, 8), torch.full((7, 8), NAN)
    run((1,), views_and_advanced, x, y, outputs=[y])
    want = x.clone()
    want[::2] *= 2
    assert torch.equal(y, want)


@ct.kernel
def list_of_arrays(xs, out):
    acc = ct.zeros((4,), ct.float32)
    for k in range(len(xs)):
        acc = acc + ct.load(xs[k], (0,), (4,))
    ct.store(out, (0,), acc)


def test_lists_of_arrays():
    out = torch.full((4,), NAN)
    interpreter.launch((1,), list_of_arrays, ([torch.ones(4), torch.full((4,), 2.0)], out))
    assert out.tolist() == [3, 3, 3, 3]


@ct.kernel
def static_and_wide(x: ct.IndexedWithInt64, out, n: ct.ScalarInt64):
    offset = x.shape[0] * n
    out.get_raw_memory().store_offset(0, offset)


def test_int64_parameters_and_shapes_do_not_overflow():
    out = torch.zeros(1, dtype=torch.int64)
    run((1,), static_and_wide, torch.zeros(4), out, 2**40)
    assert out.item() == 2**42


def test_an_argument_inside_a_huge_parent_costs_nothing():
    parent = torch.empty(2**31 + 64, dtype=torch.uint8)
    x = parent[-64:].view(8, 8)
    x.fill_(3)
    y = parent[:64].view(8, 8)
    interpreter.launch((2, 1), copy_tiles, (x, y), outputs=[y])
    assert (y == 3).all()


# ---- helpers, printing, control ---------------------------------------------------------------------------


@ct.function
def marked_helper(tile):
    return ct.exp2(tile) * 2


def plain_helper(tile, factor=3.0):
    return marked_helper(tile) * factor


@ct.kernel
def uses_everything(x, y):
    ct.grid_dependency_control_wait()
    tiles = ()
    for k in ct.static_iter(range(2)):
        tiles += (ct.load(x, (k,), (4,)),)
    ct.static_assert(len(tiles) == 2, "two tiles")
    ct.ensure_constant(len(tiles))
    n = ct.assume_divisible_by(x.shape[0], 4)
    ct.assert_(tiles[0] > -1.0, "positive")
    i = 0
    while i < 2:
        i += 1
    ct.store(y, (0,), plain_helper(tiles[0] + tiles[1], ct.static_eval(6.0 / 2)) + n * i)
    ct.grid_dependency_control_launch_dependents()


def test_helpers_static_functions_and_hints():
    y = torch.full((4,), NAN)
    run((1,), uses_everything, torch.ones(8), y)
    assert y.tolist() == [40.0] * 4


@ct.kernel
def prints(x, n):
    ct.print("n", n, ct.load(x, (0,), (2,)), sep="|")
    print(f"{n} and {ct.load(x, (0,), (2,)):.1f}")
    ct.printf("%d %f\n", n, ct.load(x, (0,), ()))


def test_printing(capsys):
    run((1,), prints, torch.tensor([1.0, 2.0]), 7)
    assert capsys.readouterr().out == "n|7|[1.0, 2.0]\n7 and [1.0, 2.0]\n7 1.000000\n"


# ---- reports ----------------------------------------------------------------------------------------------


@ct.kernel
def overlapping(x, y, step):
    i = ct.bid(0)
    ct.store(y.slice(0, i * step, i * step + 4), (0,), ct.load(x, (0,), (4,)))


def test_an_element_written_by_two_blocks_is_a_race():
    x, y = torch.ones(4), torch.zeros(8)
    run((2,), overlapping, x, y, 4, outputs=[y])
    with pytest.raises(interpreter.RaceError, match=r"y.*\[0\] is written by block .* and by block") as info:
        interpreter.launch((2,), overlapping, (x, y, 3), seed=5)
    assert (
        info.value.kernel == "overlapping"
        and info.value.seed == 5
        and info.value.block in ((0, 0, 0), (1, 0, 0))
    )
    assert "test_interpreter.py:" in info.value.location and "ct.store(y.slice" in str(info.value)


@ct.kernel
def scatter_all(y):
    ct.scatter(y, ct.arange(4, dtype=ct.int32), ct.bid(0))


def test_a_scatter_of_two_blocks_is_a_race():
    with pytest.raises(interpreter.RaceError, match=r"y\[0\] is written by block"):
        interpreter.launch((2,), scatter_all, (torch.zeros(4, dtype=torch.int32),))


@ct.kernel
def neighbours(y):
    i = ct.bid(0)
    ct.store(y, (i,), 1.0)
    ct.store(y, (i,), ct.load(y, ((i + 1) % 2,), ()) + 1)


def test_reading_what_another_block_writes_is_a_race():
    with pytest.raises(interpreter.RaceError, match=r"y\[[01]\] is read by block .* and written by block"):
        interpreter.launch((2,), neighbours, (torch.zeros(2),))


def test_races_are_seen_through_aliases():
    buffer = torch.zeros(8)

    @ct.kernel
    def two_names(a, b):
        if ct.bid(0) == 0:
            ct.store(a, (1,), ct.ones((4,), ct.float32))
        else:
            ct.store(b, (0,), ct.ones((4,), ct.float32))

    with pytest.raises(interpreter.RaceError):
        interpreter.launch((2,), two_names, (buffer, buffer[2:]))


@ct.kernel
def one_of_each(x, y):
    ct.store(y, (ct.bid(0), 0), ct.load(x, (ct.bid(0), 0), (2, 4)))


def test_an_output_that_is_not_written_completely():
    x, y, other = torch.ones(8, 8), torch.zeros(8, 8), torch.zeros(3)
    run((4,), one_of_each, x, y, outputs=[y[:, :4]])
    with pytest.raises(
        interpreter.NeverWrittenError, match=r"output y .*32 of 64 elements .* first at \[0, 4\]"
    ):
        interpreter.launch((4,), one_of_each, (x, y), outputs=[y])
    with pytest.raises(interpreter.NeverWrittenError, match=r"output rest .* was never written"):
        interpreter.launch((4,), one_of_each, (x, y), outputs={"rest": other})
    interpreter.launch((4,), one_of_each, (x, y), outputs={"empty": torch.zeros(0, 3)})


@pytest.mark.parametrize("rows", [7, 8])
def test_a_tile_wholly_outside_its_array(rows):
    x, y = torch.ones(rows, 4), torch.zeros(10, 4)
    run((4,), one_of_each, x, y)
    with pytest.raises(interpreter.OutOfBoundsError, match="load of x") as info:
        interpreter.launch((5,), one_of_each, (x, y))
    assert info.value.block == (4, 0, 0) and f"starts at 8 of {rows}" in str(info.value)


@ct.kernel
def negative_tile(x, y, unchecked: ct.Constant[bool]):
    tile = ct.load(x, (0, 0), (2, 4), check_bounds=unchecked)
    ct.store(y, (0 - ct.num_blocks(0), 0), tile)


def test_negative_tiles_and_unchecked_bounds():
    x, y = torch.ones(3, 4), torch.zeros(2, 4)
    with pytest.raises(interpreter.OutOfBoundsError, match=r"store of y\[2, 4\]: tile \(-1, 0\)"):
        interpreter.launch((1,), negative_tile, (x, y, True))
    with pytest.raises(interpreter.OutOfBoundsError, match="check_bounds=False.*crosses the end of axis 1"):
        interpreter.launch((1,), negative_tile, (x[:, :3], y, False))


@ct.kernel
def unchecked_gather(x, n):
    ct.print(ct.gather(x, (ct.arange(4, dtype=ct.int32), n), check_bounds=False))


def test_an_unchecked_gather_outside_the_array():
    with pytest.raises(interpreter.OutOfBoundsError, match=r"gather of x\[3, 2\].*at index \[3, 1\]"):
        interpreter.launch((1,), unchecked_gather, (torch.ones(3, 2), 1))


def test_a_slice_outside_the_array():
    with pytest.raises(interpreter.OutOfBoundsError, match=r"y.slice\(0, 8, 12\) of an axis of 8"):
        interpreter.launch((3,), overlapping, (torch.ones(4), torch.zeros(8), 4))


@ct.kernel
def big_offsets(x, n, in_tile: ct.Constant[bool]):
    if in_tile:
        ct.print(ct.arange(4, dtype=ct.int32) * n)
    else:
        ct.print(ct.bid(0) * n)


@pytest.mark.parametrize("in_tile", [True, False])
def test_int32_overflow_is_reported(in_tile):
    run((2,), big_offsets, torch.zeros(1), 2**29, in_tile)
    with pytest.raises(interpreter.IntegerOverflowError, match="int32 overflow.*2147483648"):
        interpreter.launch((3,), big_offsets, (torch.zeros(1), 2**30, in_tile))


@ct.kernel
def divides(x, n):
    ct.print(ct.bid(0) // n, ct.arange(2, dtype=ct.int32) % n)


def test_integer_division_by_zero_is_reported():
    run((1,), divides, torch.zeros(1), 2)
    with pytest.raises(interpreter.IntegerDivisionError):
        interpreter.launch((1,), divides, (torch.zeros(1), 0))


@ct.kernel
def not_implemented(x):
    ct.print(ct.pack_to_bytes(ct.load(x, (0,), (4,))))


@ct.kernel
def misspelt(x):
    ct.stoer(x, (0,), 1.0)


def test_an_unknown_function_is_named():
    with pytest.raises(
        interpreter.UnsupportedError, match="cuda.tile.pack_to_bytes is not supported by the tile"
    ):
        interpreter.launch((1,), not_implemented, (torch.zeros(4),))
    with pytest.raises(interpreter.KernelCrashError, match="'cuda.tile' has no attribute 'stoer'") as info:
        interpreter.launch((1,), misspelt, (torch.zeros(4),))
    assert isinstance(info.value.__cause__, AttributeError)


@ct.kernel
def wrong_store(x, y):
    ct.store(y, (0,), ct.load(x, (0,), (4,)))


def test_a_store_does_not_round_silently():
    refused(
        wrong_store,
        torch.zeros(4),
        torch.zeros(4).bfloat16(),
        match="store to y: cannot implicitly cast float32",
    )
    run((1,), wrong_store, torch.ones(4).bfloat16(), torch.zeros(4))


@ct.kernel
def asserts(x, n):
    ct.assert_(ct.load(x, (0,), (4,)) < 3.0, "too large")
    ct.assume_divisible_by(n, 4)


def test_assertions():
    run((1,), asserts, torch.zeros(4), 8)
    with pytest.raises(interpreter.KernelAssertionError, match=r"at \[2\]: too large"):
        interpreter.launch((1,), asserts, (torch.tensor([1.0, 2, 3, 4]), 8))
    with pytest.raises(interpreter.KernelAssertionError, match="6 is not divisible by 4"):
        interpreter.launch((1,), asserts, (torch.zeros(4), 6))


# ---- launches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [(0,), (-1, 1), (), (1, 1, 1, 1), (1.0,), (2**31,), (1, 65536), 3, (True,)])
def test_grids_that_a_launch_refuses(grid):
    with pytest.raises(interpreter.LaunchError, match="grid"):
        interpreter.launch(grid, one_of_each, (torch.zeros(2, 4), torch.zeros(2, 4)))


@pytest.mark.parametrize(
    "args, match",
    [
        ((torch.zeros(4),), r"takes 2 arguments \(x, n\), got 1"),
        ([torch.zeros(4), 1], "must be a tuple"),
        ((torch.zeros(4, dtype=torch.complex64), 1), "x has unsupported dtype torch.complex64"),
        ((torch.zeros(4, device="meta"), 1), "x is on meta"),
        ((torch.zeros(4).to_sparse(), 1), "x has layout"),
        ((torch.complex(torch.zeros(4), torch.ones(4)).conj().imag, 1), "x is negated beside its memory"),
        ((torch.zeros(4), 2**31), "n = 2147483648 does not fit int32"),
        ((torch.zeros(4), None), "n of type NoneType"),
        ((torch.zeros(4), "4"), "n of type str"),
    ],
)
def test_arguments_that_a_launch_refuses(args, match):
    with pytest.raises(interpreter.LaunchError, match=match):
        interpreter.launch((1,), asserts, args)


@pytest.mark.parametrize("value", [ct.float32, torch.float32, ct.PaddingMode.ZERO, None, "4", (1, 2, None)])
def test_constants_are_numbers(value):
    with pytest.raises(interpreter.LaunchError, match="constant argument n"):
        interpreter.launch((1,), constant_only, (value,))
    with pytest.raises(TypeError):
        compile_kernel(constant_only, value)


@ct.kernel
def constant_only(n: ct.Constant):
    ct.print(n)


def test_what_is_no_kernel():
    with pytest.raises(interpreter.LaunchError, match="expected a @ct.kernel object, got function"):
        interpreter.launch((1,), plain_helper, ())


def order_of_blocks(seed=None, blocks=(4, 3, 2)):
    seen = []

    @ct.kernel
    def kernel(x):
        seen.append(tuple(ct.bid(axis).value for axis in range(3)))

    interpreter.launch(blocks, kernel, (torch.zeros(1),), seed=seed)
    return seen


def test_blocks_run_once_each_in_an_order_that_the_seed_replays(monkeypatch):
    every = [(x, y, z) for z in range(2) for y in range(3) for x in range(4)]
    assert sorted(order_of_blocks()) == sorted(every)
    assert order_of_blocks(seed=1) == order_of_blocks(seed=1) != order_of_blocks(seed=2)
    assert len({tuple(order_of_blocks()) for _ in range(4)}) > 1
    monkeypatch.setenv("TILEGYM_MAMBA2_INTERPRET_SEED", "2")
    assert order_of_blocks(seed=1) == order_of_blocks() != every
    monkeypatch.setenv("TILEGYM_MAMBA2_INTERPRET_SEED", "two")
    with pytest.raises(interpreter.LaunchError, match="must be an integer, got 'two'"):
        order_of_blocks()


def test_interpret_nests_and_belongs_to_its_thread(monkeypatch):
    assert not interpreter.is_active()
    with interpreter.interpret():
        with interpreter.interpret():
            assert interpreter.is_active()
        assert interpreter.is_active()
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(interpreter.is_active()))
        thread.start()
        thread.join()
        assert elsewhere == [False]
    with pytest.raises(ZeroDivisionError), interpreter.interpret():
        1 / 0  # noqa: B018
    assert not interpreter.is_active()
    for value, active in {
        "1": True,
        "true": True,
        "Yes": True,
        "on": True,
        "0": False,
        "": False,
        "no": False,
    }.items():
        monkeypatch.setenv("TILEGYM_MAMBA2_INTERPRET", value)
        assert interpreter.is_active() is active


def test_the_dispatch_mode_is_put_back():
    with pytest.raises(interpreter.OutOfBoundsError):
        interpreter.launch((9,), one_of_each, (torch.ones(7, 4), torch.zeros(8, 4)))
    with pytest.raises(RuntimeError, match="only be called from device code"):
        ct.bid(0)


class CountOperations(TorchDispatchMode):
    def __init__(self):
        self.count = 0
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket is torch.ops.aten.addmm
        return func(*args, **(kwargs or {}))


def test_what_the_interpreter_computes_is_nobody_elses_business():
    x, y = torch.randn(16, 64, requires_grad=True), torch.randn(64, 32)
    out = torch.zeros(16, 32)
    with CountOperations() as counter:
        interpreter.launch((1,), products(ct.float32), (x, y, out))
    assert counter.count == 0 and out.grad_fn is None and out.abs().sum() > 0


def test_a_cuda_tile_without_dispatch_modes_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.tile._dispatch_mode", None)
    monkeypatch.delitem(sys.modules, "tilegym_mamba2.interpreter.run", raising=False)
    with pytest.raises(interpreter.InterpreterError, match=f"which cuda-tile {ct.__version__} does not have"):
        interpreter.launch((1,), one_of_each, (torch.ones(7, 4), torch.zeros(8, 4)))


@pytest.mark.parametrize("fails", [False, True])
def test_a_launch_takes_one_thread_and_gives_the_others_back(fails):
    seen = []

    @ct.kernel
    def kernel(x):
        seen.append(torch.get_num_threads())
        ct.static_assert(not fails)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(interpreter.KernelAssertionError) if fails else contextlib.nullcontext():
            interpreter.launch((1,), kernel, (torch.ones(8),))
        assert seen == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
