"""NEFTune: the numbers drawn, their size, and the place where transformers adds them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.neftune import neftune_post_forward_hook

from meshlora.comm.groups import Axis
from meshlora.layers.noise import add_noise, sequence_lengths
from meshlora.layers.tokens import ForwardTokens, Share
from meshlora.run.config.file import read_run
from meshlora.train.collation import collate
from meshlora.train.packing import joined, with_positions
from meshlora_ground.dataset import Sequence
from meshlora_ground.errors import UserError
from meshlora_ground.masks import noise_key, token_numbers, uniform
from tests.unit.mistakes import Setup

ALONE = Axis(1, 0, (0,), None)
TOKENS, FEATURES = token_numbers(torch.arange(8), 64).flatten(), torch.arange(256)
# Worked out in whole numbers of Python, from the words of `meshlora_ground.masks`: word * 2 + 1 over 2**32.
FIXED_KEY = 0xE8A3A2741FD26B91
FIXED = [
    [-840556897, -4212763729, -4292875765],
    [-1126289199, 46688721, 583890179],
    [3484637179, -1905416697, 4023122015],
]


def test_numbers_are_those_of_every_other_day() -> None:
    """A checkpoint is resumed by another version, on another machine: the bits must not change."""
    assert noise_key(3, 5) == 0xD210F1C8CCE58BD4
    tokens = torch.tensor([0, 2**32, 7 * 2**32 + 1000])
    found = uniform(FIXED_KEY, tokens, torch.tensor([0, 1, 4095]), torch.float64)
    assert (found * 2**32).long().tolist() == FIXED


def test_numbers_are_uniform_and_of_each_step_and_seed_unrelated() -> None:
    drawn = torch.stack(
        [uniform(noise_key(*key), TOKENS, FEATURES, torch.float64).flatten() for key in ((0, 0), (0, 1), (1, 0))]
    )
    number = drawn.shape[1]
    assert drawn.abs().max() < 1
    assert (drawn.mean(1).abs() * (3 * number) ** 0.5 < 4.5).all()
    assert (drawn.square().mean(1) * 3 - 1).abs().max() < 4.5 * (4 / 5 / number) ** 0.5
    for quarter in torch.linspace(-1, 1, 5)[:-1]:
        share = ((drawn > quarter) & (drawn <= quarter + 0.5)).double().mean(1)
        assert (share - 0.25).abs().max() < 4.5 * (3 / 16 / number) ** 0.5
    between = drawn @ drawn.T * 3 / number - torch.eye(3)
    assert between.abs().max() < 4.5 * 2 / number**0.5


class Scaled(nn.Embedding):
    """As gemma3's: the module itself scales what it looks up."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 7.0


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
def test_noise_is_added_where_and_as_transformers_adds_it(
    kind: type[nn.Embedding], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence without padding, whose length transformers takes too; its draws are replaced by ours."""
    length, width, alpha = 11, 24, 5.0
    numbers = token_numbers(torch.tensor([6]), length)
    drawn = uniform(noise_key(3, 2), numbers.flatten(), torch.arange(width), torch.float64).unsqueeze(0)
    monkeypatch.setattr(Tensor, "uniform_", lambda self, low, high: self.copy_(low + (high - low) * (drawn + 1) / 2))
    ids, found = torch.arange(length).unsqueeze(0), []
    for ours in (False, True):
        torch.manual_seed(0)
        embedding, tokens = kind(length, width, dtype=torch.float64), ForwardTokens(ALONE, sp=False)
        if ours:
            add_noise(embedding, tokens, alpha=alpha)
        else:
            embedding.neftune_noise_alpha = alpha
            embedding.register_forward_hook(neftune_post_forward_hook)
        with tokens.of([Share(None, numbers, seed=3, step=2, is_token=torch.ones_like(numbers))], [None]):
            found.append(embedding(ids))
            assert torch.equal(embedding.eval()(ids), kind.forward(embedding, ids))  # none in evaluations
    assert not torch.equal(found[1], kind.forward(embedding, ids))
    assert torch.allclose(found[1], found[0], rtol=0, atol=1e-7)  # it computes the size in float32


def test_size_of_noise_is_of_the_sequence_itself_whatever_is_beside_it() -> None:
    sequences = [Sequence(torch.arange(n).numpy(), torch.ones(n).bool().numpy(), {}) for n in (3, 5, 1, 7)]
    apart = collate(sequences, pad_token_id=0, token_multiple=32)
    rows = [[0, 2], [3, 1]]
    packed = collate([joined([sequences[n] for n in row]) for row in rows], pad_token_id=0, token_multiple=32)
    packed = with_positions(packed, [[len(sequences[n].input_ids) for n in row] for row in rows], rows)
    assert sequence_lengths(apart.tokens, apart.attention_mask).tolist() == [
        [3] * 3 + [0] * 5, [5] * 5 + [0] * 3, [1] + [0] * 7, [7] * 7 + [0]
    ]  # fmt: skip
    assert sequence_lengths(packed.tokens, packed.attention_mask).tolist() == [
        [3] * 3 + [1] + [0] * 12,
        [7] * 7 + [5] * 5 + [0] * 4,
    ]


def test_noise_is_named_as_others_name_it(setup: Setup) -> None:
    setup.set("train.neftune_noise_alpha", 5)
    setup.write()
    with pytest.raises(UserError, match=r"train\.neftune_noise_alpha: unknown key; here it is train\.neftune_alpha"):
        read_run(setup.folder / "run.yaml")
