"""docs/coming-from.md: what the keys of other trainers are here, from the table that import and parser read.

    .venv/bin/python scripts/write_coming_from.py    # write it; scripts/describe_house.py does too, --check compares

The rows are those of src/meshlora/run/config/foreign; here besides: the words around them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from meshlora.run.config.foreign.fact import Fact, Trainer
from meshlora.run.config.foreign.trainers import INHERITED, OTHERS, TRAINERS
from meshlora_extra.importing.sources import TEMPLATES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coming-from.md"
_HEAD = """# Coming from another trainer

<!-- written by scripts/write_coming_from.py from src/meshlora/run/config/foreign -->

`meshlora import` turns a recipe of another trainer into a run file that says, line by line, which of their keys it
comes from, whose default it is, and what differs. Nothing of a recipe is run: scripts and notebooks are read as syntax
trees.

    meshlora import lora-8b.yml
    meshlora import train.sh --nproc 4 --out run.yaml
    meshlora import notebook.ipynb --allow-missing
    meshlora check run.yaml

If every key has an answer here, or changes no number, the file is written. Else nothing is, and all keys without one
are named (exit code 2); `--allow-missing` leaves them out, and the file says `# NOT TAKEN: key: value, because ...`.

- `--nproc N`: sizes are per process in most recipes and global here, so they are multiplied. An accelerate file or a
  launcher in the script says how many, too.
- `--beside FILE`: an accelerate YAML, a DeepSpeed JSON (their numbers win; `"auto"` is the recipe's) or a
  `dataset_info.json`. Those that a recipe names are found.
- `--from NAME`: whose recipe it is, where its keys do not say so.

No run draws the same batches as another trainer's: each has a permutation of its own. Adapters compare only in the
same order (`data.shuffle: false` here, a sequential sampler there) and from the same first adapter (`adapter:`).

## Words that have another name here
"""
_WORDS = {
    "gradient accumulation": "`train.batch_size`, of all processes and all accumulated batches; "
    "`train.micro_batch_size` is at once on one",
    "sample packing, multipack": "`data.packing: rows`, where a batch counts rows; `auto` joins the sequences of a "
    "micro-batch",
    "val_set_size, split of one file": "`data.eval: 0.05`",
    "warmup_ratio": "`train.warmup_ratio`, with `train.warmup_from_zero: true` for the same first rates",
    "evals per epoch, saves per epoch": "`train.eval_every: epoch/4`, `train.save_every: epoch`",
    "continue training, resume": "`--resume auto` goes on with a run; `adapter: FOLDER` begins one from a PEFT adapter",
    "custom dataset": "[files, folders and names of the hub](data.md); `data.map: file.py:function` for any other row",
    "alpaca prompt, prompt style": "`data.prompt: alpaca`",
    "chat template by name": "`data.chat_template: chatml`; other names: the last section",
    "ZeRO-3, FSDP": "`topology: dp=8,dp_shard`",
    "train on inputs, completions only": "`data.train_on: everything`, `all`, `last`",
}


def text() -> str:
    """The page."""
    rows = [f"| {theirs} | {here} |" for theirs, here in _WORDS.items()]
    parts = ["\n".join([_HEAD, "| looked for | here |", "|---|---|", *rows, ""])]
    parts += [_section(trainer) for trainer in TRAINERS.values()]
    words = "What axolotl, LLaMA-Factory, ms-swift, TRL and unsloth inherit; their own rows above go first."
    parts.append(f"## transformers and PEFT\n\n{words}\n\n{_tables(INHERITED)}")
    words = "Names of GRPO trainers, and further spellings, as messages of the parser have them."
    parts.append(f"## Other programs\n\n{words}\n\n{_tables(OTHERS)}")
    parts.append(_defaults())
    names = ", ".join(f"`{theirs}`: `{ours}`" for theirs, ours in TEMPLATES.items())
    parts.append(
        f"## Names of chat templates\n\n{names}. Of other names the tokenizer's own template is taken, and said.\n"
    )
    return "\n".join(parts)


def _section(trainer: Trainer) -> str:
    lines = [f"## {trainer.title}", "", f"`--from {trainer.name}`: {trainer.recipe}."]
    if trainer.differs:
        lines += ["Of every run: " + "; ".join(trainer.differs) + "."]
    own = [fact for fact in trainer.facts if not _is_of_another(trainer, fact)]
    return "\n".join([*lines, "", _tables(own)])


def _is_of_another(trainer: Trainer, fact: Fact) -> bool:
    """Whether a row stands on the page already: unsloth's arguments are TRL's, too."""
    return trainer.name == "unsloth" and fact in TRAINERS["trl"].facts


def _tables(facts: Iterable[Fact]) -> str:
    """What has an answer, what has none, and what changes no number."""
    plain, answered, lost, idle = [], [], [], []
    for fact in facts:
        names = ", ".join(f"`{name}`" for name in fact.names.split())
        if fact.how == "no effect":
            idle.append(f"{names} ({fact.note})")
        elif fact.how == "no answer":
            lost.append(f"| {names} | {_cell(fact.note)} | {', '.join(f'`{each}`' for each in fact.off) or '–'} |")
        elif fact.how == "same" and not fact.note and "," not in fact.here:
            plain.append(f"{names} (`{fact.here}`)")
        else:
            answered.append(f"| {names} | {_here(fact.here)} | {_cell(fact.note)} |")
    lines = ["| theirs | here | what is silently different |", "|---|---|---|", *answered, ""]
    if plain:
        lines += [f"As they are: {', '.join(plain)}.", ""]
    if lost:
        lines += ["| no answer | why, or what is near | nothing is lost with |", "|---|---|---|", *lost, ""]
    if idle:
        lines += [f"No effect on numbers: {'; '.join(idle)}.", ""]
    return "\n".join(lines)


def _here(text: str) -> str:
    """Our key as code, with the words behind it."""
    if not text:
        return "–"
    key, comma, words = text.partition(",")
    key, colon, more = key.partition(":")
    words = re.sub(r"(?<=as in )([^;]*?)(?=, where|; |: a share|$)", r"`\1`", words)
    return _cell(f"`{key}`{colon}{more}{comma}{words}")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _defaults() -> str:
    """Lines that are written although a recipe has not got them."""
    keys = list(dict.fromkeys(key for trainer in TRAINERS.values() for key in trainer.defaults))
    lines = [
        "## Defaults that are written",
        "",
        "Wherever a recipe says nothing, its trainer's default is written, never "
        "ours; rates, sizes and lengths are in the tables above.",
        "",
    ]
    lines += _row(["", *(trainer.title for trainer in TRAINERS.values())], "|---" * (len(TRAINERS) + 1) + "|")
    for key in keys:
        cells = [_value(trainer.defaults[key]) if key in trainer.defaults else "–" for trainer in TRAINERS.values()]
        lines += _row([f"`{key}`", *cells])
    return "\n".join([*lines, ""])


def _row(cells: Sequence[str], *below: str) -> list[str]:
    return [f"| {' | '.join(cells)} |", *below]


def _value(value: Any) -> str:
    return f"`{yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix('...' + chr(10)).strip()}`"


if __name__ == "__main__":
    PAGE.write_text(text(), "utf-8")
