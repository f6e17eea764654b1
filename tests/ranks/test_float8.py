"""Products in float8 on meshes: against one process that rounds by itself, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PretrainedConfig

from meshlora.loading.blueprint import make_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.plan.rules import ModelPlan
from meshlora.wings.quantized.kinds import kind_for_twin
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config
from tests.conftest import Prove
from tests.packed import WIDE, write_packed

_LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


@pytest.mark.parametrize("compute", ["fp8", "fp8_backward"])
def test_adapter_is_the_one_of_the_same_products_on_one_process(compute: str, prove: Prove) -> None:
    for outcome in prove(family="llama", compute=compute, topologies=("tp=2,sp",), steps=1):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "topologies"),
    [
        ({"family": "llama", "compute": "fp8"}, ("dp=2,dp_shard", "cp=2")),
        ({"family": "llama", "compute": "fp8_backward"}, ("dp=2,dp_shard", "cp=2")),
        ({"family": "qwen3_moe", "compute": "fp8"}, ("ep=2,dp=2",)),
        ({"family": "qwen3_moe", "compute": "fp8_backward"}, ("ep=2,dp=2",)),
        ({"family": "phi3", "compute": "fp8"}, ("tp=2",)),  # fused, gate and up interleaved by rank
        ({"family": "llama", "compute": "fp8", "recompute": True, "packing": True}, ("dp=2",)),
        ({"family": "llama", "compute": "fp8", "adapters": 2}, ("dp=2",)),
        ({"family": "llama", "compute": "fp8", "lora": _LORA | {"bias": "all"}}, ("tp=2",)),
        pytest.param({"family": "llama", "compute": "fp8"}, ("pp=2", "cp=2,ring"), marks=pytest.mark.proof),
        pytest.param({"family": "qwen3", "compute": "fp8", "resume": True}, ("tp=2,sp",), marks=pytest.mark.proof),
        pytest.param({"family": "gemma2", "compute": "fp8_backward"}, ("dp=2,tp=2",), marks=pytest.mark.proof),
    ],
    ids=str,
)
def test_products_go_with_what_a_run_has(options: dict[str, object], topologies: tuple[str, ...], prove: Prove) -> None:
    for outcome in prove(**options, topologies=topologies, steps=1):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


@pytest.mark.parametrize("compute", ["fp8", pytest.param("fp8_backward", marks=pytest.mark.long)])
def test_a_base_in_float8_is_multiplied_as_it_is(compute: str, prove: Prove) -> None:
    """What the preflight proves of a run on a published checkpoint: cuts of two ranks cross its blocks of 128."""
    for outcome in prove(family="llama", quantization="fp8", compute=compute, topologies=("tp=2,sp",), steps=1):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "compute", "topology", "sizes"),
    [
        ("fp8 of 128", "fp8", "tp=2,sp", WIDE),
        ("fp8 of 128", "fp8_backward", "cp=2", WIDE),
        ("fp8 of a tensor", "fp8", "dp=2,dp_shard", WIDE),
        ("compressed-tensors fp8", "fp8", "tp=2", WIDE),
        ("compressed-tensors fp8", "fp8_backward", "tp=2,sp", WIDE),
        ("fp8 in part", "fp8", "tp=2", WIDE),
        ("fp8 experts", "fp8", "dp=2,ep=2", {}),
        pytest.param("fbgemm", "fp8", "tp=2,sp", WIDE, marks=pytest.mark.proof),
    ],
)
def test_a_checkpoint_in_float8_is_multiplied_as_it_is_published(
    case: str, compute: str, topology: str, sizes: dict[str, int], tmp_path: Path, prove: Prove
) -> None:
    folder = write_packed(tmp_path / "model", case, **sizes)
    (outcome,) = prove(model=folder, topologies=(topology,), quantization="keep", compute=compute, steps=1)
    assert outcome.passed, outcome.divergence or outcome.error


def _refused(model: PretrainedConfig | Path, topology: str, **options: object) -> str:
    with pytest.raises((UserError, UnsupportedError)) as error:
        make_blueprint(model, Topology.parse(topology), BaseOptions(**options))  # type: ignore[arg-type]
    return str(error.value)


def test_of_a_checkpoint_what_is_not_stored_in_float8_has_plain_products(tmp_path: Path) -> None:
    """Experts are held as they are stored, and linears that were left in plain numbers stay so."""
    folder = write_packed(tmp_path / "model", "fp8 experts")
    some = write_packed(tmp_path / "some", "fp8 in part", **WIDE)
    options = BaseOptions(quantization="keep", compute="fp8")
    kinds = {name.split(".", 3)[3]: packing.kind for name, packing in _plan(folder, options).quantized.items()}
    experts = {f"mlp.experts.{name}": "fp8" for name in ("gate_up_proj", "down_proj")}
    linears = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert kinds == experts | dict.fromkeys(linears, "stored_float8")
    found = {name.rpartition(".")[2] for name in _plan(some, options).quantized}
    assert found == {"q_proj", "o_proj", "up_proj"}
    # The preflight's twin is quantised so, whatever most of the checkpoint is.
    assert kind_for_twin(_plan(some, options)) == "fp8"
    only = write_packed(tmp_path / "other", "compressed-tensors int8")
    found = _refused(only, "", quantization="keep", compute="fp8")
    assert "none of its linears is stored in float8 (e4m3); leave out model.compute" in found
    found = _refused(folder, "tp=2", quantization="keep", compute="fp8")
    assert "k_proj, of which tp rank 0 has features 0 to 16: blocks of 32 share a scale, and none is cut" in found


def _plan(folder: Path, options: BaseOptions) -> ModelPlan:
    return make_blueprint(folder, Topology(), options).plan


def test_what_is_not_the_same_everywhere_is_refused() -> None:
    def refused(family: str, topology: str, **options: object) -> str:
        return _refused(twin_config(family, tp=Topology.parse(topology).tp), topology, **options)

    found = refused("llama", "tp=2", compute="fp8")  # whose heads are 8 wide
    assert "k_proj, of which tp rank 0 has features 0 to 16: blocks of 32 share a scale, and none is cut" in found
    assert "use dp_shard or less tp" in found
    assert "none of its linears can have products in float8" in refused("gpt2", "", compute="fp8")
    assert "did you mean 'fp8'" in refused("llama", "", compute="fp9")
    given = refused("llama", "", compute="fp8", quantization="int8")
    assert given.startswith("model.compute=fp8 with quantization int8: its base is in few bits already, and they are")


# Heads of keys that two ranks hold; what latent attention makes of low rank; a linear between the layers and the head.
@pytest.mark.parametrize(
    ("family", "overrides", "linear"),
    [
        ("llama", {"num_key_value_heads": 1}, "model.layers.0.self_attn.k_proj"),
        ("deepseek_v3", {}, "model.layers.0.self_attn.q_a_proj"),
        ("bert", {}, "cls.predictions.transform.dense"),
    ],
)
def test_terms_of_a_gradient_that_ranks_would_round_apart_are_refused(
    family: str, overrides: dict[str, object], linear: str
) -> None:
    config = twin_config(family, tp=2, block=192, **overrides)
    found = _refused(config, "tp=2", compute="fp8_backward", dtype="float64")
    assert found == (
        f"compute fp8_backward of {linear} on tp=2: each tp rank has a term of its gradient, and the sum is what "
        "is rounded; use dp_shard, cp or pp in place of tp"
    )
    make_blueprint(config, Topology.parse("dp=2,dp_shard"), BaseOptions(compute="fp8_backward", dtype="float64"))
