"""Whether a model keeps packed sequences apart: tested on a tiny twin of the model, not listed by family.

Owns: the comparison, and the refusal. Does not own: rows (`train.packing`), twins (`meshlora_judge.twin`).

Without a mask, attention in transformers finds sequence borders by restarting position ids. A convolution or recurrent
state along the row, an alibi bias or a mask made elsewhere does not: the logits of packed tokens then differ from those
of the same sequences one by one.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from meshlora.layers.row_lengths import rows_of
from meshlora.train.losses import packed_positions
from meshlora.train.packing import padded_lengths
from meshlora.wings.packed_rows.by_sequence import keep_apart
from meshlora.wings.packed_rows.row_masks import read_positions_in_masks
from meshlora_ground.errors import UnsupportedError, reason
from meshlora_ground.float64 import lift
from meshlora_ground.model_class import model_class
from meshlora_judge.twin import shrink_config

# Longer and shorter than a twin's windows (8), odd; the second row ends in padding.
_ROWS = ((13, 5, 3), (3, 11))
_LIMIT = 1e-9


def check_packing(config: PretrainedConfig, *, attn_implementation: str | None, trust_remote_code: bool) -> bool:
    """Refuse packing for a model in whose twin sequences of a row affect each other. Runs here, on a tiny model.

    Returns whether all its attention runs one sequence at a time (`wings.packed_rows.by_sequence`); else some has a
    mask of the whole row, and computes the scores of all its tokens.

    Raises:
        UnsupportedError: they do; the twin cannot show it.
    """
    what = f"data.packing with model_type {config.model_type!r}"
    way_out = "set data.packing: false"
    try:
        model = _twin(config, attn_implementation, trust_remote_code)
        lengths = keep_apart(model)
        packed, mixed = _differences(model)
    except Exception as error:  # families raise all kinds of errors for unknown arguments
        raise UnsupportedError(what, f"its twin does not run on packed rows ({reason(error)})", way_out) from error
    if not packed <= _LIMIT:
        raise UnsupportedError(what, f"its layers mix sequences of one row (logits differ by {packed:.1e})", way_out)
    if not mixed > _LIMIT:
        raise UnsupportedError(what, "its twin could not show that sequences of one row are kept apart", way_out)
    return lengths is not None and bool(lengths.apart) and not lengths.whole


def _twin(config: PretrainedConfig, attn_implementation: str | None, trust_remote_code: bool) -> Any:
    """A float64 model of tiny sizes with random weights."""
    small = shrink_config(config)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # families warn about their own defaults
        torch.manual_seed(0)
        model = model_class(small).from_config(
            small,
            dtype=torch.float64,
            attn_implementation=attn_implementation,
            experts_implementation="eager",  # the others do not compute in float64
            trust_remote_code=trust_remote_code,
        )
        for parameter in model.parameters():
            parameter.data = parameter.data.double()  # routers of some families ignore `dtype` and are float32
            if parameter.ndim > 1:
                parameter.data.normal_(std=0.2)  # the usual 0.02 shows little in a tiny model
    read_positions_in_masks(model)
    return model.eval()


@torch.no_grad()
def _differences(model: Any) -> tuple[float, float]:
    """Logit differences to the sequences run alone: of packed rows, and of rows run as one long sequence."""
    vocab = model.config.get_text_config().vocab_size
    longest = max(map(sum, _ROWS))
    ids = torch.randint(3, vocab, (len(_ROWS), longest), generator=torch.Generator().manual_seed(0))
    of_rows = [padded_lengths(lengths, longest) for lengths in _ROWS]
    positions = torch.stack([torch.cat([*map(torch.arange, lengths)]) for lengths in of_rows])
    positions = packed_positions(model.config, positions)
    with lift():
        with rows_of(model, of_rows):
            packed = model(input_ids=ids, attention_mask=None, position_ids=positions, use_cache=False).logits
        plain = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        worst, mixed = 0.0, 0.0
        for row, lengths in enumerate(_ROWS):
            start = 0
            for length in lengths:
                part = slice(start, start + length)
                alone = ids[row : row + 1, part]
                found = model(input_ids=alone, attention_mask=torch.ones_like(alone), use_cache=False).logits[0]
                worst = max(worst, _distance(packed[row, part], found))
                mixed = max(mixed, _distance(plain[row, part], found) if start else 0.0)
                start += length
    return worst, mixed


def _distance(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest value; infinite if one is not finite."""
    found = float((one - other).abs().max() / other.abs().max())
    return found if math.isfinite(found) else math.inf
