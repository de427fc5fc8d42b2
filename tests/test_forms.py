"""What is kept for a form of call."""

import torch

from tilegym_mamba2.forms import Kept, form_of


def test_kept_does_not_grow_without_end() -> None:
    kept = Kept()
    for number in range(2 * Kept.MOST + 1):
        kept[number] = number
        assert len(kept) <= Kept.MOST
    assert kept[2 * Kept.MOST] == 2 * Kept.MOST
    assert 0 not in kept


def test_a_form_is_that_of_tensors_and_not_their_values() -> None:
    def tensors(tokens: int = 5, shift: int = 0) -> list[torch.Tensor | None]:
        x = torch.randn(tokens * 16 + 8)[shift : shift + tokens * 16].view(1, tokens, 2, 8)
        b, c = torch.randn(2, 1, tokens, 1, 4)
        return [x, torch.randn(2), b, c, None, torch.rand(1, tokens, 2), None]

    first = form_of(*tensors())
    assert form_of(*tensors()) == first
    assert form_of(*tensors(tokens=6)) != first
    # Two elements on: off the 16 bytes for which code is compiled.
    assert form_of(*tensors(shift=2)) != first
    given = tensors()
    assert form_of(*given[:4], torch.randn(2), *given[5:]) != first
    assert form_of(*given[:2], given[2].transpose(1, 2).reshape(1, 5, 1, 4).bfloat16(), *given[3:]) != first
