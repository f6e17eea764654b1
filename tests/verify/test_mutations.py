"""The kill table: every deliberate fault is caught on each of its topologies, and the run without it passes.

For many of them also that the diagnosis names the right module and cause.
"""

from __future__ import annotations

import pytest

from meshlora.plan.topology import Topology
from meshlora.verify.document import is_proved
from meshlora.verify.mutations import MUTATIONS
from meshlora.verify.proof import Outcome
from tests.conftest import Prove

FAMILIES = ("llama", "qwen3")
TOPOLOGIES = ("tp=2", "tp=2,sp", "dp=2", "dp=2,tp=2,sp")
# The last layer is the first whose gradients are computed, and the first layer the first that runs.
LAST_MLP, FIRST_ATTENTION = "model.layers.1.mlp", "model.layers.0.self_attn"

# mutation -> (topology, phase, where, words of the cause).
DIAGNOSES = {
    "row_output_not_reduced": ("tp=2", "forward", f"{FIRST_ATTENTION}.o_proj", "not reduced over tp"),
    "row_output_averaged": ("tp=2,sp", "forward", f"{FIRST_ATTENTION}.o_proj", "averaged over tp instead of summed"),
    "row_output_reduced_twice": ("tp=2,sp", "forward", f"{FIRST_ATTENTION}.o_proj", "reduced over tp twice"),
    "column_bias_of_rank_0": ("tp=2", "forward", f"{FIRST_ATTENTION}.q_proj", "bias is missing, or is another rank's"),
    "row_bias_on_every_rank": ("tp=2", "forward", f"{FIRST_ATTENTION}.o_proj", "bias of a row-parallel linear"),
    "base_shards_reversed": ("tp=2", "forward", f"{FIRST_ATTENTION}.o_proj", "another rank's slice"),
    "column_input_gradient_not_reduced": (
        "tp=2",
        "backward",
        "model.layers.1.post_attention_layernorm",
        f"column-parallel linears of {LAST_MLP} is not reduced",
    ),
    "column_input_gradient_reduced_per_linear": ("tp=2", "collectives", "backward allreduce", "once per linear"),
    "column_a_not_summed": ("tp=2", "gradients", f"{LAST_MLP}.up_proj.lora_A", "A of column-parallel linears is not"),
    "row_b_not_summed": ("tp=2,sp", "gradients", f"{LAST_MLP}.down_proj.lora_B", "B of row-parallel linears is not"),
    "factor_gradients_averaged": ("tp=2", "gradients", f"{LAST_MLP}.down_proj.lora_B", "averaged over tp"),
    "a_gradient_without_scale": ("tp=2", "gradients", f"{LAST_MLP}.down_proj.lora_A", "0.5 times what it should be"),
    "dp_reduction_skipped": ("dp=2", "gradients", f"{LAST_MLP}.down_proj.lora_B", "not summed over dp"),
    "dp_mean_of_means": ("dp=2", "gradients", f"{LAST_MLP}.down_proj.lora_B", "weighed unequally"),
    "local_token_count": ("dp=2", "gradients", f"{LAST_MLP}.down_proj.lora_B", "its own token count"),
    "micro_batch_means": ("dp=2", "loss", "loss of step 1", "mean of micro-batch means"),
    "accumulation_indices_of_rank_0": ("dp=2", "sequences", "sequence 0", "accumulation index"),
    "dummy_micro_batch_counted": ("dp=2", "sequences", "tokens of step 1", "dummy micro-batch"),
    "labels_not_shifted": ("dp=2", "loss", "loss of step 1", "other labels"),
    "epochs_in_one_order": ("dp=2", "deltas", f"{FIRST_ATTENTION}.q_proj.lora_A", "later ones take other sequences"),
    "evaluation_per_sequence": ("dp=2", "loss", "loss of evaluation 1", "how it is averaged"),
    "labels_shifted_after_the_split": ("tp=2,sp", "sequences", "tokens of step 1", "labels shifted after"),
    "kaiming_on_local_fan_in": ("tp=2", "fresh_adapter", f"{FIRST_ATTENTION}.o_proj.lora_A", "local fan-in"),
    "a_drawn_per_rank": ("tp=2", "fresh_adapter", f"{FIRST_ATTENTION}.q_proj.lora_A", "seed depends on the rank"),
    "lora_scale_divided_by_tp": ("tp=2", "forward", f"{FIRST_ATTENTION}.q_proj", "scale is divided by tp"),
    "lora_scale_squared": ("tp=2", "forward", f"{FIRST_ATTENTION}.q_proj", "scale is 2 times"),
    "sp_slices_rotated": ("tp=2,sp", "forward", "model.layers.0.input_layernorm", "wrong order"),
    "sp_gather_reversed": ("tp=2,sp", "forward", f"{FIRST_ATTENTION}.q_proj", "wrong order"),
    "clip_norm_counts_replicas": ("tp=2", "grad_norm", "norm of step 1", "counted as often as there are ranks"),
    "clip_before_reduction": ("tp=2", "gradients", f"{LAST_MLP}.down_proj.lora_B", "clipped or scaled before the sum"),
    "clipping_skipped": ("tp=2", "grad_norm", f"clipped {LAST_MLP}.down_proj.lora_B", "clipped gradients are not"),
    "warmup_skipped": ("tp=2", "deltas", f"{FIRST_ATTENTION}.q_proj.lora_A", "rate of step 2 is 0.00667, not 0.01"),
    "weight_decay_skipped": ("tp=2", "deltas", f"{FIRST_ATTENTION}.q_proj.lora_A", "weight decay"),
    "default_betas": ("dp=2", "deltas", f"{FIRST_ATTENTION}.q_proj.lora_A", "betas"),
    "last_step_left_out": ("dp=2", "deltas", f"{FIRST_ATTENTION}.q_proj.lora_A", "2 optimizer steps were taken, not 3"),
    "scale_of_fresh_squared": (
        "tp=2",
        "fresh_adapter",
        "fresh/adapter_config.json",
        "its scale, is not what PEFT says",
    ),
    "adapter_loaded_on_rank_0_only": ("tp=2", "loaded_adapter", f"{FIRST_ATTENTION}.q_proj.lora_A", "hold zeros"),
    "shard_missing_in_file": ("tp=2", "saved_file", "", "shard of tp rank 1 is missing"),
    "shards_reversed_in_file": ("tp=2", "saved_file", "", "reversed order"),
    "whole_entries_duplicated_in_file": ("tp=2", "saved_file", "adapter_model.safetensors", "more than once"),
    "rounded_in_file": ("tp=2", "saved_file", "", "rounded"),
    "extra_entry_in_file": (
        "dp=2",
        "saved_file",
        "run/adapter/adapter_model.safetensors",
        "entries that no factor has",
    ),
    "alpha_doubled_in_file": ("dp=2", "saved_file", "logits of PEFT", "lora_alpha is 32, not 16"),
    "target_missing_in_fresh_file": ("dp=2", "saved_file", "", "target_modules is"),
}


@pytest.fixture(scope="module", params=FAMILIES)
def outcomes(request: pytest.FixtureRequest, prove: Prove) -> list[Outcome]:
    """Every mutation on every topology of one family, and the runs without any."""
    return prove(family=request.param, topologies=TOPOLOGIES, mutations=tuple(MUTATIONS))


def test_every_fault_is_caught_and_the_run_without_it_passes(outcomes: list[Outcome]) -> None:
    plain = [o for o in outcomes if o.mutation is None]
    assert [str(o.topology) for o in plain] == list(TOPOLOGIES)
    assert all(o.passed for o in plain), [(o.topology, o.divergence) for o in plain]
    survivors = [(str(o.topology), o.mutation) for o in outcomes if o.mutation and o.passed]
    assert not survivors
    assert is_proved(outcomes)


def test_faults_are_caught_by_a_difference_not_by_a_crash(outcomes: list[Outcome]) -> None:
    assert [(str(o.topology), o.mutation, o.error) for o in outcomes if o.error] == []


def test_no_fault_is_left_out_where_it_can_show(outcomes: list[Outcome]) -> None:
    ran = {
        topology: {o.mutation for o in outcomes if o.topology == topology}
        for topology in map(Topology.parse, TOPOLOGIES)
    }
    for topology, names in ran.items():
        has = (
            {"scale", "steps", "targets", "digits"}
            | {a for a in ("dp", "tp") if getattr(topology, a) > 1}
            | ({"sp"} if topology.sp else set())
        )
        if topology.tp > 1:
            has |= {"row_bias", "column_bias"}
        assert names == {None} | {name for name, mutation in MUTATIONS.items() if mutation.needs <= has}
    # A block that mixes tokens and is kept whole is what these families do not have; the test below has one.
    assert set(MUTATIONS) - set().union(*ran.values()) == {"whole_region_sees_its_slice"}


def test_block_that_sees_only_its_slice_of_the_tokens_is_caught(prove: Prove) -> None:
    name = "whole_region_sees_its_slice"
    plain, mutated = prove(family="qwen3_5_text", topologies=("tp=2,sp",), mutations=(name,))
    assert plain.passed, plain.divergence
    assert mutated.divergence is not None
    assert "saw only its rank's slice of the tokens" in mutated.divergence.cause


@pytest.mark.parametrize("mutation", DIAGNOSES)
def test_diagnosis_names_the_module_and_the_cause(mutation: str, outcomes: list[Outcome]) -> None:
    topology, phase, where, words = DIAGNOSES[mutation]
    (outcome,) = [o for o in outcomes if o.mutation == mutation and str(o.topology) == topology]
    found = outcome.divergence
    assert found is not None
    assert (found.phase, found.name) == (phase, where or found.name)
    assert words in found.cause, found.cause


@pytest.mark.parametrize(
    ("mutation", "ratio"),
    [("row_output_averaged", 0.5), ("row_output_reduced_twice", 2.0), ("factor_gradients_averaged", 0.5)],
)
def test_missing_or_doubled_reduction_shows_its_ratio(mutation: str, ratio: float, outcomes: list[Outcome]) -> None:
    (outcome,) = [o for o in outcomes if o.mutation == mutation and str(o.topology) == "tp=2,sp"]
    assert outcome.divergence is not None
    assert outcome.divergence.ratio == ratio
    assert outcome.divergence.ranks == [0, 1]


def test_only_the_wrong_ranks_are_named(outcomes: list[Outcome]) -> None:
    by_name = {o.mutation: o.divergence for o in outcomes if str(o.topology) == "tp=2"}
    assert by_name["adapter_loaded_on_rank_0_only"].ranks == [1]  # type: ignore[union-attr]
    assert by_name["b_unequal_on_replicas"].ranks == [1]  # type: ignore[union-attr]
    assert by_name["column_bias_of_rank_0"].ranks == [1]  # type: ignore[union-attr]
    assert by_name["shards_reversed_in_file"].ranks == []  # type: ignore[union-attr]
