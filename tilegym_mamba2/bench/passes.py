"""What can be measured: the passes of each op that has specs, and what they return."""

import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

CHUNK_OP, SCAN_OP, STEP_OP = "mamba2_chunk_forward", "mamba2_chunk_scan", "mamba2_state_update"
CHUNK_BACKWARD, SCAN_BACKWARD = "mamba2_chunk_backward", "mamba2_chunk_scan_backward"

OUTPUTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        CHUNK_OP: ("out", "final_state"),
        CHUNK_BACKWARD: ("dx", "da", "db", "dc", "dd", "ddt", "dinit_state"),
        SCAN_OP: ("out", "final_state"),
        SCAN_BACKWARD: ("dx", "ddt", "da", "db", "dc", "dd", "dz", "ddt_bias", "dinit_state"),
        STEP_OP: ("out", "final_state"),
    }
)
PASSES: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        CHUNK_OP: {
            "forward": (CHUNK_OP,),
            "backward": (CHUNK_BACKWARD,),
            "forward+backward": (CHUNK_OP, CHUNK_BACKWARD),
        },
        SCAN_OP: {
            "forward": (SCAN_OP,),
            "backward": (SCAN_BACKWARD,),
            "forward+backward": (SCAN_OP, SCAN_BACKWARD),
        },
        STEP_OP: {"forward": (STEP_OP,)},
    }
)
"""By a spec's `op` and the pass's name: the ops that a pass calls, in this order."""
PASS_NAMES = tuple(PASSES[CHUNK_OP])


def outputs_of(spec: Any, pass_name: str) -> tuple[str, ...]:
    """The names of a pass's results, in the order of a backend's."""
    return tuple(itertools.chain.from_iterable(OUTPUTS[op] for op in PASSES[spec.op][pass_name]))
