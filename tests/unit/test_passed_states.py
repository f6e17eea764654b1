"""What a convolution sees of the ranks before, without processes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshlora.comm.groups import Axis
from meshlora.wings.context import passed_states
from meshlora.wings.context.passed_states import PassedStates
from tests.for_each import for_each


@for_each("kernel", [1, 2, 4, 6])
@for_each(("size", "per_rank"), [(2, 1), (3, 2), (4, 2), (2, 9)])
def test_a_convolution_sees_the_tokens_before_of_as_many_ranks_as_have_them(
    size: int, per_rank: int, kernel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel may be longer than what one rank has: then it reaches into several."""
    row = torch.randn(2, 3, size * per_rank, dtype=torch.float64, requires_grad=True)
    parts, reach = row.split(per_rank, -1), kernel - 1
    padded = F.pad(row, (reach, 0))

    def tails(x: Tensor, axis: Axis) -> Tensor:
        assert torch.equal(x, parts[axis.rank][..., per_rank - x.shape[-1] :])
        return torch.cat([part[..., per_rank - x.shape[-1] :] for part in parts])

    monkeypatch.setattr(passed_states, "gather_each_to_each", tails)
    for rank in range(size):
        states = PassedStates(Axis(size, rank, tuple(range(size)), None), row, (2,))
        found = states.update_conv_state(parts[rank], conv_kernel_size=kernel)
        expected = padded.narrow(-1, rank * per_rank, reach + per_rank)
        assert torch.equal(found, expected), rank
        weights = torch.randn_like(found)
        of_found, of_expected = (torch.autograd.grad((y * weights).sum(), row)[0] for y in (found, expected))
        assert torch.allclose(of_found, of_expected, rtol=1e-14), rank
