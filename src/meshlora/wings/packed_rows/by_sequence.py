"""Attention of packed rows, one sequence at a time: no mask of S x S, and no score of two sequences.

Owns: the mask of packed rows, made whole only for code that looks into it, and attention to each sequence by
transformers' own function with the mask of that sequence alone. Does not own: the lengths (`layers.row_lengths`), which
sequences share a row (`train.packing`), position ids, by which transformers notices packed rows, and cp, whose ranks
attend in parts (`wings.context.context`).

transformers calls attention and makes masks through two registries of functions by name. Ours stand there as
`meshlora-apart-sdpa` and `meshlora-apart-eager`. So windows, sinks and soft caps are those of the model. Sequences of
one length are a batch; of others on a GPU one kernel takes all at once where it computes the same
(`wings.packed_rows.varlen`). Rows of one sequence each are none of packed ones. A mask that depends on more than
positions, attention with further values for each token, and a forward without known lengths take the whole mask, as
without this file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig
from transformers.masking_utils import create_causal_mask

from meshlora.layers.row_lengths import Lengths, lengths_of
from meshlora.wings.packed_rows.varlen import Ends, fits, in_one_call
from meshlora_ground.compat import transformers_attention, transformers_models
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.slow_paths import ONE_BY_ONE, WHOLE_MASK, take

_OURS = "meshlora-apart-"
BASES = ("sdpa", "eager")
# Arguments of attention functions that may have a value for each token, and change nothing in one sequence.
_WITHOUT_EFFECT = {"position_ids"}


class PackedLengths(Lengths):
    """`Lengths` of a model that attends one sequence at a time.

    Attributes:
        apart, whole: the attention modules that have run packed rows one sequence at a time, and with a whole mask.
    """

    def __init__(self) -> None:
        super().__init__()
        self.apart: set[nn.Module] = set()
        self.whole: set[nn.Module] = set()
        self.ends = Ends()


class PackedMask:
    """The mask of packed rows, by the rule for one sequence alone.

    make: transformers' function, with `given` its arguments by name. alone: the mask function of a sequence by itself.
    """

    def __init__(self, make: Callable[..., Any], given: dict[str, Any], alone: Callable[..., Any]) -> None:
        self.make, self.given, self.rule = make, given, alone
        self.is_known = False
        self._lengths: Sequence[Sequence[int]] | None = None
        self._alone: dict[int, Any] = {}

    @functools.cached_property
    def whole(self) -> Any:
        """The mask as transformers makes it, `[B, 1, S, S]`."""
        return self.make(**self.given)

    def alone(self, length: int) -> Any:
        """The mask of one sequence, as in a batch of it alone; the same for all layers."""
        if length not in self._alone:
            self._alone[length] = self.make(
                **self.given
                | {
                    "batch_size": 1,
                    "q_length": length,
                    "kv_length": length,
                    "mask_function": self.rule,
                    # Of the model's own additions transformers does not know whether they can be left out.
                    "allow_is_causal_skip": not self.given.get("use_vmap", False),
                }
            )
        return self._alone[length]

    def lengths(self, running: Lengths) -> Sequence[Sequence[int]] | None:
        """Those of this mask's own forward: layers that run again in a backward have them too."""
        if not self.is_known:
            self.is_known, found = True, running.of_rows  # once: of the forward that made the mask
            fits = found is not None and list(map(sum, found)) == self.given["batch_size"] * [self.given["q_length"]]
            self._lengths = found if fits else None
        return self._lengths

    # All else that the code of a model does with a mask is done with the whole one.

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __getitem__(self, index: Any) -> Any:
        return self.whole[index]

    def __invert__(self) -> Any:
        return ~self.whole

    def __eq__(self, other: object) -> Any:
        return self.whole == other

    def __ne__(self, other: object) -> Any:
        return self.whole != other

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch calls it for every function and operator that has such a mask beside a tensor."""

        def made(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(map(made, value))
            if isinstance(value, PackedMask):
                return value.whole
            return value

        return function(*map(made, args), **{name: made(value) for name, value in (kwargs or {}).items()})


def _mask(base: str, **given: Any) -> Any:
    """The mask of a forward: of packed rows a `PackedMask`, else transformers' own."""
    make = AttentionMaskInterface()[base]
    if given.get("attention_mask") is not None:
        return make(**given)
    alone = transformers_attention.rule_of_one_sequence(given["mask_function"])
    if alone is None:
        return make(**given)
    return PackedMask(make, given, alone)


def _attention(
    base: str, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
) -> Any:
    """Attention `[B, h, S, d]` -> `[B, S, h, d]` as transformers' function `base` computes it."""
    call = functools.partial(transformers_attention.attention_function(base, module), module)
    running: PackedLengths = module.meshlora_lengths
    lengths = None
    if isinstance(attention_mask, PackedMask):
        lengths = attention_mask.lengths(running)
    if lengths is None or _has_more(args, kwargs, key.shape[2], query.shape[2]):
        if isinstance(attention_mask, PackedMask) or running.of_rows is not None:
            running.whole.add(module)
            take(WHOLE_MASK, query.device)
        if isinstance(attention_mask, PackedMask):
            attention_mask = attention_mask.whole
        return call(query, key, value, attention_mask, *args, **kwargs)
    running.apart.add(module)
    sizes = {n for of_row in lengths for n in of_row}
    masks = list(map(attention_mask.alone, sizes))
    if len(sizes) == 1:
        # `[B, h, N L, d]` -> `[B N, h, L, d]`, a view of one row: a batch, for which there are the fastest kernels.
        batch = (x.unflatten(2, (-1, *sizes)).transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        return call(*batch, *masks, *args, **kwargs)[0].unflatten(0, (len(lengths), -1)).flatten(1, 2), None
    if base == "sdpa" and fits(module, query, key, value, masks, args, kwargs):
        return in_one_call(query, key, value, lengths, running.ends, scale=kwargs.get("scaling")), None
    if running.ends.fixed is not None:
        given, rule = (
            "train.cuda_graphs",
            "attention of joined rows has no kernel here that takes all sequences at once",
        )
        raise UnsupportedError(given, rule, "set data.packing: false, or train.cuda_graphs: off")
    take(ONE_BY_ONE, query.device)
    rows = []
    for row, of_row in enumerate(lengths):  # rows of other lengths, in which nothing can be stacked
        each = zip(*(x[row : row + 1].split(list(of_row), 2) for x in (query, key, value)), strict=True)
        parts = [call(*part, attention_mask.alone(n), *args, **kwargs)[0] for n, part in zip(of_row, each, strict=True)]
        rows.append(_joined(parts, 1))
    return _joined(rows, 0), None


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    if len(parts) == 1:  # `cat` would copy it
        return parts[0]
    return torch.cat(list(parts), dim)


def _has_more(args: Sequence[Any], kwargs: dict[str, Any], num_keys: int, num_queries: int) -> bool:
    """Whether attention has arguments with something for each token, or keys of something else."""
    more = [*args, *(value for name, value in kwargs.items() if name not in _WITHOUT_EFFECT)]
    return num_keys != num_queries or any(isinstance(x, Tensor) and num_keys in x.shape for x in more)


def _register() -> None:
    for base in BASES:
        AttentionInterface.register(_OURS + base, functools.partial(_attention, base))
        AttentionMaskInterface.register(_OURS + base, functools.partial(_mask, base))


_register()


def knows_packed_rows() -> bool:
    """Whether the installed transformers masks packed rows of plain attention by a rule that is known here."""
    config = LlamaConfig()
    transformers_attention.set_attention(config, f"{_OURS}sdpa")
    rows = {
        "inputs_embeds": torch.zeros(1, 2, 1, device="cpu"),
        "position_ids": torch.arange(2, device="cpu")[None] * 0,
    }
    with transformers_models.all_rows_packed():
        mask = create_causal_mask(config=config, attention_mask=None, past_key_values=None, **rows)
    return isinstance(mask, PackedMask)


def keep_apart(model: Any) -> PackedLengths | None:
    """Let attention of `model` run packed rows one sequence at a time, where `layers.row_lengths.rows_of` says which
    there are.

    Returns None if its attention is none of transformers' sdpa and eager: it goes on as it was.
    """
    if (found := lengths_of(model)) is not None:
        assert isinstance(found, PackedLengths)
        return found
    base = transformers_models.attention_of(model.config.get_text_config())
    if base not in BASES:
        return None
    lengths = PackedLengths()
    model.register_forward_pre_hook(lambda *_: lengths.begin(), prepend=True)
    for module in model.modules():
        module.meshlora_lengths = lengths
        config = getattr(module, "config", None)
        if config is not None and transformers_models.attention_of(config) == base:
            transformers_attention.set_attention(config, _OURS + base)
    return lengths
