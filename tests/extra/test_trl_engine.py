"""GRPOTrainer on a mesh with rollouts of a server: those that the adapter as it is gives, and TRL's own adapter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import meshlora
from meshlora_extra.hf.trl_engine import MeshEngine
from meshlora_extra.rl.rollouts import seed_of
from meshlora_ground.errors import UserError
from meshlora_ground.float64 import lift
from tests.extra.test_publish import serving
from tests.extra.test_trl import BASE, _Exact, _said, _same, _trainer, start
from tests.pool import Pool

__all__ = ["start"]
MORE = {"vllm_mode": "server", "num_generations": 4, "vllm_importance_sampling_mode": "token_truncate"}


def _completed(model: Any, prompts: list[list[int]], *, n: int, seed: int, **options: Any) -> list[dict[str, Any]]:
    """`n` completions of each prompt, drawn token by token from whole logits in float64."""
    temperature, most, found = options["temperature"], options["max_tokens"], []
    for place in range(n * len(prompts)):
        numbers = torch.Generator().manual_seed((seed + place) % 2**62)
        tokens, log_probs = list[int](), list[float]()
        with torch.no_grad(), lift(True):
            for _ in range(most):
                ids = torch.tensor([[*prompts[place // n], *tokens]])
                log_p = (model(input_ids=ids, use_cache=False).logits[0, -1].double() / temperature).log_softmax(-1)
                token = int(torch.multinomial(log_p.exp(), 1, generator=numbers))
                tokens.append(token)
                log_probs.append(float(log_p[token]))
        found.append({"token_ids": tokens, "log_probs": log_probs})
    return found


def _engine(path: str, body: dict[str, Any], held: dict[str, Any]) -> tuple[int, Any]:
    """What a server answers that has the base, and the adapter that it was told to load."""
    if path.endswith("load_lora_adapter"):
        base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64)
        held[body["lora_name"]] = PeftModel.from_pretrained(base, body["lora_path"]).eval()
        return 200, "Success"
    said = _completed(
        held[body["model"]],
        body["prompt"],
        n=body["n"],
        seed=body["seed"],
        temperature=body["temperature"],
        max_tokens=body["max_tokens"],
    )
    choices = []
    for index, one in enumerate(said):
        choices.append(
            {"index": index, "token_ids": one["token_ids"], "logprobs": {"token_logprobs": one["log_probs"]}}
        )
    return 200, {"model": body["model"], "choices": choices}


class _InProcess:
    """TRL's `vllm_generation` of one process: the model itself, as it is."""

    def __init__(self, model: Any, args: Any) -> None:
        self.model, self.args, self.asked = model, args, 0

    def sync_weights(self) -> None: ...

    def generate(self, prompts: Any, num_generations: int, **_: Any) -> Any:
        args, seed = self.args, seed_of(self.args.seed, self.asked)
        self.asked += 1
        was_training, _ = self.model.training, self.model.eval()
        options = {"temperature": args.temperature, "max_tokens": args.max_completion_length}
        found = _completed(self.model, prompts[::num_generations], n=num_generations, seed=seed, **options)
        self.model.train(was_training)
        log_probs = [[[each] for each in one["log_probs"]] for one in found]
        return prompts, [one["token_ids"] for one in found], log_probs, None


def _size(number: int) -> dict[str, int]:
    """Rows of a device; prompts are as far from the start of a row on each, as positions are of float32."""
    return {"per_device_train_batch_size": number, "pad_to_multiple_of": 32}


def _alone(start: Path, out: Path, size: int) -> Any:
    """Body of a rank."""
    import trl

    trainer, options = _trainer("grpo", out, **_size(size))
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64)
    model = PeftModel.from_pretrained(model, str(start), is_trainable=True)
    options["args"] = _args(options["args"])
    with mock.patch("trl.trainer.utils._ChunkedLogProbFunction", _Exact):
        made = trainer(model=model, processing_class=AutoTokenizer.from_pretrained(BASE), **options)
        assert isinstance(made, trl.GRPOTrainer)
        made.vllm_generation, made._last_loaded_step = _InProcess(made.model, made.args), -1
        made.use_vllm = True
        said = _said(made)
    model.save_pretrained(str(out / "adapter"), selected_adapters=["default"])
    return said, made.vllm_generation.asked


def _args(args: Any) -> Any:
    for name, value in MORE.items():
        setattr(args, name, value)
    return args


def _on_mesh(topology: str, url: str, start: Path, out: Path, size: int, dtype: str = "float64") -> Any:
    """Body of a rank."""
    from meshlora_extra.hf import on_mesh

    model = meshlora.load(BASE, adapter=str(start), topology=topology, dtype=dtype)
    trainer, options = _trainer("grpo", out, model.meshlora.mesh.dp.size, **_size(size))
    args = _args(options["args"])
    args.use_vllm, args.vllm_server_base_url = True, url
    made = on_mesh(trainer)(model=model, processing_class=AutoTokenizer.from_pretrained(BASE), **options)
    said = _said(made)
    made.save_model(str(out / "adapter"))
    return said, made.vllm_generation._asked


@pytest.mark.long
@pytest.mark.parametrize(("topology", "size"), [("tp=2,sp", 4), ("dp=2", 8)])
def test_rollouts_of_a_server_are_those_of_the_adapter_as_it_is(
    topology: str, size: int, start: Path, pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    held: dict[str, Any] = {}
    (said, number) = pools(1).run(_alone, start, tmp_path / "alone", size)[0]
    with serving(lambda path, body: _engine(path, body, held)) as (url, seen):
        found, asked = pools(2).run(_on_mesh, topology, url, start, tmp_path / "mesh", size)[0]
    assert asked == number > 1
    paths = [path for path, _ in seen]
    assert paths == ["/v1/load_lora_adapter", "/v1/completions"] * number, "by rank 0 alone, before each generation"
    # Means over tokens of a micro-batch, whose rows are each rank's own.
    _same(said, found, tmp_path, ("entropy", "kl"))


def _refused(topology: str, url: str, start: Path) -> str:
    """Body of a rank."""
    with pytest.raises(UserError) as caught:
        _on_mesh(topology, url, start, start.parent / "refused", 4)
    return str(caught.value)


def _not_made(start: Path, name: str, value: str) -> str:
    """Body of a rank."""
    args = _args(_trainer("grpo", start)[1]["args"])
    setattr(args, name, value)
    model = meshlora.load(BASE, lora=LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(UserError) as caught:
        MeshEngine(model, args)
    return str(caught.value)


def test_a_server_that_refuses_ends_all_ranks(start: Path, pools: Callable[[int], Pool]) -> None:
    with serving(lambda *_: (400, json.dumps({"message": "no LoRA here"}))) as (url, _):
        said = pools(2).run(_refused, "tp=2", url, start)
    assert said[0] == said[1]
    assert "it loads an adapter not: 400 no LoRA here" in said[0]


def test_an_engine_in_the_process_of_a_rank_is_refused(start: Path, pools: Callable[[int], Pool]) -> None:
    (said,) = pools(1).run(_not_made, start, "vllm_mode", "colocate")
    assert "vllm_mode='colocate': an engine in each rank's process" in said
    (said,) = pools(1).run(_not_made, start, "vllm_structured_outputs_regex", "a+")
    assert "it is not handed on from a mesh" in said
