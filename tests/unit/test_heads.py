"""Objectives of other heads: losses are those of transformers, or of all texts at once; records; new heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, BertTokenizer

from meshlora.adapter.formats.peft_format import lora_config, save_adapter
from meshlora.loading.blueprint import Blueprint, make_blueprint, read_model_config
from meshlora.loading.load import load_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.reading.readers import READERS
from meshlora.run import heads
from meshlora.run.heads import Compared, embeddings, info_nce
from meshlora.train.batch import Batch
from meshlora.train.collation import collate
from meshlora_extra.merging.head import set_head
from meshlora_extra.merging.merge import merge
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UserError
from meshlora_ground.objective import Objective
from meshlora_ground.objectives.labels import Classify, ClassifyTokens, Embed
from meshlora_ground.tasks import class_of_task, set_task, task_of
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config
from tests.for_each import for_each

TINY = Path(__file__).parents[2] / "examples" / "tiny_base"
THREE = Classify(labels=["bad", "fair", "good"])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def batch_of(targets: Tensor | None = None, labels: Tensor | None = None, **rest: Any) -> Batch:
    ids = torch.ones(4, 5, dtype=torch.int64) if labels is None else torch.ones_like(labels)
    columns = {} if labels is None else {"label": labels.clamp(min=0).float()}
    return Batch(ids, ids, ids if labels is None else labels, 0, ids, columns, targets=targets, **rest)


@pytest.mark.parametrize(
    ("objective", "targets"),
    [
        (Classify(num_labels=3), torch.tensor([[2.0], [0.0], [1.0], [2.0]])),
        (Classify(num_labels=3, problem="multi"), torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])),
        (Classify(num_labels=3, problem="regression"), torch.randn(4, 3)),
    ],
    ids=["single", "multi", "regression"],
)
def test_loss_of_texts_is_that_of_transformers(objective: Classify, targets: Tensor) -> None:
    config = twin_config("llama")
    objective.configure(config)
    model = AutoModelForSequenceClassification.from_config(config)
    outputs = torch.randn(4, 3)
    labels = targets[:, 0].long() if objective.problem == "single" else targets
    expected = model.loss_function(labels=labels, pooled_logits=outputs, logits=outputs, config=config)
    losses, values = heads.classify(objective, outputs, batch_of(targets), None)
    assert torch.allclose(losses.mean(), expected)
    assert losses.shape == (4,)
    if objective.problem == "single":
        assert torch.equal(values["accuracy"], (outputs.argmax(1) == labels).float())
    if objective.problem == "multi":
        _, values = heads.classify(objective, outputs / 8, batch_of(targets), None)
        assert torch.allclose(values["accuracy"], ((outputs.sigmoid() > 0.5) == labels.bool()).float().mean(1))


def test_loss_of_words_is_a_mean_over_those_that_have_labels() -> None:
    labels = torch.tensor([[2, -100, 1], [-100, 0, -100]])
    outputs = torch.randn(2, 3, 3)
    losses, values = heads.classify_tokens(ClassifyTokens(num_labels=3), outputs, batch_of(labels=labels), None)
    expected = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert torch.allclose(losses.sum() / 3, expected)
    with torch.no_grad():
        _, values = heads.classify_tokens(ClassifyTokens(num_labels=3), outputs, batch_of(labels=labels), None)
    is_right = (outputs.argmax(2) == labels) & (labels >= 0)
    assert torch.equal(values["accuracy"], is_right.sum(1).float())
    counts = values[heads.COUNTS].sum(0).view(2, -1)
    assert (counts[0].sum(), counts[1].sum()) == (is_right.sum(), 2 * 3)


@pytest.mark.parametrize("normalize", [True, False])
def test_embeddings_of_a_step_in_parts_have_the_gradient_of_all_at_once(normalize: bool) -> None:
    """The surrogate of each micro-batch, against one loss of all texts, as sentence-transformers computes it."""
    objective = Embed(pooling="mean", temperature=0.3, normalize=normalize)
    hidden = torch.randn(6, 4, 8, dtype=torch.float64, requires_grad=True)  # two records of an anchor and two others
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]] * 2)
    texts = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    scale = F.normalize if normalize else (lambda found: found)
    anchors, others = scale(texts[0::3]), scale(torch.cat([texts[1::3], texts[2::3]]))
    expected = F.cross_entropy(anchors @ others.T / 0.3, torch.arange(2), reduction="sum")
    (gradient,) = torch.autograd.grad(expected, hidden)

    every = embeddings(objective, hidden.detach(), mask).requires_grad_()
    losses, hits = info_nce(objective, every.view(2, 3, -1))
    (by_text,) = torch.autograd.grad(losses.sum(), every)
    compared = Compared(losses.detach(), hits, by_text)
    total = torch.zeros((), dtype=torch.float64)
    for record in (0, 1):
        rows = slice(3 * record, 3 * record + 3)
        places = torch.arange(3 * record, 3 * record + 3) << 32
        batch = Batch(mask[rows], mask[rows], mask[rows], 0, places.unsqueeze(1), rows_per_example=3)
        found, _ = heads.embed(objective, hidden[rows], batch, compared)
        found.sum().backward()
        total += found.sum().detach()
    assert torch.allclose(total, expected, rtol=1e-12)
    assert torch.allclose(hidden.grad, gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(("pooling", "place"), [("last", 2), ("cls", 0)])
def test_one_token_is_taken_and_never_the_padding(pooling: Any, place: int) -> None:
    hidden, mask = torch.randn(1, 5, 4), torch.tensor([[1, 1, 1, 0, 0]])
    found = embeddings(Embed(pooling=pooling, normalize=False), hidden, mask)
    assert torch.equal(found[0], hidden[0, place])


def read(objective: Objective, tmp_path: Path, *rows: dict[str, Any], **rest: Any) -> TokenizedDataset:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"objective": objective, "max_length": 16, "vocab_size": 2048} | rest
    return READERS[objective.reader](str(file), AutoTokenizer.from_pretrained(TINY), **options)


def test_labels_go_by_name_or_number_and_stay_with_their_text(tmp_path: Path) -> None:
    data = read(THREE, tmp_path, {"text": "a", "label": "good"}, {"text": "a long text", "label": 0})
    assert data.targets is not None
    assert data.targets.tolist() == [[2.0], [0.0]]
    batch = collate([data[1], data[0]], pad_token_id=1, num_targets=1, predicts_next=False)
    assert batch.targets is not None
    assert batch.targets.tolist() == [[0.0], [2.0]]
    multi = Classify(labels=["x", "y", "z"], problem="multi")
    data = read(multi, tmp_path, {"text": "a", "label": ["z", 0]}, {"text": "b", "label": []})
    assert data.targets is not None
    assert data.targets.tolist() == [[1, 0, 1], [0, 0, 0]]


def test_pairs_reach_the_model_with_the_token_types_of_their_tokenizer(tmp_path: Path) -> None:
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdef"])}
    tokenizer = BertTokenizer(vocab=vocabulary)
    file = tmp_path / "rows.jsonl"
    pairs = [("a b c", "d"), ("e", "f a")]
    file.write_text("".join(json.dumps({"text": a, "text_pair": b, "label": 0}) + "\n" for a, b in pairs))
    options: dict[str, Any] = {"objective": THREE, "max_length": 16}
    data = READERS["labelled"](str(file), tokenizer, vocab_size=11, **options)
    batch = collate([data[0], data[1]], pad_token_id=0, num_targets=1, predicts_next=False)
    theirs = tokenizer([a for a, _ in pairs], [b for _, b in pairs], padding=True, return_tensors="pt")
    assert set(theirs["token_type_ids"].flatten().tolist()) == {0, 1}
    assert torch.equal(batch.more["token_type_ids"], theirs["token_type_ids"])
    config = twin_config("bert", is_decoder=False)  # the first token sees the second text
    THREE.configure(config)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # as they are drawn, token types hardly reach the outputs
            parameter.normal_()
        torch.testing.assert_close(heads.outputs_of(model, batch), model(**theirs).logits)
    assert data.images is None
    swapped = [("d", "a b c"), ("f a", "e")]
    file.write_text("".join(json.dumps({"text": a, "text_pair": b, "label": 0}) + "\n" for a, b in swapped))
    other = READERS["labelled"](str(file), tokenizer, vocab_size=11, **options)
    assert not np.array_equal(data.arrays["further"], other.arrays["further"])


def test_label_of_a_word_is_that_of_its_first_token(tmp_path: Path) -> None:
    objective = ClassifyTokens(labels=["other", "verb"])
    words = ["check_all_of_them", "now", "x"]
    data = read(objective, tmp_path, {"tokens": words, "labels": ["verb", -100, "other"]})
    encoded = AutoTokenizer.from_pretrained(TINY)(words, is_split_into_words=True)
    first = {word: encoded.word_ids().index(word) for word in range(3)}
    assert data.is_trained.nonzero()[0].tolist() == [first[0], first[2]]
    assert data.columns["label"][[first[0], first[2]]].tolist() == [1, 0]
    batch = collate([data[0]], pad_token_id=1, columns=("label",), predicts_next=False)
    assert (batch.labels[0] >= 0).nonzero().flatten().tolist() == [first[0], first[2]]


def test_records_of_similar_texts_are_neighbours(tmp_path: Path) -> None:
    row = {"anchor": "a", "positive": "b", "negatives": ["c", "d"]}
    data = read(Embed(), tmp_path, row, row)
    assert (data.rows_per_example, data.num_examples, len(data)) == (4, 2, 8)


@for_each(
    ("objective", "row", "words"),
    [
        (THREE, {"text": "a", "label": "goood"}, "did you mean 'good'"),
        (THREE, {"text": "a", "label": 3}, "label 3 is not one of 0 to 2"),
        (THREE, {"text": "a", "label": 1.0}, "not a name or a whole number"),
        (THREE, {"text": "a"}, "'label' is missing"),
        (THREE, {"text": " ", "label": 1}, "empty text"),
        (Classify(num_labels=2, problem="regression"), {"text": "a", "label": 0.5}, "not 2 finite numbers"),
        (Classify(num_labels=2, problem="multi"), {"text": "a", "label": 1}, "not a list of labels"),
        (ClassifyTokens(num_labels=2), {"tokens": ["a", "b"], "labels": [1]}, "one label for each of 2 tokens"),
        (ClassifyTokens(num_labels=2), {"tokens": ["a"], "labels": [-100]}, "no labelled word"),
        (ClassifyTokens(num_labels=2), {"tokens": ["a"], "labels": [2]}, "label 2 is not one of 0 to 1"),
        (Embed(), {"anchor": "a"}, "'positive' is missing"),
        (Embed(), {"anchor": "a", "positive": "b", "negatives": "c"}, "not a list of texts"),
    ],
)
def test_wrong_record_is_named_with_its_line(
    objective: Objective, row: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"rows\.jsonl:1") as error:
        read(objective, tmp_path, row)
    assert words in str(error.value)


def test_other_number_of_negatives_is_named(tmp_path: Path) -> None:
    one, two = ({"anchor": "a", "positive": "b", "negatives": ["c"] * number} for number in (1, 2))
    with pytest.raises(UserError, match=r"rows\.jsonl:2: 2 negatives, where the records before have 1"):
        read(Embed(), tmp_path, one, two)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "neither labels nor num_labels"),
        ({"labels": ["a", "b"], "num_labels": 2}, "both labels and num_labels"),
        ({"labels": ["a", "a"]}, "one name of its own"),
        ({"num_labels": 1}, "one label"),
    ],
)
def test_labels_that_say_no_head_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Classify(**options)


def test_configuration_of_a_task_is_the_one_transformers_writes() -> None:
    config = twin_config("bert")
    THREE.configure(config)
    assert config.architectures == ["BertForSequenceClassification"]
    assert config.problem_type == "single_label_classification"
    assert config.id2label == {0: "bad", 1: "fair", 2: "good"}
    assert config.label2id == {"bad": 0, "fair": 1, "good": 2}
    set_task(config, "CAUSAL_LM")
    assert task_of(config) == "CAUSAL_LM"


def blueprint_of(folder: Path, lora: dict[str, Any]) -> Blueprint:
    base = make_blueprint(folder, Topology(), BaseOptions(dtype="float32"), THREE)
    return base.with_adapter(lora_config(lora, "lora"))


def test_new_head_is_a_function_of_the_seed_and_is_trained(tmp_path: Path) -> None:
    """Of a checkpoint of a language model, whose own head is passed over."""
    blueprint = blueprint_of(TINY, {"r": 2, "target_modules": "all-linear"})
    assert blueprint.trained.copies == ("score.weight",)
    assert "score" not in blueprint.trained.targets
    blueprint.check_weights()
    one, two, other = (load_blueprint(blueprint, device="cpu", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.score.weight, two.score.weight)
    assert not torch.equal(one.score.weight, other.score.weight)
    assert one.score.weight.std().item() == pytest.approx(one.config.initializer_range, rel=0.2)


def test_another_part_that_is_missing_is_named_with_the_way_out(tmp_path: Path) -> None:
    config = twin_config("bert")
    THREE.configure(config)
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "pooler" not in name and "classifier" not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="modules_to_save"):
        blueprint_of(tmp_path, {"r": 2, "target_modules": ["query"]}).check_weights()
    own = {"r": 2, "target_modules": ["query"], "modules_to_save": ["pooler.dense"]}
    blueprint_of(tmp_path, own).check_weights()


def test_macro_f1_is_the_mean_over_labels_that_occur() -> None:
    """Against its definition, label by label, from counts that are summed over parts."""
    outputs, targets = torch.randn(30, 5), torch.randint(4, (30, 1)).float()  # the last label is never right
    objective = Classify(num_labels=5)
    with torch.no_grad():
        parts = [heads.classify(objective, outputs[r], batch_of(targets[r]), None)[1] for r in (slice(7), slice(7, 30))]
    found = heads.means({name: parts[0][name].sum(0) + parts[1][name].sum(0) for name in parts[0]}, 30)
    predicted, scores = outputs.argmax(1), []
    for label in range(5):
        right = int(((predicted == label) & (targets[:, 0] == label)).sum())
        both = int((predicted == label).sum() + (targets[:, 0] == label).sum())
        scores += [2 * right / both] if both else []
    assert found["macro_f1"] == pytest.approx(sum(scores) / len(scores))
    assert found["accuracy"] == pytest.approx(float((predicted == targets[:, 0]).float().mean()))


def test_model_is_told_its_padding_where_the_configuration_does_not_say() -> None:
    config = twin_config("llama")
    THREE.configure(config)
    config.pad_token_id = None
    model = AutoModelForSequenceClassification.from_config(config).eval()
    heads.set_padding(model, 7)
    ids = torch.tensor([[3, 4, 5], [3, 4, 7]])
    batch = Batch(ids, torch.tensor([[1, 1, 1], [1, 1, 0]]), ids, 0, ids)
    with torch.no_grad():
        alone = model(input_ids=ids[1:, :2]).logits
        assert torch.allclose(heads.outputs_of(model, batch)[1:], alone, atol=1e-6)


def test_merged_folder_has_the_head_and_its_labels(tmp_path: Path) -> None:
    """Of a checkpoint of a language model, loaded by its own configuration, against transformers + peft."""
    base, adapter, merged = (tmp_path / name for name in ("base", "adapter", "merged"))
    AutoModelForCausalLM.from_config(twin_config("llama")).save_pretrained(base)
    blueprint = blueprint_of(base, {"r": 2, "target_modules": "all-linear", "init_lora_weights": False})
    model = load_blueprint(blueprint, device="cpu", seed=3).eval()
    save_adapter(model, adapter)
    done = merge(base, adapter, merged, config=read_model_config(base))
    assert "logits of transformers + peft" in done.check
    found = AutoModelForSequenceClassification.from_pretrained(merged).eval()
    assert found.config.id2label == {0: "bad", 1: "fair", 2: "good"}
    ids = torch.tensor([[5, 9, 4, 3], [7, 3, 8, 0]])
    with torch.no_grad():
        theirs, ours = (one(input_ids=ids, attention_mask=(ids > 0).long()).logits for one in (found, model))
    assert torch.allclose(theirs, ours, atol=1e-5)
    with safe_open(merged / "model.safetensors", framework="pt") as file:
        assert "score.weight" in file.keys()  # noqa: SIM118 - not a dict
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - the same


def test_adapter_without_labels_is_not_merged(tmp_path: Path) -> None:
    config = twin_config("llama")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "task_type": "SEQ_CLS"}))
    with pytest.raises(UserError, match="must name them"):
        set_head(config, tmp_path)


@pytest.mark.parametrize("task", ["CAUSAL_LM", "SEQ_CLS", "TOKEN_CLS", "FEATURE_EXTRACTION"])
def test_a_folder_is_of_the_task_whose_class_it_names(task: str) -> None:
    config = twin_config("llama")
    config.architectures = ["LlamaForCausalLM"]
    if task != "CAUSAL_LM":
        config.architectures = [class_of_task(task)[1][type(config)].__name__]
    assert task_of(config) == task


def test_architectures_that_are_no_list_are_a_mistake() -> None:
    config = twin_config("llama")
    config.architectures = {"LlamaForCausalLM": ""}  # as a file of JSON may have it
    with pytest.raises(UserError, match="must have a list of names"):
        task_of(config)
