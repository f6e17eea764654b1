"""A loop of one's own with `meshlora.step` ends where a plain loop with transformers and PEFT does on one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

import meshlora
from meshlora.adapter.attach import gather_adapter
from meshlora.run.feeding import fitted
from meshlora.run.recompute import recompute_layers
from meshlora_ground.topology import Topology
from meshlora_judge.compare import compare_adapters
from meshlora_judge.twin import twin_config
from tests.pool import Pool
from tests.ranks.masked import MaskedPeft

BASE = str(Path(__file__).parents[2] / "examples/tiny_base")
LIMIT = 1e-9
STEPS, MAX_NORM = 3, 0.1


def _micro_batches(step: int) -> list[dict[str, Tensor]]:
    """Three micro-batches of unequal numbers of rows and lengths, prompts untrained; the last row by itself."""
    numbers = torch.Generator().manual_seed(step)
    lengths = torch.randint(6, 24, (5,), generator=numbers).tolist()
    found = []
    for part in (lengths[:2], lengths[2:4], lengths[4:]):
        ids = torch.randint(3, 200, (len(part), max(part)), generator=numbers)
        mask = torch.stack([(torch.arange(max(part)) < length).long() for length in part])
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :3] = -100
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def _optimizer(model: Any) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=STEPS)


def _alone(start: Path, out: Path, drops: bool = False) -> list[tuple[float, float, int]]:
    """Plain torch, transformers and PEFT: what HF's own loss with the number of all tokens gives."""
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64)
    model = PeftModel.from_pretrained(model, str(start), is_trainable=True).train()
    optimizer, scheduler = _optimizer(model)
    masks = MaskedPeft(model, seed=7) if drops else None
    said = []
    for step in range(STEPS):
        if masks is not None:
            masks.step = step
        batches, mean = _micro_batches(step), 0.0
        number = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        for batch in batches:
            with meshlora.lift():
                loss = model(**batch, num_items_in_batch=number).loss
            loss.backward()
            mean += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], MAX_NORM)
        assert norm > 2 * MAX_NORM, "clipping is to bite"
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        said.append((mean, float(norm), number))
    assert masks is None or masks.num_dropped > 0
    model.save_pretrained(str(out))
    return said


def _labels(model: Any, step: Any, batch: dict[str, Tensor]) -> None:
    step.backward(model(**batch).loss)


def _own_sum(model: Any, step: Any, batch: dict[str, Tensor]) -> None:
    """From whole logits."""
    labels = batch.pop("labels")
    logits = model(**batch).logits[:, :-1].float()
    loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    step.backward(loss, int((labels[:, 1:] != -100).sum()))


def _chunked(model: Any, step: Any, batch: dict[str, Tensor]) -> None:
    loss = meshlora.language_model_loss(model, batch["input_ids"], batch["attention_mask"], batch["labels"])
    step.backward(loss, int((batch["labels"][:, 1:] != -100).sum()))


def _scored(model: Any, step: Any, batch: dict[str, Tensor]) -> None:
    """As a policy gradient of one advantage."""
    scores = meshlora.token_scores(model, batch["input_ids"], batch["attention_mask"], batch["labels"])
    step.backward(-scores.log_probs.sum(), int((batch["labels"][:, 1:] != -100).sum()))


LOSSES = {function.__name__: function for function in (_labels, _own_sum, _chunked, _scored)}


def _on_mesh(topology: str, name: str, start: Path, out: Path) -> list[tuple[float, float, int]]:
    """Body of a rank."""
    model = meshlora.load(BASE, adapter=start, topology=topology, dtype="float64").train()
    mesh = model.meshlora.mesh
    optimizer, scheduler = _optimizer(model)
    said = []
    for step in range(STEPS):
        batches = _micro_batches(step)
        if mesh.dp.size > 1:  # the second rank has the last two micro-batches
            batches = batches[:1] if mesh.dp.rank == 0 else batches[1:]
        with meshlora.step(model, optimizer, max_norm=MAX_NORM, seed=7) as one:
            for batch in batches:
                with meshlora.lift():
                    LOSSES[name](model, one, fitted(batch, mesh.topology, pad_token_id=0))
        scheduler.step()
        said.append((one.loss, one.grad_norm, one.num_tokens))
    meshlora.save_adapter(model, out)
    return said


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "adapter"
    lora = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
    meshlora.save_adapter(meshlora.load(BASE, lora=lora, dtype="float64", seed=3), folder)
    return folder


@pytest.fixture(scope="module")
def alone(start: Path, tmp_path_factory: pytest.TempPathFactory, pools: Callable[[int], Pool]) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("alone") / "adapter"
    return out, pools(1).run(_alone, start, out)[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("topology", "name"),
    [
        ("tp=2,sp", "_labels"),
        ("dp=2", "_labels"),
        pytest.param("", "_labels", marks=pytest.mark.proof),
        pytest.param("tp=2", "_labels", marks=pytest.mark.proof),
        pytest.param("cp=2", "_labels", marks=pytest.mark.proof),
        pytest.param("dp=2,tp=2,sp", "_labels", marks=pytest.mark.proof),
        pytest.param("cp=2", "_chunked", marks=pytest.mark.proof),
        pytest.param("tp=2,sp", "_own_sum", marks=pytest.mark.proof),
        pytest.param("tp=2,sp", "_scored", marks=pytest.mark.proof),
        pytest.param("dp=2", "_scored", marks=pytest.mark.proof),
        ("pp=2", "_labels"),
        ("pp=2", "_scored"),
        pytest.param("pp=2", "_own_sum", marks=pytest.mark.proof),
        pytest.param("pp=2", "_chunked", marks=pytest.mark.proof),
        *(
            pytest.param(topology, name, marks=pytest.mark.proof)
            for topology in ("pp=2,tp=2,sp", "pp=2,dp=2")
            for name in ("_labels", "_scored")
        ),
        pytest.param("pp=2,cp=2", "_labels", marks=pytest.mark.proof),
    ],
)
def test_steps_end_with_the_adapter_of_a_plain_loop(
    topology: str, name: str, alone: Any, start: Path, pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    """With accumulation, unequal lengths and shares, a schedule, and clipping that bites."""
    folder, said = alone
    world = Topology.parse(topology, world=1).world if topology == "" else Topology.parse(topology).world
    for found in pools(world).run(_on_mesh, topology, name, start, tmp_path / "adapter"):
        for ours, theirs in zip(found, said, strict=True):
            assert ours == pytest.approx(theirs, rel=LIMIT)
    worst = compare_adapters(tmp_path / "adapter", folder)
    assert worst.relative <= LIMIT, worst


@pytest.mark.long
@pytest.mark.parametrize(
    "topology",
    [
        "dp=2",
        *(pytest.param(topology, marks=pytest.mark.proof) for topology in ("tp=2,sp", "cp=2", "dp=2,tp=2,sp", "pp=2")),
    ],
)
def test_dropout_of_a_step_is_that_of_one_process(topology: str, pools: Callable[[int], Pool], tmp_path: Path) -> None:
    """The masks are those of the tokens, whatever rank has them, and however their rows are filled up."""
    lora = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.2)
    meshlora.save_adapter(meshlora.load(BASE, lora=lora, dtype="float64", seed=3), tmp_path / "start")
    said = pools(1).run(_alone, tmp_path / "start", tmp_path / "alone", True)[0]
    world = Topology.parse(topology).world
    found = pools(world).run(_on_mesh, topology, "_labels", tmp_path / "start", tmp_path / "mesh")[0]
    for ours, theirs in zip(found, said, strict=True):
        assert ours == pytest.approx(theirs, rel=LIMIT)
    worst = compare_adapters(tmp_path / "mesh", tmp_path / "alone")
    assert worst.relative <= LIMIT, worst


def _of_two_forwards(topology: str, recompute: str, is_summed: bool) -> dict[str, Tensor]:
    """Body of a rank: the adapter after a step with two forwards of other shapes, and a backward of each or of both."""
    lora = LoraConfig(r=4, lora_dropout=0.4, target_modules="all-linear", init_lora_weights=False)
    model = meshlora.load(BASE, lora=lora, dtype="float64", topology=topology, seed=3).train()
    recompute_layers(model, recompute)
    optimizer, losses = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), list[Tensor]()
    with meshlora.step(model, optimizer) as step, meshlora.lift():
        for rows, length in ((2, 8), (4, 4)):
            ids = torch.randint(3, 200, (rows, length), generator=torch.Generator().manual_seed(rows))
            losses.append(meshlora.language_model_loss(model, ids, None, ids))
            if not is_summed:
                step.backward(losses[-1], rows * (length - 1))
        if is_summed:
            step.backward(losses[0] + losses[1], 26)
    return gather_adapter(model, "default")


@pytest.mark.long
@pytest.mark.parametrize("topology", ["", "tp=2,sp", pytest.param("pp=2", marks=pytest.mark.proof)])
def test_layers_are_recomputed_with_the_masks_of_their_own_forward(topology: str, pools: Callable[[int], Pool]) -> None:
    """Whatever forwards were between it and its backward."""
    pool = pools(2 if topology else 1)
    expected = pool.run(_of_two_forwards, topology, "none", False)[0]
    found = pool.run(_of_two_forwards, topology, "full", True)[0]
    worst = max(float((found[name] - value).norm() / value.norm()) for name, value in expected.items())
    assert worst < LIMIT


LORA = LoraConfig(r=2, target_modules="all-linear")
IDS = torch.randint(3, 200, (2, 8), generator=torch.Generator().manual_seed(0))


def _twin(topology: str) -> tuple[Any, torch.optim.Optimizer]:
    model = meshlora.load(twin_config("llama"), lora=LORA, topology=topology).train()
    return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def _mean(model: Any, step: Any) -> Tensor:
    return model(input_ids=IDS, labels=IDS).loss  # type: ignore[no-any-return]


def _nothing(model: Any, step: Any) -> None:
    pass


def _finishes(model: Any, step: Any) -> None:
    step.backward(model(input_ids=IDS, labels=IDS, num_items_in_batch=1).loss)
    meshlora.finish_gradients(model, num_tokens=14)


def _backward_of_a_mean(model: Any, step: Any) -> None:
    step.backward(_mean(model, step))
    _mean(model, step).backward()


def _scaled_mean(model: Any, step: Any) -> None:
    step.backward(2 * _mean(model, step), 14)


def _own_mean(model: Any, step: Any) -> None:
    logits = model(input_ids=IDS).logits
    step.backward(F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()), 14)


def _without_number(model: Any, step: Any) -> None:
    step.backward(model(input_ids=IDS).logits.sum())


def _wrong_number(model: Any, step: Any) -> None:
    step.backward(_mean(model, step), 16)


def _adapter_off(model: Any, step: Any) -> None:
    with meshlora.disable_adapter(model):
        step.backward(_mean(model, step))


def _another_divisor(model: Any, step: Any) -> None:
    step.backward(model(input_ids=IDS, labels=IDS, num_items_in_batch=10).loss)


def _other_rows(model: Any, step: Any) -> None:
    step.backward(model(input_ids=IDS + model.meshlora.mesh.rank, labels=IDS).loss)


def _other_labels(model: Any, step: Any) -> None:
    labels = IDS.clone()
    labels[0, 3 + model.meshlora.mesh.rank] = 7
    step.backward(model(input_ids=IDS, labels=labels).loss)


def _other_own_labels(model: Any, step: Any) -> None:
    logits = model(input_ids=IDS).logits[:, :-1]
    labels = IDS[:, 1:].roll(model.meshlora.mesh.rank, 1)
    step.backward(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), 14)


def _other_number(model: Any, step: Any) -> None:
    logits = model(input_ids=IDS).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten(), reduction="sum")
    step.backward(loss, 14 + model.meshlora.mesh.rank)


def _not_finite(model: Any, step: Any) -> None:
    step.backward(model(input_ids=IDS).logits.sum() * float("nan"), 14)


def _one_fails(model: Any, step: Any) -> None:
    step.backward(_mean(model, step))
    if model.meshlora.mesh.rank == 1:
        raise RuntimeError("the disk is full")


def _one_backward_less(model: Any, step: Any) -> None:
    if model.meshlora.mesh.rank == 0:
        step.backward(_mean(model, step))


# What a loop does in a step -> what all ranks say.
MISTAKES: list[tuple[str, Callable[[Any, Any], object], str]] = [
    ("tp=2", _nothing, "a step without backward on ranks 0, 1: it would leave the adapter as it is"),
    ("dp=2", _one_backward_less, "a step without backward on rank 1: "),
    ("tp=2", _finishes, "a step finished twice on ranks 0, 1: "),
    ("tp=2", _backward_of_a_mean, "a mean where a sum is meant on ranks 0, 1: "),
    ("tp=2", _scaled_mean, "a mean where a sum is meant on ranks 0, 1: "),
    ("tp=2", _own_mean, "a mean where a sum is meant: it is divided"),
    ("tp=2", _without_number, "a loss of your own without num_tokens: "),
    ("tp=2", _wrong_number, "num_tokens=16: the model has counted 14 labels"),
    ("tp=2", _adapter_off, "a loss that nothing trained has made: "),
    ("dp=2", _another_divisor, "num_items_in_batch=10: the step has 28 trained tokens"),
    ("tp=2", _other_rows, "differ on rank 1 from those of rank 0 (2 rows of 8 on rank 0, 2 rows of 8 on rank 1)"),
    ("tp=2", _other_labels, "the input_ids or labels of this forward differ on rank 1"),
    ("tp=2", _other_own_labels, "ranks with another loss: "),
    ("tp=2", _other_number, "ranks with another trained tokens: 14 on rank 0, 15 on rank 1"),
    ("dp=2", _not_finite, "the loss of a step is nan"),
    ("dp=2", _one_fails, "rank 1 raised an error in this step"),
]


def _wrong(topology: str) -> list[str]:
    """Body of a rank: what each mistake says. After each the next step is a right one, on all ranks."""
    model, optimizer = _twin(topology)
    said = []
    for _ in range(3):  # the first forwards of a model are compared anyway
        _right(model, optimizer)
    for wants, mistake, _ in MISTAKES:
        if wants != topology:
            continue
        before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
        try:
            with meshlora.step(model, optimizer) as step:
                mistake(model, step)
            said.append("nothing")
        except (meshlora.MeshloraError, RuntimeError) as error:
            said.append(str(error))
        own = [p for p in model.parameters() if p.requires_grad]
        assert all(torch.equal(p, old) for p, old in zip(own, before, strict=True)), mistake
        assert all(p.grad is None for p in own), mistake
        _right(model, optimizer)
    return said


def _right(model: Any, optimizer: torch.optim.Optimizer) -> None:
    with meshlora.step(model, optimizer) as step:
        step.backward(_mean(model, step))
    assert step.num_tokens == 14 * model.meshlora.mesh.dp.size


@pytest.mark.parametrize("topology", ["tp=2", "dp=2"])
def test_a_mistake_in_a_step_is_said_by_all_ranks_and_leaves_nothing(
    topology: str, pools: Callable[[int], Pool]
) -> None:
    expected = [(mistake, message) for wants, mistake, message in MISTAKES if wants == topology]
    for rank, found in enumerate(pools(2).run(_wrong, topology)):
        assert len(found) == len(expected)
        for text, (mistake, message) in zip(found, expected, strict=True):
            is_own = mistake is _one_fails and rank == 1
            assert ("the disk is full" if is_own else message) in text, (rank, mistake, text)


def test_a_step_is_used_once_by_itself_with_the_optimizer_of_its_adapter() -> None:
    model, optimizer = _twin("")
    with meshlora.step(model, optimizer) as step:
        step.backward(_mean(model, step))
        with pytest.raises(meshlora.UserError, match="a step in a step"), meshlora.step(model, optimizer):
            pass
    with pytest.raises(meshlora.UserError, match="backward outside of its step"):
        step.backward(_mean(model, step))
    with pytest.raises(meshlora.UserError, match="a step that has been used"), step:
        pass
    some = torch.optim.SGD([p for p in model.parameters() if p.requires_grad][1:], lr=0.1)
    with pytest.raises(meshlora.UserError, match="an optimizer without"), meshlora.step(model, some):
        pass
    model(input_ids=IDS).logits.sum().backward()
    with pytest.raises(meshlora.UserError, match="begins with a gradient"), meshlora.step(model, optimizer):
        pass
    meshlora.set_adapter(model, None)
    with pytest.raises(meshlora.UserError, match="no active adapter"), meshlora.step(model, optimizer):
        pass


def _one_leaves() -> str:
    """Body of a rank: rank 1 fails where rank 0 waits for it."""
    model, optimizer = _twin("tp=2")
    try:
        with meshlora.step(model, optimizer, timeout_s=1.0) as step:
            if model.meshlora.mesh.rank == 1:
                raise ValueError("the disk is full")
            step.backward(_mean(model, step))
    except (ValueError, RuntimeError, meshlora.MeshloraError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.proof  # seconds to start ranks of its own
def test_a_rank_that_fails_in_a_forward_lets_no_other_wait_forever() -> None:
    pool = Pool(2)  # of its own: its ranks are out of step then
    try:
        first, second = pool.run(_one_leaves)
    finally:
        pool.close()
    assert "imed out" in first
    assert second == "ValueError: the disk is full"
