"""NEFTune on a mesh (Jain et al., 2023, arXiv 2310.05914): uniform noise on the embedded tokens, in training alone.

Owns: the hook on the input embedding, and the length of each token's sequence. Does not own: the numbers drawn
(`meshlora_ground.masks`), the tokens of a forward (`layers.tokens`).

Noise is added where transformers adds it, to what the module of `get_input_embeddings()` returns: with its LoRA, and
after a scale that the module itself applies, but before one that the model applies to its output. Its size is alpha /
sqrt(L d) with L the tokens of the sequence itself. transformers takes the padded length of the row, which depends on
the batch. All tp, cp and sp ranks embed the same tokens, and so add the same noise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshlora.layers.tokens import ForwardTokens, Share
from meshlora_ground.float64 import wide_dtype
from meshlora_ground.masks import POSITION_BITS, noise_key, uniform


def add_noise(embedding: nn.Module, tokens: ForwardTokens, *, alpha: float) -> None:
    """Let `embedding` add noise to the tokens of the running forward while it is in training mode."""

    def hook(module: nn.Module, _: Any, found: Tensor) -> Tensor:
        if not module.training:
            return found
        flat = found.reshape(-1, found.shape[-1])  # [B*S, d]
        noises = [_noise(part.share, alpha, flat) for part in tokens.parts("the input embedding", len(flat))]
        return found + torch.cat(noises).view_as(found)

    embedding.register_forward_hook(hook)


def _noise(share: Share, alpha: float, like: Tensor) -> Tensor:
    """The noise of all tokens of `share`, `[B*S, d]`; that of padding is 0."""
    assert share.is_token is not None, "the tokens of a share with noise are known from its padding"
    wide, width = wide_dtype(like.dtype), like.shape[1]
    lengths = sequence_lengths(share.tokens, share.is_token).to(wide)
    sizes = torch.where(lengths > 0, alpha / (lengths * width).sqrt(), 0)  # 0: padding
    features = torch.arange(width, device=like.device)
    drawn = uniform(noise_key(share.seed, share.step), share.tokens.flatten(), features, wide)
    return drawn.mul_(sizes.view(-1, 1)).to(like.dtype)


def sequence_lengths(tokens: Tensor, is_token: Tensor) -> Tensor:
    """int64 `[B, S]`: the tokens of the sequence that each token is of; 0 at padding, which is at the end of rows.

    tokens: int64 `[B, S]`, their numbers. is_token: `[B, S]`, 0 at padding. Nothing waits for the device.
    """
    positions, is_real = tokens & (2**POSITION_BITS - 1), is_token != 0
    begins = (positions == 0) | ~is_real  # of a packed sequence, or of the padding after the last one
    is_last = is_real & torch.nn.functional.pad(begins[:, 1:], (0, 1), value=True)
    # Of a last token its position, plus 1, is the length; before the next last one all are of the same sequence.
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    ends = torch.where(is_last, places, tokens.shape[1] - 1).flip(1).cummin(1).values.flip(1)
    return torch.where(is_real, positions.gather(1, ends) + 1, 0)
