"""`model.generate` on a mesh: the tokens of transformers + peft on one process, in float64."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import meshlora
from meshlora.cli.main import _parser, main
from meshlora.run.config.run_file import GenerateConfig
from meshlora.run.generated import blueprint_to_generate, continued_by_all
from meshlora_extra.commands.generate import decoding_of, prepare, spoken
from meshlora_ground.compat.peft_targets import targets_as_configured
from meshlora_ground.errors import UserError
from tests.pool import Pool
from tests.run_files import copy_tokenizer
from tests.twins import make_twin

# Three prompts of unequal lengths, of 7 tokens with the padding on the left; one in seven tokens ends a text. Of the
# prompt's 21 tokens and of a step's 3 no two ranks have as many.
PROMPTS = [[5, 9, 200, 31, 77, 8, 19], [44, 45, 46], [120, 3, 99, 7, 250]]
ENDS = list(range(4, 256, 7))
NEW = 12
GREEDY: dict[str, Any] = {"do_sample": False}
DRAWN: dict[str, Any] = {"do_sample": True, "temperature": 3.0, "top_p": 0.9, "top_k": 0}
BEAMS: dict[str, Any] = {"do_sample": False, "num_beams": 3, "length_penalty": 0.7}
STATIC: dict[str, Any] = {**GREEDY, "cache_implementation": "static"}


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`twins("qwen3_moe")`: its folder, made once."""
    made: dict[str, Path] = {}

    def get(family: str, **overrides: Any) -> Path:
        key = f"{family}{overrides}"
        if key not in made:
            made[key] = make_twin(tmp_path_factory.mktemp(family), family, **overrides)
        return made[key]

    return get


def _tokens(model: Any, prompts: list[list[int]], options: dict[str, Any]) -> list[list[int]]:
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in prompts])
    torch.manual_seed(11)
    with meshlora.lift():
        found = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=ENDS, pad_token_id=0, **options
        )
    tokens: list[list[int]] = found[:, length:].tolist()
    return tokens


def one_process(folder: Path) -> Any:
    """The model of transformers and peft."""
    # Grouped products of transformers know no float64.
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64, experts_implementation="eager")
    with targets_as_configured():
        return PeftModel.from_pretrained(model, str(folder / "adapter")).eval()


def _on_mesh(folder: Path, topology: str, prompts: list[list[int]], options: list[dict[str, Any]]) -> Any:
    """Body of a rank: the tokens with each of `options`. Each dp rank has prompts of its own."""
    model = meshlora.load(folder / "model", adapter=folder / "adapter", topology=topology).eval()
    dp = model.meshlora.mesh.dp
    own = prompts[dp.rank * len(prompts) // dp.size : (dp.rank + 1) * len(prompts) // dp.size]
    return dp.rank, [_tokens(model, own, each) for each in options]


def check(folder: Path, topology: str, pool: Pool, options: list[dict[str, Any]]) -> None:
    """The tokens of every rank are those of one process."""
    topology_of, reference = meshlora.Topology.parse(topology), one_process(folder)
    seen = set()
    for rank, found in pool.run(_on_mesh, folder, topology, PROMPTS, options):
        first, stop = (place * len(PROMPTS) // topology_of.dp for place in (rank, rank + 1))
        for tokens, each in zip(found, options, strict=True):
            expected = _tokens(reference, PROMPTS[first:stop], each)
            assert tokens == expected, (topology, each)
            seen |= {tuple(row) for row in expected}
    assert len(seen) > len(PROMPTS), "rows and options say the same: this shows nothing"


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "topology"),
    [
        ("llama", "tp=2,sp"),
        ("llama", "cp=2"),
        ("qwen3_moe", "tp=2,sp,ep=2"),
        ("qwen3_moe", "dp=2,ep=2"),
        ("llama", "dp=2,dp_shard"),
        *(pytest.param("llama", topology, marks=pytest.mark.proof) for topology in ("tp=2", "dp=2")),
        *(
            pytest.param("qwen3_moe", topology, marks=pytest.mark.proof)
            for topology in ("tp=2", "tp=2,etp=2", "tp=2,sp,etp=2", "dp=2,etp=2", "dp=2,ep=2,dp_shard", "cp=2,ep=2")
        ),
        *(
            pytest.param(family, topology, marks=pytest.mark.proof)
            for family in ("gemma3_text", "gpt_oss", "qwen3_next", "bamba", "opt", "mistral")
            for topology in ("tp=2", "tp=2,sp")
        ),
        ("llama", "pp=2"),
        *(
            pytest.param(family, "pp=2", marks=pytest.mark.proof)
            for family in (
                "gemma3_text",
                "gpt_oss",
                "qwen3_next",
                "bamba",
                "opt",
                "deepseek_v3",
                "glm_moe_dsa",
                "hy_v4",
            )
        ),
        *(
            pytest.param("qwen3_moe", topology, marks=pytest.mark.proof)
            for topology in ("pp=2,tp=2,sp,ep=2", "pp=2,dp=2,ep=2", "pp=2,cp=2")
        ),
    ],
)
def test_tokens_are_those_of_one_process(
    family: str, topology: str, twins: Callable[..., Path], pools: Callable[[int], Pool]
) -> None:
    options = [GREEDY, DRAWN, BEAMS]
    if family in ("llama", "gemma3_text", "gpt_oss"):
        options.append(STATIC)
    check(twins(family), topology, pools(meshlora.Topology.parse(topology).world), options)


# Five prompts in batches of two: of three batches two ranks have two and one.
ROLLOUTS = [*PROMPTS, [9, 9, 8], [17]]
DRAWING = GenerateConfig(max_new_tokens=NEW, do_sample=True, temperature=0.7, batch_size=2, seed=5)


def _in_training(folder: Path, topology: str, eos: int, options: GenerateConfig) -> Any:
    """Body of a rank: continuations between a backward and the next, with all that they must leave as it was."""
    model = meshlora.load(folder / "model", adapter=folder / "adapter", topology=topology).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    ids = torch.tensor(PROMPTS[0] + [3]).repeat(2, 1)
    gradients = []
    for generates in (False, True):
        model.zero_grad()
        with meshlora.lift():
            meshlora.language_model_loss(model, ids, None, ids).backward()
        if generates:
            state, tokenizer = torch.get_rng_state(), SimpleNamespace(pad_token_id=0, eos_token_id=eos)
            found = continued_by_all(model, tokenizer, ROLLOUTS, options, log_probs=options.do_sample)  # type: ignore[arg-type]
            assert torch.equal(torch.get_rng_state(), state)
            assert all(module.training for module in model.modules())
        with meshlora.lift():
            meshlora.language_model_loss(model, ids, None, ids).backward()
        gradients.append([p.grad.clone() for p in trained if p.grad is not None])
    assert gradients[0]
    assert all(map(torch.equal, *gradients)), "to generate between them has changed a gradient"
    return [(each.tokens, each.log_probs) for each in found]


def _alone(model: Any, eos: int | None, options: GenerateConfig) -> list[tuple[list[int], list[float]]]:
    """What `_in_training` must find, by transformers' own `generate` and forward."""
    expected = []
    for number in range(0, len(ROLLOUTS), options.batch_size):
        prompts = ROLLOUTS[number : number + options.batch_size]
        length = max(map(len, prompts))
        ids = torch.tensor([[0] * (length - len(row)) + row for row in prompts])
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in prompts])
        torch.manual_seed(options.seed + number // options.batch_size)
        words = {"do_sample": True, "temperature": options.temperature, "top_k": 0} if options.do_sample else {}
        with meshlora.lift():
            found = model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=eos, pad_token_id=0, **words
            )
        for prompt, row in zip(prompts, found[:, length:].tolist(), strict=True):
            tokens = row[: row.index(eos) + 1] if eos in row else row
            with meshlora.lift(), torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            scores = (logits / options.temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])
            expected.append((tokens, scores.flatten().tolist()))
    return expected


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "topology"),
    [
        ("llama", "tp=2,sp"),
        ("qwen3_moe", "dp=2,ep=2"),
        *(pytest.param("llama", topology, marks=pytest.mark.proof) for topology in ("dp=2", "dp=2,dp_shard", "cp=2")),
        *(pytest.param("qwen3_moe", topology, marks=pytest.mark.proof) for topology in ("cp=2,ep=2", "tp=2,etp=2")),
        ("llama", "pp=2"),
    ],
)
def test_rollouts_between_two_steps_are_those_of_one_process_and_leave_no_trace(
    family: str, topology: str, twins: Callable[..., Path], pools: Callable[[int], Pool]
) -> None:
    folder = twins(family)
    reference = one_process(folder)
    eos = _alone(reference, None, DRAWING)[0][0][4]  # one that a row draws before its last token
    assert continued_by_all(meshlora.load(folder / "model"), SimpleNamespace(), [], DRAWING) == []  # type: ignore[arg-type]
    expected = _alone(reference, eos, DRAWING)
    assert len({len(tokens) for tokens, _ in expected}) > 1, "no row ends early: this shows nothing"
    for found in pools(2).run(_in_training, folder, topology, eos, DRAWING):
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        for (_, scores), (_, theirs) in zip(found, expected, strict=True):
            assert scores == pytest.approx(theirs, rel=1e-9)


def _drawn_apart(folder: Path) -> str:
    model = meshlora.load(folder / "model", adapter=folder / "adapter", topology="tp=2").eval()
    rank = model.meshlora.mesh.rank
    said = []
    for seed, prompt, draws in ((rank, 7, True), (0, rank, False)):
        torch.manual_seed(seed)
        with pytest.raises(UserError) as caught:
            model.generate(input_ids=torch.tensor([[5, prompt]]), max_new_tokens=2, do_sample=draws)
        said.append(str(caught.value))
    torch.manual_seed(rank)  # no matter where nothing is drawn
    model.generate(input_ids=torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False)
    return " ".join(said)


def test_ranks_that_would_draw_different_tokens_are_refused(
    twins: Callable[..., Path], pools: Callable[[int], Pool]
) -> None:
    for said in pools(2).run(_drawn_apart, twins("llama")):
        assert "the random states of tp ranks differ" in said
        assert "the input_ids of tp ranks differ" in said


def _command(model: Path, topology: str | None, *more: str) -> list[str]:
    words = ["generate", "--model", str(model), "--adapter", str(model.parent / "adapter"), "--max-new-tokens", "9"]
    words += [f"--prompt={prompt}" for prompt in SAID]
    return [*words, *more, *(["--topology", topology] if topology else [])]


SAID = ["def f(a, b):", "--n", "return"]


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`speaking("llama")`: the model of a twin with a tokenizer, beside its adapter."""

    @functools.cache
    def get(family: str) -> Path:
        folder = make_twin(tmp_path_factory.mktemp(family), family, vocab_size=2048) / "model"
        copy_tokenizer(folder)
        return folder

    return get


def _said_by_one(model: Path, draws: bool) -> list[str]:
    reference, tokenizer, said = one_process(model.parent), AutoTokenizer.from_pretrained(model), []
    for number, prompt in enumerate(SAID):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        torch.manual_seed(4 + number)
        words = {"do_sample": True, "temperature": 0.9, "top_p": 0.8, "top_k": 0} if draws else {}
        with meshlora.lift():
            found = reference.generate(input_ids=ids, max_new_tokens=9, **words, eos_token_id=0, pad_token_id=1)
        said.append(tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True))
    return said


ON_TWO_RANKS = [("llama", "tp=2"), ("llama", "tp=2,sp"), ("qwen3_moe", "ep=2")]
DRAWS = ("--temperature", "0.9", "--top-p", "0.8", "--seed", "4")


def _spoken(words: list[str], world: int) -> tuple[str, list[str]]:
    """Body of a rank of the command."""
    options = _parser().parse_args(words)
    run, config = prepare(options, decoding_of(options), world=world), decoding_of(options)
    return str(run[0].topology), spoken(run, config)


def test_command_says_on_each_mesh_what_one_process_says(
    speaking: Callable[[str], Path], pools: Callable[[int], Pool]
) -> None:
    model = speaking("llama")
    expected = _said_by_one(model, draws=True)
    for topology, on in ((None, "tp=2"), ("tp=2,sp", "tp=2,sp"), ("dp=2", "dp=2"), ("pp=2", "pp=2")):
        found = pools(2).run(_spoken, _command(model, topology, *DRAWS), 2)
        assert found == [(on, expected)] * 2
    assert blueprint_to_generate(model, adapter=None, topology=None, world=6).topology == meshlora.Topology(tp=2, dp=3)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("family", "topology", "draws"),
    [*((family, on, draws) for family, on in ON_TWO_RANKS for draws in (False, True)), ("qwen3_moe", None, True)],
)
def test_command_starts_its_ranks(
    family: str, topology: str | None, draws: bool, speaking: Callable[[str], Path], tmp_path: Path
) -> None:
    model = speaking(family)
    words = _command(model, topology, "--nproc", "2", "--json", str(tmp_path / "said.json"), *(DRAWS if draws else ()))
    assert main(words) == 0
    said = json.loads((tmp_path / "said.json").read_text())["texts"]
    assert [each["prompt"] for each in said] == SAID
    assert [each["text"] for each in said] == _said_by_one(model, draws)
