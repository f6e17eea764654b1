"""Scores of generated text against references: BLEU by sacrebleu, ROUGE-L by rouge-score.

Owns: calling these libraries, and the error if one is missing. Does not own: the texts (`data.prompts_of`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from meshlora.common.errors import UserError

_LIBRARIES = ("sacrebleu", "rouge_score")


def check_scorers() -> None:
    """Raises: UserError with a missing library and the command that installs it."""
    for name in _LIBRARIES:
        if importlib.util.find_spec(name) is None:
            raise UserError("scores of generated text", f"they need {name}", "pip install 'meshlora[metrics]'")


def scores(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, Any]:
    """`bleu` and `rouge_l`, both in percent, and `bleu_signature`: how sacrebleu computed it.

    references: one or more per hypothesis. BLEU is of the whole corpus; ROUGE-L is the mean over hypotheses of the best
    F-measure among the references.
    """
    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer

    # sacrebleu takes streams: the first reference of every hypothesis, the second, ...; None if missing.
    streams = [list(stream) for stream in zip_longest(*references)]
    metric = sacrebleu.BLEU()
    bleu = metric.corpus_score(list(hypotheses), streams)
    scorer = RougeScorer(["rougeL"])
    rouge = [
        max(scorer.score(reference, text)["rougeL"].fmeasure for reference in own)
        for text, own in zip(hypotheses, references, strict=True)
    ]
    return {
        "bleu": bleu.score,
        "rouge_l": 100 * sum(rouge) / len(rouge),
        "bleu_signature": str(metric.get_signature()),
    }
