"""The model that answers a conversation: transformers' tokens, drawn too, and one end on all ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import meshlora
from meshlora.cli.main import _parser
from meshlora.run.config.run_file import GenerateConfig
from meshlora.run.streaming import continue_one
from meshlora_extra.chat.speaker import Speaker
from meshlora_extra.chat.terminal import Talk
from meshlora_extra.commands.chat import _prepare
from meshlora_ground.errors import UserError
from tests.extra.talking import QUESTIONS, answered, asked, trained
from tests.extra.test_generate import PROMPTS, one_process
from tests.pool import Pool
from tests.run_files import TINY
from tests.twins import make_twin

DRAWING = GenerateConfig(max_new_tokens=12, do_sample=True, temperature=3.0, top_p=0.9, seed=7)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("speaker")).parent / "run" / "adapter"


def speaker_of(adapter: Path, *more: str) -> Speaker:
    words = ["chat", "--model", str(TINY), "--adapter", str(adapter), "--dtype", "float32", *more]
    blueprint, tokenizer, decoding, _ = _prepare(_parser().parse_args(words), world=1)
    return Speaker(blueprint, tokenizer, decoding)


def test_conversation_is_that_of_transformers_turn_by_turn(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Talk(speaker_of(adapter, "--max-new-tokens", "16"), system="Be brief.")
    capsys.readouterr()
    turns = asked("", system="Be brief.")[:-1]
    for question in (QUESTIONS[0], "//slash"):
        turns += asked(question.removeprefix("/"))
        (expected,) = answered(adapter, [turns], most=16)
        assert talk.hear(question)
        assert capsys.readouterr().out == f"{expected}\n"
        (of_base,) = answered(None, [turns], most=16)
        assert talk.hear("/base")
        assert capsys.readouterr().out == f"{of_base}\n"
        assert of_base != expected
        turns.append({"role": "assistant", "content": expected})
    assert talk.hear("/reset")
    with pytest.raises(UserError, match="nothing has been asked yet"):
        talk.hear("/base")
    assert talk.hear(QUESTIONS[1])
    assert capsys.readouterr().out == f"{answered(adapter, [asked(QUESTIONS[1], system='Be brief.')], most=16)[0]}\n"
    assert talk.hear("/system")
    assert talk.hear(QUESTIONS[1])
    assert capsys.readouterr().out == f"{answered(adapter, [asked(QUESTIONS[1])], most=16)[0]}\n"
    assert not talk.hear("/exit")


def test_empty_answer_is_said(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speaker = speaker_of(adapter)
    (first,) = speaker.tokenizer(answered(adapter, [asked("a")])[0], add_special_tokens=False).input_ids[:1]
    speaker.tokenizer.further_stop_tokens = [first]  # type: ignore[attr-defined]
    capsys.readouterr()
    found = speaker.ask(speaker.tokens_of(asked("a"), way_out=""))
    assert (found.why, found.num_tokens) == ("ended", 1)


def _heard(folder: Path, topology: str, stop_after: int | None) -> tuple[list[int], list[int], list[int]]:
    """Body of a rank: (tokens, tokens as they were heard, those of a stop that rank 0 alone asked for)."""
    model = meshlora.load(folder / "model", adapter=folder / "adapter", topology=topology).eval()
    tokenizer: Any = _NoEnd()
    heard, stopped = list[int](), list[int]()
    tokens = continue_one(model, tokenizer, PROMPTS[0], DRAWING, hear=heard.extend)
    is_first = model.meshlora.mesh.rank == 0

    def is_stopped() -> bool:
        return is_first and len(stopped) == stop_after

    found = continue_one(model, tokenizer, PROMPTS[0], DRAWING, hear=stopped.extend, is_stopped=is_stopped)
    return tokens, heard, found


class _NoEnd:
    pad_token_id, eos_token_id, name_or_path = 0, None, ""


@pytest.mark.parametrize(("family", "topology"), [("llama", "tp=2,sp"), ("qwen3_moe", "dp=2,ep=2")])
def test_every_rank_hears_the_tokens_of_one_process_and_stops_where_rank_0_does(
    family: str, topology: str, tmp_path: Path, pools: Callable[[int], Pool]
) -> None:
    folder = make_twin(tmp_path, family)
    reference = one_process(folder)
    words = {"do_sample": True, "temperature": 3.0, "top_p": 0.9, "top_k": 0}
    ids = torch.tensor([PROMPTS[0]])
    torch.manual_seed(DRAWING.seed)
    with meshlora.lift():
        output = reference.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, pad_token_id=0, **words
        )
    expected = output[0, ids.shape[1] :].tolist()
    for tokens, heard, stopped in pools(2).run(_heard, folder, topology, 3):
        assert tokens == heard == expected
        # transformers hands on a token after it has asked whether to stop.
        assert stopped == expected[:4]
