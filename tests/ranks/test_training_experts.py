"""A run with experts, from file to adapter, on several topologies: load balancing, routing recorded and replayed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshlora.run.config.file import read_run
from meshlora.run.together import prepare_run
from meshlora.train.collation import collate
from meshlora.wings.experts.routing import step_file
from meshlora_ground.errors import MeshloraError, UserError
from meshlora_ground.float64 import lift
from meshlora_ground.routing import RoutingRecord
from meshlora_judge.compare import compare_adapters
from meshlora_judge.inputs import write_twin
from meshlora_judge.twin import twin_config
from tests.pool import Pool, RankError
from tests.ranks.test_trainer import run_and_keep_groups
from tests.run_files import TINY, copy_lines, copy_tokenizer, metrics_of, write_run_file

STEPS = 3
MESHES = ["dp=2,ep=2", "tp=2,sp,ep=2", "tp=2,etp=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with experts beside a tokenizer, and 9 sequences."""
    path = tmp_path_factory.mktemp("experts")
    tokenizer = json.loads((TINY / "config.json").read_text())
    config = twin_config("qwen3_moe", vocab_size=tokenizer["vocab_size"], max_position_embeddings=256)
    write_twin(config, path / "base", dtype=torch.float64, seed=0)
    copy_tokenizer(path / "base")
    copy_lines("train", path / "train.jsonl", 0, 9)
    return path


def _run_file(folder: Path, name: str, topology: str, *, data: dict[str, Any] | None = None, **train: Any) -> Path:
    return write_run_file(
        folder / f"{name}.yaml",
        model={"path": str(folder / "base"), "dtype": "float64"},
        lora={
            "r": 4,
            "target_modules": ["q_proj", "o_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
        },
        data=data or {},
        train={"steps": STEPS, "batch_size": 5, "micro_batch_size": 2, "lr": 5e-3, **train},
        topology=topology,
    )


def _run(pools: Callable[[int], Pool], folder: Path, name: str, topology: str, **train: Any) -> None:
    world = 1 if topology == "dp=1" else 2
    pools(world).run(run_and_keep_groups, _run_file(folder, name, topology, **train), world)


@pytest.fixture(scope="module")
def plain(folder: Path, pools: Callable[[int], Pool]) -> Path:
    """A run on one process whose routing is recorded."""
    _run(pools, folder, "plain", "dp=1", routing_record=str(folder / "routing"))
    return folder / "plain" / "adapter"


def test_adapter_and_load_balancing_loss_do_not_depend_on_the_topology(
    folder: Path, plain: Path, pools: Callable[[int], Pool]
) -> None:
    """With a weight so large that the loss of load balancing decides where training goes."""
    _run(pools, folder, "balanced", "dp=1", router_aux_loss_coef=5.0)
    expected = metrics_of(folder / "balanced")
    assert all(line["aux_loss"] > 1 for line in expected)
    assert compare_adapters(plain, folder / "balanced" / "adapter").relative > 1e-2
    for mesh in MESHES:
        name = f"balanced-{mesh}"
        _run(pools, folder, name, mesh, router_aux_loss_coef=5.0)
        for ours, theirs in zip(metrics_of(folder / name), expected, strict=True):
            limit = 1e-11 if ours["step"] == 1 else 1e-6  # then AdamW has divided by tiny moments
            assert ours["aux_loss"] == pytest.approx(theirs["aux_loss"], rel=limit)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=limit)
        assert compare_adapters(folder / name / "adapter", folder / "balanced" / "adapter").relative < 1e-6


def test_load_balancing_loss_is_that_of_transformers_over_the_whole_step(folder: Path, plain: Path) -> None:
    """The first step's, from the function of transformers on all of its sequences at once."""
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    run = prepare_run(read_run(folder / "balanced.yaml", ["train.overwrite=true"]))
    batch = collate([run.train_data[int(i)] for i in run.batches.batch(0)], pad_token_id=0)
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype="float64", experts_implementation="eager")
    with lift(), torch.no_grad():
        found = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, output_router_logits=True)
        loss = load_balancing_loss_func(
            found.router_logits, model.num_experts, model.num_experts_per_tok, batch.attention_mask
        )
    assert metrics_of(folder / "balanced")[0]["aux_loss"] == pytest.approx(float(loss), rel=1e-12)


@pytest.mark.parametrize("mesh", ["tp=2,sp,ep=2", *(pytest.param(m, marks=pytest.mark.proof) for m in MESHES[::2])])
def test_routing_that_is_recorded_on_a_mesh_is_that_of_one_process(
    mesh: str, folder: Path, plain: Path, pools: Callable[[int], Pool]
) -> None:
    name = f"record-{mesh}"
    # Not joined in one row, as on one process: a micro-batch has rows that could be exchanged.
    _run(pools, folder, name, mesh, routing_record=str(folder / f"routing-{mesh}"), data={"packing": False})
    assert compare_adapters(folder / name / "adapter", plain).relative < 1e-6
    for step in range(STEPS):
        ours, theirs = (RoutingRecord.load(step_file(folder / where, step)) for where in (f"routing-{mesh}", "routing"))
        assert ours.choices.keys() == theirs.choices.keys()
        for key, table in theirs.choices.items():
            assert bool((table >= 0).all()), "every token of the step has a number"
            assert torch.equal(ours.choices[key], table)


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
def test_replayed_routing_decides_on_every_mesh(
    mesh: str, folder: Path, plain: Path, pools: Callable[[int], Pool]
) -> None:
    """Each token is sent to the experts next to those that it chose: another run, but everywhere the same."""
    other = folder / "routing-of-others"
    if not other.exists():
        other.mkdir()
        for step in range(STEPS):
            record = RoutingRecord.load(step_file(folder / "routing", step))
            for key, table in record.choices.items():
                record.choices[key] = (table + 1) % record.num_experts[key[1]]
            record.save(step_file(other, step))
        _run(pools, folder, "others", "dp=1", routing_replay=str(other))
        assert compare_adapters(folder / "others" / "adapter", plain).relative > 1e-2
    name = f"others-{mesh}"
    _run(pools, folder, name, mesh, routing_replay=str(other))
    assert compare_adapters(folder / name / "adapter", folder / "others" / "adapter").relative < 1e-6
    tensors = load_file(folder / name / "adapter" / "adapter_model.safetensors")
    router = next(t for key, t in tensors.items() if key.endswith("mlp.gate.lora_B.weight"))
    assert bool(router.any()), "scores of replayed choices have a gradient"


def test_replay_without_the_file_of_a_step_is_refused_before_anything_is_loaded(folder: Path, plain: Path) -> None:
    file = _run_file(folder, "short", "dp=1", routing_replay=str(folder / "routing"), steps=STEPS + 1)
    with pytest.raises(UserError, match=r"step-000004.safetensors is not there \(1 of 4 steps"):
        prepare_run(read_run(file))


def test_record_of_another_batch_is_refused(folder: Path, plain: Path, pools: Callable[[int], Pool]) -> None:
    with pytest.raises(RankError, match="this step has"):
        _run(pools, folder, "larger", "dp=1", routing_replay=str(folder / "routing"), batch_size=6)


@pytest.mark.long
def test_record_of_another_order_of_the_data_is_refused(folder: Path, pools: Callable[[int], Pool]) -> None:
    """Where all sequences are cut to one length, every step has as many tokens."""
    routing = folder / "routing-of-short"
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    texts = [json.dumps({"text": line["completion"]}) + "\n" for line in lines]
    (folder / "texts.jsonl").write_text("".join(texts))
    same: dict[str, Any] = {"steps": 1, "data": {"train": str(folder / "texts.jsonl"), "max_length": 8}}
    _run(pools, folder, "ordered", "dp=1", routing_record=str(routing), **same)
    assert RoutingRecord.load(step_file(routing, 0)).num_tokens == 5 * 8
    _run(pools, folder, "same-order", "dp=2,ep=2", routing_replay=str(routing), **same)
    with pytest.raises(RankError, match="it is of other tokens than this step has") as error:
        _run(pools, folder, "other-order", "dp=1", routing_replay=str(routing), seed=1, **same)
    assert isinstance(error.value.cause, UserError)


def test_shorter_record_leaves_no_tail_of_a_longer_one(folder: Path, pools: Callable[[int], Pool]) -> None:
    routing = folder / "routing-of-two"
    _run(pools, folder, "longer", "dp=1", routing_record=str(routing), steps=2)
    (routing / "step-best.safetensors").touch()  # no file of ours
    _run(pools, folder, "shorter", "dp=1", routing_record=str(routing), steps=1, overwrite=True)
    assert sorted(file.name for file in routing.iterdir()) == ["step-000001.safetensors", "step-best.safetensors"]


def test_run_that_goes_on_keeps_the_record_of_the_steps_before(folder: Path, pools: Callable[[int], Pool]) -> None:
    routing, output = folder / "routing-goes-on", folder / "goes-on"
    _run(pools, folder, output.name, "dp=1", routing_record=str(routing), save_every=1)
    shutil.rmtree(output / "adapter")
    shutil.rmtree(output / "checkpoints" / "step-000002")
    step_file(routing, 0).write_bytes(b"kept")
    step_file(routing, STEPS).touch()
    file = _run_file(folder, output.name, "dp=1", routing_record=str(routing), save_every=1)
    pools(1).run(run_and_keep_groups, file, 1, "auto")
    assert sorted(routing.iterdir()) == [step_file(routing, step) for step in range(STEPS)]
    assert step_file(routing, 0).read_bytes() == b"kept"
    for step in range(1, STEPS):
        assert len(RoutingRecord.load(step_file(routing, step)).choices) > 0


def test_run_with_experts_goes_on_as_if_it_had_not_been_stopped(
    folder: Path, plain: Path, pools: Callable[[int], Pool]
) -> None:
    """On other ranks, each of which takes up the moments of the experts that it now has."""
    name, output = "stopped", folder / "stopped"
    _run(pools, folder, name, "dp=2,ep=2", save_every=1)
    shutil.rmtree(output / "adapter")
    pools(2).run(run_and_keep_groups, _run_file(folder, name, "tp=2,etp=2", save_every=1), 2, "auto")
    assert [line["step"] for line in metrics_of(folder / name)] == [1, 2, 3]
    assert compare_adapters(output / "adapter", plain).relative < 1e-6


@pytest.mark.parametrize("resume", [None, "auto"])
def test_record_of_another_run_is_not_overwritten(resume: str | None, folder: Path, plain: Path) -> None:
    """Nor by one that would go on, but has not begun."""
    file = _run_file(folder, "not-begun", "dp=1", routing_record=str(folder / "routing"))
    with pytest.raises(UserError, match="holds a record already"):
        prepare_run(read_run(file), resume=resume)


@pytest.mark.parametrize("step", [0, pytest.param(1, marks=pytest.mark.proof)])
def test_record_that_cannot_be_written_ends_every_rank(step: int, folder: Path, pools: Callable[[int], Pool]) -> None:
    routing = folder / f"routing-{step}-not-written"
    if step:  # a folder is where the file should be
        step_file(routing, step).mkdir(parents=True)
    else:  # a link to nothing passes for a folder that is still to be made
        routing.symlink_to(folder / "nowhere")
    with pytest.raises(RankError, match=r"it could not be written \(see rank 0\)") as error:
        _run(pools, folder, f"not-written-{step}", "dp=2,ep=2", routing_record=str(routing))
    assert type(error.value.cause) is MeshloraError
    assert f"train.routing_record={routing}: it could not be written ([Errno" in str(error.value)
