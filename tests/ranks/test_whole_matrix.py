"""PiSSA and OLoRA: where training starts is what PEFT takes out of the base, on every topology."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

import meshlora
from meshlora.adapter.attach import active_factors, adapter_factors, gather_adapter, runtime
from meshlora.model.inject import parallel_leaves
from meshlora.run.config.run_file import TrainConfig
from meshlora.train.gradsync import clip_gradients, finish_gradients
from meshlora.train.losses import shifted_loss
from meshlora_ground.errors import UserError
from meshlora_ground.topology import Topology
from meshlora_judge.inputs import write_twin
from meshlora_judge.reference import rates_of, train
from meshlora_judge.twin import twin_config
from tests.blueprints import load_without_proof
from tests.pool import Pool
from tests.twins import make_batches

LINEARS = {"llama": ["q_proj", "o_proj", "down_proj"], "gpt2": ["c_attn", "mlp.c_proj"]}
STEPS, LR = 3, 1e-3
SETTINGS = TrainConfig("unused", steps=STEPS, lr=LR)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoints("llama")`: the folder of a float32 twin."""
    root = tmp_path_factory.mktemp("checkpoints")

    def make(family: str) -> Path:
        if not (root / family).is_dir():
            write_twin(twin_config(family), root / family, dtype=torch.float32, seed=0)
        return root / family

    return make


def _lora(family: str, init: str) -> LoraConfig:
    return LoraConfig(
        r=4, lora_alpha=8, target_modules=LINEARS[family], init_lora_weights=init, fan_in_fan_out=family == "gpt2"
    )


def _ours(folder: Path, lora: LoraConfig, topology: str, out: Path | None = None) -> dict[str, Any]:
    """Fresh factors, the weights they are taken out of, and what some steps make of them."""
    model = load_without_proof(folder, topology=Topology.parse(topology), lora=lora, dtype="float32")
    batch = make_batches()
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    found = {"fresh": gather_adapter(model, "default"), "logits": logits, "weights": _weights(model)}
    optimizer = torch.optim.AdamW([f.parameter for f in active_factors(model)], lr=LR, weight_decay=0.0)
    rates, losses = rates_of(SETTINGS), []
    for rate in rates:
        optimizer.zero_grad(set_to_none=True)
        loss = shifted_loss(model, batch.input_ids, batch.attention_mask, batch.labels)
        loss.backward()
        tokens = finish_gradients(model, num_tokens=batch.num_tokens)
        losses.append(float(loss.detach()) / tokens)
        clip_gradients(model, 1.0)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    if out is not None:
        meshlora.save_adapter(model, out)
    return found | {"losses": losses}


def _weights(model: Any) -> dict[str, Tensor]:
    """Whole weights of the targets, without their principal part."""
    mesh, found = runtime(model).mesh, {}
    for name, leaf in parallel_leaves(model).items():
        if "default" in leaf.scaling and mesh.tp.size == 1:
            found[name] = leaf.weight.detach().clone()
    return found


def _draw_by_name(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Let PEFT's fast decomposition draw the random matrix of each target by its name, as ours does."""
    ends = tuple(f".{name}" for name in LINEARS[model.config.model_type])
    targets = iter([name for name, _ in model.named_modules() if name.endswith(ends)])

    def drawn(weight: Tensor, r: int, niter: int) -> Any:
        digest = hashlib.sha256(f"0:{next(targets)}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            return torch.svd_lowrank(weight, r, niter)

    monkeypatch.setattr("peft.tuners.lora.layer.svd_lowrank", drawn)


@pytest.mark.long
@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "OLoRA"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_starts_and_trains_as_peft_does(
    family: str,
    init: str,
    checkpoints: Callable[[str], Path],
    pools: Callable[[int], Pool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, lora = checkpoints(family), _lora(family, init)
    if (family, init) == ("gpt2", "OLoRA"):
        with pytest.raises(UserError, match="PEFT decomposes the transposed weight"):
            _ours(folder, lora, "")
        return
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    _draw_by_name(monkeypatch, base)
    peft = get_peft_model(base, lora)
    theirs = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): p.detach().clone()
        for name, p in peft.named_parameters()
        if p.requires_grad
    }
    batch = make_batches()
    with torch.no_grad():
        start = peft(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    losses = train(peft, [[batch]] * STEPS, SETTINGS)
    runs = {"": _ours(folder, lora, "")}
    for topology in ("tp=2", "tp=2,sp"):
        runs[topology] = pools(2).run(_ours, folder, lora, topology, tmp_path / topology)[0]
    # The float32 rounding of nine QRs, of random matrices, whose singular values lie close together.
    atol = 1e-5 if "niter" in init else 1e-6
    for topology, run in runs.items():
        assert run["fresh"].keys() == theirs.keys()
        for name, value in theirs.items():  # one process and the same library: the same signs, the same bits
            torch.testing.assert_close(run["fresh"][name], value, rtol=1e-5, atol=atol, msg=f"{topology} {name}")
        torch.testing.assert_close(run["logits"], start, rtol=0, atol=2e-5)
        assert run["losses"] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("init", ["pissa", "olora", "OLoRA"])
def test_what_is_saved_gives_the_trained_logits_in_peft_and_here(
    init: str, checkpoints: Callable[[str], Path], pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    folder, ids = checkpoints("llama"), make_batches().input_ids
    pools(2).run(_ours, folder, _lora("llama", init), "tp=2", tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    ours = load_without_proof(folder, topology=Topology(), adapter=tmp_path / "adapter", dtype="float32")
    with torch.no_grad():
        torch.testing.assert_close(ours(input_ids=ids).logits, peft(input_ids=ids).logits, rtol=0, atol=2e-5)


def test_the_base_without_the_adapter_is_refused_as_it_is_not_the_base(checkpoints: Callable[[str], Path]) -> None:
    model = load_without_proof(checkpoints("llama"), topology=Topology(), lora=_lora("llama", "pissa"), dtype="float32")
    with pytest.raises(UserError, match="has given its principal part"), meshlora.disable_adapter(model):
        pass
    with pytest.raises(UserError, match="with 2 adapters"):
        meshlora.add_adapter(model, "other", LoraConfig(r=2, target_modules=["q_proj"]))
    assert len(adapter_factors(model, "default")) == 12


def test_float64_is_refused_as_by_peft(checkpoints: Callable[[str], Path]) -> None:
    with pytest.raises(UserError, match="PEFT computes it in float32"):
        load_without_proof(checkpoints("llama"), topology=Topology(), lora=_lora("llama", "pissa"), dtype="float64")


def test_the_fast_decomposition_finds_its_base_again(
    checkpoints: Callable[[str], Path], pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    folder, ids = checkpoints("llama"), make_batches().input_ids
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    saved = tmp_path / "adapter"
    started = load_without_proof(folder, topology=Topology(), lora=_lora("llama", "pissa_niter_2"), dtype="float32")
    meshlora.save_adapter(started, saved)
    # Another seed, and another mesh: a file says neither.
    found = pools(2).run(_logits, folder, saved, "tp=2", 7)[0]
    with torch.no_grad():
        torch.testing.assert_close(found, whole(input_ids=ids).logits, rtol=0, atol=2e-5)


def _logits(folder: Path, adapter: Path, topology: str, seed: int) -> Tensor:
    model = load_without_proof(folder, topology=Topology.parse(topology), adapter=adapter, dtype="float32", seed=seed)
    with torch.no_grad():
        logits: Tensor = model(input_ids=make_batches().input_ids).logits
    return logits
