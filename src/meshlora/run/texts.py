"""The texts of a run as tokens: its tokenizer, and the reader that its objective and its `data` options ask for.

Owns: which reader gets which options. Does not own: several sources (`run.sources`), reading (`meshlora.reading`),
whether data and model fit (`run.prepare`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from meshlora.reading.bad_rows import ERROR
from meshlora.reading.chat import add_stop_tokens, further_stops
from meshlora.reading.clock import day_of, set_day
from meshlora.reading.processor import load_processor
from meshlora.reading.readers import READERS
from meshlora.reading.tokenizer import tokenizer_with
from meshlora.run.config.run_file import DataConfig, Given, ModelConfig
from meshlora.run.sources import Split, read_sources, read_split
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.model_class import reads_pairs
from meshlora_ground.objective import Objective
from meshlora_ground.objectives.distillation import Distill
from meshlora_ground.tasks import CAUSAL


@dataclass(frozen=True)
class Texts:
    """How texts become tokens: `Texts(config.model, config.data, config.train.objective)`.

    reader: key of `READERS`; empty: as the objective says.
    """

    model: ModelConfig
    data: DataConfig
    objective: Objective
    reader: str = ""

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the run. Raises: UserError, as `tokenizer_with`."""
        return tokenizer_with(
            self.model.path,
            trust_remote_code=self.model.trust_remote_code,
            chat_template=self.data.chat_template,
            stop_tokens=self.data.stop_tokens,
            date=self.data.date,
        )

    def read(
        self,
        given: Given,
        tokenizer: PreTrainedTokenizerBase,
        model: PretrainedConfig,
        *,
        say: Callable[[str], None] | None = None,
        categories: str = "all",
    ) -> TokenizedDataset:
        """The tokens of the sources `given`.

        say: told what is skipped. categories: `data.eval_categories`, for held-out files.
        """
        return read_sources(self.data, given, self._reader(tokenizer, model, say, categories=categories), say)

    def read_split(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model: PretrainedConfig,
        *,
        seed: int,
        say: Callable[[str], None] | None = None,
    ) -> Split:
        """The tokens of `data.train`, cut in two as `data.eval` says by a number. seed: `train.seed`."""
        return read_split(self.data, self._reader(tokenizer, model, say, names_rows=True), say, seed=seed)

    def _reader(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model: PretrainedConfig,
        say: Callable[[str], None] | None,
        *,
        categories: str = "all",
        names_rows: bool = False,
    ) -> Callable[..., TokenizedDataset]:
        """What reads the files of a source."""
        data, own = self.data, dict[str, Any](objective=self.objective)
        reader = "streamed" if data.streaming else self.reader or self.objective.reader
        if reads_pairs(model):
            reader, own = "prompted", {"model": model}
        elif self.objective.task == CAUSAL or self.objective.unit == "pair":  # whose records are read as answers are
            own = self._options(tokenizer, model, categories)
            if names_rows:
                own["names_rows"] = True
        return functools.partial(
            READERS[reader],
            tokenizer=tokenizer,
            max_length=data.longest,
            vocab_size=model.get_text_config().vocab_size,
            say=say,
            **own,
        )

    def _options(self, tokenizer: PreTrainedTokenizerBase, model: PretrainedConfig, categories: str) -> dict[str, Any]:
        """Arguments of a reader of text. Those that not every reader has are left out where they say nothing."""
        data = self.data
        own: dict[str, Any] = {"train_on": data.train_on, "too_long": data.too_long, "lost_text": data.lost_text}
        own |= {"turns": data.turns, "answers": data.answers}
        own["cache_dir"] = Path(data.cache_dir).expanduser()
        if not data.streaming:
            own["processor"] = functools.partial(self._processor, tokenizer, model)
        if data.prompt is not None:
            own["prompt"] = data.prompt
        if data.system is not None:
            own["system"] = data.system
        if isinstance(self.objective, Distill) and self.objective.context is not None:
            own["context"] = self.objective.context
        if getattr(self.objective, "mask_truncated", False):
            own["masks_truncated"] = True
        if data.separator:
            own["separator"] = data.separator
        if data.on_bad_row != ERROR:
            own["on_bad_row"] = data.on_bad_row
        if data.empty_answers == "skip":
            own["skips_empty"] = True
        if categories != "all":
            own["categories"] = categories
        return own

    def _processor(self, tokenizer: PreTrainedTokenizerBase, model: PretrainedConfig) -> Any:
        """The processor of images, with the template, the day and the stop tokens of `tokenizer`."""
        found = load_processor(self.model.path, model)
        if self.data.chat_template is not None:
            found.tokenizer.chat_template = tokenizer.chat_template
        set_day(found.tokenizer, day_of(tokenizer))
        add_stop_tokens(found.tokenizer, further_stops(tokenizer))
        return found
