"""What would depend on the topology, or work on one rank's part, is refused; what must not is left alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

import meshlora
from meshlora.run.config.run_file import ModelConfig
from meshlora.train.losses import summed_cross_entropy
from meshlora_ground.compat import transformers_models
from meshlora_judge.compare import relative
from meshlora_judge.reference import losses_of, reference_model
from meshlora_judge.twin import twin_config
from tests.pool import Pool, RankError
from tests.twins import make_batches, make_twin

LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)


def _forward(topology: str, option: str) -> None:
    model = meshlora.load(twin_config("llama"), topology=topology)
    model(input_ids=make_batches().input_ids, **{option: True})


@pytest.mark.parametrize(
    ("topology", "option"),
    [
        *(("tp=2,sp", "output_hidden_states"), ("tp=2,sp", "output_attentions"), ("tp=2", "output_attentions")),
        *(("pp=2", "output_hidden_states"), ("pp=2", "output_attentions")),
    ],
)
def test_outputs_of_which_a_rank_has_a_part_are_refused(
    topology: str, option: str, pools: Callable[[int], Pool]
) -> None:
    with pytest.raises(RankError, match=option):
        pools(2).run(_forward, topology, option)


def _on_stages(option: str) -> None:
    model, ids = meshlora.load(twin_config("llama"), topology="pp=2"), make_batches().input_ids
    if option == "return_dict":
        model(input_ids=ids, return_dict=False)
    model(inputs_embeds=torch.zeros(*ids.shape, model.config.hidden_size))


@pytest.mark.parametrize("option", ["return_dict", "inputs_embeds"])
def test_forwards_of_which_stages_know_no_tokens_or_no_names_are_refused(
    option: str, pools: Callable[[int], Pool]
) -> None:
    with pytest.raises(RankError, match=f"{option} of a forward on pp=2"):
        pools(2).run(_on_stages, option)


def _finish_twice(zero: bool) -> None:
    model = meshlora.load(twin_config("llama"), lora=LORA)
    ids = make_batches().input_ids
    for _ in range(2):
        summed_cross_entropy(model(input_ids=ids).logits, ids).backward()
        meshlora.finish_gradients(model, num_tokens=ids.numel())
        if zero:
            model.zero_grad()


def test_gradients_finished_in_the_accumulation_loop_are_an_error() -> None:
    with pytest.raises(meshlora.MeshloraError, match="finished already"):
        _finish_twice(zero=False)
    _finish_twice(zero=True)


def test_norm_of_a_model_without_split_factors_stays_on_its_device() -> None:
    """With tp=1 nothing is split; the empty sum was made on the CPU, which a GPU run could not add."""
    model = meshlora.load(twin_config("llama"), lora=LORA)
    mesh = model.meshlora.mesh
    with FakeTensorMode(allow_non_fake_inputs=True):
        mesh.device = torch.device("cuda")
        from meshlora.train.gradsync import _sum_of_squares

        assert _sum_of_squares([], mesh).device.type == "cuda"


@pytest.mark.parametrize(("family", "where"), [("opt", "layerdrop"), ("mpt", "attn_config.attn_pdrop")])
def test_dropout_is_found_wherever_a_family_keeps_it(family: str, where: str) -> None:
    config = twin_config(family)
    part: Any = config
    *path, name = where.split(".")
    for step in path:
        part = getattr(part, step)
    setattr(part, name, type(getattr(part, name))(1))
    with pytest.raises(meshlora.UnsupportedError, match=name):
        meshlora.load(config)
    meshlora.load(config, disable_dropout=True)


def test_configuration_of_the_caller_is_not_changed() -> None:
    config = twin_config("llama", attention_dropout=0.1)
    before = copy.deepcopy(config.to_dict())
    meshlora.load(config, disable_dropout=True, dtype="float64")
    assert config.to_dict() == before


def test_rope_that_looks_at_the_batch_is_refused_beyond_its_fixed_part() -> None:
    factors = [1.0] * 4
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 16,
        "short_factor": factors,
        "long_factor": [2.0] * 4,
    }
    model = meshlora.load(twin_config("llama", rope_parameters=rope), lora=LORA)
    model(input_ids=torch.ones(1, 16, dtype=torch.int64))
    with pytest.raises(meshlora.UnsupportedError, match="at most 16"):
        model(input_ids=torch.ones(1, 17, dtype=torch.int64))


def test_mask_that_looks_at_the_batch_is_refused_beyond_its_fixed_part() -> None:
    """transformers itself: one token of padding more, and doge keeps another of two equal tokens."""
    config = twin_config("doge", keep_window_size=8)
    tokens = torch.tensor([[5, 6, 7] * 6])
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    shorter, longer = (theirs(input_ids=tokens[:, :n], use_cache=False).logits for n in (17, 18))
    assert (shorter - longer[:, :17]).abs().max() > 1e-4
    model = meshlora.load(config, lora=LORA)
    model(input_ids=tokens[:, :8])
    with pytest.raises(meshlora.UnsupportedError, match=r"dynamic mask depends on the batch.*at most 8"):
        model(input_ids=tokens[:, :9])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_head_that_is_stored_with_other_values_is_not_tied_or_refused(family: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(twin_config(family, tie_word_embeddings=True), dtype=torch.float64)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = model.lm_head.weight.detach().clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    twice = meshlora.load(tmp_path)  # stored twice and equal is fine
    assert twice.lm_head.weight is twice.get_input_embeddings().weight
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if family == "gpt2":  # its embedding has another name
        with pytest.raises(meshlora.UserError, match="tie_word_embeddings: false"):
            meshlora.load(tmp_path)
        return
    theirs, tokens = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager"), torch.arange(9)[None]
    with meshlora.lift():
        assert torch.allclose(meshlora.load(tmp_path)(tokens).logits, theirs(tokens).logits, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_is_that_of_the_files_where_the_configuration_has_none(dtype: torch.dtype, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(twin_config("llama"), dtype=dtype).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == dtype
    assert meshlora.load(tmp_path).dtype == dtype


def test_buffer_that_nobody_computes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_models, "initialize", lambda *_: None)
    with pytest.raises(meshlora.UnsupportedError, match=r"rotary_emb\.\w+, it is not stored|inv_freq"):
        meshlora.load(twin_config("llama"))


@pytest.mark.parametrize("owner", ["rotary_emb", "layers.0.self_attn"], ids=["its own module", "another"])
def test_stored_buffer_is_not_initialised_again(owner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By that of the rotary embedding, which runs for its computed buffers, after the layers were read."""
    inner = meshlora.load(twin_config("llama")).model
    cls, rotary = type(inner.get_submodule(owner)), type(inner.rotary_emb)
    init, initialize = cls.__init__, transformers_models.initialize

    def with_alpha(self: Any, config: Any, *given: Any, **rest: Any) -> None:
        init(self, config, *given, **rest)
        self.register_buffer("alpha", torch.zeros(3))

    def and_alpha(model: Any, module: Any) -> None:
        initialize(model, module)
        if isinstance(module, rotary):
            model.get_submodule(owner).alpha.zero_()  # as mistral_large4 does, of its own

    monkeypatch.setattr(cls, "__init__", with_alpha)
    monkeypatch.setattr(transformers_models, "initialize", and_alpha)
    AutoModelForCausalLM.from_config(twin_config("llama")).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    alphas = {key: torch.zeros(3) for key in tensors if key.endswith("alpha")}
    tensors |= alphas | {f"model.{owner}.alpha": torch.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = meshlora.load(tmp_path).model
    assert torch.equal(found.get_submodule(owner).alpha, torch.ones(3))
    assert found.rotary_emb.inv_freq.isfinite().all()


def test_model_that_changes_a_linears_output_in_place_trains_on_one_process(tmp_path: Path) -> None:
    folder = make_twin(tmp_path, "falcon", hidden_dropout=0.0, attention_dropout=0.0)
    batch = make_batches()
    base = ModelConfig(str(folder / "model"), dtype="float64", attn_implementation="eager")
    peft_model = reference_model(base, folder / "adapter")
    expected = losses_of(peft_model, batch)[1].detach()
    model = meshlora.load(folder / "model", adapter=folder / "adapter", dtype="float64", attn_implementation="eager")
    with meshlora.lift():
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    assert relative(logits.detach(), expected) < 1e-11


def test_adapter_with_values_that_are_not_finite_is_not_saved(tmp_path: Path) -> None:
    model = meshlora.load(twin_config("llama"), lora=LORA)
    next(p for p in model.parameters() if p.requires_grad).data.fill_(float("nan"))
    with pytest.raises(meshlora.MeshloraError, match="not finite"):
        meshlora.save_adapter(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_interrupted_overwrite_never_pairs_a_config_with_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = meshlora.load(twin_config("llama"), lora=LORA)
    meshlora.save_adapter(model, tmp_path / "adapter")
    (tmp_path / "adapter" / "README.md").write_text("mine")
    model.meshlora.adapters["default"].plan.stored.lora_alpha = 64
    replace = Path.replace
    calls = 0

    def stop_at(nth: int) -> None:
        def interrupted(self: Path, target: Path) -> Path:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise KeyboardInterrupt
            return replace(self, target)

        monkeypatch.setattr(Path, "replace", interrupted)

    for nth in range(1, 8):
        calls = 0
        stop_at(nth)
        try:
            meshlora.save_adapter(model, tmp_path / "adapter")
            done = True
        except KeyboardInterrupt:
            done = False
        folders = [p for p in tmp_path.iterdir() if (p / "adapter_config.json").exists()]
        assert folders, "nothing that was saved is lost"
        for folder in folders:
            assert (folder / "adapter_model.safetensors").exists()
        if done:
            break
    assert done
    assert (tmp_path / "adapter" / "README.md").read_text() == "mine"
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["lora_alpha"] == 64


def test_adapter_with_dropout_that_is_not_followed_can_be_looked_at_but_not_trained_on(tmp_path: Path) -> None:
    folder = make_twin(tmp_path, "llama")
    file = folder / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "lora_dropout": 0.05}))
    meshlora.load(folder / "model", adapter=folder / "adapter")
    model = meshlora.load(folder / "model", adapter=folder / "adapter", ignore_lora_dropout=True)
    model(input_ids=torch.ones(1, 4, dtype=torch.int64))  # in training mode, and nobody has said which tokens
