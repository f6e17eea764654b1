"""Products in float8 on meshes: against one process that rounds by itself, and what is refused."""

from __future__ import annotations

import pytest

from meshlora.loading.blueprint import make_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config
from tests.conftest import Prove

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


def test_what_is_not_the_same_everywhere_is_refused() -> None:
    def refused(family: str, topology: str, **options: object) -> str:
        config = twin_config(family, tp=Topology.parse(topology).tp)
        with pytest.raises((UserError, UnsupportedError)) as error:
            make_blueprint(config, Topology.parse(topology), BaseOptions(**options))  # type: ignore[arg-type]
        return str(error.value)

    found = refused("llama", "tp=2", compute="fp8")  # whose heads are 8 wide
    assert "k_proj, of which tp rank 0 has features 0 to 16: blocks of 32 share a scale, and none is cut" in found
    assert "use dp_shard or less tp" in found
    assert "none of its linears can have products in float8" in refused("gpt2", "", compute="fp8")
    assert "did you mean 'fp8'" in refused("llama", "", compute="fp9")
    given = refused("llama", "", compute="fp8", quantization="int8")
    assert given.startswith("model.compute=fp8 with quantization int8: its base is in few bits already")
