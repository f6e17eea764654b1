"""A reward model: a classification model of transformers with one output.

Owns: loading it, and its output for prompt and completion. Does not own: weights of rewards (`rl.rewards`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from meshlora.loading.guards import most_positions
from meshlora_ground.errors import UserError, reason


class RewardModel:
    """The model in folder `path`, in evaluation mode. Its input is the prompt with the completion right after it.

    Raises:
        UserError: it cannot be loaded, without code or pickles of its own; it has another number of outputs than one,
            or lacks weights.
    """

    def __init__(self, path: str | Path, *, batch_size: int, device: str = "cpu") -> None:
        given = f"rl.rewards.path={path}"
        if not Path(path).is_dir():
            raise UserError(given, "there is no such folder", "give that of a classification model with one label")
        try:
            own: Any = {"local_files_only": True, "trust_remote_code": False}
            # On the right: a head that takes the first token, and positions by place, are wrong behind padding.
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, padding_side="right", **own)
            model, found = AutoModelForSequenceClassification.from_pretrained(
                path, use_safetensors=True, output_loading_info=True, **own
            )
        except (OSError, ValueError) as error:
            raise UserError(given, f"it cannot be loaded ({reason(error)})") from None
        if model.config.num_labels != 1:
            rule = f"it has {model.config.num_labels} outputs; a reward is one number"
            raise UserError(given, rule, "give a model with num_labels=1")
        if missing := sorted(found["missing_keys"]):
            raise UserError(given, f"it lacks {missing[0]}, which would be random", "give a trained reward model")
        self._model, self._batch_size, self._device = model.eval().to(device), batch_size, device

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> list[float]:
        """The output for each text. Raises: UserError: names the first that has too many tokens."""
        rows = [self._tokenizer(text, verbose=False).input_ids for text in texts]
        most = most_positions(self._model.config, self._model)
        for text, row in zip(texts, rows, strict=True):
            if most is not None and len(row) > most:
                rule = f"the reward model has {most} positions, and this text {len(row)} tokens"
                raise UserError(f"{text[-60:]!r}", rule, "lower rl.max_new_tokens, or leave long prompts out")
        # The head looks for the last token that is not padding, by its id.
        can_pad = self._tokenizer.pad_token_id is not None and self._model.config.pad_token_id is not None
        found, size = list[float](), self._batch_size if can_pad else 1
        for start in range(0, len(rows), size):
            part: Any = {"input_ids": rows[start : start + size]}
            if can_pad:
                batch = self._tokenizer.pad(part, return_tensors="pt")
            else:
                batch = {"input_ids": torch.tensor(part["input_ids"])}
            found += self._model(**{name: each.to(self._device) for name, each in batch.items()}).logits[:, 0].tolist()
        return found
