"""The options of a run file, each with the test that fails where the product ignores it."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

from meshlora.run.config import endings, metrics, rl
from meshlora.run.config import run_file as module
from meshlora_ground.objectives.kinds import KINDS
from meshlora_ground.versions import file_of, name_of

# Group of the run file -> its options; "" is the file itself.
GROUPS: dict[str, type] = {
    "model": module.ModelConfig,
    "data": module.DataConfig,
    "data.train": module.Source,
    "generate": module.GenerateConfig,
    "train": module.TrainConfig,
    "generate.metrics": metrics.RegexMetric,
    "train.early_stopping": endings.EarlyStopping,
    "train.on_spike": endings.LossSpike,
    **{f"train.objective.{name}": kind for name, kind in KINDS.items()},
    "rl": rl.RlConfig,
    **{f"rl.rewards.{name}": kind for name, kind in rl.REWARDS.items()},
    "": module.RunConfig,
}

_LORA = "{'r': 8, 'target_modules': 'all-linear'}"
# What takes the place of what is given, of `self`, where the default would not be legal.
_INSTEAD = {
    "model.path": "{'path': 'examples/tiny_base'}",
    "data.train": "{'train': 'examples/docstrings/train.jsonl'}",
    "data.train.path": "{'path': 'examples/docstrings/train.jsonl'}",
    "train.output": "{'output': self.output + '-of-others'}",
    "train.steps": "{'steps': self.steps and self.steps + 1}",
    "train.epochs": "{'epochs': self.epochs and self.epochs + 1}",
    "generate.metrics.regex": "{'regex': 'nothing like that'}",
    "rl.rewards": "{'rewards': [RegexReward(pattern='nothing like that')]}",
    "rl.rewards.regex.pattern": "{'pattern': 'nothing like that'}",
    "rl.rewards.json_schema.schema": "{'schema': {}}",
    "rl.rewards.function.name": "{'name': 'math:sqrt'}",
    "rl.rewards.model.path": "{'path': 'examples/tiny_base'}",
    "lora": f"{{'lora': self.lora and {_LORA}}}",
    "adapter": f"{{'adapter': None, 'lora': self.lora or {_LORA}}}",
}
_IGNORING = '''

def _ignoring(checks):
    """The checks see what is given, all others what takes its place."""

    def __post_init__(self):
        checks(self)
        vars(self).update({instead})

    return __post_init__


{kind}.__post_init__ = _ignoring({kind}.__post_init__)
'''
# A preset is read before there are options.
_PRESET = ('name = tree.get("preset")', "name = None")


def options() -> list[str]:
    """All that a run file can say, as in `train.lr`."""
    return [
        f"{group}.{field.name}".removeprefix(".")
        for group, kind in GROUPS.items()
        for field in dataclasses.fields(kind)
        if (group or field.name not in GROUPS) and field.name != "kind"
    ]


def ignoring(option: str) -> dict[str, str]:
    """The file of the package, with its text, that makes the product ignore `option`: whatever a run file gives, all
    but the checks of its own group read the default, or another legal value where there is none.
    """
    if option == "preset":
        text = file_of("run/config/presets.py").read_text("utf-8")
        assert text.count(_PRESET[0]) == 1
        return {"run/config/presets.py": text.replace(*_PRESET)}
    group, _, name = option.rpartition(".")
    kind = GROUPS[group]
    (field,) = (field for field in dataclasses.fields(kind) if field.name == name)
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    has_value = option in _INSTEAD or default is not dataclasses.MISSING
    assert has_value, f"{option} has no default: name another legal value in _INSTEAD"
    instead = _INSTEAD.get(option, repr({name: default}))
    path = Path(inspect.getfile(kind))
    file, text = name_of(path), path.read_text("utf-8")
    return {file: text + _IGNORING.replace("{kind}", kind.__name__).replace("{instead}", instead)}


_OPTIONS, _EVALUATE = "tests/unit/test_options.py", "tests/extra/test_evaluate.py"
_SLICES = "tests/unit/test_data_row_slices.py"
_SCHEDULE = "tests/unit/test_schedule.py::test_after_the_warm_up_rates_are_those_of_transformers"
_OPTIMIZER, _TRACKING = "tests/unit/test_optimizer.py", "tests/unit/test_tracking.py"
_ADAM = f"{_OPTIMIZER}::test_adam_has_the_constants_of_the_run_file"
_DECODING = f"{_EVALUATE}::test_every_option_of_decoding_has_an_effect"
_AT_ONCE = f"{_EVALUATE}::test_continuations_have_at_most_so_many_tokens_and_so_many_prompts_are_continued_at_once"
_KEEPING = "tests/ranks/test_not_finite.py::test_last_and_best_checkpoints_stay"
_EARLY = "tests/unit/test_early_stopping.py::test_run_ends_at_the_evaluation_that_is_one_too_many"
_SPIKE = "tests/unit/test_spikes.py::test_planted_spike_ends_the_run"
_LENGTH = "tests/unit/test_length.py"
_ANSWERS, _METRICS = "tests/ranks/test_answers.py", "tests/unit/test_answer_metrics.py"
_EXPERTS = "tests/ranks/test_training_experts.py"
# What the proof itself sees.
_POLICY = "tests/verify/test_packing.py::test_policy_reads_its_columns_and_the_base_in_packed_rows"
# Both sides of a proof are given the same value: that its parameters are read is seen by formulas in plain torch.
_REFERENCE = "tests/ranks/test_reference.py"
_HEADS = "tests/unit/test_heads.py"
_TRL = "tests/unit/test_trl_formulas.py::test_loss_and_gradient_are_those_of_trl"
_FORMULAS = "tests/unit/test_objectives.py::test_objective_is_the_formula_of_its_paper"
_RUN = "tests/ranks/test_train_objectives.py::test_run_gives_the_adapter_of_one_process_on_every_mesh[policy]"
_DPO = "tests/verify/test_objectives.py::test_layers_that_are_computed_twice_have_the_masks_of_the_first_time"
_SFT = "tests/verify/test_objectives.py::test_objective_is_that_of_one_process_on_every_mesh[sft]"

_JUDGED = "tests/extra/test_rewards.py::test_a_completion_that_cannot_be_judged_ends_the_run_or_is_counted"
_REWARDS, _RL = "tests/extra/test_rewards.py", "tests/extra/test_rl.py"
_PUBLISH = "tests/extra/test_publish.py"
_LIMITS = f"{_REWARDS}::test_a_program_ends_within_its_limits"
_GENERATION = f"{_RL}::test_own_generation_has_the_options_of_the_run_file"

# Option -> the test that fails where the product ignores it.
CAUGHT_BY: dict[str, str] = {
    "model.path": f"{_EVALUATE}::test_loss_is_that_of_transformers_and_peft_over_the_whole_file",
    "model.revision": "tests/unit/test_hub.py::test_revision_of_the_run_file_is_the_one_that_is_read[old]",
    **dict.fromkeys(
        ("model.add_tokens", "model.add_special_tokens"),
        "tests/extra/test_added_tokens.py::test_new_rows_are_the_mean_and_the_same_to_the_bit[tied]",
    ),
    "model.dtype": f"{_OPTIONS}::test_model_computes_in_the_dtype_of_the_run_file",
    "model.attn_implementation": "tests/verify/test_preflight.py::test_attention_of_the_run_is_that_of_the_proof",
    "model.trust_remote_code": f"{_OPTIONS}::test_code_beside_a_model_runs_where_the_run_file_trusts_it",
    "model.disable_dropout": f"{_OPTIONS}::test_dropout_that_is_not_supported_is_disabled_where_the_run_file_says_so",
    "model.allow_unused_weights": f"{_OPTIONS}::test_weights_without_a_place_are_left_out_where_the_run_file_allows_it",
    "model.quantization": (
        "tests/ranks/test_quantized_runs.py::test_a_run_gives_the_same_bytes_sharded_over_dp_and_a_plain_peft_folder"
    ),
    "model.compute": f"{_OPTIONS}::test_products_are_in_float8_where_the_run_file_says_so",
    "model.kernels": f"{_OPTIONS}::test_kernels_that_a_cpu_has_not_are_refused_where_the_run_file_names_them",
    "model.plan": (
        "tests/unit/test_found_plans.py::test_saved_plan_is_taken_back_and_that_of_other_units_or_code_is_refused"
    ),
    "data.train": f"{_OPTIONS}::test_data_are_those_of_the_files_that_are_named",
    "data.eval": f"{_OPTIONS}::test_data_are_those_of_the_files_that_are_named",
    "data.columns": f"{_OPTIONS}::test_columns_of_the_run_file_are_read",
    **dict.fromkeys(
        ("data.train.path", "data.train.weight"), f"{_OPTIONS}::test_sources_are_drawn_by_their_weights_on_any_mesh"
    ),
    **dict.fromkeys(
        ("data.train.split", "data.train.columns", "data.train.format"),
        f"{_OPTIONS}::test_a_source_has_a_split_columns_and_a_format_of_its_own",
    ),
    "data.train.rows": f"{_SLICES}::test_rows_of_a_source_are_those_of_the_run_file",
    "data.map": "tests/unit/test_data_map.py::test_rows_are_what_the_function_makes_of_each",
    "data.max_samples": f"{_SLICES}::test_at_most_so_many_rows_of_each_source_are_read",
    "data.shuffle": f"{_SLICES}::test_epochs_have_the_order_of_the_files_where_nothing_is_shuffled",
    "data.format": f"{_OPTIONS}::test_rows_are_read_in_the_format_of_the_run_file",
    "data.prompt": f"{_OPTIONS}::test_instructions_are_written_in_the_style_of_the_run_file",
    "data.system": f"{_OPTIONS}::test_system_says_what_the_run_file_gives_where_it_says_nothing",
    "data.max_length": f"{_OPTIONS}::test_sequences_are_cut_to_the_length_of_the_run_file",
    "data.packing": f"{_OPTIONS}::test_sequences_share_a_row_where_the_run_file_says_so",
    "data.train_on": f"{_OPTIONS}::test_prompts_are_trained_where_the_run_file_says_so",
    "data.too_long": f"{_OPTIONS}::test_long_records_are_left_out_where_the_run_file_says_so",
    "data.turns": f"{_OPTIONS}::test_a_step_on_answers_that_are_apart_is_the_step_on_their_conversations",
    **dict.fromkeys(
        ("data.answers", "data.lost_text"),
        f"{_OPTIONS}::test_answers_are_taken_as_they_are_given_where_the_run_file_says_so",
    ),
    "data.empty_answers": f"{_OPTIONS}::test_empty_answers_are_left_out_where_the_run_file_says_so",
    "data.streaming": "tests/unit/test_data_streamed.py::test_run_is_the_one_that_holds_its_records",
    "data.follow_s": "tests/ranks/test_followed.py::test_steps_are_the_files_as_they_come[dp=2]",
    "data.chat_template": f"{_OPTIONS}::test_conversations_are_rendered_by_the_template_of_the_run_file",
    "data.stop_tokens": f"{_OPTIONS}::test_answers_end_at_the_stop_tokens_of_the_run_file",
    "data.on_bad_row": f"{_OPTIONS}::test_bad_rows_are_passed_over_where_the_run_file_says_so",
    "data.date": "tests/unit/test_data_clock.py::test_a_resumed_run_writes_the_day_on_which_it_was_begun",
    "data.separator": "tests/unit/test_nlg_data.py::test_tokens_are_those_of_microsofts_encoder",
    "data.eval_categories": f"{_EVALUATE}::test_only_categories_that_are_asked_for_are_evaluated",
    "data.cache_dir": f"{_OPTIONS}::test_tokens_are_cached_where_the_run_file_says",
    "data.eval_limit": f"{_EVALUATE}::test_only_the_first_sequences_are_evaluated_where_a_limit_is_set",
    "data.sample_prompts": (
        "tests/ranks/test_samples.py::test_samples_are_what_the_adapter_says_on_one_process[tp=2,sp]"
    ),
    "generate.max_new_tokens": _AT_ONCE,
    "generate.num_beams": _DECODING,
    "generate.length_penalty": _DECODING,
    "generate.no_repeat_ngram_size": _DECODING,
    "generate.search": _DECODING,
    "generate.stop": _DECODING,
    "generate.do_sample": _DECODING,
    "generate.temperature": _DECODING,
    "generate.top_p": _DECODING,
    "generate.batch_size": _AT_ONCE,
    "generate.seed": _DECODING,
    "generate.metrics": f"{_ANSWERS}::test_metrics_are_those_of_transformers_and_peft_and_change_no_step",
    "generate.metrics.regex": f"{_METRICS}::test_an_answer_is_worth",
    "generate.metrics.whole": f"{_METRICS}::test_an_answer_is_worth",
    "generate.metrics.name": f"{_METRICS}::test_means_are_over_the_answers",
    "generate.limit": f"{_ANSWERS}::test_a_run_ends_when_the_metric_rises_no_more",
    "train.output": _KEEPING,
    "train.steps": f"{_TRACKING}::test_tensorboard_reads_back_every_number",
    "train.epochs": f"{_OPTIONS}::test_epochs_are_passes_over_the_data",
    "train.batch_size": f"{_OPTIONS}::test_epochs_are_passes_over_the_data",
    "train.micro_batch_size": f"{_OPTIONS}::test_so_many_sequences_are_computed_at_once",
    "train.lr": _SCHEDULE,
    "train.schedule": _SCHEDULE,
    "train.warmup_steps": _SCHEDULE,
    "train.warmup_from_zero": "tests/unit/test_schedule.py::test_rates_are_those_of_microsofts_own_schedulers",
    "train.min_lr": _SCHEDULE,
    "train.decay_steps": _SCHEDULE,
    "train.decay_type": _SCHEDULE,
    "train.num_cycles": _SCHEDULE,
    "train.power": _SCHEDULE,
    "train.timescale": _SCHEDULE,
    "train.warmup_ratio": f"{_LENGTH}::test_a_warm_up_by_its_share_has_the_rates_of_its_steps",
    "train.cycle": "tests/unit/test_schedule.py::test_cycle_is_straight_lines_through_its_points",
    "train.weight_decay": f"{_OPTIMIZER}::test_all_is_decayed_unless_asked_otherwise",
    "train.decay_biases_and_norms": f"{_OPTIMIZER}::test_biases_and_norms_are_left_out_as_in_transformers",
    **{f"train.{name}": _ADAM for name in ("beta1", "beta2", "eps")},
    "train.max_grad_norm": _POLICY,
    "train.on_spike": _SPIKE,
    "train.on_spike.factor": _SPIKE,
    "train.on_spike.above": _SPIKE,
    "train.on_spike.patience": _SPIKE,
    "train.on_spike.then": "tests/unit/test_spikes.py::test_note_says_it_and_the_run_goes_on",
    "train.on_spike.window": "tests/unit/test_spikes.py::test_the_median_is_of_the_last_losses",
    "train.early_stopping": _EARLY,
    "train.early_stopping.patience": _EARLY,
    "train.early_stopping.metric": f"{_ANSWERS}::test_the_best_checkpoint_is_the_one_with_the_best_answers",
    "train.early_stopping.min_delta": "tests/unit/test_early_stopping.py::test_small_improvement_is_none",
    "train.objective": _RUN,
    **{
        f"train.objective.{option}": f"{_FORMULAS}[{option.partition('.')[0]}]"
        for option in (
            "sft.label_smoothing",
            *("dpo.beta", "dpo.label_smoothing", "orpo.beta"),
            *("kto.beta", "kto.desirable_weight", "kto.undesirable_weight"),
            *("simpo.beta", "simpo.gamma", "simpo.label_smoothing"),
        )
    },
    **{
        f"train.objective.{option}": f"{_FORMULAS}[{case}]"
        for case, options_of_case in {
            "sft-dft": ("sft.loss",),
            "dpo-by length": ("dpo.loss", "dpo.loss_weights", "dpo.length_weight"),
            "dpo-weighted": ("dpo.weighted",),
            "dpo-discovered": ("dpo.discopop_tau", "dpo.f_divergence", "dpo.f_alpha"),
            "kto-apo": ("kto.loss",),
        }.items()
        for option in options_of_case
    },
    **{
        f"train.objective.{kind}.{option}": f"{_FORMULAS}[{kind}{case}]"
        for kind in ("policy", "grpo")
        for case, options_of_case in {
            "": ("clip_low", "clip_high", "kl_coef", "importance_cap", "entropy_coef"),
            "-of sequences": ("ratio",),
            "-by a constant": ("loss", "kl", "mean_over", "max_completion_length"),
            "-squashed": (
                *("sapo_temperature_pos", "sapo_temperature_neg"),
                *("correction", "importance_floor", "kl_correction"),
            ),
            "-of a weight": ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
            "-bounded": ("delta", "off_policy_mask"),
        }.items()
        for option in options_of_case
    },
    **{f"train.objective.{kind}.top_entropy": f"{_TRL}[cispo-top_entropy]" for kind in ("policy", "grpo")},
    **{
        f"train.objective.{kind}.mask_truncated": (
            "tests/verify/test_objectives.py::test_truncated_rollouts_are_compared_and_train_nothing"
        )
        for kind in ("policy", "grpo")
    },
    **{
        f"train.objective.{kind}.reference": f"{_REFERENCE}::test_evaluate_compares_with_the_same_policy[{kind}]"
        for kind in ("policy", "grpo", "dpo", "kto")
    },
    **{
        f"train.objective.distill.{option}": f"tests/unit/test_distillation.py::{test}"
        for option, test in {
            "teacher": "test_loss_over_the_likeliest_tokens_is_that_of_trl[True-jsd-bucket]",
            "context": "test_the_teacher_alone_sees_the_context",
            "divergence": "test_loss_and_gradient_are_those_of_gkd[reverse_kl-1.7]",
            "beta": "test_loss_and_gradient_are_those_of_gkd[jsd-1.7]",
            "temperature": "test_loss_and_gradient_are_those_of_gkd[jsd-1.7]",
            "cross_entropy": "test_cross_entropy_is_of_the_data_at_temperature_1",
            "top_k": "test_loss_over_the_likeliest_tokens_is_that_of_trl[False-jsd-bucket]",
            "rest": "test_loss_over_the_likeliest_tokens_is_that_of_trl[False-jsd-renormalize]",
        }.items()
    },
    "train.objective.distill.reference": "tests/ranks/test_distillation.py::test_a_teacher_is_the_reference",
    "train.objective.grpo.scale_rewards": (
        "tests/unit/test_objectives.py::test_rewards_are_compared_within_their_group[batch-divisors2]"
    ),
    **{
        f"train.objective.{option}": f"{_HEADS}::{test}"
        for option, test in {
            "classify.labels": "test_labels_go_by_name_or_number_and_stay_with_their_text",
            "classify.num_labels": "test_wrong_record_is_named_with_its_line",
            "classify.problem": "test_labels_go_by_name_or_number_and_stay_with_their_text",
            "classify_tokens.labels": "test_label_of_a_word_is_that_of_its_first_token",
            "classify_tokens.num_labels": "test_wrong_record_is_named_with_its_line",
            "embed.pooling": "test_one_token_is_taken_and_never_the_padding[last-2]",
            "embed.temperature": "test_embeddings_of_a_step_in_parts_have_the_gradient_of_all_at_once[True]",
            "embed.normalize": "test_embeddings_of_a_step_in_parts_have_the_gradient_of_all_at_once[False]",
        }.items()
    },
    "train.objective.reward.center": (
        "tests/unit/test_reward.py::test_loss_of_pairs_has_their_margins_and_the_square_of_their_sum"
    ),
    "rl.rewards": f"{_RL}::test_records_are_the_completions_of_groups_with_their_rewards",
    "rl.completions": f"{_RL}::test_records_are_the_completions_of_groups_with_their_rewards",
    **{f"rl.{name}": _GENERATION for name in ("max_new_tokens", "temperature", "stop", "batch_size")},
    "rl.source": f"{_RL}::test_recorded_rollouts_give_one_adapter_and_that_of_transformers[tp=2,sp]",
    "rl.updates": f"{_RL}::test_a_generation_is_used_for_several_updates",
    "rl.on_policy": ("tests/extra/test_rl_distillation.py::test_a_share_of_the_steps_has_the_completions_of_the_data"),
    "rl.publish_to": f"{_PUBLISH}::test_an_adapter_is_published_every_so_many_steps_and_at_the_end",
    "rl.publish_every": f"{_PUBLISH}::test_an_adapter_is_published_every_so_many_steps_and_at_the_end",
    "rl.adapter_name": f"{_PUBLISH}::test_an_engine_samples_with_the_adapter_of_the_step_before",
    **{f"rl.rewards.{kind}.weight": f"{_REWARDS}::test_the_sum_is_weighted" for kind in rl.REWARDS},
    "rl.rewards.regex.on_failure": f"{_JUDGED}[pattern]",
    "rl.rewards.json_schema.on_failure": f"{_JUDGED}[schema]",
    "rl.rewards.regex.pattern": f"{_REWARDS}::test_a_pattern_is_found_or_is_all",
    "rl.rewards.regex.whole": f"{_REWARDS}::test_a_pattern_is_found_or_is_all",
    "rl.rewards.json_schema.schema": f"{_REWARDS}::test_json_is_what_the_schema_accepts",
    "rl.rewards.match.field": f"{_REWARDS}::test_an_answer_is_matched_as_text_or_by_its_last_number",
    "rl.rewards.match.how": f"{_REWARDS}::test_an_answer_is_matched_as_text_or_by_its_last_number",
    "rl.rewards.tests.field": f"{_REWARDS}::test_code_is_that_of_the_block_and_meets_the_tests_of_its_prompt",
    "rl.rewards.tests.with_prompt": f"{_REWARDS}::test_code_is_that_of_the_block_and_meets_the_tests_of_its_prompt",
    "rl.rewards.tests.cpu_s": f"{_LIMITS}[thinks]",
    "rl.rewards.tests.wall_s": f"{_LIMITS}[waits]",
    "rl.rewards.tests.memory_mb": f"{_LIMITS}[takes]",
    "rl.rewards.tests.sandbox": "tests/extra/test_sandbox.py::test_without_a_sandbox_where_the_run_file_says_so",
    "rl.rewards.function.name": f"{_REWARDS}::test_a_function_gets_what_it_takes",
    "rl.rewards.model.path": f"{_REWARDS}::test_a_reward_model_says_what_transformers_says_of_the_whole_text",
    "rl.rewards.model.batch_size": f"{_REWARDS}::test_a_reward_model_says_what_transformers_says_of_the_whole_text",
    "train.router_aux_loss_coef": (f"{_EXPERTS}::test_adapter_and_load_balancing_loss_do_not_depend_on_the_topology"),
    "train.recompute": f"{_OPTIONS}::test_layers_are_computed_twice_where_the_run_file_says_so",
    "train.cuda_graphs": "tests/ranks/test_graphs.py::test_without_a_gpu_on_is_refused_and_auto_runs_eagerly",
    "train.routing_record": f"{_EXPERTS}::test_shorter_record_leaves_no_tail_of_a_longer_one",
    "train.routing_replay": f"{_EXPERTS}::test_record_of_another_order_of_the_data_is_refused",
    "train.optimizer": "tests/verify/test_lora_fa.py::test_preflight_proves_the_optimizer_of_the_run",
    "train.min_8bit_size": "tests/verify/test_eight_bit.py::test_run_goes_on_with_its_codes_on_another_mesh",
    "train.neftune_alpha": "tests/verify/test_noise.py::test_preflight_proves_the_noise_of_the_run",
    "train.lora_plus_ratio": f"{_OPTIMIZER}::test_biases_and_norms_are_left_out_beside_lora_plus",
    "train.lora_plus_embedding_lr": f"{_OPTIMIZER}::test_embedding_has_its_own_rate_beside_lora_plus",
    "train.seed": _DPO,
    "train.eval_every": f"{_TRACKING}::test_tensorboard_reads_back_every_number",
    "train.save_every": _KEEPING,
    "train.sample_every": (
        "tests/ranks/test_samples.py::test_prompts_are_those_of_the_held_out_data_where_none_are_given"
    ),
    "train.log_every": f"{_OPTIONS}::test_every_so_many_steps_are_said",
    "train.merge_at_end": (
        "tests/extra/test_merge_at_end.py::test_what_cannot_be_merged_ends_the_run_before_its_first_step"
    ),
    "train.track": f"{_TRACKING}::test_tensorboard_reads_back_every_number",
    "train.replica_check_every": "tests/ranks/test_replicas.py::test_zero_turns_the_check_off",
    "train.keep_last": _KEEPING,
    "train.keep_best": _KEEPING,
    "train.on_save_error": (
        "tests/ranks/test_full_disk.py::test_full_disk_for_a_while_is_gone_through_where_the_run_file_says_so"
    ),
    "train.on_nonfinite": "tests/ranks/test_not_finite.py::test_ten_skipped_steps_in_a_row_end_the_run",
    "train.timeout_s": f"{_OPTIONS}::test_ranks_are_waited_for_as_long_as_the_run_file_says",
    "train.on_fewer": "tests/extra/test_elastic.py::test_planner_chooses_what_fits",
    "train.deterministic": f"{_OPTIONS}::test_the_same_bytes_are_asked_of_torch_where_the_run_file_says_so",
    "train.require_fast": (
        "tests/unit/test_slow_paths.py::test_a_slow_path_that_is_known_before_ends_a_run_that_requires_fast[check]"
    ),
    "train.overwrite": f"{_EXPERTS}::test_shorter_record_leaves_no_tail_of_a_longer_one",
    "lora": f"{_OPTIONS}::test_adapter_and_topology_are_those_of_the_run_file",
    "adapter": "tests/ranks/test_trainer.py::test_going_on_from_an_adapter_starts_where_it_ended",
    "topology": f"{_OPTIONS}::test_adapter_and_topology_are_those_of_the_run_file",
    "device": "tests/unit/test_user_mistakes.py::test_fewer_gpus_than_processes",
    "preflight": "tests/verify/test_preflight.py::test_preflight_off_in_the_run_file_is_the_option",
    "preset": "tests/unit/test_presets.py::test_microsoft_e2e_is_the_recipe_of_the_paper",
}
