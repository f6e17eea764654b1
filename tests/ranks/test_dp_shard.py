"""The frozen base sharded over dp: the same bits as on whole weights, a part of the memory, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from torch.distributed.tensor import DTensor

import meshlora
from meshlora.adapter.attach import active_factors, gather_adapter, runtime
from meshlora.adapter.formats.peft_format import WEIGHTS_FILE
from meshlora.loading import load as api
from meshlora.model import weights
from meshlora.model.dp_shard import whole_weights
from meshlora.run.recompute import recompute_layers
from meshlora.train.losses import shifted_loss
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.float64 import lift
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config
from tests.conftest import Prove
from tests.pool import Pool
from tests.ranks.test_trainer import folder, run_and_keep_groups, run_file
from tests.run_files import metrics_of

__all__ = ["folder"]  # a fixture

LAYERS = 4


def _model(topology: str, *, family: str = "llama", dtype: str = "float64", layers: int = LAYERS, **lora: Any) -> Any:
    config = twin_config(family, num_hidden_layers=layers, tie_word_embeddings=dtype == "bfloat16")
    options = {"target_modules": "all-linear", "init_lora_weights": False, **lora}
    return meshlora.load(config, lora=LoraConfig(**options), topology=topology, dtype=dtype)


def _steps(topology: str, options: dict[str, Any], recompute: str = "none") -> dict[str, Tensor]:
    """Logits in evaluation, then loss and gradients of two micro-batches that add up; each dp rank its own tokens."""
    model = _model(topology, layers=2, **options)
    rank = runtime(model).mesh.dp.rank
    batches = [torch.randint(3, 200, (2, 16), generator=torch.Generator().manual_seed(2 * rank + n)) for n in range(2)]
    recompute_layers(model, recompute)
    with lift(options.get("dtype", "float64") == "float64"):
        with torch.no_grad():
            found = {"logits": model.eval()(input_ids=batches[0]).logits}
        model.train()
        for number, ids in enumerate(batches):
            loss = shifted_loss(model, ids, torch.ones_like(ids), ids.roll(-1, 1))
            loss.backward()
            found[f"loss {number}"] = loss.detach()
    return found | {f.name: f.parameter.grad for f in active_factors(model) if f.parameter.grad is not None}


@pytest.mark.parametrize(
    ("options", "recompute"),
    [
        pytest.param({}, "none", id="float64", marks=pytest.mark.proof),  # as what is trained beside, and less
        pytest.param({"dtype": "float32"}, "full", id="float32, recomputed", marks=pytest.mark.proof),
        pytest.param({"dtype": "bfloat16"}, "none", id="bfloat16, tied embeddings"),
        pytest.param({"use_dora": True, "bias": "lora_only"}, "none", id="dora, biases"),
        pytest.param({"modules_to_save": ["embed_tokens", "norm"]}, "none", id="trained beside"),
        pytest.param({"family": "gpt2"}, "none", id="stored transposed"),
    ],
)
def test_sharded_weights_give_the_bits_of_whole_ones(
    options: dict[str, Any], recompute: str, pools: Callable[[int], Pool]
) -> None:
    whole = pools(2).run(_steps, "dp=2", options, recompute)
    sharded = pools(2).run(_steps, "dp=2,dp_shard", options, recompute)
    for ours, theirs in zip(sharded, whole, strict=True):
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def _held(topology: str) -> dict[str, Any]:
    """Of a model that is loaded: sizes in memory of sharded matrices, and names of what is not sharded."""
    unit_bytes: list[int] = []
    held_when_read: list[int] = []
    shard_unit, read_local = weights.shard_unit, weights._read_local
    seen: list[Any] = []

    def held() -> int:
        """Bytes of the layers' matrices that are in memory."""
        local = [p.to_local() if isinstance(p, DTensor) else p for p in seen[0].parameters() if not p.is_meta]
        return sum(p.untyped_storage().nbytes() for p in local if p.ndim > 1)

    def sharding(model: Any, unit: str, plan: Any, mesh: Any) -> None:
        unit_bytes.append(sum(p.numel() * p.element_size() for p in model.get_submodule(unit).parameters()))
        shard_unit(model, unit, plan, mesh)

    def reading(*args: Any) -> Tensor:
        held_when_read.append(held())
        return read_local(*args)

    def parallelizing(model: Any, *args: Any, **options: Any) -> Any:
        seen.append(model)
        return parallelize(model, *args, **options)

    parallelize = api.parallelize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "shard_unit", sharding)
        patch.setattr(weights, "_read_local", reading)
        patch.setattr(api, "parallelize", parallelizing)
        model = _model(topology)
    named = dict(model.named_parameters())
    sharded = {name: p for name, p in named.items() if isinstance(p, DTensor)}
    whole = {name: p.numel() for name, p in sharded.items()}
    with whole_weights(model):
        again = sum(isinstance(p, DTensor) for p in model.parameters())
    return {
        "sharded": whole,
        "local": {name: p.to_local().numel() for name, p in sharded.items()},
        "others": {name for name in named if name not in sharded},
        "most": max(held_when_read),
        "end": held(),
        "unit": max(unit_bytes),
        "dtensors while whole": again,
    }


@pytest.mark.long
@pytest.mark.parametrize("topology", [pytest.param("dp=2,dp_shard", marks=pytest.mark.proof), "dp=2,tp=2,dp_shard"])
def test_each_dp_rank_holds_its_part_of_the_layers_and_never_more_than_one_layer_besides(
    topology: str, pools: Callable[[int], Pool]
) -> None:
    for found in pools(Topology.parse(topology).world).run(_held, topology):
        assert len(found["sharded"]) == 7 * LAYERS
        assert all(2 * found["local"][name] == size for name, size in found["sharded"].items())
        kept = ("norm.weight", "layernorm.weight", "embed_tokens.weight", "lm_head.weight", ".bias")
        assert all("lora_" in name or name.endswith(kept) for name in found["others"])
        assert found["most"] <= found["end"] + found["unit"]
        assert found["dtensors while whole"] == 0


@pytest.mark.long
@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.proof)])
def test_a_run_with_all_that_a_run_has_gives_the_bytes_of_dp(
    is_whole: bool, folder: Path, pools: Callable[[int], Pool]
) -> None:
    """Evaluation, samples, replica checks, checkpoints, recomputed layers; stopped on dp and gone on with dp_shard, or
    not stopped."""
    options = {"train__sample_every": 2, "train__recompute": "full", "train__replica_check_every": 1}
    dp, sharded = folder / f"dp-{is_whole}", folder / f"sharded-{is_whole}"
    pools(2).run(run_and_keep_groups, run_file(folder, dp.name, "dp=2", **options), 2, timeout_s=120)
    if not is_whole:
        sharded.mkdir()
        (dp / "checkpoints").rename(sharded / "checkpoints")
    file = run_file(folder, sharded.name, "dp=2,dp_shard", **options)
    pools(2).run(run_and_keep_groups, file, 2, None if is_whole else "auto", timeout_s=120)
    assert (sharded / "adapter" / WEIGHTS_FILE).read_bytes() == (dp / "adapter" / WEIGHTS_FILE).read_bytes()
    losses = [{line["step"]: line["loss"] for line in metrics_of(output) if "loss" in line} for output in (dp, sharded)]
    assert sorted(losses[1]) == ([1, 2, 3, 4] if is_whole else [3, 4])
    assert losses[1].items() <= losses[0].items()


@pytest.mark.parametrize(
    ("family", "topologies"),
    [
        ("llama", ("dp=2,tp=2,sp,dp_shard",)),
        pytest.param("llama", ("dp=2,dp_shard",), marks=pytest.mark.proof),
        # Experts are sharded over dp where its ranks hold the same ones; else ep shards them.
        pytest.param("mixtral", ("dp=2,dp_shard",), marks=pytest.mark.long),
        pytest.param("mixtral", ("dp=2,ep=2,dp_shard",), marks=pytest.mark.proof),
        pytest.param("mixtral", ("dp=2,tp=2,etp=2,dp_shard",), marks=pytest.mark.proof),
    ],
)
def test_adapter_is_the_one_a_single_process_produces(family: str, topologies: tuple[str, ...], prove: Prove) -> None:
    for outcome in prove(family=family, topologies=topologies, steps=1):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


def _refusals() -> dict[str, str]:
    model = _model("dp=2,dp_shard", target_modules=["q_proj"])
    found = {}
    for name, options in {
        "matrix": {"target_modules": ["q_proj"], "modules_to_save": ["o_proj"]},
        "other": {"target_modules": ["v_proj"]},
    }.items():
        with pytest.raises((UserError, UnsupportedError)) as error:
            meshlora.add_adapter(model, name, LoraConfig(**options))
        found[name] = str(error.value)
    meshlora.add_adapter(model, "second", LoraConfig(target_modules=["q_proj"]))
    gather_adapter(model, "second")
    with pytest.raises(UnsupportedError) as error:
        _model("dp=2,dp_shard", dtype="float32", init_lora_weights="pissa")
    return {**found, "pissa": str(error.value)}


def test_what_a_sharded_base_cannot_do_is_refused(pools: Callable[[int], Pool]) -> None:
    found = pools(2).run(_refusals)[0]
    assert "what dp_shard shards is frozen" in found["matrix"]
    assert "leave out dp_shard" in found["pissa"]
    assert "sharded over dp already" in found["other"]
