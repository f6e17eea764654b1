"""An adapter that a run on conversations has made, and what transformers + peft answer with it."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshlora.run.config.file import read_run
from meshlora.run.run import train
from meshlora.run.together import prepare_run
from tests.run_files import TINY, write_run_file

QUESTIONS = ["Add two numbers.", "Return the longest word of a text."]
# Not the base's own: an answer ends at a line's end, which no other template here has.
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<<{% generation %}{{ message.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ message.role }}: {{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<<{% endif %}"
)


def trained(folder: Path, *, rows: list[dict[str, Any]] | None = None, **data: Any) -> Path:
    """The run file in `folder` of a run that has ended; its adapter is in `run/adapter`."""
    if rows is None:
        rows = []
        for number in range(8):
            asked = {"role": "user", "content": f"Write function {number} of a list."}
            rows.append({"messages": [asked, {"role": "assistant", "content": f"def f(x): return {number}"}]})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"steps": 4, "lr": 0.02, "batch_size": 4}
    file = write_run_file(folder / "run.yaml", model={"dtype": "float32"}, data=data, train=options)
    train({"": prepare_run(read_run(file), world=1)})
    return file


def answered(
    adapter: Path | None, prompts: list[Any], *, template: str | None = None, most: int = 24, ends: tuple[int, ...] = ()
) -> list[str]:
    """The greedy answers of transformers (+ peft): to a list of messages through the chat template, else to a text."""
    with contextlib.redirect_stderr(io.StringIO()):  # a bar
        model: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    tokenizer, said = AutoTokenizer.from_pretrained(TINY), []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
        else:
            ids = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True, chat_template=template
            )["input_ids"]
        found = model.eval().generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=most,
            do_sample=False,
            eos_token_id=[tokenizer.eos_token_id, *ends],
            pad_token_id=0,
        )
        said.append(tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True))
    return said


def asked(question: str, *, system: str = "") -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": question}]
