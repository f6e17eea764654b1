"""`train.cuda_graphs` of mixtures of experts: each replay goes by the routing of its own rows, not the recorded one's.

The kernel for all experts computes on GPUs in bfloat16; here its definition stands for it, in float64.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from meshlora.run import trainer
from meshlora.run.config.file import read_run
from meshlora.run.graphs import choice
from meshlora.run.together import prepare_run
from meshlora.wings.experts import products, recorded, row_counts
from meshlora.wings.experts.row_counts import RowCounts
from meshlora_ground.errors import MeshloraError, UnsupportedError, UserError
from meshlora_judge.compare import compare_adapters, largest_loss_gap, read_losses
from meshlora_judge.inputs import write_twin
from meshlora_judge.twin import twin_config
from tests.pool import Pool
from tests.ranks.test_graphs import kernel
from tests.ranks.test_trainer import _train, run_and_keep_groups
from tests.run_files import TINY, copy_lines, copy_tokenizer, write_run_file
from tests.tape import TapeRecorder

__all__ = ["kernel"]  # a fixture

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
ON_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]


def _definition(x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
    """`F.grouped_mm` of numbers of the device alone: `[N, in]`, `[E, in, out]`; or over rows, `[a, N]`, `[N, b]`."""
    rows = x.shape[1] if weight.ndim == 2 else len(x)
    of_row = torch.searchsorted(offs.contiguous(), torch.arange(rows).int(), right=True)
    chosen = (of_row.unsqueeze(1) == torch.arange(len(offs))).to(x.dtype)  # [N, E]
    if weight.ndim == 2:
        return torch.einsum("an,ne,nb->eab", x, chosen, weight)
    return torch.einsum("ni,ne,eio->no", x, chosen, weight)


def _patches() -> list[Any]:
    """The kernel, and that there is one."""
    return [
        mock.patch.object(products.F, "grouped_mm", _definition),
        mock.patch.object(products, "can_group", return_value=True),
        mock.patch.object(products, "ROWS_TO_LOOP", 10**9),  # that it pays
        mock.patch.object(recorded, "reads_sizes_on_device", return_value=True),
    ]


class _Watched(TapeRecorder):
    """Keeps the rows of each expert: as recorded, and as each replay leaves them in the memory of the record."""

    def __init__(self) -> None:
        super().__init__()
        self.own: list[Tensor] = []  # of the record that is being made, a tensor for each layer
        self.recorded: set[tuple[int, ...]] = set()
        self.replayed: set[tuple[int, ...]] = set()
        self.after = lambda: None

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        self.own = []
        replay, ends = super().record(run), self.own
        self.recorded |= {tuple(each.tolist()) for each in ends}
        self.after()

        def watched() -> None:
            replay()
            self.replayed.update(tuple(each.tolist()) for each in ends)

        return watched

    def of_sorted(self, experts: Tensor, number: int) -> RowCounts:
        made = _of_sorted(experts, number)
        self.own.append(made.ends)
        return made


_of_sorted = RowCounts.of_sorted


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = _Watched()
    monkeypatch.setattr(trainer, "recorder", lambda: found)
    monkeypatch.setattr(choice, "recorder", lambda: found)
    monkeypatch.setattr(RowCounts, "of_sorted", found.of_sorted)
    for patch in _patches():
        patch.start()
    yield found
    mock.patch.stopall()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small mixtures, a folder each, and 19 sequences."""
    path = tmp_path_factory.mktemp("mixtures")
    copy_lines("train", path / "train.jsonl", 0, 19)
    return path


def _base(folder: Path, family: str) -> Path:
    base = folder / family
    if not base.exists():
        size = json.loads((TINY / "config.json").read_text())["vocab_size"]
        model_type, _, width = family.partition("-")
        config = twin_config(model_type, vocab_size=size, max_position_embeddings=256)
        if width:
            config.moe_intermediate_size = int(width)
        write_twin(config, base, dtype=torch.float64, seed=0)
        copy_tokenizer(base)
    return base


def _file(folder: Path, name: str, family: str = "qwen3_moe", topology: str = "", **changes: Any) -> Path:
    groups = {"model": {}, "lora": {}, "data": {}, "train": {}}
    for key, value in changes.items():
        group, _, leaf = key.partition("__")
        groups[group][leaf] = value
    return write_run_file(
        folder / f"{name}.yaml",
        model={"path": str(_base(folder, family)), "dtype": "float64", **groups["model"]},
        lora={"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "o_proj"], **groups["lora"]},
        data={"packing": False, **groups["data"]},
        train={"steps": 8, "batch_size": 7, "micro_batch_size": 2, "lr": 5e-3, **groups["train"]},
        topology=topology,
        preflight="off",
    )


def _both(folder: Path, tape: _Watched, name: str, family: str = "qwen3_moe", **changes: Any) -> None:
    _train(_file(folder, f"{name}-off", family, **changes), 1)
    assert not tape.records
    _train(_file(folder, f"{name}-on", family, train__cuda_graphs="on", **changes), 1)
    eager, found = folder / f"{name}-off", folder / f"{name}-on"
    assert compare_adapters(found / "adapter", eager / "adapter").relative < 1e-9
    assert largest_loss_gap(read_losses(found / "metrics.jsonl"), read_losses(eager / "metrics.jsonl")) < 1e-11
    assert tape.replays > tape.records > 1
    # Else a record that kept the sizes of its groups would not show.
    assert len(tape.replayed - tape.recorded) > tape.replays


@pytest.mark.parametrize("family", ["qwen3_moe", *(pytest.param(f, marks=pytest.mark.long) for f in FAMILIES[1:])])
def test_replayed_steps_of_a_mixture_are_the_eager_ones(family: str, folder: Path, tape: _Watched) -> None:
    """With dropout, of rows of many lengths that are routed otherwise each time."""
    changes = {"lora__lora_dropout": 0.25}
    if family == "deepseek_v3":
        changes["lora__target_modules"] = ["q_a_proj", "o_proj"]
    _both(folder, tape, family, family, **changes)


def test_mixtures_of_joined_rows_replay(folder: Path, tape: _Watched, kernel: list[int]) -> None:
    _both(folder, tape, "joined", data__packing="auto", train__micro_batch_size=3)
    assert kernel[0]


ADAPTERS: dict[str, dict[str, Any]] = {
    "one-each": {"lora__target_parameters": ON_EXPERTS},
    "shared": {"lora__target_parameters": ON_EXPERTS[:2], "lora__share_experts": True},
    "recomputed": {"lora__target_parameters": ON_EXPERTS, "train__recompute": "full"},
}


@pytest.mark.parametrize("name", ["one-each", *(pytest.param(n, marks=pytest.mark.long) for n in [*ADAPTERS][1:])])
def test_adapters_on_experts_and_routers_replay(name: str, folder: Path, tape: _Watched) -> None:
    """Of experts that get no token in some micro-batches, whose factors then have gradients of 0."""
    _both(folder, tape, name, **ADAPTERS[name])


def _in_pool(file: Path, world: int) -> tuple[int, int]:
    tape = _Watched()
    with contextlib.ExitStack() as stack:
        for module in (trainer, choice):
            stack.enter_context(mock.patch.object(module, "recorder", return_value=tape))
        for patch in (*_patches(), mock.patch.object(RowCounts, "of_sorted", tape.of_sorted)):
            stack.enter_context(patch)
        run_and_keep_groups(file, world)
    return tape.replays - tape.records, len(tape.replayed - tape.recorded)


def test_mixtures_are_recorded_over_dp(folder: Path, pools: Callable[[int], Pool]) -> None:
    on_experts = {"lora__target_parameters": ON_EXPERTS}
    pools(2).run(run_and_keep_groups, _file(folder, "dp-off", topology="dp=2", **on_experts), 2)
    file = _file(folder, "dp-on", topology="dp=2", train__cuda_graphs="on", **on_experts)
    for more, other_sizes in pools(2).run(_in_pool, file, 2):
        assert more > 0
        assert other_sizes > 1
    assert compare_adapters(folder / "dp-on" / "adapter", folder / "dp-off" / "adapter").relative < 1e-9


def _frozen(experts: Tensor, number: int) -> RowCounts:
    """A fault: the ends of groups are numbers of the recorded rows."""
    made = _of_sorted(experts, number)
    with _disable_current_modes():
        return RowCounts(made.ends.clone(), made.num_rows)


def test_sizes_of_experts_frozen_at_capture_end_the_run(
    folder: Path, tape: _Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RowCounts, "of_sorted", _frozen)
    with pytest.raises(MeshloraError, match=r"of a recorded micro-batch of . x \d+ tokens is .* apart from the eager"):
        _train(_file(folder, "frozen", train__cuda_graphs="on"), 1)
    assert tape.records


def test_a_record_reads_no_tensor_that_others_may_drop(
    folder: Path, tape: _Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each record what is kept for all forwards is dropped, and its memory used for something else."""
    kept, make = list[Tensor](), row_counts._kept

    def watched(*given: Any) -> Tensor:
        kept.append(make(*given))
        return kept[-1]

    def drop() -> None:
        make.cache_clear()
        for tensor in kept:
            tensor.zero_()
        kept.clear()

    monkeypatch.setattr(row_counts, "_kept", watched)
    tape.after = drop
    _train(_file(folder, "dropped", train__cuda_graphs="on", train__steps=4), 1)
    assert tape.replays > tape.records


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("what looks at routers in each micro-batch is passed by", {"train__router_aux_loss_coef": 0.1}),
        ("as r is no multiple of 8", {"lora__r": 4, "lora__target_parameters": ON_EXPERTS}),
        ("as a width of theirs is no multiple of 8", {"family": "qwen3_moe-12"}),
        ("one call for all of them is there in bfloat16", {}),
        ("whose form is not that", {"family": "jetmoe", "lora__target_modules": ["kv_proj"]}),
        ("some experts compute nothing", {"family": "longcat_flash", "lora__target_modules": ["o_proj"]}),
        (
            "joined rows has no kernel that takes all sequences at once: heads of 8 in float64",
            {"data__packing": "auto"},
        ),
        ("copies to host memory wait for events", {"train__recompute": "offload"}),
    ],
)
def test_a_mixture_that_is_not_recorded_is_refused_before_it_starts(
    why: str, changes: dict[str, Any], folder: Path, tape: _Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "bfloat16" in why:
        monkeypatch.setattr(recorded, "reads_sizes_on_device", lambda dtype: dtype == torch.bfloat16)
    with pytest.raises((UserError, UnsupportedError), match=why):
        prepare_run(read_run(_file(folder, "refused", train__cuda_graphs="on", **changes)))
    run = prepare_run(read_run(_file(folder, "eager", train__cuda_graphs="auto", **changes)))
    assert run.config.train.cuda_graphs == "off"
    assert any(
        note.startswith("train.cuda_graphs: auto: micro-batches run eagerly") and why in note for note in run.notes
    )
