"""Losses as sums over trained tokens; `gradsync.finish_gradients` divides by the global number of tokens.

Owns: the loss and log-probabilities of a language model without materialising its logits, and the loss of given
logits, for custom loops. Does not own: the arithmetic over a split vocabulary (`layers.head_loss`), the objectives
(`run.objectives`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlora.adapter.attach import runtime
from meshlora.layers.head_loss import (
    IGNORED,
    log_probabilities_from_hidden,
    scores_from_hidden,
    shifted,
    summed_cross_entropy_from_hidden,
)
from meshlora.layers.linear import ParallelHead
from meshlora.layers.logits_recipe import LogitsRecipe
from meshlora.layers.row_lengths import rows_of
from meshlora.plan.pairs import check
from meshlora.plan.token_order import order_of_rows
from meshlora.train.batch import Batch
from meshlora_ground.compat.transformers_models import no_rows_packed
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.slow_paths import PADDING_MASK, take

# Input of the head `[T, H]`, the head, options of a loss over its vocabulary.
Lazy = tuple[Tensor, Callable[[Tensor], Tensor], dict[str, Any]]
Found = Tensor | Lazy  # or logits `[B, S, V]`
Rows = Sequence[tuple[str, Batch]]  # (adapter, its rows), in the order of the batch


def language_model_loss(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    labels: Tensor,
    *,
    label_smoothing: float = 0.0,
    position_ids: Tensor | None = None,
    more: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Sum over the trained tokens of (1-e) -log p(token) + e times the mean of -log p over the vocabulary.

        loss = meshlora.language_model_loss(model, batch["input_ids"], batch["attention_mask"], batch["labels"])

    input_ids, attention_mask, labels: `[B, S]`; labels as Hugging Face's models take them: `labels[b, t]` is the token
    at t, -100 where untrained. The logits `[B, S, V]` are never materialised: the head runs on a chunk of tokens at a
    time. Under cp the sum is over this rank's tokens of these rows.
    position_ids: `[B, S]` of packed rows, restarting at each sequence.
    more: further inputs of the model, as its processor makes them of images (`pixel_values` ...).

    Raises:
        UserError: labels that are shifted already; S is not divisible by cp.
    """
    after = _after(input_ids, labels, attention_mask, position_ids)
    loss = shifted_loss(
        model, input_ids, attention_mask, after, label_smoothing=label_smoothing, position_ids=position_ids, more=more
    )
    return runtime(model).pipeline.whole(loss)


def shifted_loss(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    labels: Tensor,
    *,
    label_smoothing: float = 0.0,
    position_ids: Tensor | None = None,
    trained: Tensor | None = None,
    more: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """`language_model_loss` of labels as batches of `meshlora.reading` have them: `labels[b, t]` is the token after t.

    Stages of a pipeline before the last have `[]`, 0, whose backward is that of what they sent.
    trained: `[N]`, the indices where `labels.flatten()` is not -100, in order. Pass it if you know it: the host then
    need not wait for the device.

    Raises:
        UserError: unshifted labels. Not checked if `trained` is given, which would make the host wait. S is not
            divisible by cp.
    """
    mask: Any = attention_mask  # None is handed on: transformers need not look for padding
    given = Batch(input_ids, mask, labels, 0, input_ids, position_ids=position_ids, trained=trained, more=more or {})
    batch = _held(model, given)
    if (signal := before_last(model, batch)) is not None:
        return signal
    return _summed(to_head(model, batch), batch.own_labels, batch.trained, label_smoothing)


def language_model_losses(model: Any, batch: Batch, own: Rows, *, label_smoothing: float) -> Sequence[Tensor]:
    """`shifted_loss` of the rows of each of K adapters, from one forward; the head runs once unless trained."""
    if (signal := before_last(model, batch)) is not None:
        return [signal] * len(own)
    found = to_head(model, batch)
    if len(own) == 1 or isinstance(found, Tensor) or found[2]["parameters"]:
        losses = []
        for one, (_, rows) in zip(_per_adapter(model, found, own), own, strict=True):
            losses.append(_summed(one, rows.own_labels, rows.trained, label_smoothing))
        return losses
    hidden, head, options = found
    summed = summed_cross_entropy_from_hidden(
        hidden,
        head,
        batch.own_labels.flatten(),
        **options,
        label_smoothing=label_smoothing,
        trained=batch.trained,
        sizes=[rows.own_labels.numel() for _, rows in own],
    )
    return summed.unbind()


def batch_log_probabilities(model: Any, batch: Batch, own: Rows = ()) -> Tensor:
    """log p(label) of each token, `[B, S]`, 0 where untrained. own: the rows of each of several adapters.

    Under cp every rank has those of all tokens. Their gradients are summed over cp, so that a loss of theirs is to be
    counted by one rank (`Batch.counts_rows`). Stages of a pipeline before the last have zeros.

    Raises:
        UserError: as in `shifted_loss`.
    """
    (log_p,) = _of_tokens(model, batch, own, lambda *given: (_log_probabilities(*given),), 1)
    return log_p


def batch_scores(model: Any, batch: Batch, own: Rows = (), *, score: str = "entropy") -> tuple[Tensor, ...]:
    """(`batch_log_probabilities`, `score` of `TokenScores` at each trained token), `[B, S]` both."""

    def scored(found: Found, labels: Tensor, trained: Tensor | None) -> tuple[Tensor, ...]:
        scores = _scores(found, labels, 1.0, trained)
        return scores.log_probs, getattr(scores, score)

    return _of_tokens(model, batch, own, scored, 2)


def _of_tokens(
    model: Any, batch: Batch, own: Rows, of: Callable[[Found, Tensor, Tensor | None], tuple[Tensor, ...]], number: int
) -> tuple[Tensor, ...]:
    """`number` values of each token, `[B, S]` each: what `of` makes of a forward, given labels and trained indices."""
    if (signal := before_last(model, batch)) is not None:
        return (signal.expand(batch.labels.shape),) * number
    found = to_head(model, batch)
    if not own or isinstance(found, Tensor) or not found[2]["parameters"]:
        values = of(found, batch.own_labels, batch.trained)
    else:
        of_each = []
        for one, (_, rows) in zip(_per_adapter(model, found, own), own, strict=True):
            of_each.append(of(one, rows.own_labels, rows.trained))
        values = tuple(map(torch.cat, zip(*of_each, strict=True)))
    if batch.own is None:
        return values
    held = runtime(model).context.held
    assert held is not None
    return tuple(map(held.gathered, values))


class TokenScores(NamedTuple):
    """What a model says of chosen tokens, each `[B, S]`: at t of the token at t, 0 where it is untrained.

    log_probs: log p(token). entropy: of the distribution that the token was chosen from. mean_logit: the logits' mean
    over the vocabulary. is_top1: 1 where no token is likelier. log_sum_sq: log of the sum of p^2 over the vocabulary.
    The last three have no gradient.
    """

    log_probs: Tensor
    entropy: Tensor
    mean_logit: Tensor
    is_top1: Tensor
    log_sum_sq: Tensor


def token_scores(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    position_ids: Tensor | None = None,
    more: Mapping[str, Tensor] | None = None,
) -> TokenScores:
    """Log-probabilities of chosen tokens and the entropy there, with gradients; the logits are never whole.

        scores = meshlora.token_scores(model, input_ids, attention_mask, labels)
        loss = -(advantages * scores.log_probs).sum()  # advantages `[B, S]`, of the tokens in place

    Arguments are those of `language_model_loss`. temperature: the logits are divided by it.

    Raises:
        UserError: labels that are shifted already; temperature not positive. UnsupportedError: cp or pp, whose ranks
            have a part of the tokens, or of the layers, each.
    """
    if not temperature > 0:
        raise UserError(f"temperature={temperature}", "logits are divided by it", "give a positive number")
    check({"topology": runtime(model).mesh.topology, "door": "token_scores"})
    mask: Any = attention_mask
    after = _after(input_ids, labels, attention_mask, position_ids)
    batch = Batch(input_ids, mask, after, 0, input_ids, position_ids=position_ids, more=more or {})
    if (signal := before_last(model, batch)) is not None:
        own, none = signal.expand(after.shape), signal.detach().expand(after.shape)
        found = TokenScores(own, own, none, none, none)
    else:
        found = _scores(to_head(model, batch), after, temperature, None)
    # From where a token is predicted to the token itself.
    return TokenScores(*[F.pad(score[:, :-1], (1, 0)) for score in map(runtime(model).pipeline.whole, found)])


def _scores(found: Found, labels: Tensor, temperature: float, trained: Tensor | None) -> TokenScores:
    """`token_scores` of shifted labels: each at the place before its token."""
    if isinstance(found, Tensor):
        chosen = labels.clamp(min=0).unsqueeze(-1)
        logits = found.float() / temperature
        log_p, mean = logits.log_softmax(-1), logits.detach().mean(-1)
        log_probs, entropy = log_p.gather(-1, chosen).squeeze(-1), torch.special.entr(log_p.exp()).sum(-1)
        is_top1 = (log_p.detach().amax(-1) <= log_probs.detach()).to(log_p.dtype)
        scores = log_probs, entropy, mean, is_top1, (2 * log_p.detach()).logsumexp(-1)
        return TokenScores(*[score.where(labels != IGNORED, 0.0) for score in scores])
    hidden, head, options = found
    each = scores_from_hidden(hidden, lambda x: head(x) / temperature, labels.flatten(), **options, trained=trained)
    return TokenScores(*[score.view_as(labels) for score in each])


def _per_adapter(model: Any, found: Found, own: Rows) -> Sequence[Found]:
    """The head's input for the rows of each adapter, with that adapter active on the head; or their logits."""
    if isinstance(found, Tensor):
        return found.split([len(rows.input_ids) for _, rows in own])
    hidden, head, options = found
    leaf = model.get_submodule(runtime(model).plan.head)
    assert isinstance(leaf, ParallelHead)
    # With several, none is active (`set_adapters`).
    if leaf.active is not None:  # all rows are of one adapter
        return [found]
    parts = hidden.split([rows.own_labels.numel() for _, rows in own])
    each: list[Lazy] = []
    for part, (name, _) in zip(parts, own, strict=True):
        of_head = _requiring_grad(leaf.trained(name).values())
        each.append((part, _on_head(leaf, name, head), {**options, "parameters": of_head}))
    return each


def _on_head(leaf: ParallelHead, name: str, head: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(hidden: Tensor) -> Tensor:  # in a backward too
        before, leaf.active = leaf.active, name
        try:
            return head(hidden)
        finally:
            leaf.active = before

    return run


def _requiring_grad(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def _summed(found: Found, labels: Tensor, trained: Tensor | None, label_smoothing: float) -> Tensor:
    if isinstance(found, Tensor):
        return summed_cross_entropy(found, labels, label_smoothing=label_smoothing)
    hidden, head, options = found
    return summed_cross_entropy_from_hidden(
        hidden, head, labels.flatten(), **options, label_smoothing=label_smoothing, trained=trained
    )


def _log_probabilities(found: Found, labels: Tensor, trained: Tensor | None) -> Tensor:
    if isinstance(found, Tensor):
        exact = F.cross_entropy(found.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
        return -exact.view_as(labels)
    hidden, head, options = found
    return log_probabilities_from_hidden(hidden, head, labels.flatten(), **options, trained=trained).view_as(labels)


def check_shifted(
    input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
) -> None:
    """Refuse labels `[B, S]` that are the tokens themselves, not their successors. The host waits for the device.

    No false positives: shifted labels equal the next token wherever that is of the same sequence.
    """
    if labels.shape != input_ids.shape:
        given = f"labels {list(labels.shape)} and input_ids {list(input_ids.shape)}"
        rule = "labels[b, t] is the token after input_ids[b, t], so both have one shape"
        raise UserError(given, rule, "give -100 where there is none, as after the last token")
    is_trained = labels != IGNORED
    is_itself = (labels == input_ids) | ~is_trained
    goes_on = _goes_on(is_trained, attention_mask, position_ids)
    differs = goes_on & (labels[:, :-1] != input_ids[:, 1:])
    if bool(is_itself.all() & (2 * differs.sum() > goes_on.sum())):
        given = "labels that are the input_ids themselves, as Hugging Face's models take them"
        rule = "labels[b, t] must be the token after input_ids[b, t]; these would train it to repeat each token"
        raise UserError(given, rule, "shift them: labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)")


def _after(input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
    """Labels `[B, S]` as Hugging Face's models take them -> of each token the one after it. The host waits. Raises:
    UserError: labels that are shifted already."""
    found = shifted(labels)
    if labels.shape == input_ids.shape:
        goes_on = _goes_on(labels != IGNORED, attention_mask, position_ids)
        is_next = (labels[:, :-1] == input_ids[:, 1:]) | ~goes_on
        differs = goes_on & (labels != input_ids)[:, :-1]
        if bool(is_next.all() & (2 * differs.sum() > goes_on.sum())):
            given = "labels that are shifted already: each is the token after that of its place"
            rule = "labels[b, t] is the token at t, as Hugging Face's models take it; they are shifted here"
            raise UserError(given, rule, "give the input_ids as labels, with -100 where untrained")
    return found


def _goes_on(is_trained: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
    """`[B, S-1]`: whether a place has a label, and the next token is of the same sequence."""
    found = is_trained[:, :-1]
    if attention_mask is not None and attention_mask.ndim == 2:
        found = found & (attention_mask[:, 1:] == attention_mask[:, :-1])
    if position_ids is not None:
        found = found & (position_ids[:, 1:] == position_ids[:, :-1] + 1)
    return found


def model_inputs(
    input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, config: Any
) -> dict[str, Any]:
    """Arguments of a model's forward. Without a mask transformers finds sequence starts by the position ids."""
    if position_ids is not None:
        position_ids = packed_positions(config, position_ids)
        return {"input_ids": input_ids, "attention_mask": None, "position_ids": position_ids, "use_cache": False}
    return {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}


def packed_positions(config: Any, position_ids: Tensor) -> Tensor:
    """`[B, S]` as a model of this configuration takes them. With M-RoPE `[4, B, S]`: those in the row, by which
    sequences are kept apart, then those of time, height and width, which are the same for text.
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if "mrope_section" not in rope:
        return position_ids
    return position_ids.expand(4, *position_ids.shape)


def further_inputs(model: Any, more: Mapping[str, Tensor]) -> dict[str, Any]:
    """`Batch.more` as arguments of a model's forward."""
    inputs = dict(more)
    for name, value in more.items():
        if value.is_floating_point():  # processors make float32 pixels whatever the model's dtype is
            inputs[name] = value.to(model.dtype)
    return inputs


def _held(model: Any, batch: Batch) -> Batch:
    """`batch` with the tokens of this cp rank as its own, for a loop that has not dealt them. The host waits."""
    cp, context = runtime(model).mesh.cp, runtime(model).context
    if cp.size == 1:
        return batch
    on_host = dataclasses.replace(batch.to("cpu"), trained=None)
    order = order_of_rows(batch.input_ids.shape, batch.position_ids, size=cp.size, is_balanced=context.balances)
    return on_host.cut(order, rank=cp.rank, size=cp.size).to(batch.input_ids.device)


def before_last(model: Any, batch: Batch) -> Tensor | None:
    """`[]`, 0: the loss of a stage before the last, after its forward. None: the one that runs next is the last."""
    state = runtime(model)

    def run() -> Tensor:
        _run(model, batch)
        return state.pipeline.signal()

    for _ in state.pipeline.earlier():
        run()
    if state.pipeline.is_last:
        return None
    return run()


def to_head(model: Any, batch: Batch) -> Found:
    if batch.trained is None:
        check_shifted(batch.input_ids, batch.labels, batch.attention_mask, batch.position_ids)
    state = runtime(model)
    # "": the model itself, which is no head either.
    head = model.get_submodule(state.plan.head)
    if not isinstance(head, ParallelHead):
        logits = _run(model, batch)
        assert isinstance(logits, Tensor)
        return logits
    # The model then returns what its head would be given, and the loss runs it a chunk at a time.
    head.is_lazy = True
    try:
        recipe = _run(model, batch)
    except UnsupportedError:
        if not state.plan.topology.is_whole:
            raise
        # This model's post-processing needs whole logits, which one process can afford.
        head.is_lazy = False
        logits = _run(model, batch)
        assert isinstance(logits, Tensor)
        return logits
    finally:
        head.is_lazy = False
    assert isinstance(recipe, LogitsRecipe), type(recipe)

    def local_logits(hidden: Tensor) -> Tensor:
        return recipe.replay(head.local_logits(hidden))

    parameters: list[Tensor] = []
    if torch.is_grad_enabled():
        parameters = _requiring_grad(head.parameters())
    options = {"parameters": parameters, "axis": state.mesh.tp, "vocab": recipe.shape[-1]}
    return recipe.hidden.flatten(0, -2), local_logits, options


def _run(model: Any, batch: Batch) -> Any:
    """The logits of a forward, or what stands for them. Padding at the end of rows has no mask where it needs none."""
    state = runtime(model)
    state.context.next(batch.order)
    # Without a mask attention is faster, and padding behind all tokens is seen by none if attention is causal.
    is_masked = not state.is_causal or not batch.pads_right or bool(batch.more)
    mask: Any = batch.attention_mask if is_masked else None
    inputs = model_inputs(batch.input_ids, mask, batch.position_ids, model.config) | further_inputs(model, batch.more)
    if mask is not None and batch.position_ids is None and len(mask) > 1:
        take(PADDING_MASK, batch.input_ids.device)
    is_packed, lengths = batch.position_ids is not None, batch.lengths
    if batch.has_one_each and state.is_causal:  # no token sees the padding behind it
        lengths = [[batch.input_ids.shape[1]]] * len(batch.input_ids)
    with state.pipeline.alone(), rows_of(model, lengths) if is_masked or is_packed else no_rows_packed():
        return model(**inputs).logits


def summed_cross_entropy(logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """`shifted_loss` from whole logits `[B, S, V]`, in fp32 (fp64 inside the lift)."""
    flat, wanted = logits.flatten(0, 1).float(), labels.flatten()
    return F.cross_entropy(flat, wanted, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)
