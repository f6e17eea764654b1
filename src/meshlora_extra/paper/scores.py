"""Scores of generated text against references, as the scripts compute them that papers quote.

Owns: each script's scores and its preparation of texts. BLEU and chrF++ are sacrebleu's, TER is pyter's, tokens are
nltk's. Does not own: NIST, ROUGE-L and CIDEr (`meshlora_extra.paper.caption_scores`), METEOR's process
(`meshlora_extra.paper.meteor`), the texts (`data.prompts_of`).
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal

from meshlora_extra.paper.caption_scores import cider, nist, rouge_l
from meshlora_extra.paper.caption_tokens import caption_tokens
from meshlora_extra.paper.meteor import meteor
from meshlora_ground.errors import UserError

Script = Literal["e2e-metrics", "generation-eval"]
SCRIPTS: tuple[Script, ...] = ("e2e-metrics", "generation-eval")

References = Sequence[Sequence[str]]

_LIBRARIES = {"e2e-metrics": ("sacrebleu",), "generation-eval": ("sacrebleu", "nltk", "pyter")}
# Score -> its name on the terminal, in the order of the papers' tables; those with four digits behind the point.
SHOWN = {"bleu": "BLEU", "nist": "NIST", "meteor": "METEOR", "rouge_l": "ROUGE-L", "cider": "CIDEr"}
SHOWN |= {"ter": "TER", "chrf": "chrF++"}
_FINE = ("nist", "cider")


def check_scorers(script: Script) -> None:
    """Raises: UserError with a missing library and the command that installs it."""
    for name in _LIBRARIES[script]:
        if importlib.util.find_spec(name) is None:
            raise UserError("scores of generated text", f"they need {name}", "pip install 'meshlora[metrics]'")


def scores(hypotheses: Sequence[str], references: References, script: Script = "e2e-metrics") -> dict[str, Any]:
    """The scores of `script` by name, and `bleu_signature`: how sacrebleu computed BLEU.

    references: one or more per hypothesis. In percent, but for NIST and CIDEr. `meteor` is None without Java and
    pycocoevalcap.

    - e2e-metrics (tuetschek/e2e-metrics, of the E2E challenge): BLEU, NIST, METEOR, ROUGE-L, CIDEr; without regard to
      case.
    - generation-eval (WebNLG/GenerationEval, on files that microsoft/LoRA's gpt2_decode.py has written with
      `--tokenize --lower`): BLEU, METEOR, TER, chrF++.

    Raises:
        UserError: no hypotheses.
    """
    if not hypotheses:
        raise UserError("no generated text", "there is nothing to score")
    if script == "e2e-metrics":
        return _e2e_metrics(hypotheses, references)
    return _generation_eval(hypotheses, references)


def _e2e_metrics(hypotheses: Sequence[str], references: References) -> dict[str, Any]:
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    mteval = Tokenizer13a()

    def words_of(text: str) -> list[str]:
        return mteval(text.lower()).split()

    words, words_of_references = _tokenized(hypotheses, references, words_of)
    tokens, tokens_of_references = _tokenized(hypotheses, references, caption_tokens)
    return {
        **_bleu(hypotheses, references, lowercase=True),
        "nist": nist(words, words_of_references),
        "meteor": meteor(tokens, tokens_of_references),
        "rouge_l": 100 * rouge_l(tokens, tokens_of_references),
        "cider": cider(tokens, tokens_of_references),
    }


def _generation_eval(hypotheses: Sequence[str], references: References) -> dict[str, Any]:
    import pyter
    import sacrebleu
    from nltk.tokenize import NLTKWordTokenizer

    texts, own_texts = _tokenized(hypotheses, references, spaced)
    tokens, own_tokens = _tokenized(texts, own_texts, NLTKWordTokenizer().tokenize)
    # The nearest reference, of tokens.
    rates = [min(pyter.ter(text, reference) for reference in own) for text, own in zip(tokens, own_tokens, strict=True)]
    chrf = sacrebleu.CHRF(word_order=2, eps_smoothing=True).corpus_score(texts, _streams(own_texts))  # chrF++
    return {
        **_bleu(texts, own_texts, lowercase=False),
        "meteor": meteor(tokens, own_tokens),
        "ter": 100 * sum(rates) / len(rates),
        "chrf": chrf.score,
    }


def _tokenized(hypotheses: Sequence[str], references: References, split: Callable[[str], Any]) -> tuple[Any, Any]:
    """`split` of each text: of the hypotheses, and of each one's references."""
    return list(map(split, hypotheses)), [list(map(split, own)) for own in references]


def spaced(text: str) -> str:
    """Lower case, with spaces around all that is neither letter, digit nor underscore, as gpt2_decode.py has it."""
    return " ".join(" ".join(re.split(r"(\W)", text.lower())).split())


def _bleu(hypotheses: Sequence[str], references: References, *, lowercase: bool) -> dict[str, Any]:
    import sacrebleu

    metric = sacrebleu.BLEU(lowercase=lowercase, smooth_method="none")  # the scripts do not smooth
    found = metric.corpus_score(list(hypotheses), _streams(references))
    return {"bleu": found.score, "bleu_signature": str(metric.get_signature())}


def _streams(references: References) -> list[Any]:
    """As sacrebleu takes them: the first reference of every hypothesis, the second, ...; None if missing."""
    return list(map(list, zip_longest(*references)))


def shown(found: Mapping[str, Any]) -> str:
    """The scores in one line."""
    parts = []
    for name, title in SHOWN.items():
        if name in found and found[name] is None:
            parts.append(f"{title} –")
        elif name in found:
            parts.append(f"{title} {found[name]:.{4 if name in _FINE else 2}f}")
    return "  ".join(parts)


def written_references(references: References, script: Script) -> dict[str, str]:
    """Name -> content of the files in which the script reads references; "" names a single file.

    e2e-metrics: one file, a reference a line, an empty line after each text. generation-eval: `reference0`,
    `reference1`, ..., a line a text; a text with fewer references repeats its first.
    """
    if script == "e2e-metrics":
        return {"": "\n".join("".join(f"{_line(text)}\n" for text in own) for own in references) + "\n"}
    files = {}
    for index in range(max(map(len, references))):
        texts = [own[index] if index < len(own) else own[0] for own in references]
        files[f"reference{index}"] = "".join(f"{spaced(text)}\n" for text in texts)
    return files


def _line(text: str) -> str:
    return " ".join(text.split())
