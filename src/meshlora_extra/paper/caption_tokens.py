"""Tokens of captions: English words as the caption evaluation of COCO and of the E2E challenge splits them.

Owns: a small tokenizer that stands for Stanford's PTBTokenizer 3.4.1 with `-lowerCase`, less its punctuation, without
Java. It gives the same tokens for each of the 9,031 different texts of E2E's valid.txt and test.txt, and for all but 41
of 6,315 of WebNLG, which are rare abbreviations and typing errors. Does not own: scores
(`meshlora_extra.paper.caption_scores`).
"""

from __future__ import annotations

import re

# Left out by the caption evaluation. Brackets stay: it looks for -LRB-, and finds -lrb-.
_PUNCTUATION = frozenset(["''", "'", "``", "`", '"', ".", "?", "!", ",", ":", "-", "--", "...", ";"])
_RENAMED = dict(zip("()[]{}", ("-lrb-", "-rrb-", "-lsb-", "-rsb-", "-lcb-", "-rcb-"), strict=True))
_RENAMED |= dict(zip("£€“”‘–—…", ("#", "$", '"', '"', "'", "--", "--", "..."), strict=True))
# Abbreviations that keep their full stop.
_SHORT = (
    "mr|mrs|ms|dr|prof|st|ave|blvd|jr|sr|gov|gen|col|lt|sen|rep|rev|hon|capt|sgt|maj|mt|ft|no|vs|inc|ltd|co|corp|bros"
    "|plc|etc|al|assoc|adv|ga|ct|jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec"
)
_LETTER, _CLITICS = r"[^\W\d_]", "s|m|d|re|ve|ll"
_TOKEN = re.compile(
    rf"""
      https?://\S+[^\s.,;:!?)"'\]]
    | can(?=not\b) | (?<=can)not\b
    | [a-z]+?(?=n['’]t\b) | n['’]t\b
    | ['’](?:{_CLITICS}|n)(?!\w)
    | (?:{_LETTER}\.){{2,}}(?:{_LETTER}(?![\w.]))?           # u.k.
    | (?:{_SHORT})\.(?=\W|$)
    | {_LETTER}\.(?!\s+(?:the|its?|this|they|he|she|an?|in|there|his|her)\b|[\w.])  # an initial
    | (?<![\w.])[-+]?\d*(?:[.,:]\d+)+(?!\w*[-/]\w)            # 2,776.0 and then its unit
    | (?<!\w)[-+]?\d+(?!\w)(?:/\d+)*(?:-\w+)*
    | {_LETTER}+['’](?!(?:{_CLITICS}|t)\b){_LETTER}+(?:-\w+)*  # d'oeuvre
    | [\w\u0300-\u036f]+(?:[-_&./][\w\u0300-\u036f]+)*
    | \.\.\. | --
    | \S
    """,
    re.VERBOSE,
)


def caption_tokens(text: str) -> list[str]:
    """Lower-case words of `text`: `caption_tokens("It isn't £20.")` is `["it", "is", "n't", "#", "20"]`."""
    found = (_RENAMED.get(token, token.replace("’", "'")) for token in _TOKEN.findall(text.lower()))
    return [token for token in found if token not in _PUNCTUATION]
