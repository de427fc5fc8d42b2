"""What float64 arithmetic makes of a problem: the yardstick of every test, benchmark and command."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

# Elements that one step may touch: 2 GiB of doubles.
REFERENCE_ELEMENTS = 2**28
REFERENCE_CHUNK = 64

_FORWARD = ("x", "a", "b", "c", "d", "dt", "init_state")


def float64_reference(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor | None]:
    """What float64 arithmetic makes of a problem's inputs, on their device and in bounded memory.

    Large problems are cut by batch row and by heads of a group, so that beside inputs and results about 4 GiB
    are used. Where `dout` is among the inputs, the gradients are added.

    Args:
        inputs: x, a, b, c, d, dt, init_state (d and init_state may be None), and for the gradients dout and
            dfinal_state, in any floating dtype.

    Returns:
        float64 `out` (B, T, H, P) and `final_state` (B, H, P, N), and with `dout` also `dx, da, db, dc, dd,
        ddt, dinit_state`, where `dd` and `dinit_state` are None if `d` and `init_state` are.
    """
    from tilegym_mamba2.backends.torch import chunked

    x, b = inputs["x"], inputs["b"]
    batch, tokens, heads, head_size = x.shape
    groups, state_size = b.shape[2:]
    backward = inputs.get("dout") is not None
    results = _zero_results(inputs, backward)
    per_head = max(tokens, 1) * 2 * (head_size + state_size + REFERENCE_CHUNK) * (3 if backward else 1)
    whole = per_head * batch * heads <= REFERENCE_ELEMENTS
    heads_per_call = None if whole else max(1, min(heads // groups, REFERENCE_ELEMENTS // per_head))
    for rows, group_range, head_range in _cuts(batch, heads, groups, heads_per_call):
        cut = _cut(inputs, rows, group_range, head_range)
        arguments = [cut[name] for name in _FORWARD]
        out, final_state = chunked.mamba2_chunk_forward(*arguments, REFERENCE_CHUNK)
        results["out"][rows, :, head_range] = out
        results["final_state"][rows, head_range] = final_state
        if backward:
            arguments += [cut["dout"], cut["dfinal_state"], REFERENCE_CHUNK, torch.float64]
            gradients = chunked.mamba2_chunk_backward(*arguments)
            places = _places(rows, group_range, head_range)
            for name, gradient in zip(_FORWARD, gradients, strict=True):
                if gradient is not None:
                    # A cut adds to a, b, c, d of other cuts and is alone with the rest of its places.
                    results[f"d{name}"][places[name]] += gradient
    return results


def _zero_results(inputs: Mapping[str, Any], backward: bool) -> dict[str, torch.Tensor | None]:
    x, b = inputs["x"], inputs["b"]
    options = {"dtype": torch.float64, "device": x.device}
    state_shape = (x.shape[0], x.shape[2], x.shape[3], b.shape[3])
    results = {"out": torch.zeros(x.shape, **options), "final_state": torch.zeros(state_shape, **options)}
    if backward:
        for name in _FORWARD:
            tensor = inputs.get(name)
            results[f"d{name}"] = None if tensor is None else torch.zeros(tensor.shape, **options)
    return results


def _cuts(
    batch: int, heads: int, groups: int, heads_per_call: int | None
) -> Iterator[tuple[slice, slice, slice]]:
    """(batch rows, groups, heads) as slices: everything at once, or some heads of one group in one row."""
    if heads_per_call is None:
        yield slice(0, batch), slice(0, groups), slice(0, heads)
        return
    heads_per_group = heads // groups
    for row in range(batch):
        for group in range(groups):
            end = (group + 1) * heads_per_group
            for start in range(group * heads_per_group, end, heads_per_call):
                stop = min(start + heads_per_call, end)
                yield slice(row, row + 1), slice(group, group + 1), slice(start, stop)


def _places(rows: slice, groups: slice, heads: slice) -> dict[str, tuple[slice, ...]]:
    """Where a cut lies in each tensor."""
    every = slice(None)
    per_head, per_group = (rows, every, heads), (rows, every, groups)
    places = dict.fromkeys(("x", "dt", "dout"), per_head) | dict.fromkeys(("b", "c"), per_group)
    places |= dict.fromkeys(("a", "d"), (heads,))
    return places | dict.fromkeys(("init_state", "dfinal_state"), (rows, heads))


def _cut(
    inputs: Mapping[str, Any], rows: slice, groups: slice, heads: slice
) -> dict[str, torch.Tensor | None]:
    cut = {}
    for name, place in _places(rows, groups, heads).items():
        tensor = inputs.get(name)
        cut[name] = None if tensor is None else tensor[place].detach().double()
    return cut
