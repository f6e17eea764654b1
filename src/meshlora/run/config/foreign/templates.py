"""Other trainers' names of chat templates, and which of those that are shipped here write the same."""

from __future__ import annotations

from meshlora.reading import named_templates

# Their name, in small letters -> ours; another name means a template of the tokenizer's own, or none here.
TEMPLATES = {name: name for name in named_templates.TEMPLATES} | dict(named_templates.ELSEWHERE)
del TEMPLATES["alpaca"]  # with others a style of plain prompts, which is data.prompt here
