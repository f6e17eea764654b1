"""The text of an imported run file: each key with what it comes from, what differs, and what has no place.

Does not own: what it says (`meshlora_extra.importing.draft`).
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable
from typing import Any

import yaml

from meshlora_extra.importing.draft import Draft
from meshlora_ground.errors import one_line

# In this order, as docs/run-file.md has them.
_GROUPS = ("model", "lora", "data", "train")
_FIRST = {"model": ("path",), "lora": ("r", "lora_alpha"), "data": ("train", "eval"), "train": ("output",)}
_WIDTH, _LONGEST = 110, 200


def text_of(draft: Draft, *, file: str, schema: str) -> str:
    """The run file. file: its name. schema: a first line for editors."""
    start = f"meshlora train {file}"
    if draft.num_processes > 1:
        start += f" --nproc {draft.num_processes}"
    count = f"{draft.num_processes} process{'es' if draft.num_processes > 1 else ''}"
    lines = [
        schema,
        f"# {draft.recipe.file.name} of {draft.title}, for {count}, as meshlora import wrote it. Start it by",
    ]
    lines += [f"#   {start}", *_notes(draft), ""]
    for group in _GROUPS:
        lines += _group(draft, group)
    for key in ("adapter", "topology", "device"):
        if key in draft.values:
            lines.append(_line(key, draft.values[key], draft.why[key]))
    return "\n".join(lines) + "\n"


def _notes(draft: Draft) -> list[str]:
    found = []
    differs = [*draft.notes, *draft.recipe.trainer.differs]
    if differs:
        found.append("# What is not as there:")
        for each in differs:
            found += _wrapped(f"- {each}")
    for gap in draft.gaps:
        found += _wrapped(f"NOT TAKEN: {gap.key}: {one_line(str(gap.value), 80)}, because {gap.why}", indent="  ")
    if draft.idle:
        found += _wrapped(f"Of no effect on numbers: {', '.join(_groups(draft.idle))}")
    return found


def _groups(names: Iterable[str]) -> list[str]:
    """Names in order, with those of a group of many as one."""
    names, found = list(dict.fromkeys(names)), []
    counts = Counter(name.partition(".")[0] for name in names if " " not in name)
    for name in names:
        group = name.partition(".")[0]
        found.append(f"{group}.*" if "." in name and counts[group] > 2 else name)
    return list(dict.fromkeys(found))


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    """Comment lines."""
    line = one_line(text, 2000)
    return textwrap.wrap(line, _WIDTH, initial_indent="# ", subsequent_indent=f"# {indent}", break_long_words=False)


def _group(draft: Draft, group: str) -> Iterable[str]:
    own = {key.partition(".")[2]: key for key in draft.values if key.startswith(f"{group}.")}
    if not own:
        return []
    names = [name for name in _FIRST[group] if name in own]
    names += [name for name in own if name not in names]
    return [f"{group}:", *(f"  {_line(name, draft.values[own[name]], draft.why[own[name]])}" for name in names)]


def _line(key: str, value: Any, why: str) -> str:
    written = yaml.safe_dump(value, width=10_000, default_flow_style=True, sort_keys=False, allow_unicode=True)
    written = written.removesuffix("...\n").strip()
    return f"{key}: {written}  # {one_line(why, _LONGEST)}"
