"""The card of a finished adapter says no secret and no folder of a machine."""

from __future__ import annotations

import dataclasses

import pytest

from meshlora.run.edge import whole_command
from meshlora.run.model_card import _name, model_card, public
from meshlora.verify.preflight import proof_words
from tests.for_each import for_each
from tests.unit.mistakes import Setup


@for_each(
    ("given", "expected"),
    [
        ("meshlora train /home/me/run.yaml --nproc 2", "meshlora train run.yaml --nproc 2"),
        (
            "--set model.path=~/models/tiny --set data.train=../x/a.jsonl",
            "--set model.path=tiny --set data.train=a.jsonl",
        ),
        ("--set data.train='[/data/a.jsonl, /data/b.jsonl]'", "--set data.train='[a.jsonl, b.jsonl]'"),
        ("--set x=https://me:secret@host.org/a/b?token=1", "--set x=https://host.org"),
        ("--set x=hf_abcDEF123", "--set x=…"),
        ("--set data.train=file:///home/me/secret/d.jsonl", "--set data.train=d.jsonl"),
        ("--set data.columns={prompt:/home/me/x,y:1}", "--set data.columns={prompt:x,y:1}"),
        ("-/home/me/x host:/home/me/x ~me/x/y", "-x host:x y"),
        ("./../me/x a/../../me/x ./run.yaml", "x x run.yaml"),
        ("sk-proj-abcDEF123 hf_abc-def github_pat_11AAA_bb", "… … …"),
        ("meshlora train runs/run.yaml --set model.path=Qwen/Qwen3-0.6B", None),
    ],
)
def test_command_is_without_secrets_and_folders(given: str, expected: str | None) -> None:
    assert public(given) == (given if expected is None else expected)


def test_data_is_named_without_its_folder_or_by_its_repository() -> None:
    assert _name("/home/me/secret-project/a.jsonl") == "a.jsonl"
    cached = f"/home/me/.cache/huggingface/hub/datasets--acme--set/snapshots/{'1' * 40}/data/train.parquet"
    assert _name(cached) == "acme/set/data/train.parquet"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("meshlora train 'my run.yaml' --resume auto --nproc 2", "meshlora train 'my run.yaml' --nproc 2"),
        ("meshlora train run.yaml --resume=out/checkpoints/latest", "meshlora train run.yaml"),
        ("meshlora train run.yaml --resume auto --resume-despite train.lr", None),
        ("meshlora train run.yaml --resume auto --resume-despite=train.lr", None),
    ],
)
def test_command_of_a_resumed_run_is_the_one_that_trains_all_of_it(given: str, expected: str | None) -> None:
    assert whole_command(given) == (given if expected is None else expected)


def test_a_run_that_nothing_has_proved_does_not_claim_to_be(setup: Setup) -> None:
    run = setup.prepared()
    claim = "It is the adapter that one process would have trained"
    for skip in (False, True):
        proof = proof_words(run, skip=skip)
        card = model_card(dataclasses.replace(run, proof=proof), done=1, task="CAUSAL_LM", eval_loss=None)
        assert (claim in card) == (not skip)
        assert ("was not proved before this run" in card) == skip
    assert claim not in model_card(dataclasses.replace(run, proof=""), done=1, task="CAUSAL_LM", eval_loss=None)
