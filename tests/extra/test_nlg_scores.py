"""Scores of generated text: the numbers of the official scripts, recorded on ten texts of E2E and ten raw ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshlora_extra.paper.caption_scores import cider, nist, rouge_l
from meshlora_extra.paper.caption_tokens import caption_tokens
from meshlora_extra.paper.meteor import meteor
from meshlora_extra.paper.scores import scores, shown, spaced, written_references

SETS = json.loads((Path(__file__).parents[1] / "recorded" / "official_scores.json").read_text("utf-8"))["sets"]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("name", SETS)
def test_scores_are_those_of_e2e_metrics(name: str) -> None:
    recorded = SETS[name]
    found, meant = scores(recorded["hypotheses"], recorded["references"]), recorded["e2e-metrics"]
    assert found["bleu"] == pytest.approx(100 * meant["BLEU"], abs=1e-9)
    assert found["nist"] == pytest.approx(meant["NIST"], abs=1e-9)
    assert found["rouge_l"] == pytest.approx(100 * meant["ROUGE_L"], abs=1e-9)
    assert found["cider"] == pytest.approx(meant["CIDEr"], abs=1e-9)


@pytest.mark.parametrize("name", SETS)
def test_scores_are_those_of_generation_eval(name: str) -> None:
    """Its script prints BLEU with two decimals."""
    recorded = SETS[name]
    found, meant = (
        scores(recorded["hypotheses"], recorded["references"], "generation-eval"),
        recorded["generation-eval"],
    )
    assert round(found["bleu"], 2) == meant["bleu"]
    assert found["ter"] == pytest.approx(100 * meant["ter"], abs=1e-9)
    assert found["chrf"] == pytest.approx(100 * meant["chrf++"], abs=1e-9)


@pytest.mark.meteor
@pytest.mark.parametrize("script", ["e2e-metrics", "generation-eval"])
@pytest.mark.parametrize("name", SETS)
def test_meteor_is_that_of_both_scripts(name: str, script: Any) -> None:
    recorded = SETS[name]
    meant = recorded[script].get("METEOR") or recorded[script]["meteor"]
    found = scores(recorded["hypotheses"], recorded["references"], script)
    assert found["meteor"] == pytest.approx(100 * meant, abs=1e-9)


def test_meteor_is_none_and_said_so_without_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert meteor([["a"]], [[["a"]]]) is None
    assert shown({"bleu": 12.345, "meteor": None, "cider": 1.5}) == "BLEU 12.35  METEOR –  CIDEr 1.5000"


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("It isn't £20-25, and they can't.", "it is n't # 20-25 and they ca n't"),
        ("'Bananaman' (STV)...", "bananaman -lrb- stv -rrb-"),
        ("Dr. J. Smith lives in the U.K., we cannot say.", "dr. j. smith lives in the u.k. we can not say"),
        ("A.F.C. Blackpool's mass is 7.9kg; hors d'oeuvre.", "a.f.c. blackpool 's mass is 7.9 kg hors d'oeuvre"),
        ("Runway 18L/36R, 80% of 2,776.0 or -71.", "runway 18l/36r 80 % of 2,776.0 or -71"),
        (
            "Near 20£-25 , a 5of5 low - priced pub ; the students' hall .",
            "near 20 # -25 a 5of5 low priced pub the students hall",
        ),
    ],
)
def test_tokens_are_those_of_stanfords_tokenizer_without_punctuation(text: str, tokens: str) -> None:
    """Recorded from PTBTokenizer of stanford-corenlp-3.4.1 with -preserveLines -lowerCase."""
    assert " ".join(caption_tokens(text)) == tokens


def test_text_that_shares_nothing_scores_nothing() -> None:
    references = [[["a", "b", "c"]], [["d", "e"]]]
    for score in (nist, rouge_l, cider):
        assert score([["x"], []], references) == 0


def test_references_are_written_as_the_scripts_read_them() -> None:
    references = [("It isn't\nfar.", "Near."), ("Yes.",)]
    assert written_references(references, "e2e-metrics") == {"": "It isn't far.\nNear.\n\nYes.\n\n"}
    found = written_references(references, "generation-eval")
    assert found == {"reference0": "it isn ' t far .\nyes .\n", "reference1": "near .\nyes .\n"}
    assert spaced("A_b-C 5.0%") == "a_b - c 5 . 0 %"
