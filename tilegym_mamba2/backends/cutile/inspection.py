"""What the compiler makes of the kernels, with or without a GPU at hand: registers, spills, instructions.

The launches are those that the ops themselves make: an op is called on tensors without memory, its launches
are recorded, and their arguments become the signatures that a launch would compile for. So nothing here
repeats a kernel's constants.
"""

import collections
import contextlib
import functools
import io
import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import cuda.tile as ct
import torch
from cuda.tile.compilation import (
    ArrayConstraint,
    CallingConvention,
    ConstantConstraint,
    KernelSignature,
    ScalarConstraint,
    TupleConstraint,
    export_kernel,
)

from tilegym_mamba2.options import ScanOptions
from tilegym_mamba2.spec import SPECS, Mamba2ProblemSpec, Mamba2ScanSpec

from . import backward, backward_config, forward, scan, scan_backward, state_update, tuning
from .availability import find_program
from .launch import Launch, recording

ARCHS = ("sm_80", "sm_90", "sm_100", "sm_103", "sm_120")
# How x's dtype and torch.get_float32_matmul_precision() pick the products.
MODES: dict[str, tuple[torch.dtype, str]] = {
    "bf16": (torch.bfloat16, "highest"),
    "fp16": (torch.float16, "highest"),
    "fp32": (torch.float32, "highest"),
    "tf32": (torch.float32, "high"),
}
# "packed" also stands for padded rows, and makes chunk states.
OPS = ("forward", "backward", "scan", "scan-backward", "packed", "packed-backward", "step")
COUNTED = ("HGMMA", "LDSM", "STS", "BAR", "UTMALDG")
TOOLS = "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"

_DTYPES = {
    torch.bfloat16: ct.bfloat16,
    torch.float16: ct.float16,
    torch.float32: ct.float32,
    torch.int32: ct.int32,
    torch.int64: ct.int64,
}
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")
_OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", re.MULTILINE)


@dataclass(frozen=True)
class Code:
    """A compiled kernel: registers and bytes of stack a thread, bytes of shared memory a block, instructions
    by opcode without modifiers."""

    registers: int
    stack: int
    shared: int
    opcodes: collections.Counter[str]


class Job(NamedTuple):
    """One kernel to compile: the op that launches it, the GPU, a key of `MODES`, and the launch."""

    op: str
    arch: str
    dtype: str
    launch: Launch


def report(
    archs: Sequence[str] = ARCHS,
    dtypes: Sequence[str] = tuple(MODES),
    spec: Mamba2ProblemSpec = SPECS["published"],
    *,
    config: tuning.ForwardConfig | None = None,
    ops: Sequence[str] = OPS,
) -> list[dict[str, Any]]:
    """Compiles every kernel for every arch and dtype, as a call on such a GPU would: `rows` of a `plan`.

    Args:
        archs: GPUs as tileiras names them: "sm_90".
        dtypes: keys of `MODES`; "tf32" is float32 inputs below "highest" precision.
        spec: whose sizes to take; its dtype is replaced.
        config: of the forward, instead of the one that the tables give for each arch.
        ops: of `OPS`; a step and a scan have every option. A kernel that several launch is compiled as the
            first of them does, and once more for sequences of different lengths.

    Returns:
        A row for each kernel, arch and dtype: op, kernel, arch, dtype, registers, shared and stack (bytes),
        and the number of HGMMA, LDSM, STS, BAR and UTMALDG instructions. A kernel that does not compile has a
        row with `error` instead of numbers.

    Raises:
        ValueError: an unknown arch, dtype or op. RuntimeError: cuobjdump or nvdisasm is missing. OSError: the
        compiler is.
    """
    return list(rows(plan(archs, dtypes, spec, config=config, ops=ops)))


def plan(
    archs: Sequence[str] = ARCHS,
    dtypes: Sequence[str] = tuple(MODES),
    spec: Mamba2ProblemSpec = SPECS["published"],
    *,
    config: tuning.ForwardConfig | None = None,
    ops: Sequence[str] = OPS,
) -> list[Job]:
    """What `report` compiles, given the same; nothing is compiled yet."""
    for arch in archs:
        if not re.fullmatch(r"sm_\d+[a-z]?", arch):
            raise ValueError(f"arch must look like sm_90, got {arch!r}")
    for name in dtypes:
        if name not in MODES:
            raise ValueError(f"dtype must be one of {', '.join(MODES)}, got {name!r}")
    for name in ops:
        if name not in OPS:
            raise ValueError(f"op must be one of {', '.join(OPS)}, got {name!r}")
    _tool("cuobjdump"), _tool("nvdisasm")
    jobs: list[Job] = []
    for arch in archs:
        for name in dtypes:
            dtype, precision = MODES[name]
            of_dtype = replace(spec, dtype=dtype)
            found: dict[tuple[str, bool], Job] = {}
            for op in ops:
                for launch in _launches(op, of_dtype, arch, config, precision):
                    found.setdefault((name_of(launch), "packed" in op), Job(op, arch, name, launch))
            jobs += found.values()
    return jobs


def rows(jobs: Sequence[Job]) -> Iterator[dict[str, Any]]:
    """The rows of `report`, in the order of `jobs`, each as soon as it and those before it are compiled."""
    pool = ThreadPoolExecutor(2)
    try:
        yield from pool.map(lambda job: _row(*job), jobs)
    finally:
        # Who stops reading does not wait for the rest.
        pool.shutdown(cancel_futures=True)


def _launches(
    op: str, spec: Mamba2ProblemSpec, arch: str, config: tuning.ForwardConfig | None, precision: str
) -> list[Launch]:
    if op == "forward":
        return kernels_of(spec, arch, config, precision)
    if op == "backward":
        return backward_launches(spec, arch, precision)
    if op == "step":
        return state_update_launches(spec)
    layer = Mamba2ScanSpec(
        **{field.name: getattr(spec, field.name) for field in fields(Mamba2ProblemSpec)},
        gated=True,
        raw_dt=True,
        d_per_row=True,
    )
    row = {"batch_size": 1, "num_tokens": spec.batch_size * spec.num_tokens, "num_sequences": spec.batch_size}
    kinds = [replace(layer, **row), replace(layer, padded=True)] if "packed" in op else [layer]
    found = []
    for kind in kinds:
        if op in ("scan", "packed"):
            found += scan_launches(kind, arch, config, precision, chunk_states="packed" in op)
        else:
            found += scan_backward_launches(kind, arch, precision)
    return found


def kernels_of(
    spec: Mamba2ProblemSpec,
    arch: str,
    config: tuning.ForwardConfig | None = None,
    precision: str = "highest",
) -> list[Launch]:
    """One launch for each kernel of the forward: the op's own, and what the published kernels alone add."""
    found: dict[str, Launch] = {}
    for launch in [
        *forward_launches(spec, arch, config, precision),
        *published_launches(spec, arch, config, precision),
    ]:
        found.setdefault(name_of(launch), launch)
    return list(found.values())


def forward_launches(
    spec: Mamba2ProblemSpec,
    arch: str,
    config: tuning.ForwardConfig | None = None,
    precision: str = "highest",
    **changes: Any,
) -> list[Launch]:
    """The launches of `mamba2_chunk_forward` on a GPU `arch`, on tensors without memory.

    `config` replaces the tables' choice, `precision` is the float32 matmul precision, `changes` replace
    arguments of the op (d=None, x=…).
    """
    inputs = meta_inputs(spec) | changes
    return _recorded(lambda: forward.mamba2_chunk_forward(**inputs), inputs, arch, config, precision)


def published_launches(
    spec: Mamba2ProblemSpec,
    arch: str,
    config: tuning.ForwardConfig | None = None,
    precision: str = "highest",
    **changes: Any,
) -> list[Launch]:
    """As `forward_launches`, of `chunk_cumsum`, `fwd_pass_state` and `compute_out` called one by one."""
    inputs = meta_inputs(spec) | changes
    x, b, c, dt = (inputs[name] for name in ("x", "b", "c", "dt"))
    size = {"chunk_size": inputs["chunk_size"]}

    def call() -> None:
        decay = forward.chunk_cumsum(inputs["a"], dt, **size)
        states, _ = forward.fwd_pass_state(x, b, dt, decay, inputs["init_state"], **size)
        forward.compute_out(x, b, c, inputs["d"], dt, decay, states, **size)

    return _recorded(call, inputs, arch, config, precision)


def backward_launches(
    spec: Mamba2ProblemSpec, arch: str, precision: str = "highest", **changes: Any
) -> list[Launch]:
    """The launches of `mamba2_chunk_backward` on a GPU `arch`, in its default configuration there."""
    inputs = meta_inputs(spec)
    del inputs["chunk_size"]
    inputs |= {"dout": torch.empty_like(inputs["x"]), "dfinal_state": torch.empty_like(inputs["init_state"])}
    inputs |= changes
    with _matmul_precision(precision), _default_backward(arch, inputs["x"], inputs["b"]):
        return _recorded(lambda: backward.mamba2_chunk_backward(**inputs), inputs, arch, None, precision)


def scan_launches(
    spec: Mamba2ScanSpec,
    arch: str,
    config: tuning.ForwardConfig | None = None,
    precision: str = "highest",
    *,
    chunk_states: bool = False,
    **changes: Any,
) -> list[Launch]:
    """The launches of `mamba2_chunk_scan` on a GPU `arch`: the spec's sequences, gate and dt pipeline."""
    inputs = meta_scan_inputs(spec) | changes
    options = ScanOptions(spec.raw_dt, (0.0, math.inf), spec.chunk_size, spec.state_dtype, chunk_states)
    return _recorded(
        lambda: scan.mamba2_chunk_scan(**inputs, options=options), inputs, arch, config, precision
    )


def scan_backward_launches(
    spec: Mamba2ScanSpec, arch: str, precision: str = "highest", **changes: Any
) -> list[Launch]:
    """The launches of `mamba2_chunk_scan_backward` for all gradients, in its default configuration there."""
    inputs = meta_scan_inputs(spec)
    inputs |= {
        "dout": torch.empty_like(inputs["x"]),
        "dfinal_state": None if spec.stateless else torch.empty_like(inputs["init_state"]),
        "options": ScanOptions(spec.raw_dt, (0.0, math.inf), spec.chunk_size, spec.state_dtype),
    }
    inputs |= changes
    with _matmul_precision(precision), _default_backward(arch, inputs["x"], inputs["b"]):
        return _recorded(
            lambda: scan_backward.mamba2_chunk_scan_backward(**inputs), inputs, arch, None, precision
        )


def state_update_launches(spec: Mamba2ProblemSpec, tokens: int = 1, **changes: Any) -> list[Launch]:
    """The launch of `mamba2_state_update` with every option, for `tokens` tokens a row of a spec's sizes."""
    inputs = meta_inputs(replace(spec, num_tokens=tokens))
    batch, heads = spec.batch_size, spec.num_heads
    arguments: dict[str, Any] = {name: inputs[name] for name in ("x", "dt", "a", "b", "c", "d")}
    arguments |= {
        "state": inputs["init_state"],
        "z": torch.empty_like(inputs["x"]),
        "dt_bias": torch.empty(heads, device="meta"),
        "state_indices": torch.empty(batch, dtype=torch.int32, device="meta"),
        "dt_softplus": True,
        "dt_limit": (0.0, math.inf),
        "out": torch.empty_like(inputs["x"]),
    }
    with recording() as launches:
        state_update.mamba2_state_update(**(arguments | changes))
    return launches


def meta_inputs(spec: Mamba2ProblemSpec) -> dict[str, Any]:
    """A spec's arguments of the op as tensors without memory; dt is float32 unless the spec names another."""
    dtypes = dict.fromkeys(("x", "b", "c"), spec.dtype) | {"init_state": spec.state_dtype}
    dtypes["dt"] = spec.dt_dtype or torch.float32
    shapes = {name: spec.shapes[name] for name in ("x", "a", "b", "c", "d", "dt", "init_state")}
    inputs: dict[str, Any] = {
        name: torch.empty(shape, dtype=dtypes.get(name, torch.float32), device="meta")
        for name, shape in shapes.items()
    }
    return inputs | {"chunk_size": spec.chunk_size}


def meta_scan_inputs(spec: Mamba2ScanSpec) -> dict[str, Any]:
    """The tensors of a `mamba2_chunk_scan` without memory, None for those that a spec has not."""
    inputs = meta_inputs(spec)
    del inputs["chunk_size"]
    like = {"z": (spec.gated, inputs["x"]), "dt_bias": (spec.raw_dt, inputs["a"])}
    inputs |= {name: torch.empty_like(tensor) if there else None for name, (there, tensor) in like.items()}
    if spec.stateless:
        inputs["init_state"] = None
    lengths = {"cu_seqlens": spec.num_sequences and spec.num_sequences + 1}
    lengths["seq_lens"] = spec.padded and spec.batch_size
    for name, count in lengths.items():
        inputs[name] = torch.empty(count, dtype=torch.int32, device="meta") if count else None
    return inputs


@contextlib.contextmanager
def _default_backward(arch: str, x: torch.Tensor, b: torch.Tensor) -> Iterator[None]:
    """The backward as on a GPU `arch`, whatever is here."""
    precision = forward.precision_of(x.dtype)
    config = backward_config.default_config(arch, precision, x.shape[2:], b.shape[3])
    with backward_config.BackwardConfig.override(config):
        yield


def _recorded(
    call: Callable[[], Any],
    inputs: dict[str, Any],
    arch: str,
    config: tuning.ForwardConfig | None,
    precision: str,
) -> list[Launch]:
    if config is None:
        x = inputs["x"]
        _, tokens, heads, head_size = x.shape
        config, _ = tuning.lookup(
            tuning.key_of(arch, x.dtype, tokens, heads, head_size, inputs["b"].shape[3])
        )
    with tuning.override(config), _matmul_precision(precision), recording() as launches:
        call()
    return launches


@contextlib.contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _row(op: str, arch: str, dtype: str, launch: Launch) -> dict[str, Any]:
    row: dict[str, Any] = {"op": op, "kernel": name_of(launch), "arch": arch, "dtype": dtype}
    try:
        code = compiled(launch.kernel, signature_of(launch), arch)
    except RuntimeError as error:
        return row | {"error": str(error)}
    numbers = {"registers": code.registers, "shared": code.shared, "stack": code.stack}
    return row | numbers | {opcode: code.opcodes[opcode] for opcode in COUNTED}


# ---- signatures


def name_of(launch: Launch) -> str:
    """The name of a launch's kernel."""
    return launch.kernel._pyfunc.__name__


def signature_of(launch: Launch) -> KernelSignature:
    """What `ct.launch` would compile the kernel for, given these arguments.

    `KernelSignature.from_kernel_args` tells the same, but needs a driver.
    """
    annotations = launch.kernel._annotated_function.parameter_annotations
    constraints = [_constraint(*pair) for pair in zip(launch.args, annotations, strict=True)]
    signature = KernelSignature(constraints, CallingConvention.cutile_python_v2())
    return signature.with_mangled_symbol(name_of(launch))


def _constraint(value: Any, annotation: Any) -> Any:
    if isinstance(value, tuple):
        each = getattr(annotation, "items", None) or [getattr(annotation, "each", annotation)] * len(value)
        return TupleConstraint([_constraint(*pair) for pair in zip(value, each, strict=True)])
    if isinstance(value, torch.Tensor):
        return _array_constraint(value, annotation.array)
    if annotation.constant:
        return ConstantConstraint(value)
    if isinstance(value, bool):
        return ScalarConstraint(ct.bool_)
    if isinstance(value, float):
        return ScalarConstraint(ct.float32)
    return ScalarConstraint(ct.int32 if annotation.scalar is None else annotation.scalar.dtype)


def _array_constraint(tensor: torch.Tensor, annotation: Any) -> ArrayConstraint:
    shape, strides = tensor.shape, tensor.stride()
    # In elements, what 16 bytes are.
    unit = 16 // tensor.element_size()
    extent, overlaps = 1, False
    for stride, size in sorted(zip(strides, shape, strict=True)):
        overlaps |= stride < extent
        extent = stride * size
    return ArrayConstraint(
        _DTYPES[tensor.dtype],
        tensor.ndim,
        index_dtype=ct.int32 if annotation is None else annotation.index_dtype,
        stride_lower_bound_incl=[None if stride == 1 else 0 for stride in strides],
        alias_groups=(),
        may_alias_internally=overlaps,
        stride_constant=[1 if stride == 1 else None for stride in strides],
        shape_constant=[1 if size == 1 else None for size in shape],
        stride_divisible_by=[1 if stride % unit or stride == 1 else unit for stride in strides],
        shape_divisible_by=[1 if size % 16 else 16 for size in shape],
        base_addr_divisible_by=math.gcd(tensor.data_ptr(), 16),
    )


# ---- code


_cubins: dict[tuple[int, str, str], Code] = {}


def compiled(kernel: Any, signature: KernelSignature, arch: str) -> Code:
    """Compiles a kernel for a GPU and reads what came out; RuntimeError with the compiler's words if not."""
    key = (id(kernel), signature.symbol, arch)
    if key not in _cubins:
        _cubins[key] = read_cubin(compile_cubin(kernel, signature, arch))
    return _cubins[key]


def compile_cubin(kernel: Any, signature: KernelSignature, arch: str) -> bytes:
    """The binary that `arch` would run; RuntimeError with the compiler's words if it cannot be made."""
    file = io.BytesIO()
    try:
        export_kernel(kernel, [signature], file, gpu_code=arch, output_format="cubin")
    except ct.TileError as error:
        raise RuntimeError(f"{kernel._pyfunc.__name__} does not compile for {arch}: {error}") from error
    return file.getvalue()


def read_cubin(cubin: bytes) -> Code:
    """Registers, stack, shared memory and instructions of a cubin with one kernel."""
    with _in_a_file(cubin) as name:
        usage = _output(_tool("cuobjdump"), "-res-usage", name)
        sass = _output(_tool("nvdisasm"), "-c", name)
    found = _RESOURCES.search(usage)
    if found is None:
        raise RuntimeError(f"cuobjdump shows no resources: {usage.strip()!r}")
    registers, stack, shared = map(int, found.groups())
    return Code(registers, stack, shared, collections.Counter(_OPCODE.findall(sass)))


def dump_elf(cubin: bytes) -> str:
    """The sections of a cubin as cuobjdump prints them."""
    with _in_a_file(cubin) as name:
        return _output(_tool("cuobjdump"), "-elf", name)


@contextlib.contextmanager
def _in_a_file(cubin: bytes) -> Iterator[str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        yield file.name


@functools.cache
def _tool(name: str) -> str:
    path = find_program(name)
    if path is None:
        raise RuntimeError(f"{name}, which reads compiled kernels, is not installed: {TOOLS}")
    return path


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        words = (done.stderr or done.stdout).strip()
        raise RuntimeError(f"{Path(command[0]).name} failed with status {done.returncode}: {words}")
    return done.stdout + done.stderr
