"""The chat templates that go by a name, against texts that were written down by hand from the published ones, and
against those that an installed TRL has; what is trained under each; and tokenizers without their tokens.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from meshlora.reading.chat import add_stop_tokens, conversation_prompts, tokenize_conversations
from meshlora.reading.named_templates import ELSEWHERE, TEMPLATES, named_template
from meshlora.reading.tokenizer import tokenizer_with
from meshlora_ground.errors import UserError
from tests.unit.records import BOS, EOS, chat, make_tokenizer

FOLDER = Path(__file__).parents[2] / "src/meshlora/reading/templates"
SYSTEM, TURNS = ("system", "be kind"), (("user", "hi"), ("assistant", "hello"), ("user", "and?"), ("assistant", "bye"))
WITHOUT, WITH = chat(*TURNS), chat(SYSTEM, *TURNS)
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
_CHATML = (
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦hello<|im_end|>⟧\n"
    "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n⟦bye<|im_end|>⟧\n"
)
_LLAMA3 = (
    "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    "⟦hello<|eot_id|>⟧<|start_header_id|>user<|end_header_id|>\n\nand?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟦bye<|eot_id|>⟧"
)
_GEMMA = (
    "hi<end_of_turn>\n<start_of_turn>model\n⟦hello<end_of_turn>⟧\n"
    "<start_of_turn>user\nand?<end_of_turn>\n<start_of_turn>model\n⟦bye<end_of_turn>⟧\n"
)
_PHI3 = "<|user|>\nhi<|end|>\n<|assistant|>\n⟦hello<|end|>⟧\n<|user|>\nand?<|end|>\n<|assistant|>\n⟦bye<|end|>⟧\n<eos>"
_PHI4 = (
    "<|im_start|>user<|im_sep|>hi<|im_end|><|im_start|>assistant<|im_sep|>⟦hello<|im_end|>⟧"
    "<|im_start|>user<|im_sep|>and?<|im_end|><|im_start|>assistant<|im_sep|>⟦bye<|im_end|>⟧"
)
_DEEPSEEK = "<｜User｜>hi<｜Assistant｜>⟦hello<eos>⟧<｜User｜>and?<｜Assistant｜>⟦bye<eos>⟧"
_ZEPHYR = "<|user|>\nhi<eos>\n<|assistant|>\n⟦hello<eos>⟧\n<|user|>\nand?<eos>\n<|assistant|>\n⟦bye<eos>⟧\n"
_VICUNA = "USER: hi ASSISTANT:⟦ hello<eos>⟧USER: and? ASSISTANT:⟦ bye<eos>⟧"
_ALPACA = "### Instruction:\nhi\n\n### Response:\n⟦hello<eos>⟧\n\n### Instruction:\nand?\n\n### Response:\n⟦bye<eos>⟧"
# Name -> the same conversation without and with a turn of the system, what is trained between ⟦ and ⟧.
EXPECTED = {
    "chatml": (_CHATML, f"<|im_start|>system\nbe kind<|im_end|>\n{_CHATML}"),
    "qwen": (f"<|im_start|>system\n{QWEN}<|im_end|>\n{_CHATML}", f"<|im_start|>system\nbe kind<|im_end|>\n{_CHATML}"),
    "llama3": (f"<bos>{_LLAMA3}", f"<bos><|start_header_id|>system<|end_header_id|>\n\nbe kind<|eot_id|>{_LLAMA3}"),
    "llama2": (
        "<bos>[INST] hi [/INST]⟦ hello <eos>⟧<bos>[INST] and? [/INST]⟦ bye <eos>⟧",
        "<bos>[INST] <<SYS>>\nbe kind\n<</SYS>>\n\nhi [/INST]⟦ hello <eos>⟧<bos>[INST] and? [/INST]⟦ bye <eos>⟧",
    ),
    "gemma": (f"<bos><start_of_turn>user\n{_GEMMA}", f"<bos><start_of_turn>user\nbe kind\n\n{_GEMMA}"),
    "mistral": (
        "<bos>[INST] hi[/INST]⟦ hello<eos>⟧[INST] and?[/INST]⟦ bye<eos>⟧",
        "<bos>[INST] be kind\n\nhi[/INST]⟦ hello<eos>⟧[INST] and?[/INST]⟦ bye<eos>⟧",
    ),
    "mistral_v1": (
        "<bos>[INST] hi [/INST]⟦ hello<eos>⟧[INST] and? [/INST]⟦ bye<eos>⟧",
        "<bos>[INST] be kind\n\nhi [/INST]⟦ hello<eos>⟧[INST] and? [/INST]⟦ bye<eos>⟧",
    ),
    "phi3": (_PHI3, f"<|system|>\nbe kind<|end|>\n{_PHI3}"),
    "phi4": (_PHI4, f"<|im_start|>system<|im_sep|>be kind<|im_end|>{_PHI4}"),
    "deepseek3": (f"<bos>{_DEEPSEEK}", f"<bos>be kind{_DEEPSEEK}"),
    "zephyr": (_ZEPHYR, f"<|system|>\nbe kind<eos>\n{_ZEPHYR}"),
    "vicuna": (f"<bos>{VICUNA} {_VICUNA}", f"<bos>be kind {_VICUNA}"),
    "alpaca": (f"<bos>{ALPACA}\n\n{_ALPACA}", f"<bos>be kind\n\n{_ALPACA}"),
}
# Ours -> TRL's file of the published one. Its DeepSeek opens reasoning in the generation prompt, as R1 does.
OF_TRL = {"qwen": "qwen2_5", "llama3": "llama3", "gemma": "gemma3", "phi3": "phi3", "deepseek3": "deepseekv3"}
EOS_OF = {"deepseek3": "<｜end▁of▁sentence｜>"}  # which the published one spells


def _tokenizer(name: str) -> Any:
    """A tokenizer with the tokens of a template, and the template."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([*TEMPLATES[name].tokens], special_tokens=True)
    tokenizer.chat_template, ends = named_template(name, tokenizer)
    add_stop_tokens(tokenizer, ends)
    return tokenizer


def _marked(record: Any, tokenizer: Any) -> str:
    """The text of a conversation, with what is trained between ⟦ and ⟧."""
    (row,) = tokenize_conversations([record], tokenizer, max_length=2**20, train_on="all", processor=None)
    assert row is not None
    text, was_trained = "", False
    for token, is_trained in zip(row.ids, row.is_trained, strict=True):
        if is_trained != was_trained:
            text += "⟦" if is_trained else "⟧"
        text += tokenizer.decode([token])
        was_trained = bool(is_trained)
    return text + "⟧" * was_trained


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_and_trained_answers_are_those_of_the_published_template(name: str) -> None:
    tokenizer, (without, with_system) = _tokenizer(name), EXPECTED[name]
    assert _marked(WITHOUT, tokenizer) == without
    assert _marked(WITH, tokenizer) == with_system


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_leads_to_an_answer_is_what_stands_before_it_in_training(name: str) -> None:
    tokenizer = _tokenizer(name)
    for record, expected in zip((WITHOUT, WITH), EXPECTED[name], strict=True):
        before = expected.split("⟦")
        (led,) = conversation_prompts([chat(*[(m["role"], m["content"]) for m in record.messages[:-1]])], tokenizer)
        assert led == "".join(before[:-1]).replace("⟧", "")


@pytest.mark.parametrize("name", OF_TRL)
def test_renderings_are_those_of_the_templates_of_trl(name: str) -> None:
    trl = importlib.util.find_spec("trl")
    assert trl is not None
    assert trl.origin is not None
    published = Path(trl.origin).parent / "chat_templates" / f"{OF_TRL[name]}.jinja"
    theirs, ours = published.read_text("utf-8"), (FOLDER / f"{name}.jinja").read_text("utf-8")
    special = {"bos_token": BOS, "eos_token": EOS_OF.get(name, EOS)}
    spaces = chat(("user", " a\n b "), ("assistant", "\n c <d> "), ("user", "'\"{{ e }}"), ("assistant", "f"))
    given = [WITHOUT, WITH, spaces, chat(*TURNS[:2]), chat(SYSTEM, *TURNS[:2])]
    for record in given:
        texts = []
        for template in (theirs, ours):
            found, _ = render_jinja_template([[*record.messages]], chat_template=template, **special)
            texts.append(found[0])
        assert texts[0] == texts[1]


@pytest.mark.parametrize("name", [name for name, one in TEMPLATES.items() if one.tokens])
def test_a_tokenizer_without_a_token_of_the_template_is_refused_with_those_that_it_fits(name: str) -> None:
    tokenizer = make_tokenizer()
    tokens = TEMPLATES[name].tokens
    tokenizer.add_tokens([*tokens[1:]], special_tokens=True)
    with pytest.raises(UserError) as raised:  # it would be several tokens, silently
        named_template(name, tokenizer)
    assert f"data.chat_template={name}: it needs {tokens[0]}, and the tokenizer" in str(raised.value)
    assert "zephyr, vicuna, alpaca, whose tokens this one has" in str(raised.value)


def test_a_template_that_ends_answers_with_eos_needs_one() -> None:
    with pytest.raises(UserError, match="it needs an eos token"):
        named_template("vicuna", make_tokenizer(eos=None))


def test_every_name_has_a_file_and_every_file_a_name() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == {*TEMPLATES}
    assert {*ELSEWHERE.values()} <= {*TEMPLATES}
    assert not {*ELSEWHERE} & {*TEMPLATES}


def _with(folder: Path, given: str) -> Any:
    return tokenizer_with(str(folder), trust_remote_code=False, chat_template=given, stop_tokens=[], date=None)


def test_a_file_and_a_template_of_the_tokenizer_go_before_ours_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained("plain")
    tokenizer.chat_template = {"default": "no", "vicuna": "own"}
    tokenizer.save_pretrained("own")
    assert _with(Path("plain"), "vicuna").chat_template == (FOLDER / "vicuna.jinja").read_text()
    assert _with(Path("own"), "vicuna").chat_template == "own"
    Path("vicuna").write_text("file")
    assert _with(Path("own"), "vicuna").chat_template == "file"
    for given, words in (("vicunna", "did you mean 'vicuna'"), ("qwen_25", "here it is qwen")):
        with pytest.raises(UserError, match=words):
            _with(Path("plain"), given)
