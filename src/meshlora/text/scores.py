"""Scores of generated text against references, by the libraries that papers cite: BLEU by sacrebleu, ROUGE-L by
rouge-score.

Owns: handing texts to them, and what is said where one is missing. Does not own: which texts (`data.prompts_of`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from meshlora.common.errors import UserError

_LIBRARIES = ("sacrebleu", "rouge_score")


def check_scorers() -> None:
    """Raises: UserError naming a library that is not installed, and the command that installs it."""
    for name in _LIBRARIES:
        if importlib.util.find_spec(name) is None:
            raise UserError("scores of generated text", f"they need {name}", "pip install 'meshlora[metrics]'")


def scores(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, Any]:
    """`bleu` and `rouge_l`, both in percent, and `bleu_signature`: how sacrebleu computed it.

    references: those of each hypothesis, one or more. BLEU is of the whole corpus; ROUGE-L is the mean over hypotheses
    of the best F-measure among the references.
    """
    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer

    # sacrebleu wants streams: the first reference of every hypothesis, the second, ...; None where there is none.
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
