"""What the tests of registration and of backends share."""

import os
import subprocess
import sys
import textwrap

import tilegym
import torch
from tilegym.backend import dispatcher, selector

FORWARD = "mamba2_chunk_forward"
BACKWARD = "mamba2_chunk_backward"
TORCH_FORWARD = "tilegym_mamba2.backends.torch.chunked:mamba2_chunk_forward"


def problem(device="cpu", **changes):
    B, T, H, P, G, N = 2, 6, 4, 3, 2, 5
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    inputs = {
        "x": draw(B, T, H, P),
        "a": -draw(H).abs(),
        "b": draw(B, T, G, N),
        "c": draw(B, T, G, N),
        "d": draw(H),
        "dt": draw(B, T, H).abs(),
        "init_state": draw(B, H, P, N),
    }
    return inputs | changes


def tensors(inputs):
    return tuple(inputs.values())


def tilegym_state():
    return (
        {name: dict(table) for name, table in dispatcher._REGISTRY.items()},
        dict(vars(tilegym.ops)),
        dict(vars(sys.modules["tilegym.ops.ops"])),
        set(selector._AVAILABLE_BACKENDS),
        selector._CURRENT_BACKENDS,
    )


def run_python(source, **env):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith(("TILEGYM_MAMBA2", "CUTILE"))} | env,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
