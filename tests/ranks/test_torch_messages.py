"""Messages and collectives as ranks on GPUs send them, by torch itself, here over gloo: they are those of the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig

from meshlora.adapter.attach import runtime
from meshlora.loading.blueprint import make_blueprint
from meshlora.loading.load import load_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.verify.budget import Flow, Sizes, micro_batch_messages
from meshlora.verify.options import Request
from meshlora.verify.proof import Processes, run_proof
from meshlora.verify.request import prepare_proof
from meshlora_ground.topology import LAYERS, Topology
from meshlora_judge.judge import _Judge
from meshlora_judge.twin import twin_config
from tests.pool import Pool
from tests.ranks.test_budget import count_passes
from tests.ranks.test_stages import _passed_on
from tests.torch_messages import over_torch


@pytest.fixture(scope="module")
def torchs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Processes]]:
    """`torchs(2)`: processes whose two ranks have no messages but torch's."""
    folder, joined = tmp_path_factory.mktemp("stores"), set[int]()
    with Processes() as processes:

        def of(size: int) -> Processes:
            if size not in joined:
                over_torch(processes.ranks(size, "cpu"), folder)
                joined.add(size)
            return processes

        yield of


def _sent(topology: str) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """((phase, kind) -> (calls, bytes) of the messages of a micro-batch; the plan's)."""
    lora = LoraConfig(target_modules="all-linear", init_lora_weights=False)
    blueprint = make_blueprint(twin_config("llama"), Topology.parse(topology), BaseOptions(dtype="float32"))
    model = load_blueprint(blueprint.with_adapter(lora), device="cpu")
    ids, plan = torch.arange(3, 51).view(2, 24), runtime(model).plan
    counter = count_passes(model, ids)
    sizes = Sizes(ids.numel(), 24, model.config.hidden_size)
    messages = micro_batch_messages(plan, Flow.everywhere(plan), sizes, ranks={}, scaled=())
    planned = {(m.phase, m.kind): (m.calls, m.calls * m.num_bytes) for _, m in messages if m.axes == LAYERS}
    kinds = ("send", "receive")
    return {key: (n, counter.sent[key]) for key, n in counter.counts.items() if key[1] in kinds}, planned


def test_messages_of_a_stage_are_those_of_the_plan_by_whatever_means(
    pools: Callable[[int], Pool], torchs: Callable[[int], Processes]
) -> None:
    """torch's `recv` was none of the plan's: every proof of stages on GPUs failed."""
    for pool in (pools(2), torchs(2).ranks(2, "cpu")):
        first, last = pool.run(_sent, "pp=2")
        assert first[0] == first[1] != {}
        assert last[0] == last[1] != {}


def test_what_is_sent_by_torch_arrives_in_order_though_nobody_waits_for_it_to_leave(
    torchs: Callable[[int], Processes],
) -> None:
    first, last = torchs(2).ranks(2, "cpu").run(_passed_on, "pp=2")
    assert first == ([], [2.0, 3.0, 4.0, 5.0])
    assert last == ([0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 5.0])


@pytest.mark.parametrize(("kind", "counted", "wrong"), [("send", 2, 1), ("send", 4, 1), ("allreduce", 2, 0)])
def test_of_messages_fewer_than_planned_are_as_wrong_as_more(kind: str, counted: int, wrong: int) -> None:
    """A count that missed all of them had passed."""
    planned = {f"forward {kind}": 3}
    ranks = [SimpleNamespace(collectives=own, budget=planned) for own in (planned, {f"forward {kind}": counted})]
    (found,) = _Judge.collectives(SimpleNamespace(ranks=ranks))  # type: ignore[arg-type]
    assert (found.error > 0, found.passed) == (bool(wrong), not wrong)
    assert not wrong or found.note == f"{counted} calls, the plan has 3"


@pytest.mark.proof
@pytest.mark.parametrize(
    ("family", "topology"),
    [
        ("llama", "pp=2"),
        ("llama", "pp=2,interleave=2"),
        ("llama", "pp=3,interleave=2"),
        ("llama", "pp=2,tp=2,sp"),
        ("llama", "cp=2,ring"),
        ("llama", "tp=2,sp"),
        ("bamba", "cp=2"),  # hands a state from rank to rank
        ("qwen3_moe", "dp=2,ep=2"),
    ],
)
def test_a_mesh_over_torch_trains_as_one_process(
    family: str, topology: str, torchs: Callable[[int], Processes], tmp_path: Path
) -> None:
    proof = prepare_proof(Request((topology,), family=family, device="cpu", cache_dir=tmp_path / "proofs"))
    (outcome,) = run_proof(proof, torchs(proof.topologies[0].world))
    assert outcome.passed, (outcome.divergence, outcome.error)
