"""`train.cuda_graphs`: replayed micro-batches train what eager ones do, shown by a recorder that needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from transformers.models.llama.modeling_llama import LlamaMLP

from meshlora.model import weights
from meshlora.run import trainer
from meshlora.run.config.file import read_run, read_runs
from meshlora.run.graphs import choice, graphs
from meshlora.run.graphs.buckets import Static
from meshlora.run.together import prepare_run, prepare_runs
from meshlora.train.batch import Batch
from meshlora.wings.kernels import fused, kernels
from meshlora.wings.packed_rows import varlen
from meshlora.wings.quantized import float8_gpu
from meshlora.wings.quantized.float8_matrix import for_kernels
from meshlora_ground.errors import MeshloraError, UserError
from meshlora_judge.compare import compare_adapters, largest_loss_gap, read_losses
from tests.kernels import STAND_IN
from tests.pool import Pool
from tests.ranks.test_trainer import _train, folder, run_and_keep_groups, run_file
from tests.run_files import copy_lines, write_run_file
from tests.tape import TapeRecorder

__all__ = ["folder"]  # a fixture


_FEW: dict[str, Any] = {"data__eval": None, "train__eval_every": 0, "train__save_every": 0, "train__steps": 8}


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> TapeRecorder:
    found = TapeRecorder()
    monkeypatch.setattr(trainer, "recorder", lambda: found)
    monkeypatch.setattr(choice, "recorder", lambda: found)
    return found


def _both(folder: Path, tape: TapeRecorder, name: str, **changes: Any) -> None:
    changes |= _FEW
    _train(run_file(folder, f"{name}-off", "", **changes), 1)
    assert not tape.records
    _train(run_file(folder, f"{name}-on", "", train__cuda_graphs="on", **changes), 1)
    eager, found = folder / f"{name}-off", folder / f"{name}-on"
    assert compare_adapters(found / "adapter", eager / "adapter").relative < 1e-9
    assert largest_loss_gap(read_losses(found / "metrics.jsonl"), read_losses(eager / "metrics.jsonl")) < 1e-11


def test_replayed_steps_are_the_eager_ones(folder: Path, tape: TapeRecorder) -> None:
    """Rows of many lengths, padded, in micro-batches that are added up."""
    _both(folder, tape, "plain", data__packing=False)
    assert tape.records > 1
    assert tape.replays > tape.records


def test_replays_of_one_record_in_a_step_are_added_up(folder: Path, tape: TapeRecorder) -> None:
    """All rows are cut to one length: a replay writes where the one before it has."""
    few = {"data__packing": False, "data__max_length": 48, "train__micro_batch_size": 1}
    _both(folder, tape, "alike", **few)
    assert tape.replays > 3 * tape.records


METHODS: dict[str, dict[str, Any]] = {
    "dora": {"lora__use_dora": True},
    "dropout": {"lora__lora_dropout": 0.25, "train__batch_size": 4},
    "lora-bias": {"lora__lora_bias": True},
    "orthogonal": {"lora__init_lora_weights": "orthogonal", "lora__use_rslora": True},
    "lora-fa": {"train__optimizer": "lora_fa"},
    "lora-plus": {"train__lora_plus_ratio": 4.0},
    "label-smoothing": {"train__objective": {"kind": "sft", "label_smoothing": 0.1}},
    "float8": {"model__compute": "fp8", "lora__lora_dropout": 0.25, "train__batch_size": 4},
    "float8-backward": {"model__compute": "fp8_backward", "data__max_length": 48},
    "recomputed": {"train__recompute": 2, "train__batch_size": 4},
    "recomputed-but-attention": {"train__recompute": "keep_attention", "train__batch_size": 4},
}


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_methods_and_options_replay(name: str, folder: Path, tape: TapeRecorder) -> None:
    _both(folder, tape, name, data__packing=False, **METHODS[name])
    assert tape.replays > tape.records


def test_recomputed_layers_replay_with_the_dropout_of_each_step(folder: Path, tape: TapeRecorder) -> None:
    changes = {"train__recompute": "full", "lora__lora_dropout": 0.25, "train__batch_size": 4}
    _both(folder, tape, "recomputed-dropout", data__packing=False, **changes)
    assert tape.replays > tape.records


_WITHOUT_CYCLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"lora__lora_dropout": 0.25},
    "recomputed": {"train__recompute": "full"},
    "recomputed-but-attention": {"train__recompute": "keep_attention"},
    "float8": {"model__compute": "fp8"},
    "fused": {"model__dtype": "float32", "model__kernels": "fused"},
}


@pytest.mark.parametrize("name", _WITHOUT_CYCLES)
def test_no_node_of_a_factor_outlives_its_micro_batch(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd would add up the gradients of a record on the stream of such a node, which on a GPU ends the record.
    The collector is off in tests: neither may a cycle keep one."""
    parameters, losses = list[Tensor](), trainer.Trainer._losses

    def marking(own: Any, *given: Any) -> Any:
        found = losses(own, *given)
        parameters[:] = [factor.parameter for factor in own.adapters[0].factors]
        for parameter in parameters:
            get_gradient_edge(parameter).node.metadata["is_of_a_micro_batch"] = True
        return found

    class Watching:  # no tape, which holds all that it has written down
        records = 0

        def record(self, run: Callable[[], None]) -> Callable[[], None]:
            assert parameters
            assert not any(get_gradient_edge(parameter).node.metadata for parameter in parameters)
            self.records += 1
            run()
            return run

    found = Watching()
    for module in (trainer, choice):
        monkeypatch.setattr(module, "recorder", lambda: found)
    monkeypatch.setattr(trainer.Trainer, "_losses", marking)
    if name == "fused":
        monkeypatch.setattr(kernels, "_refusal", lambda *_, **__: None)  # which asks for a GPU
        monkeypatch.setattr(kernels, "liger", lambda *_: STAND_IN)
    alike = {"data__packing": False, "data__max_length": 48, "train__micro_batch_size": 1, **_FEW}
    file = run_file(folder, f"nodes-{name}", "", train__cuda_graphs="on", **alike, **_WITHOUT_CYCLES[name])
    _train(file, 1)
    assert found.records


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "keep_attention"])
def test_fused_kernels_replay(
    recompute: str, folder: Path, tape: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their definitions, in float64. Nobody asks for a number on the way to them, which a GPU walks too."""
    monkeypatch.setattr(kernels, "_refusal", lambda *_, **__: None)  # which asks for a GPU
    monkeypatch.setattr(kernels, "liger", lambda *_: STAND_IN)
    monkeypatch.setattr(kernels, "check_kernels", lambda *_: None)  # which is of float32 and less
    monkeypatch.setattr(fused, "_is_computed", lambda *_: True)
    options = {"data__packing": False, "model__kernels": "fused", "train__recompute": recompute}
    _both(folder, tape, f"fused-{recompute}", **options)
    assert tape.replays > tape.records


@pytest.mark.long
@pytest.mark.parametrize("compute", ["fp8", "fp8_backward"])
def test_products_in_float8_replay_as_a_gpu_has_them(
    compute: str, folder: Path, tape: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With scales of rows, by torch's product of codes on a CPU, which nobody else takes there."""
    products, product, read = [0], float8_gpu.scaled_product, weights.read_packed

    def counted(*given: Tensor, **how: Any) -> None:
        products[0] += 1
        product(*given, **how)

    monkeypatch.setattr(float8_gpu, "scaled_product", counted)
    monkeypatch.setattr(weights, "read_packed", lambda name, *rest, **how: for_kernels(read(name, *rest, **how), name))
    losses = {}
    for wanted in ("off", "on"):
        options = {"model__dtype": "bfloat16", "model__compute": compute, "data__packing": False, **_FEW}
        _train(run_file(folder, f"{compute}-{wanted}", "", train__cuda_graphs=wanted, **options), 1)
        losses[wanted] = read_losses(folder / f"{compute}-{wanted}" / "metrics.jsonl")
    assert products[0]
    assert tape.replays > tape.records > 0
    assert largest_loss_gap(losses["on"], losses["off"]) < 3e-2


_LONG = 64  # tokens: a bound of buckets, so that a batch and its record are on one side of it


def _leave_out(module: Any, skips: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """MLPs give back rows whose length `skips`: their factors get no gradient then."""
    forward = module.forward

    def some(self: Any, x: Tensor) -> Tensor:
        out: Tensor = x if skips(x.shape[1]) else forward(self, x)
        return out

    monkeypatch.setattr(module, "forward", some)


def test_factors_that_some_micro_batches_do_not_reach_are_trained_by_the_others(
    folder: Path, tape: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _leave_out(LlamaMLP, lambda length: length <= _LONG, monkeypatch)
    _both(folder, tape, "reached", data__packing=False, train__micro_batch_size=1)
    assert tape.replays > tape.records


def test_a_factor_that_no_micro_batch_of_a_step_reaches_ends_the_run_as_without_records(
    folder: Path, tape: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _leave_out(LlamaMLP, lambda _: True, monkeypatch)
    alike = {"data__packing": False, "data__max_length": 48, "train__micro_batch_size": 1, **_FEW}
    for wanted in ("off", "on"):
        with pytest.raises(MeshloraError, match=r"mlp\..* has no gradient: was backward called"):
            _train(run_file(folder, f"never-{wanted}", "", train__cuda_graphs=wanted, **alike), 1)
    assert tape.records


def test_several_adapters_say_that_they_run_eagerly(tmp_path: Path, tape: TapeRecorder) -> None:
    copy_lines("train", tmp_path / "train.jsonl", 0, 9)
    file = write_run_file(tmp_path / "several.yaml", lora=None, train={"cuda_graphs": "auto", "micro_batch_size": 2})
    tree = yaml.safe_load(file.read_text())
    tree["adapters"] = {name: {"lora": {"r": 4, "target_modules": "all-linear"}} for name in ("one", "two")}
    file.write_text(yaml.safe_dump(tree))
    for run in prepare_runs(read_runs(file)).values():
        assert run.config.train.cuda_graphs == "off"
        assert any("2 adapters: it is not proved in a record" in note for note in run.notes)
        assert any("data.packing: auto: rows are padded: each of several adapters" in note for note in run.notes)


def _recorded_in_pool(file: Path, world: int) -> int:
    tape = TapeRecorder()
    patches = [mock.patch.object(module, "recorder", return_value=tape) for module in (trainer, choice)]
    with patches[0], patches[1]:
        run_and_keep_groups(file, world)
    return tape.replays - tape.records


def test_gradients_are_summed_over_dp_outside_of_records(folder: Path, pools: Callable[[int], Pool]) -> None:
    """Of ranks that record other shapes, and of one that runs a dummy."""
    options = {"data__packing": False, **_FEW}
    pools(2).run(run_and_keep_groups, run_file(folder, "dp-off", "dp=2", **options), 2)
    replays = pools(2).run(_recorded_in_pool, run_file(folder, "dp-on", "dp=2", train__cuda_graphs="on", **options), 2)
    assert all(number > 0 for number in replays)
    assert compare_adapters(folder / "dp-on" / "adapter", folder / "dp-off" / "adapter").relative < 1e-9


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernel of GPUs for joined rows, of the device's numbers alone. Counts its calls."""
    calls = [0]

    def run(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, *_: Any, scale: float | None, **__: Any) -> Tensor:
        calls[0] += 1
        number = torch.searchsorted(ends[1:].contiguous(), torch.arange(len(query)).int(), right=True)
        sees = (number[:, None] == number[None]).tril()
        each = [x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)]
        out = F.scaled_dot_product_attention(*each, attn_mask=sees, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    monkeypatch.setattr(varlen, "_kernel", lambda: run)
    monkeypatch.setattr(varlen, "has_kernel", lambda _: True)
    monkeypatch.setattr(varlen, "computes_in", lambda *_: True)
    return calls


def test_replayed_steps_of_joined_rows_are_the_eager_ones(folder: Path, tape: TapeRecorder, kernel: list[int]) -> None:
    """Of other lengths in each."""
    _both(folder, tape, "joined", train__micro_batch_size=3)
    assert tape.records
    assert tape.replays > tape.records
    assert kernel[0]


def test_replayed_steps_of_packed_rows_are_the_eager_ones(folder: Path, tape: TapeRecorder, kernel: list[int]) -> None:
    _both(folder, tape, "packed", data__packing=True)
    assert tape.records
    assert tape.replays > tape.records
    assert kernel[0]


def _unless(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A fault: the tensor `name` of a record keeps what it was recorded with."""

    def put_in(monkeypatch: pytest.MonkeyPatch) -> None:
        fill = Static.fill

        def forget(static: Static, batch: Batch) -> None:
            kept = _tensor(static, name).clone()
            fill(static, batch)
            _tensor(static, name).copy_(kept)

        monkeypatch.setattr(Static, "fill", forget)

    return put_in


def _tensor(static: Static, name: str) -> Tensor:
    found = static.ends if name == "ends" else getattr(static.batch, name)
    assert isinstance(found, Tensor)
    return found


FAULTS = {
    "stale tokens": _unless("input_ids"),
    "stale labels": _unless("labels"),
    "stale indices of trained tokens": _unless("trained"),
    "stale positions": _unless("position_ids"),
    "stale ends of sequences": _unless("ends"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_record_that_keeps_something_of_its_own_ends_the_run(
    fault: str, folder: Path, tape: TapeRecorder, kernel: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[fault](monkeypatch)
    file = run_file(folder, fault.replace(" ", "-"), "", train__cuda_graphs="on", data__packing=True, **_FEW)
    with pytest.raises(MeshloraError, match=r"of a recorded micro-batch of . x \d+ tokens is .* apart from the eager"):
        _train(file, 1)
    assert tape.records


def test_a_number_that_the_host_reads_ends_the_run_or_its_records(
    folder: Path, tape: TapeRecorder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loss = graphs.padded_loss

    def reading(found: Any, batch: Batch, **options: Any) -> Tensor:
        return loss(found, batch, **options) / max(1, int(batch.labels.amax()))

    monkeypatch.setattr(graphs, "padded_loss", reading)
    options = {"data__packing": False, **_FEW}
    with pytest.raises(
        MeshloraError, match=r"cannot be recorded: \w+: _local_scalar_dense; set train\.cuda_graphs: off"
    ):
        _train(run_file(folder, "reads-on", "", train__cuda_graphs="on", **options), 1)
    monkeypatch.undo()
    _train(run_file(folder, "reads-off", "", **options), 1)
    monkeypatch.setattr(graphs, "padded_loss", reading)
    monkeypatch.setattr(trainer, "recorder", lambda: tape)
    monkeypatch.setattr(choice, "recorder", lambda: tape)
    capsys.readouterr()
    _train(run_file(folder, "reads-auto", "", train__cuda_graphs="auto", **options), 1)
    assert capsys.readouterr().out.count("micro-batches run eagerly from now on: NotRecordedError: _local") == 1
    assert not tape.records
    eager = (folder / "reads-off" / "adapter" / "adapter_model.safetensors").read_bytes()
    assert (folder / "reads-auto" / "adapter" / "adapter_model.safetensors").read_bytes() == eager


def test_without_a_gpu_on_is_refused_and_auto_runs_eagerly(folder: Path) -> None:
    with pytest.raises(UserError, match=r"train\.cuda_graphs=on: CPUs record no kernels"):
        prepare_run(read_run(run_file(folder, "cpu-on", "", train__cuda_graphs="on", **_FEW)))
    run = prepare_run(read_run(run_file(folder, "cpu-auto", "", train__cuda_graphs="auto", **_FEW)))
    assert run.config.train.cuda_graphs == "off"
    assert "train.cuda_graphs: auto: micro-batches run eagerly: CPUs record no kernels" in run.notes


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("its numbers are those of the host, which change with each step", {"train__neftune_alpha": 5.0}),
        ("messages between ranks within a micro-batch are not recorded", {"topology": "tp=2"}),
        ("messages between ranks within a micro-batch are not recorded", {"topology": "dp=2,dp_shard"}),
        ("it is not proved in a record", {"lora__modules_to_save": ["lm_head"]}),
        ("it is not proved in a record", {"model__quantization": "fp8"}),
        ("copies to host memory wait for events of their own", {"train__recompute": "offload"}),
        ("heads of 24 in float32, and it is for bfloat16", {"model__dtype": "float32"}),
        ("attn_implementation=eager, and it is for sdpa", {"model__attn_implementation": "eager"}),
    ],
)
def test_what_is_not_recorded_is_named(why: str, changes: dict[str, Any], folder: Path, tape: TapeRecorder) -> None:
    topology, options = changes.get("topology", ""), {**_FEW, **changes}
    options.pop("topology", None)
    with pytest.raises(UserError, match=why):
        prepare_run(read_run(run_file(folder, "refused", topology, train__cuda_graphs="on", **options)))
    run = prepare_run(read_run(run_file(folder, "eager", topology, train__cuda_graphs="auto", **options)))
    assert any(
        note.startswith("train.cuda_graphs: auto: micro-batches run eagerly") and why in note for note in run.notes
    )


def test_masks_of_the_recorded_step_end_the_run(
    folder: Path, tape: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "words_of", lambda _: (0, 0))  # as when it was recorded
    options = {"data__packing": False, "lora__lora_dropout": 0.25, **_FEW}
    with pytest.raises(MeshloraError, match=r"of a recorded micro-batch of . x \d+ tokens is .* apart from the eager"):
        _train(run_file(folder, "stale-masks", "", train__cuda_graphs="on", **options), 1)
    assert tape.records
