"""What float64 arithmetic makes of a problem: the yardstick of every test, benchmark and command."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tilegym_mamba2.options import NO_LIMIT, ScanOptions

# Elements that one step may touch: 2 GiB of doubles.
REFERENCE_ELEMENTS = 2**28
REFERENCE_CHUNK = 64

_FORWARD = ("x", "a", "b", "c", "d", "dt", "init_state")
_SCAN = ("x", "dt", "a", "b", "c", "d", "z", "dt_bias", "init_state")
_LENGTHS = ("cu_seqlens", "seq_lens")


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

    backward = inputs.get("dout") is not None
    results = _zero_results(inputs, _FORWARD, backward)
    for rows, group_range, head_range in _cuts(inputs, backward):
        cut = _cut(inputs, rows, group_range, head_range)
        arguments = [cut.get(name) for name in _FORWARD]
        out, final_state = chunked.mamba2_chunk_forward(*arguments, REFERENCE_CHUNK)
        results["out"][rows, :, head_range] = out
        results["final_state"][rows, head_range] = final_state
        if backward:
            arguments += [cut["dout"], cut.get("dfinal_state"), REFERENCE_CHUNK, torch.float64]
            gradients = chunked.mamba2_chunk_backward(*arguments)
            places = _places(inputs, rows, group_range, head_range)
            _add_gradients(results, places, _FORWARD, gradients)
    return results


def float64_scan_reference(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor | None]:
    """As `float64_reference`, for the keyword arguments of `mamba2_chunk_scan`, without its chunk states.

    Returns:
        float64 `out` and `final_state`, and with `dout` also `dx, ddt, da, db, dc, dd, dz, ddt_bias,
        dinit_state`, None for inputs that are not there.
    """
    from tilegym_mamba2.backends.torch import scan

    backward = inputs.get("dout") is not None
    limit = tuple(inputs.get("dt_limit", NO_LIMIT))
    options = ScanOptions(inputs.get("dt_softplus", False), limit, REFERENCE_CHUNK, torch.float64)
    results = _zero_results(inputs, _SCAN, backward)
    for rows, group_range, head_range in _cuts(inputs, backward):
        cut = _cut(inputs, rows, group_range, head_range)
        places = _places(inputs, rows, group_range, head_range)
        arguments = [cut.get(name) for name in (*_SCAN, *_LENGTHS)]
        out, final_state, _, _ = scan.mamba2_chunk_scan(*arguments, options)
        results["out"][places["x"]] = out
        results["final_state"][places["dfinal_state"]] = final_state
        if backward:
            gradients = scan.mamba2_chunk_scan_backward(
                *arguments, cut["dout"], cut.get("dfinal_state"), options
            )
            _add_gradients(results, places, _SCAN, gradients)
    return results


def float64_step_reference(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """As `float64_reference`, for the keyword arguments of `mamba2_state_update`: `out` and `final_state`."""
    from tilegym_mamba2.backends.torch import state_update

    per_token = ("x", "dt", "b", "c", "z")
    doubles = {
        name: value.double() if value.is_floating_point() else value
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor)
    }
    if inputs["x"].dim() == 3:
        doubles |= {name: doubles[name].unsqueeze(1) for name in per_token if name in doubles}
    state, x = doubles["state"].clone(), doubles["x"]
    out = torch.zeros_like(x)
    batch, tokens = x.shape[:2]
    rows_per_call = max(1, REFERENCE_ELEMENTS // max(1, 4 * tokens * state[0].numel()))
    indices = doubles.get("state_indices")
    for start in range(0, batch, rows_per_call):
        rows = slice(start, start + rows_per_call)
        cut = {name: doubles[name][rows] for name in per_token if name in doubles}
        state_update.mamba2_state_update(
            state[rows] if indices is None else state,
            *(cut["x"], cut["dt"], doubles["a"], cut["b"], cut["c"]),
            *(doubles.get("d"), cut.get("z"), doubles.get("dt_bias")),
            None if indices is None else indices[rows],
            inputs.get("dt_softplus", False),
            inputs.get("dt_limit", NO_LIMIT),
            out[rows],
        )
    return {"out": out.reshape(inputs["x"].shape), "final_state": state}


def _add_gradients(
    results: dict[str, torch.Tensor | None],
    places: dict[str, tuple[slice, ...]],
    names: tuple[str, ...],
    gradients: tuple[torch.Tensor | None, ...],
) -> None:
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not None:
            # A cut adds to a, b, c, d and dt_bias of other cuts and is alone with the rest of its places.
            results[f"d{name}"][places[name]] += gradient


def _zero_results(
    inputs: Mapping[str, Any], names: tuple[str, ...], backward: bool
) -> dict[str, torch.Tensor | None]:
    x, b = inputs["x"], inputs["b"]
    options = {"dtype": torch.float64, "device": x.device}
    state_shape = (_num_states(inputs), x.shape[2], x.shape[3], b.shape[3])
    results = {"out": torch.zeros(x.shape, **options), "final_state": torch.zeros(state_shape, **options)}
    if backward:
        for name in names:
            tensor = inputs.get(name)
            results[f"d{name}"] = None if tensor is None else torch.zeros(tensor.shape, **options)
    return results


def _num_states(inputs: Mapping[str, Any]) -> int:
    packed = inputs.get("cu_seqlens")
    return inputs["x"].shape[0] if packed is None else packed.shape[0] - 1


def _cuts(inputs: Mapping[str, Any], backward: bool) -> Iterator[tuple[slice, slice, slice]]:
    """(batch rows, groups, heads) as slices: everything at once, or some heads of one group in one row."""
    x, b = inputs["x"], inputs["b"]
    batch, tokens, heads, head_size = x.shape
    groups, state_size = b.shape[2:]
    per_head = max(tokens, 1) * 2 * (head_size + state_size + REFERENCE_CHUNK) * (3 if backward else 1)
    if per_head * batch * heads <= REFERENCE_ELEMENTS:
        yield slice(0, batch), slice(0, groups), slice(0, heads)
        return
    heads_per_group = heads // groups
    heads_per_call = max(1, min(heads_per_group, REFERENCE_ELEMENTS // per_head))
    for row in range(batch):
        for group in range(groups):
            end = (group + 1) * heads_per_group
            for start in range(group * heads_per_group, end, heads_per_call):
                stop = min(start + heads_per_call, end)
                yield slice(row, row + 1), slice(group, group + 1), slice(start, stop)


def _places(
    inputs: Mapping[str, Any], rows: slice, groups: slice, heads: slice
) -> dict[str, tuple[slice, ...]]:
    """Where a cut lies in each tensor."""
    every = slice(None)
    per_head, per_group = (rows, every, heads), (rows, every, groups)
    places = dict.fromkeys(("x", "dt", "z", "dout"), per_head) | dict.fromkeys(("b", "c"), per_group)
    places |= dict.fromkeys(("a", "d", "dt_bias"), (heads,))
    # Packed sequences are all in one row.
    states = rows if inputs.get("cu_seqlens") is None else every
    places |= dict.fromkeys(("init_state", "dfinal_state"), (states, heads))
    return places | {"seq_lens": (rows,), "cu_seqlens": (every,)}


def _cut(
    inputs: Mapping[str, Any], rows: slice, groups: slice, heads: slice
) -> dict[str, torch.Tensor | None]:
    cut = {}
    for name, place in _places(inputs, rows, groups, heads).items():
        tensor = inputs.get(name)
        if tensor is not None:
            tensor = tensor[place].detach()
            cut[name] = tensor.double() if tensor.is_floating_point() else tensor
    return cut
