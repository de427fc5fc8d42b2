"""The public ops: check the arguments, pick the backend, call it. Also reachable as `tilegym.ops.<name>`."""

from tilegym_mamba2.ops_chunk import mamba2_chunk_backward, mamba2_chunk_forward
from tilegym_mamba2.ops_scan import mamba2_chunk_scan
from tilegym_mamba2.ops_step import mamba2_state_update

__all__ = ["mamba2_chunk_backward", "mamba2_chunk_forward", "mamba2_chunk_scan", "mamba2_state_update"]
