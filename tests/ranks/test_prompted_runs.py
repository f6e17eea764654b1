"""An encoder-decoder trained on pairs gives the adapter of one process on every mesh, and PEFT loads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForSeq2SeqLM
from transformers import AutoConfig, AutoTokenizer

from meshlora.feature import check_proved
from meshlora.loading.blueprint import make_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.run.config.file import read_run
from meshlora.run.together import prepare_run
from meshlora_ground.encoded import IDS, with_start
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.topology import Topology
from meshlora_judge.compare import compare_adapters, largest_loss_gap, read_losses
from meshlora_judge.inputs import write_twin
from meshlora_judge.twin import twin_config
from tests.for_each import for_each
from tests.one_process import train_alone
from tests.pool import Pool
from tests.ranks.test_trainer import run_and_keep_groups, run_file
from tests.run_files import TINY, copy_tokenizer

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]
ROWS = [
    {"prompt": " ".join(["say it:", *WORDS[: 1 + 5 * number % 11]]), "completion": " ".join(WORDS[number:][:5])}
    for number in range(11)
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    size = len(AutoTokenizer.from_pretrained(TINY))
    write_twin(twin_config("t5", tp=2, vocab_size=size), folder, dtype=torch.float64, seed=0)
    copy_tokenizer(folder)
    return folder


def pairs_file(folder: Path, name: str, topology: str, base: Path, **changes: Any) -> Path:
    """A run on pairs of unequal lengths, with a short batch at the end of the epoch."""
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    own: dict[str, Any] = {"model__path": str(base), "data__train": str(data), "data__eval": str(data)}
    own["lora__target_modules"] = ["q", "k", "v", "o", "wi", "wo"]
    own |= {"train__steps": 3, "train__eval_every": 3, "train__save_every": 0, "lora__lora_dropout": 0.0}
    return run_file(folder, name, topology, **(own | changes))


@pytest.mark.parametrize("topology", ["tp=2", pytest.param("dp=2", marks=pytest.mark.long)])
def test_run_on_pairs_gives_the_adapter_of_one_process(
    topology: str, base: Path, tmp_path: Path, pools: Callable[[int], Pool]
) -> None:
    file = pairs_file(tmp_path, "run", topology, base)
    pools(2).run(run_and_keep_groups, file, 2)
    losses = train_alone(file, initial=tmp_path / "run/initial", out=tmp_path / "reference")
    assert compare_adapters(tmp_path / "run/adapter", tmp_path / "reference").relative < 1e-6
    assert largest_loss_gap(read_losses(tmp_path / "run/metrics.jsonl"), losses) < 1e-11
    stored = json.loads((tmp_path / "run/adapter/adapter_config.json").read_text())
    assert stored["task_type"] == "SEQ_2_SEQ_LM"
    loaded = AutoPeftModelForSeq2SeqLM.from_pretrained(tmp_path / "run/adapter")
    assert any("encoder.block.0" in name and "lora_A" in name for name, _ in loaded.named_parameters())


def test_rows_are_what_the_tokenizer_makes_of_both_texts(base: Path, tmp_path: Path) -> None:
    data = prepare_run(read_run(pairs_file(tmp_path, "run", "", base))).train_data
    tokenizer, start = AutoTokenizer.from_pretrained(base), AutoConfig.from_pretrained(base).decoder_start_token_id
    for sequence, row in zip(data, ROWS, strict=True):
        assert sequence.input_ids.tolist() == [start, *tokenizer(row["completion"]).input_ids]
        assert sequence.is_trained.tolist() == [False] + [True] * (len(sequence.input_ids) - 1)
        assert sequence.more()[IDS].tolist() == [tokenizer(row["prompt"]).input_ids]


@pytest.mark.parametrize(("family", "name"), [("t5", None), ("bart", None), ("mbart", "MBartForConditionalGeneration")])
def test_start_is_that_of_the_models_own_shift(family: str, name: str | None) -> None:
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_config(twin_config(family))
    labels = torch.tensor([[7, 8, 9, 2, -100]])
    wanted = model.prepare_decoder_input_ids_from_labels(labels=labels)
    assert with_start(model.config, np.array([7, 8, 9, 2])).tolist() == wanted[0].tolist()


@for_each(
    ("changes", "words"),
    [
        ({"topology": "tp=2,sp"}, "sp with an encoder beside the decoder"),
        ({"data__packing": True}, "training on pairs is proved"),
        ({"lora__lora_dropout": 0.1}, "set model.disable_dropout: true, and lora_dropout: 0"),
        ({"data__too_long": "drop"}, "its records are a prompt and a completion"),
        ({"train__objective": "dpo"}, "training on pairs is proved"),
    ],
)
def test_what_is_not_proved_with_an_encoder_is_refused(
    changes: dict[str, Any], words: str, base: Path, tmp_path: Path
) -> None:
    changes = dict(changes)
    topology = changes.pop("topology", "")
    with pytest.raises(UnsupportedError, match=words):
        prepare_run(read_run(pairs_file(tmp_path, "wrong", topology, base, **changes)))


@pytest.mark.parametrize("name", ["MarianMTModel", "T5GemmaForConditionalGeneration"])
def test_embeddings_in_a_form_that_is_not_read_are_refused_in_words(name: str) -> None:
    config = twin_config("marian" if name.startswith("Marian") else "t5gemma", architectures=[name])
    with pytest.raises(UnsupportedError, match=f"'{config.model_type}' with its encoder.*in other forms than"):
        make_blueprint(config, Topology(), BaseOptions())


def test_no_record_of_a_decoder_alone_is_one_of_it_with_its_encoder() -> None:
    config = twin_config("bart", architectures=["BartForConditionalGeneration"])
    blueprint = make_blueprint(config, Topology(tp=2), BaseOptions())
    with pytest.raises(UnsupportedError, match="bart with its encoder"):
        check_proved(blueprint.plan)
