"""The replica check: one bit that differs between copies is found and named; what differs by design is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

import meshlora
import meshlora.run.run
from meshlora.adapter.attach import active_factors, runtime
from meshlora.adapter.replicas import check_replicas, find_drifts, fingerprint, position_weights, replicated_over
from meshlora.plan.grads import FactorRule, Side, expert_rule, split_rule
from meshlora.plan.layout import Layout, Split
from meshlora.plan.rules import ExpertRule
from meshlora.run.config.file import read_run
from meshlora.run.together import prepare_run
from meshlora.run.trained import TrainedAdapter
from meshlora.run.trainer import Trainer
from meshlora_ground.topology import Topology
from meshlora_judge.capture import CollectiveCounter
from meshlora_judge.twin import twin_config
from tests.for_each import for_each
from tests.pool import Pool, wait_for_all
from tests.run_files import copy_lines, metrics_of, write_run_file

LAYER = "model.layers.0"
COLUMN_B, ROW_B = f"{LAYER}.self_attn.q_proj.lora_B", f"{LAYER}.mlp.down_proj.lora_B"
ROW_A = f"{LAYER}.mlp.down_proj.lora_A"
DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def _bits(tensor: Tensor) -> Tensor:
    """The flat bits of a tensor, sharing its memory."""
    return tensor.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _flip_last_bit(tensor: Tensor) -> None:
    _bits(tensor)[5] ^= 1


def _swap_two_elements(tensor: Tensor) -> None:
    _bits(tensor)[[2, 7]] = _bits(tensor)[[7, 2]]


def _negate(tensor: Tensor) -> None:
    """Every sign bit: an even number of changes that sums to zero wherever they are only added up."""
    tensor.neg_()


def _negate_zero(tensor: Tensor) -> None:
    tensor.view(-1)[0] = -0.0


def _change_a_nan(tensor: Tensor) -> None:
    tensor.view(-1)[1] = torch.nan
    _bits(tensor)[1] ^= 1


CHANGES = [_flip_last_bit, _swap_two_elements, _negate, _negate_zero, _change_a_nan]


@for_each("dtype", DTYPES, ids=str)
@for_each("change", CHANGES)
def test_two_sums_of_the_bits_see_every_kind_of_change(change: Callable[[Tensor], None], dtype: torch.dtype) -> None:
    tensor = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensor[0, 0], tensor[0, 1] = 0.0, torch.nan
    changed = tensor.clone()
    change(changed)
    weights = position_weights(torch.device("cpu"))
    assert torch.equal(fingerprint(tensor, weights), fingerprint(tensor.clone(), weights))
    assert (fingerprint(tensor, weights) != fingerprint(changed, weights)).all(), "each of the two sums sees it"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_order_of_chunks_counts_and_the_last_may_be_short(dtype: torch.dtype) -> None:
    weights = position_weights(torch.device("cpu"))[:, :16]
    tensor = torch.arange(1, 53, dtype=dtype)
    swapped, cut = tensor.clone(), tensor.clone()
    swapped[:16], swapped[16:32] = tensor[16:32], tensor[:16]
    _flip_last_bit(cut[-8:])
    values = {tuple(fingerprint(t, weights).tolist()) for t in (tensor, swapped, cut)}
    assert len(values) == 3
    assert all(first != second for first, second in values), "two sums, not one twice"


def _verdict(
    topology: str,
    faults: dict[int, tuple[str, Callable[[Tensor], None]]],
    dtype: str,
    family: str,
    shape: dict[str, int],
) -> tuple[str, Counter[tuple[str, str]]]:
    """(what the check says, its collectives) with `faults[rank] = (factor, change)`."""
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = meshlora.load(twin_config(family, **shape), lora=lora, topology=topology, dtype=dtype)
    factors = {factor.name: factor.parameter for factor in active_factors(model)}
    if (rank := runtime(model).mesh.rank) in faults:
        name, change = faults[rank]
        change(factors[name].data)
    said = ""
    with CollectiveCounter() as counter:
        counter.phase = "check"
        try:
            check_replicas(model, step=7, last_saved=Path("out/checkpoints/step-000005"))
        except meshlora.MeshloraError as error:
            said = f"exit code {error.exit_code}: {error}"
    return said, counter.counts


def _agreed(
    pool: Pool, topology: str, faults: dict[int, Any], *, dtype: str = "float32", family: str = "llama", **shape: Any
) -> str:
    """What the check says, the same on every rank, for one collective."""
    (said, counts), *others = pool.run(_verdict, topology, faults, dtype, family, shape)
    assert all(other == (said, counts) for other in others)
    assert counts == {("check", "allgather"): 1}
    return said


@pytest.mark.parametrize("topology", ["tp=2", "tp=2,sp", "dp=2", "dp=2,tp=2,sp", "dp=4"])
def test_equal_copies_pass_for_one_collective(topology: str, pools: Callable[[int], Pool]) -> None:
    assert _agreed(pools(Topology.parse(topology).world), topology, {}) == ""


def test_one_process_has_no_copies_and_does_nothing() -> None:
    with mock.patch("meshlora.adapter.replicas.fingerprint", side_effect=AssertionError("work for nothing")):
        assert _verdict("", {}, "float32", "llama", {}) == ("", Counter())


@pytest.mark.parametrize("change", [_flip_last_bit, _swap_two_elements])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.proof)])
def test_a_bit_of_a_whole_factor_is_found_over_tp(
    dtype: str, change: Callable[[Tensor], None], pools: Callable[[int], Pool]
) -> None:
    said = _agreed(pools(2), "tp=2", {1: (ROW_B, change)}, dtype=dtype)
    assert said.startswith(
        f"exit code 1: step 7: {ROW_B} must be the same to the bit over tp, and differs over tp: "
        "rank 0 against rank 1, without a majority; drifted are 1 of 28 parameters. Nothing is saved at this step; "
        "the last save, of equal copies, is out/checkpoints/step-000005. Likely cause: a GPU with memory errors"
    )
    assert said.endswith("go on from there in a new run (adapter: out/checkpoints/step-000005)")


def test_odd_rank_of_four_copies_is_named_by_majority(pools: Callable[[int], Pool]) -> None:
    said = _agreed(pools(4), "dp=2,tp=2,sp", {2: (ROW_B, _flip_last_bit)})
    assert f"{ROW_B} must be the same to the bit over dp and tp, and differs over dp and tp" in said
    assert "rank 2 against the 3 of the majority; drifted are 1 of 28" in said


@pytest.mark.parametrize("name", [COLUMN_B, ROW_A])
def test_split_factor_is_compared_over_dp_alone(name: str, pools: Callable[[int], Pool]) -> None:
    said = _agreed(pools(4), "dp=2,tp=2", {3: (name, _flip_last_bit)})
    assert f"{name} must be the same to the bit over dp, and differs over dp: " in said
    assert "rank 1 against rank 3, without a majority; drifted are 1 of 28" in said


def test_copies_that_differ_over_one_axis_name_that_axis(pools: Callable[[int], Pool]) -> None:
    """As after a sum over tp that was left out: the dp ranks still agree."""
    said = _agreed(pools(4), "dp=2,tp=2", dict.fromkeys((1, 3), (ROW_B, _flip_last_bit)))
    assert "over dp and tp, and differs over tp: ranks 0, 2 against ranks 1, 3, without a majority" in said


@pytest.mark.parametrize("name", [COLUMN_B, ROW_A])
def test_parts_of_a_split_factor_may_differ_over_tp(name: str, pools: Callable[[int], Pool]) -> None:
    """A drawn factor has unequal parts anyway; here one is changed on all of its dp copies."""
    assert _agreed(pools(4), "dp=2,tp=2", dict.fromkeys((1, 3), (name, _flip_last_bit))) == ""


def test_first_of_several_is_named_and_all_are_counted(pools: Callable[[int], Pool]) -> None:
    said = _agreed(pools(4), "dp=4", {1: (ROW_B, _flip_last_bit), 3: (COLUMN_B, _negate)})
    assert f"{COLUMN_B} must be the same" in said
    assert "rank 3 against the 3 of the majority; drifted are 2 of 28" in said


def test_factor_of_a_whole_linear_agrees_over_tp_too(pools: Callable[[int], Pool]) -> None:
    """B of an attention that is kept whole: a split one has a part of it on each rank, this one a copy."""
    name = f"{LAYER}.self_attn.q_proj.lora_B"
    said = _agreed(pools(2), "tp=2", {1: (name, _flip_last_bit)}, family="doge")
    assert f"{name} must be the same to the bit over tp" in said


KV_HEADS: dict[str, Any] = {"num_key_value_heads": 2, "num_attention_heads": 8}
KV_B = f"{LAYER}.self_attn.v_proj.lora_B"


def test_kv_head_that_two_of_four_ranks_hold_is_compared_between_them(pools: Callable[[int], Pool]) -> None:
    assert _agreed(pools(4), "tp=4", {}, **KV_HEADS) == ""
    said = _agreed(pools(4), "tp=4", {3: (KV_B, _flip_last_bit)}, **KV_HEADS)
    where = "tp (key/value heads)"
    assert f"{KV_B} must be the same to the bit over {where}, and differs over {where}: " in said
    assert "rank 2 against rank 3, without a majority; drifted are 1 of 28" in said


def test_kv_heads_of_different_ranks_may_differ(pools: Callable[[int], Pool]) -> None:
    """Both copies of the second head are changed alike."""
    assert _agreed(pools(4), "tp=4", dict.fromkeys((2, 3), (KV_B, _negate)), **KV_HEADS) == ""


def test_axes_come_from_the_rule_and_the_topology() -> None:
    rules = FactorRule((), frozenset({"dp", "tp"})), split_rule(0, Layout.plain(6))
    # No two ranks hold equal copies, and the second sum alone tells it.
    everyone = torch.stack([torch.zeros(6, 2, dtype=torch.int64), torch.arange(6).view(6, 1).expand(6, 2)], dim=2)
    found = {
        topology: [sorted(axes) for axes in find_drifts(everyone, _replicas(rules, topology), topology).values()]
        for topology in (Topology(dp=6), Topology(tp=6), Topology(dp=2, tp=3))
    }
    assert list(found.values()) == [[["dp"], ["dp"]], [["tp"]], [["dp", "tp"], ["dp"]]]


def _replicas(rules: Iterable[FactorRule], topology: Topology) -> list[frozenset[str]]:
    """Along which axes each parameter has copies."""
    parts = [part for rule in rules for part in rule.parts(rank=0, size=topology.tp)]
    return [replicated_over(part, topology) for part in parts]


def test_copies_of_experts_lie_along_the_axes_of_experts() -> None:
    first, second = (
        ExpertRule("", split, 6, 6, False, Layout.plain(6), num_experts=4) for split in (Split.COLUMN, Split.ROW)
    )
    a, b = expert_rule(first, Side.INPUT), expert_rule(second, Side.INPUT)
    shared = expert_rule(first, Side.INPUT, is_shared=True)
    topology = Topology(dp=8, ep=2, etp=2)
    assert _replicas([a, b, shared], topology) == [{"edp", "etp"}, {"edp"}, {"edp", "ep", "etp"}]
    everyone = torch.zeros(8, 1, 2, dtype=torch.int64)
    everyone[5] = 1  # edp 1, ep 0, etp 1
    assert list(find_drifts(everyone, [frozenset({"edp", "etp"})], topology).values()) == [{"edp", "etp"}]
    everyone[1] = 1  # its copy along edp
    assert find_drifts(everyone, [frozenset({"edp"})], topology) == {}
    assert list(find_drifts(everyone, [frozenset({"edp", "etp"})], topology).values()) == [{"etp"}]


def test_axes_of_rows_that_several_tp_ranks_hold_are_their_own() -> None:
    """Six tp ranks and two heads: ranks 0 to 2 hold one, 3 to 5 the other."""
    rule = split_rule(0, Layout.plain(2, 4, can_replicate=True))
    topology = Topology(tp=6)
    (axes,) = _replicas([rule], topology)
    assert axes == {"kv/3"}
    alike = torch.tensor([0, 0, 0, 1, 1, 1]).view(6, 1, 1).expand(6, 1, 2)
    assert find_drifts(alike, [axes], topology) == {}
    across = torch.tensor([0, 0, 1, 1, 1, 1]).view(6, 1, 1).expand(6, 1, 2)
    assert find_drifts(across, [axes], topology) == {0: {"kv/3"}}


# --- in a run -------------------------------------------------------------------------------------------------------

STEPS = 4


def _run_file(folder: Path, topology: str, **train: Any) -> Path:
    copy_lines("train", folder / "train.jsonl", 0, 8)
    options = {"steps": STEPS, "lr": 1e-3, **train}
    return write_run_file(
        folder / "out.yaml", model={"dtype": "float32"}, train=options, topology=topology, device="cpu"
    )


def _train_with_a_fault(file: Path, world: int, at_step: int, on_rank: int) -> str:
    """What the run says where it fails. After `at_step` (0: the start) an element of a whole factor is off."""
    train, train_step = Trainer.train, Trainer.train_step

    def plant(trainer: Trainer, done: int) -> None:
        if done == at_step and trainer.mesh.rank == on_rank:
            factor = next(f for f in active_factors(trainer.model) if f.name == ROW_B)
            factor.parameter.data[3, 2] += 0.01

    def faulty_train(self: Trainer) -> None:
        plant(self, 0)
        train(self)

    def faulty_step(self: Trainer, adapters: list[TrainedAdapter]) -> Any:
        metrics = train_step(self, adapters)
        plant(self, adapters[0].done + 1)
        return metrics

    with (
        mock.patch.object(Trainer, "train", faulty_train),
        mock.patch.object(Trainer, "train_step", faulty_step),
        mock.patch.object(meshlora.run.run, "leave"),  # it would close the group that the pool needs
    ):
        run = prepare_run(read_run(file), world=world)
        wait_for_all(world)  # rank 0 makes the output folder, which a rank that still prepares would refuse
        try:
            meshlora.run.run.train({"": run})
        except meshlora.MeshloraError as error:
            return str(error)
    return ""


def _saved(output: Path) -> list[str]:
    return sorted(str(file.parent.relative_to(output)) for file in output.rglob("adapter_config.json"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "fault_at", "found_at", "saved"),
    [
        pytest.param({}, 0, 0, [], id="before_the_start"),
        pytest.param({"replica_check_every": 3}, 1, 3, ["initial"], id="every_so_many_steps", marks=pytest.mark.proof),
        pytest.param({"save_every": 2}, 1, 2, ["initial"], id="before_a_checkpoint", marks=pytest.mark.proof),
        pytest.param({"save_every": 2}, 3, STEPS, ["checkpoints/step-000002", "initial"], id="before_the_end"),
    ],
)
def test_drift_in_a_run_stops_all_ranks_and_saves_nothing(
    options: dict[str, int],
    fault_at: int,
    found_at: int,
    saved: list[str],
    tmp_path: Path,
    pools: Callable[[int], Pool],
) -> None:
    said, *others = pools(4).run(_train_with_a_fault, _run_file(tmp_path, "dp=2,tp=2", **options), 4, fault_at, 1)
    assert others == [said] * 3
    assert said.startswith(f"step {found_at}: {ROW_B} must be the same to the bit over dp and tp")
    assert "rank 1 against the 3 of the majority" in said
    last = (
        f"the last save, of equal copies, is {tmp_path / 'out' / saved[0]}" if saved else "nothing has been saved yet"
    )
    assert f"Nothing is saved at this step; {last}. " in said
    assert _saved(tmp_path / "out") == saved
    lines = metrics_of(tmp_path / "out")
    assert [line["step"] for line in lines] == list(range(1, found_at + 1))


def test_zero_turns_the_check_off(tmp_path: Path, pools: Callable[[int], Pool]) -> None:
    file = _run_file(tmp_path, "tp=2", replica_check_every=0)
    assert pools(2).run(_train_with_a_fault, file, 2, 0, 1) == ["", ""]
    assert _saved(tmp_path / "out") == ["adapter", "initial"]


def test_it_is_on_unless_turned_off(tmp_path: Path) -> None:
    assert read_run(_run_file(tmp_path, "tp=2")).train.replica_check_every == 100
    with pytest.raises(meshlora.UserError, match=r"train\.replica_check_every=-1: it must be not negative"):
        read_run(_run_file(tmp_path, "tp=2", replica_check_every=-1))
