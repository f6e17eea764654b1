"""Faults in what of a run is outside of its proof, each with the test that fails with it.

That is routing recorded and replayed, several adapters in one run, `meshlora evaluate`, checkpoints with experts,
generation, and adapters merged in memory.
The faults are of the kind that nobody sees: wrong numbers, and no error.
"""

from __future__ import annotations

from tests.changed import Fault

_ROUTING, _OF_RUN = "meshlora_ground/routing.py", "wings/experts/routing.py"
_TRAINING = "tests/ranks/test_training_experts.py"
_IN_ANY_ORDER = "tests/unit/test_routing.py::test_replay_takes_the_recorded_choices_in_any_order_of_tokens"
_RECORDED = f"{_TRAINING}::test_routing_that_is_recorded_on_a_mesh_is_that_of_one_process"

OF_ROUTING: dict[str, Fault] = {
    "weights_of_other_choices": Fault(
        "the weights of replayed choices are theirs",
        _ROUTING,
        "return torch.return_types.topk((scores.gather(1, index), index))",
        "return torch.return_types.topk((found[0], index))",
        "tests/unit/test_routing.py::test_weights_are_those_of_the_replayed_choices",
    ),
    "choices_of_the_first_layer": Fault(
        "each layer replays its own choices",
        _ROUTING,
        "self.record.get(self.step, name, self.tokens)",
        "self.record.get(self.step, min(self._blocks), self.tokens)",
        "tests/unit/test_routing.py::test_each_layer_replays_its_own_choices",
    ),
    "routers_watched_after_the_step": Fault(
        "outside of the steps of training routers choose by themselves",
        _ROUTING,
        "        self._replaced.close()\n",
        "        pass\n",
        f"{_IN_ANY_ORDER}[values]",
    ),
    "rows_of_a_micro_batch_exchanged": Fault(
        "a row of a micro-batch has the numbers of its own tokens",
        _OF_RUN,
        "zip(whole, self._tokens[number], strict=False)",
        "zip(whole, self._tokens[number][::-1], strict=False)",
        f"{_RECORDED}[tp=2,sp,ep=2]",
    ),
    "slice_of_the_first_rank": Fault(
        "under sp a rank's choices are those of its own slice",
        _OF_RUN,
        "self.mesh.own_tokens(batch.held(whole))",
        "whole.flatten().tensor_split(self.mesh.token_cut.size)[0]",
        f"{_TRAINING}::test_replayed_routing_decides_on_every_mesh[tp=2,sp,ep=2]",
    ),
    "record_of_another_order": Fault(
        "a record is replayed on the tokens that it is of",
        _OF_RUN,
        "if record.digest != digest:",
        "if len(record.digest) != len(digest):",
        f"{_TRAINING}::test_record_of_another_order_of_the_data_is_refused",
    ),
}

_TRAINER, _GRADIENTS, _LINEAR = "run/trainer.py", "train/gradsync.py", "layers/linear.py"
_PRODUCTS = "layers/products.py"
_OWN = "__import__('meshlora').layers.tokens.Share(adapters[own.number].adapter, own.batch.tokens, "
_SHARE = _OWN + "{seed}, {step})"
_SINGLE = "tests/ranks/test_several_adapters.py::test_each_of_many_is_the_adapter_of_its_single_run[]"
_ALONE = "tests/unit/test_several_adapters.py::test_each_adapter_of_many_computes_what_it_computes_alone"

_SUMS, _INVOKED = "wings/combined/sums.py", "wings/invoked/rows.py"
_SUM = "tests/ranks/test_sums.py::test_sums_are_those_of_peft[tp=2]"
_SPOKEN = "tests/ranks/test_invoked.py::test_says_and_generates_what_peft_does[tp=2]"

OF_SUMS: dict[str, Fault] = {
    "sum_without_scales": Fault(
        "an adapter has its own scale in a sum",
        _SUMS,
        "a = torch.cat([part.a * part.weight * part.scaling for part in found])",
        "a = torch.cat([part.a * part.weight for part in found])",
        _SUM,
    ),
    "sign_on_both_factors": Fault(
        "a negative weight takes an adapter away",
        _SUMS,
        "b += part.b * root",
        "b += part.b * math.copysign(root, part.weight)",
        _SUM,
    ),
    "sum_of_before": Fault(
        "several active adapters are those of now",
        _SUMS,
        '    _fill(model, names, [1.0] * len(names), own, "cat", None)',
        '    own in sums or _fill(model, names, [1.0] * len(names), own, "cat", None)',
        "tests/ranks/test_sums.py::test_sum_of_active_adapters_is_of_what_they_are_now",
    ),
    "invoked_by_what_was_written": Fault(
        "the prompt invokes an adapter, and its answer follows with a cache",
        _INVOKED,
        "        return place >= start.unsqueeze(1)",
        "        return invoked_tokens(forward.ids, self.of[adapter])",
        _SPOKEN,
    ),
    "invoked_as_the_next_forward": Fault(
        "layers that run again have the tokens of their own forward",
        _INVOKED,
        'partial(setattr, self, "_forward", self._forward)',
        'partial(setattr, self, "_left", self._forward)',
        "tests/ranks/test_invoked.py::test_trains_as_one_process_does[stages]",
    ),
}

OF_SEVERAL: dict[str, Fault] = {
    "gradient_of_the_neighbour": Fault(
        "the gradient of an adapter is of its own rows",
        _PRODUCTS,
        "das = group.each(wide_product(dzs[-1].mT, group.seen(x), ctx.dtypes[place]))",
        "das = group.each(wide_product(dzs[-1].mT, group.seen(x), ctx.dtypes[place]).roll(1, 0))",
        f"{_ALONE}[alike]",
    ),
    "scale_of_the_first": Fault(
        "each adapter has its own scale",
        _LINEAR,
        "Segment(part.start, part.stop, self.scaling[adapter],",
        "Segment(part.start, part.stop, next(iter(self.scaling.values())),",
        f"{_ALONE}[unequal]",
    ),
    "dropout_of_the_first": Fault(
        "each adapter has its own rate of dropout",
        _LINEAR,
        "self.dropout[adapter], part",
        "next(iter(self.dropout.values())), part",
        "tests/unit/test_several_adapters.py::test_each_adapter_drops_at_its_own_rate",
    ),
    "seed_of_the_first": Fault(
        "the masks of an adapter are of its own seed",
        _TRAINER,
        "adapters[own.number].share(own.batch)",
        _SHARE.format(seed="adapters[0].run.config.train.seed", step="adapters[own.number].done"),
        _SINGLE,
    ),
    "masks_of_the_step_of_the_first": Fault(
        "the masks of an adapter are of its own step",
        _TRAINER,
        "adapters[own.number].share(own.batch)",
        _SHARE.format(seed="adapters[own.number].run.config.train.seed", step="adapters[0].done"),
        "tests/ranks/test_several_adapters.py::test_each_of_many_goes_on_from_its_own_last_checkpoint",
    ),
    "rate_of_the_step_of_the_first": Fault(
        "the learning rate of an adapter is that of its own step",
        _TRAINER,
        "rate = one.update(step, ",
        "rate = one.update(self._training[0].done, ",
        "tests/ranks/test_several_adapters.py::test_each_of_many_goes_on_from_its_own_last_checkpoint",
    ),
    "clipped_by_the_joint_norm": Fault(
        "an adapter is clipped by its own norm",
        _GRADIENTS,
        "(max_norm / (norm + 1e-6))",
        "(max_norm / (norms.norm() + 1e-6))",
        _SINGLE,
    ),
    "divided_by_the_tokens_of_all": Fault(
        "an adapter's gradient is a mean over its own tokens",
        _GRADIENTS,
        "shares = 1 / totals.clamp(min=1)",
        "shares = 1 / totals.sum().expand_as(totals)",
        _SINGLE,
    ),
    "masks_by_the_place_in_the_micro_batch": Fault(
        "the masks of a token are of its place in its adapter's own batch",
        "train/batches.py",
        "places=[of_row[0] for of_row in places],",
        "places=None,",
        _SINGLE,
    ),
    "gradients_of_one_rank": Fault(
        "an adapter's gradient is a sum over the ranks",
        _GRADIENTS,
        "flat = all_reduce_in_place(torch.cat([grad.reshape(-1) for grad in every]), mesh.over(axes))",
        "flat = torch.cat([grad.reshape(-1) for grad in every])",
        f"{_SINGLE.removesuffix('[]')}[tp=2,sp]",
    ),
}

_EVALUATE = "run/evaluate.py"
_LOSS = "tests/extra/test_evaluate.py::test_loss_is_that_of_transformers_and_peft_over_the_whole_file"

OF_DATA_AND_STATE: dict[str, Fault] = {
    "mean_of_means": Fault(
        "an evaluated loss is a mean over all tokens",
        _EVALUATE,
        "sums[0] += loss\n            sums[1] += count(objective, batch) * mesh.is_counted\n",
        "sums[0] += loss / count(objective, batch)\n            sums[1] += 1\n",
        _LOSS,
    ),
    "remainder_not_evaluated": Fault(
        "every sequence is evaluated",
        _EVALUATE,
        "np.arange(data.num_examples)",
        "np.arange(data.num_examples // batching.micro_batch_size * batching.micro_batch_size)",
        _LOSS,
    ),
    "moments_of_the_neighbouring_expert": Fault(
        "a run goes on with the moments of each expert",
        "run/checkpoint/state.py",
        "                held[key] = moments.packed(key, factor, own)",
        "                own = own.roll(1, 0) if own.ndim == 3 else own\n"
        "                held[key] = moments.packed(key, factor, own)",
        f"{_TRAINING}::test_run_with_experts_goes_on_as_if_it_had_not_been_stopped",
    ),
}

_STAGES = "wings/stages/hold.py"
_REGIONS, _GENERATION, _GENERATED = "model/regions.py", "wings/generation/rows.py", "run/generated.py"
_TOKENS = "tests/extra/test_generate.py::test_tokens_are_those_of_one_process"
_ROLLOUTS = "tests/extra/test_generate.py::test_rollouts_between_two_steps_are_those_of_one_process_and_leave_no_trace"
_MERGED = "tests/ranks/test_merge_in_memory.py::test_merged_model_says_what_peft_says_and_comes_back_bit_for_bit"

OF_GENERATION: dict[str, Fault] = {
    "decode_step_stays_in_sp": Fault(
        "a decode step has all its tokens on every rank",
        _REGIONS,
        "if not self.sp or self.is_off:",
        "if True:",
        f"{_TOKENS}[llama-tp=2,sp]",
    ),
    "steps_without_sp_stay_after_generation": Fault(
        "a step of training is cut again",
        _REGIONS,
        "leaf.scatters_tokens = not is_off",
        "leaf.scatters_tokens = False",
        f"{_ROLLOUTS}[llama-tp=2,sp]",
    ),
    "stages_count_their_own_tokens_alone": Fault(
        "the cache of a stage has the tokens that layers of others have had, too",
        _STAGES,
        "            note_tokens(value, index, x)",
        "            pass",
        f"{_TOKENS}[llama-pp=2]",
    ),
    "logits_of_the_last_stage_alone": Fault(
        "all stages have the logits of the last, and draw one token",
        _STAGES,
        "return found.to(x.dtype) + x",
        "return x",
        f"{_TOKENS}[llama-pp=2]",
    ),
    "loss_of_the_last_stage_without_a_way_back": Fault(
        "a loss that all stages are told goes back through each of them",
        _STAGES,
        "return found.to(x.dtype) + x",
        "return found.to(x.dtype) + x.detach()",
        "tests/ranks/test_steps.py::test_steps_end_with_the_adapter_of_a_plain_loop[pp=2-_labels]",
    ),
    "old_policy_of_the_first_stage": Fault(
        "the policy that acted is asked at the last stage",
        "meshlora_extra/rl/rollouts.py",
        "one.mesh.over(SEQUENCES | LAYERS)",
        "one.mesh.over(SEQUENCES)",
        "tests/extra/test_rl.py::test_a_generation_is_used_for_several_updates[pp=2]",
    ),
    "recorded_on_the_first_stage": Fault(
        "a record has what the last stage says",
        "run/distillation/recording.py",
        "of_all = all_reduce_sum(whole, mesh.losses)",
        "of_all = all_reduce_sum(whole, mesh.data)",
        "tests/ranks/test_distillation.py::test_a_record_is_what_transformers_says[pp=2]",
    ),
    "ranks_draw_from_states_of_their_own": Fault(
        "the ranks of a replica draw from one random state",
        _GENERATION,
        "draws = bool(value)",
        "draws = False",
        "tests/extra/test_generate.py::test_ranks_that_would_draw_different_tokens_are_refused",
    ),
    "batch_drawn_from_the_seed_of_its_rank": Fault(
        "a batch draws from its number in the whole set, whoever continues it",
        "run/decoding.py",
        "for number, part in batches.items():",
        "for number, part in enumerate(batches.values()):",
        f"{_ROLLOUTS}[qwen3_moe-dp=2,ep=2]",
    ),
    "log_probability_of_the_token_before": Fault(
        "a log-probability is of the token that was drawn from its distribution",
        "run/decoding.py",
        "self._found.append(self._last.gather(1, input_ids[:, -1:]))",
        "self._found.append(self._last.gather(1, input_ids[:, -2:-1]))",
        f"{_ROLLOUTS}[llama-tp=2,sp]",
    ),
    "generation_trains_on_in_evaluation_mode": Fault(
        "after generation each module is in the mode that it was in",
        _GENERATION,
        "module.training = was_training",
        "pass",
        f"{_ROLLOUTS}[llama-tp=2,sp]",
    ),
    "rows_of_another_rank": Fault(
        "each batch is taken from the rank that continued it",
        _GENERATED,
        "rank, start = number % axis.size,",
        "rank, start = 0,",
        f"{_ROLLOUTS}[qwen3_moe-dp=2,ep=2]",
    ),
    "adapter_merged_and_beside": Fault(
        "a merged adapter is not added a second time",
        "wings/generation/in_memory.py",
        "    leaf.active = None\n",
        "    pass\n",
        f"{_MERGED}[dora-tp=2,sp]",
    ),
    "head_merged_with_the_embedding": Fault(
        "the change of an embedding is not that of the head that is tied to it",
        "wings/generation/in_memory.py",
        "leaf.weight = nn.Parameter(total.to(weight.dtype), requires_grad=False)",
        "state.unmerged[name] = nn.Parameter(weight.clone(), requires_grad=False); weight.copy_(total)",
        f"{_MERGED}[tied-tp=2]",
    ),
    "shard_of_the_first_rank_merged": Fault(
        "a rank merges the rows of its own shard",
        "wings/generation/in_memory.py",
        "first = min(each * state.mesh.data.rank, weight.shape[0])",
        "first = 0",
        f"{_MERGED}[experts-dp=2,ep=2,dp_shard]",
    ),
}
