"""A reward model: a classification model of transformers with one output, or an adapter that makes a base one.

Owns: loading it, and its output for prompt and completion. Does not own: training one (`run.formulas.preferences`),
weights of rewards (`rl.rewards`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from meshlora.adapter.formats.peft_format import CONFIG_FILE
from meshlora.loading.positions import most_positions
from meshlora.reading.records import Record
from meshlora.reading.tokenization import tokenize
from meshlora.reading.tokenizer import padding_token_id
from meshlora_extra.merging.head import set_head
from meshlora_ground.errors import UserError, reason
from meshlora_ground.files import read_json

_OWN: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_LOADING: dict[str, Any] = {"use_safetensors": True, "output_loading_info": True}


class RewardModel:
    """The model in folder `path`, in evaluation mode. Its input is the prompt with the completion right after it.

    path: a model's; or an adapter's, as `objective: {kind: reward}` trains one, or that of its run. Texts of an adapter
    have the tokens that they have in training: the end of an answer is one.

    Raises:
        UserError: it cannot be loaded, without code or pickles of its own; it has another number of outputs than one,
            or lacks weights.
    """

    def __init__(self, path: str | Path, *, batch_size: int, device: str = "cpu") -> None:
        given, folder = f"rl.rewards.path={path}", Path(path)
        if (folder / "adapter" / CONFIG_FILE).is_file():
            folder /= "adapter"
        if not folder.is_dir():
            raise UserError(given, "there is no such folder", "give that of a classification model with one label")
        self._is_adapter = (folder / CONFIG_FILE).is_file()
        try:
            # On the right: a head that takes the first token, and positions by place, are wrong behind padding.
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="right", **_OWN)
            if self._is_adapter:
                model, missing = _adapted(folder, padding_token_id(self._tokenizer))
            else:
                model, found = AutoModelForSequenceClassification.from_pretrained(folder, **_LOADING, **_OWN)
                missing = sorted(found["missing_keys"])
        except (OSError, ValueError) as error:
            raise UserError(given, f"it cannot be loaded ({reason(error)})") from None
        if model.config.num_labels != 1:
            rule = f"it has {model.config.num_labels} outputs; a reward is one number"
            raise UserError(given, rule, "give a model with num_labels=1")
        if missing:
            raise UserError(given, f"it lacks {missing[0]}, which would be random", "give a trained reward model")
        self._model, self._batch_size, self._device = model.eval().to(device), batch_size, device

    def _ids(self, said: Sequence[tuple[str, str]], most: int | None) -> list[list[int]]:
        """The tokens of each prompt with its completion; of those of an adapter at most one more than `most`."""
        if not self._is_adapter:
            return [self._tokenizer(prompt + text, verbose=False).input_ids for prompt, text in said]
        records = [Record(prompt=prompt, completion=text, origin="a completion") for prompt, text in said]
        longest = 10**8 if most is None else most + 1
        return [each.input_ids.tolist() for each in tokenize(records, self._tokenizer, max_length=longest)]

    @torch.no_grad()
    def __call__(self, said: Sequence[tuple[str, str]]) -> list[float]:
        """The output for each prompt and completion. Raises: UserError: names the first that has too many tokens."""
        most = most_positions(self._model.config, self._model)
        rows = self._ids(said, most)
        for (_, text), row in zip(said, rows, strict=True):
            if most is not None and len(row) > most:
                rule = f"the reward model has {most} positions, and this text {len(row)} tokens"
                raise UserError(f"{text[-60:]!r}", rule, "lower rl.max_new_tokens, or leave long prompts out")
        # The head looks for the last token that is not padding, by its id.
        config = self._model.config.get_text_config()
        can_pad = self._tokenizer.pad_token_id is not None and config.pad_token_id is not None
        found, size = list[float](), self._batch_size if can_pad else 1
        for start in range(0, len(rows), size):
            part: Any = {"input_ids": rows[start : start + size]}
            if can_pad:
                batch = self._tokenizer.pad(part, return_tensors="pt")
            else:
                batch = {"input_ids": torch.tensor(part["input_ids"])}
            found += self._model(**{name: each.to(self._device) for name, each in batch.items()}).logits[:, 0].tolist()
        return found


def _adapted(folder: Path, pad: int) -> tuple[Any, list[str]]:
    """(the base of the adapter in `folder`, with it; names of parts that neither has)."""
    own = read_json(folder / CONFIG_FILE)
    base = own.get("base_model_name_or_path")
    config = AutoConfig.from_pretrained(base, **_OWN)
    set_head(config, folder)
    config.get_text_config().pad_token_id = pad  # as in training
    model, found = AutoModelForSequenceClassification.from_pretrained(base, config=config, **_LOADING, **_OWN)
    saved = tuple(f"{name}." for name in own.get("modules_to_save") or ())
    missing = [name for name in sorted(found["missing_keys"]) if not name.startswith(saved)]
    return PeftModel.from_pretrained(model, str(folder)), missing
