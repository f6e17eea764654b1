"""Chat templates that go by a name: `data.chat_template: chatml`, for bases that have none.

Owns: the names, the tokens that each template needs, and at which the model then stops. The templates are files of our
own, in `templates/`: they write what the published ones write, but know no tools. Does not own: a tokenizer's own
templates, files, and which goes first (`tokenizer.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshlora_ground.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FOLDER = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Named:
    """A template. tokens: its marks that are tokens of the models that have it, eos aside. end: of an answer, if it is
    not eos. Marks that are words, as `USER:`, are of any tokenizer.
    """

    tokens: tuple[str, ...] = ()
    end: str | None = None

    def missing(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Those of its tokens that the tokenizer has not: their text would become several tokens, or an unknown one."""
        found = [] if self.end is not None or tokenizer.eos_token is not None else ["an eos token"]
        for token in self.tokens:
            number = tokenizer.convert_tokens_to_ids(token)
            # Between letters, since a token that is found only by itself would not be found in a conversation.
            ids = tokenizer(f"a{token}a", add_special_tokens=False, verbose=False).input_ids
            if number not in ids or number == tokenizer.unk_token_id:
                found.append(token)
        return found


_OF_CHATML = ("<|im_start|>", "<|im_end|>")
TEMPLATES: Mapping[str, Named] = {
    "chatml": Named(_OF_CHATML, "<|im_end|>"),
    "qwen": Named(_OF_CHATML, "<|im_end|>"),
    "llama3": Named(("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>"),
    "llama2": Named(),
    "gemma": Named(("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
    "mistral": Named(("[INST]", "[/INST]")),
    "mistral_v1": Named(),
    "phi3": Named(("<|user|>", "<|assistant|>", "<|end|>"), "<|end|>"),
    "phi4": Named(("<|im_start|>", "<|im_sep|>", "<|im_end|>"), "<|im_end|>"),
    "deepseek3": Named(("<｜User｜>", "<｜Assistant｜>")),
    "zephyr": Named(),
    "vicuna": Named(),
    "alpaca": Named(),
}
# What axolotl and LLaMA-Factory call them. Of a model that came later than these names, take its own template.
ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("qwen3_nothink", "yi"), "chatml"),
    **dict.fromkeys(("qwen2", "qwen_25", "qwen2.5", "qwen25", "qwen-2.5"), "qwen"),
    **dict.fromkeys(("llama-3", "llama_3"), "llama3"),
    **dict.fromkeys(("llama-2", "llama_2"), "llama2"),
    **dict.fromkeys(("gemma2", "gemma3", "gemma_2", "gemma_3"), "gemma"),
    **dict.fromkeys(("mistral_v2v3", "mistral_v3"), "mistral"),
    **dict.fromkeys(("phi", "phi_3", "phi_35"), "phi3"),
    **dict.fromkeys(("phi_4", "phi-4"), "phi4"),
    **dict.fromkeys(("deepseek_v3", "deepseekv3"), "deepseek3"),
}


def named_template(name: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, tuple[str, ...]]:
    """(the template `name`, one of `TEMPLATES`; the tokens at which a model stops under it, beside eos).

    Raises:
        UserError: the tokenizer has not all tokens of the template.
    """
    one, option = TEMPLATES[name], f"data.chat_template={name}"
    if missing := one.missing(tokenizer):
        which = tokenizer.name_or_path or type(tokenizer).__name__
        rule = f"it needs {', '.join(missing)}, and the tokenizer {which} has no such token"
        if len(missing) > 1:
            rule = rule.replace("no such token", "no such tokens")
        raise UserError(option, rule, _way_out(tokenizer))
    return (_FOLDER / f"{name}.jinja").read_text("utf-8"), () if one.end is None else (one.end,)


def _way_out(tokenizer: PreTrainedTokenizerBase) -> str:
    fitting = fitting_templates(tokenizer)
    if not fitting:
        return "take a base whose tokenizer has them"
    return f"take a base whose tokenizer has them, or one of {', '.join(fitting)}, whose tokens this one has"


def fitting_templates(tokenizer: PreTrainedTokenizerBase) -> Sequence[str]:
    """The names of those of which the tokenizer has all tokens."""
    found = []
    for name, one in TEMPLATES.items():
        if not one.missing(tokenizer):
            found.append(name)
    return found
