"""Losses as sums over trained tokens. Dividing by the global number of tokens is `gradsync.finish_gradients`' part.

Owns: the loss and the log-probabilities of a language model whose logits never exist whole, and those of logits that
do, for loops of one's own. Does not own: the arithmetic over a split vocabulary (`layers.head.loss`), what an
objective makes of log-probabilities (`train.objectives`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlora.adapter.attach import runtime
from meshlora.common.errors import UnsupportedError, UserError
from meshlora.data import Batch
from meshlora.layers.head.loss import (
    IGNORED,
    cross_entropies_from_hidden,
    log_probabilities_from_hidden,
    summed_cross_entropy_from_hidden,
)
from meshlora.layers.head.recipe import LogitsRecipe
from meshlora.layers.linear import ParallelHead

# What the head gets `[T, H]`, the head, and what a loss over its vocabulary is given.
_Lazy = tuple[Tensor, Callable[[Tensor], Tensor], dict[str, Any]]
_Found = Tensor | _Lazy  # or logits `[B, S, V]`


def language_model_loss(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    labels: Tensor,
    *,
    label_smoothing: float = 0.0,
    position_ids: Tensor | None = None,
    trained: Tensor | None = None,
) -> Tensor:
    """Sum over the trained tokens of (1-e) -log p(label) + e times the mean of -log p over the vocabulary.

    input_ids, attention_mask, labels: `[B, S]`; labels are shifted already (labels[b, t] is the token after t), and
    -100 where untrained. The logits `[B, S, V]` never exist: the head runs on some tokens at a time.
    position_ids: `[B, S]` of packed rows, which begin again with each sequence.
    trained: `[N]`, where `labels.flatten()` is not -100, in order, if that is known: a GPU need not be asked for it.

    Raises:
        UserError: labels that are not shifted, as Hugging Face's models take them. Whoever says what is `trained` knows
            what labels are, and is not checked: a GPU would have to be asked.
    """
    if isinstance(model, Answer):
        return model.every.losses(label_smoothing)[model.place]
    if trained is None:
        check_shifted(input_ids, labels, attention_mask, position_ids)
    found = _forward(model, input_ids, attention_mask, position_ids)
    if isinstance(found, Tensor):
        return summed_cross_entropy(found, labels, label_smoothing=label_smoothing)
    hidden, head, options = found
    return summed_cross_entropy_from_hidden(
        hidden, head, labels.flatten(), **options, label_smoothing=label_smoothing, trained=trained
    )


class Answers:
    """What `model` says of a micro-batch of K adapters, from one forward; `of` one of them stands for a model of it.

    own: the rows of each, neighbours in `batch`. adapters: whose they are.
    """

    def __init__(self, model: Any, batch: Batch, own: Sequence[Batch], adapters: Sequence[str]) -> None:
        self.training, self._own, self._adapters = model.training, own, adapters
        self._rows = [len(one.labels) for one in own]
        self._batch = batch
        self._found = _forward(model, batch.input_ids, batch.attention_mask, batch.position_ids)
        head = runtime(model).plan.head
        self._head = model.get_submodule(head) if head else None
        self._losses: Sequence[Tensor] = ()
        self._log_probabilities: Sequence[Tensor] = ()

    def of(self, place: int) -> Answer:
        """What is said to the adapter at `place`."""
        return Answer(self, place)

    def losses(self, label_smoothing: float) -> Sequence[Tensor]:
        """The summed cross-entropy of each: the head runs once for all. They are smoothed alike."""
        if not self._losses:
            self._losses = self._summed(label_smoothing)
        return self._losses

    def _summed(self, label_smoothing: float) -> Sequence[Tensor]:
        found, labels = self._found, self._batch.labels
        if isinstance(found, Tensor):
            parts = zip(found.split(self._rows), self._own, strict=True)
            return [summed_cross_entropy(one, own.labels, label_smoothing=label_smoothing) for one, own in parts]
        smoothing: dict[str, Any] = {"label_smoothing": label_smoothing}
        if found[2]["parameters"]:
            every = zip(self._of_own_heads(found), self._own, strict=True)
            return [
                summed_cross_entropy_from_hidden(h, head, own.labels.flatten(), **how, **smoothing, trained=own.trained)
                for (h, head, how), own in every
            ]
        hidden, head, options = found
        sizes = [number * labels.shape[1] for number in self._rows]
        how = {name: value for name, value in options.items() if name != "parameters"}
        trained = self._batch.trained
        summed = cross_entropies_from_hidden(hidden, head, labels.flatten(), sizes, **how, **smoothing, trained=trained)
        return summed.unbind()

    def log_probabilities(self) -> Sequence[Tensor]:
        """`log_probabilities` of the rows of each."""
        if not self._log_probabilities:
            found = self._found
            if not isinstance(found, Tensor) and found[2]["parameters"]:
                every = zip(self._of_own_heads(found), self._own, strict=True)
                self._log_probabilities = [_log_probabilities(one, own.labels, own.trained) for one, own in every]
            else:
                every_row = _log_probabilities(found, self._batch.labels, self._batch.trained)
                self._log_probabilities = every_row.split(self._rows)
        return self._log_probabilities

    def _of_own_heads(self, found: _Lazy) -> list[_Lazy]:
        """What the head gets of each adapter's rows, with that adapter on the head."""
        hidden, head, options = found
        sizes = [one.labels.numel() for one in self._own]
        return [
            (h, self._head_of(name, head), {**options, "parameters": self._trained_of_head(name)})
            for h, name in zip(hidden.split(sizes), self._adapters, strict=True)
        ]

    def _head_of(self, name: str, head: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        leaf = self._head
        assert isinstance(leaf, ParallelHead)

        def run(hidden: Tensor) -> Tensor:  # in a backward too
            before, leaf.active = leaf.active, name
            try:
                return head(hidden)
            finally:
                leaf.active = before

        return run

    def _trained_of_head(self, name: str) -> list[Tensor]:
        assert isinstance(self._head, ParallelHead)
        return [p for p in self._head.trained(name).values() if p.requires_grad]


@dataclass(frozen=True)
class Answer:
    """What a model said to one of several adapters: a loss takes it in the place of a model, with that one's rows."""

    every: Answers
    place: int

    @property
    def training(self) -> bool:
        """Whether the model was."""
        return bool(self.every.training)


def log_probabilities(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    labels: Tensor,
    *,
    position_ids: Tensor | None = None,
    trained: Tensor | None = None,
) -> Tensor:
    """log p(label) of each token, `[B, S]`, 0 where untrained; arguments and errors as of `language_model_loss`."""
    if isinstance(model, Answer):
        return model.every.log_probabilities()[model.place]
    if trained is None:
        check_shifted(input_ids, labels, attention_mask, position_ids)
    return _log_probabilities(_forward(model, input_ids, attention_mask, position_ids), labels, trained)


def _log_probabilities(found: _Found, labels: Tensor, trained: Tensor | None) -> Tensor:
    if isinstance(found, Tensor):
        exact = F.cross_entropy(found.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
        return -exact.view_as(labels)
    hidden, head, options = found
    return log_probabilities_from_hidden(hidden, head, labels.flatten(), **options, trained=trained).view_as(labels)


def check_shifted(
    input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
) -> None:
    """Refuse labels `[B, S]` that say of each token itself, and not the one after it. The host waits for the answer.

    Shifted labels cannot be taken for such: where the next token is of the same sequence, they are that token.
    """
    if labels.shape != input_ids.shape:
        raise UserError(
            f"labels {list(labels.shape)} and input_ids {list(input_ids.shape)}",
            "labels[b, t] is the token after input_ids[b, t], so both have one shape",
            "give -100 where there is none, as after the last token",
        )
    is_trained = labels != IGNORED
    is_itself = (labels == input_ids) | ~is_trained
    goes_on = is_trained[:, :-1]  # the sequence, in its row
    if attention_mask is not None and attention_mask.ndim == 2:
        goes_on = goes_on & (attention_mask[:, 1:] == attention_mask[:, :-1])
    if position_ids is not None:
        goes_on = goes_on & (position_ids[:, 1:] == position_ids[:, :-1] + 1)
    differs = goes_on & (labels[:, :-1] != input_ids[:, 1:])
    if bool(is_itself.all() & (2 * differs.sum() > goes_on.sum())):
        raise UserError(
            "labels that are the input_ids themselves, as Hugging Face's models take them",
            "labels[b, t] must be the token after input_ids[b, t]; these would train it to repeat each token",
            "shift them: labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)",
        )


def model_inputs(input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> dict[str, Any]:
    """Arguments of a model's forward. Without a mask transformers reads from position ids where a sequence begins."""
    if position_ids is not None:
        return {"input_ids": input_ids, "attention_mask": None, "position_ids": position_ids, "use_cache": False}
    return {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}


def _forward(model: Any, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> _Found:
    state = runtime(model)
    inputs = model_inputs(input_ids, attention_mask, position_ids)
    head = model.get_submodule(state.plan.head) if state.plan.head else None
    if not isinstance(head, ParallelHead):
        logits = model(**inputs).logits
        assert isinstance(logits, Tensor)
        return logits
    head.is_lazy = True
    try:
        recipe = model(**inputs).logits
    except UnsupportedError:
        if not state.plan.topology.is_whole:
            raise
        # What this model does to its logits needs all of them: on one process they can be had.
        head.is_lazy = False
        logits = model(**inputs).logits
        assert isinstance(logits, Tensor)
        return logits
    finally:
        head.is_lazy = False
    assert isinstance(recipe, LogitsRecipe), type(recipe)

    def local_logits(hidden: Tensor) -> Tensor:
        return recipe.replay(head.local_logits(hidden))

    trained = [parameter for parameter in head.parameters() if parameter.requires_grad and torch.is_grad_enabled()]
    options = {"parameters": trained, "axis": state.mesh.tp, "vocab": head.rule.out_features}
    return recipe.hidden.flatten(0, -2), local_logits, options


def summed_cross_entropy(logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """The same from whole logits `[B, S, V]`, in fp32 (fp64 inside the lift)."""
    return F.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
