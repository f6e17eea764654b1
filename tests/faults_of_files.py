"""Faults in what becomes of an adapter's file, each with the test that fails with it: merging and exporting.

No proof runs these. The faults are of the kind that nobody sees: wrong numbers, and no error.
"""

from __future__ import annotations

from tests.changed import Fault

_CHANGES, _MERGE = "meshlora_extra/merging/changes.py", "meshlora_extra/merging/merge.py"
_LOGITS = "tests/extra/test_merge.py::test_logits_are_those_of_model_and_adapter"
_FILE = "tests/unit/test_adapter_file.py"
_ROUNDED = "tests/extra/test_merge.py::test_half_precision_is_rounded_once"
_OF_PARTS = "tests/extra/test_merge.py::test_update_of_a_concatenation_goes_to_its_parts"

OF_MERGING: dict[str, Fault] = {
    "scale_forgotten": Fault(
        "B A is merged times alpha / r",
        _CHANGES,
        "view.addmm_(b.to(view.dtype), a.to(view.dtype), alpha=lora.scaling)",
        "view.addmm_(b.to(view.dtype), a.to(view.dtype))",
        f"{_LOGITS}[llama]",
    ),
    "square_matrices_not_transposed": Fault(
        "B A is transposed where the weight is stored [in, out], whatever its shape",
        _CHANGES,
        "view = weight.T if lora.is_transposed else weight",
        "view = weight.T if lora.is_transposed and len(weight) != weight.shape[1] else weight",
        f"{_LOGITS}[gpt2_conv1d]",
    ),
    "dora_norm_of_the_base": Fault(
        "DoRA divides by the norms of base and product together",
        _CHANGES,
        "norm = torch.linalg.vector_norm(view, dim=1)",
        "norm = torch.linalg.vector_norm(view - lora.scaling * b.to(view.dtype) @ a.to(view.dtype), dim=1)",
        f"{_LOGITS}[dora]",
    ),
    "dora_norm_of_columns": Fault(
        "DoRA's norms are those of the rows of [out, in]",
        _CHANGES,
        "norm = torch.linalg.vector_norm(view, dim=1)",
        "norm = torch.linalg.vector_norm(view, dim=int(len(view) != view.shape[1]))",
        f"{_LOGITS}[dora]",
    ),
    "start_of_pissa_left_in": Fault(
        "PiSSA's base has lost its principal part",
        _CHANGES,
        "    return init.lower()\n",
        '    return ""\n',
        f"{_LOGITS}[pissa]",
    ),
    "rslora_ignored": Fault(
        "with rsLoRA the scale is alpha / sqrt(r)",
        _CHANGES,
        'scaling=module.scaling["default"],\n            magnitude=magnitude,',
        'scaling=module.lora_alpha["default"] / module.r["default"],\n            magnitude=magnitude,',
        f"{_LOGITS}[rslora_and_patterns]",
    ),
    "alpha_pattern_ignored": Fault(
        "a module has the alpha of its pattern",
        _CHANGES,
        'scaling=module.scaling["default"],\n            magnitude=magnitude,',
        'scaling=module.scaling["default"] / module.lora_alpha["default"] * config.lora_alpha,\n'
        "            magnitude=magnitude,",
        f"{_LOGITS}[rslora_and_patterns]",
    ),
    "trained_norms_not_written": Fault(
        "what is trained whole is written too",
        _CHANGES,
        "for key in sorted(names.keys() - added):",
        'for key in sorted(key for key in names.keys() - added if not key.endswith("norm.weight")):',
        f"{_LOGITS}[modules_to_save]",
    ),
    "rows_of_tokens_in_order": Fault(
        "each row of trainable_token_indices goes to its own token, in the order of the configuration",
        _CHANGES,
        "tuple(indices)))",
        "tuple(sorted(indices))))",
        f"{_FILE}::test_merged_model_is_the_one_that_peft_merges[rows]",
    ),
    "rows_beside_a_copy_not_taken": Fault(
        "what a file holds of its base replaces the weight tied to a trained copy",
        _MERGE,
        "whole = change.beside",
        "whole = None",
        f"{_FILE}::test_base_under_a_trained_copy_replaces_what_is_tied_to_it",
    ),
    "bias_of_lora_not_scaled": Fault(
        "the bias of B is scaled as the product is",
        _MERGE,
        "add_(changes.read(key).to(wide), alpha=scaling)",
        "add_(changes.read(key).to(wide))",
        f"{_LOGITS}[lora_bias]",
    ),
    "tied_head_merged_with_the_embedding": Fault(
        "an adapter on a tied embedding does not change the head",
        _MERGE,
        "if len({changes.by_name.get(name) for name in names}) > 1",
        "if len({changes.by_name.get(name) for name in names}) > 2",
        f"{_LOGITS}[tied_embedding]",
    ),
    "tied_weights_of_two_scales": Fault(
        "tied weights stay tied only where their products are scaled alike",
        _MERGE,
        "if one.lora.scaling != two.lora.scaling or one",
        "if one",
        "tests/extra/test_merge.py::test_tied_weights_that_are_scaled_apart_are_untied",
    ),
    "piece_of_a_fused_matrix_one_row_low": Fault(
        "a piece of a fused matrix gets the update of its own rows",
        _MERGE,
        "value = value[place]",
        "value = value.roll(1, 0)[place]",
        _OF_PARTS,
    ),
    "rounded_before_the_product": Fault(
        "a merged weight is rounded once",
        "meshlora_ground/float64.py",
        "return torch.float64 if dtype == torch.float64 else torch.float32",
        "return dtype",
        _ROUNDED,
    ),
    "float64_merged_in_float32": Fault(
        "beside a float64 base products are computed in float64",
        "meshlora_ground/float64.py",
        "return torch.float64 if dtype == torch.float64 else torch.float32",
        "return torch.float32",
        "tests/extra/test_merge.py::test_float64_is_merged_in_float64",
    ),
}

_EXPERTS = "tests/extra/test_merge_experts.py"
_AS_PEFT = f"{_EXPERTS}::test_the_same_bytes_as_peft_writes"

OF_MERGING_EXPERTS: dict[str, Fault] = {
    "a_of_the_neighbour": Fault(
        "each expert gets its own A",
        _CHANGES,
        "own_a = a.view(lora.num_experts, lora.r, -1)[expert]",
        "own_a = a.view(lora.num_experts, lora.r, -1)[expert - 1]",
        f"{_AS_PEFT}[qwen3_moe]",
    ),
    "b_with_the_expert_slow": Fault(
        "in B the expert is the fast index",
        _CHANGES,
        "own_b = b.view(-1, lora.r, lora.num_experts)[:, :, expert]",
        "own_b = b.view(-1, lora.num_experts, lora.r)[:, expert]",
        f"{_AS_PEFT}[gpt_oss]",
    ),
    "gate_and_up_exchanged": Fault(
        "gate gets the first half of the product, up the second",
        _CHANGES,
        "a, b, matrix.dtype)[tuple(inside)]",
        "a, b, matrix.dtype).roll(len(matrix), 0)[tuple(inside)]",
        f"{_AS_PEFT}[mixtral]",
    ),
    "scale_of_experts_twice": Fault(
        "the product of an expert is scaled once",
        _CHANGES,
        "own_a.to(dtype)) * lora.scaling",
        "own_a.to(dtype)) * lora.scaling**2",
        f"{_EXPERTS}::test_ranks_and_scales_are_those_of_peft[option0]",
    ),
    "stack_merged_into_the_first_alone": Fault(
        "every expert of a stack is merged",
        _CHANGES,
        "enumerate(weight):",
        "enumerate(weight[:1]):",
        f"{_AS_PEFT}[granitemoe]",
    ),
    "square_experts_not_transposed": Fault(
        "the product of an expert is transposed where its matrix is stored [in, out], whatever its shape",
        _CHANGES,
        "return product.T if lora.is_transposed else product",
        "return product.T if lora.is_transposed and len(product) != product.shape[1] else product",
        f"{_EXPERTS}::test_square_matrices_of_experts_are_merged_the_right_way_round",
    ),
    "experts_ordered_as_text": Fault(
        "expert 10 comes after expert 9",
        "model/stored.py",
        "experts, rows = sorted(by_place), []",
        "experts, rows = sorted(by_place, key=str), []",
        f"{_EXPERTS}::test_more_than_ten_experts_are_merged_in_their_order",
    ),
}

_ENGINE, _FORMAT = "meshlora_extra/engine_export.py", "wings/experts/per_expert.py"
_ENGINES = "tests/extra/test_engine_export.py"
_SAME = f"{_ENGINES}::test_peft_computes_the_same_with_either_form"
_PADDED = f"{_ENGINES}::test_smaller_ranks_of_the_same_scale_are_padded_with_zeros"
_LORALIB = "tests/extra/test_export.py"

OF_EXPORTING: dict[str, Fault] = {
    "padded_on_unlike_sides": Fault(
        "A and B of a smaller rank are padded at the same end",
        _ENGINE,
        "return torch.cat([factor, factor.new_zeros(shape)], dim)",
        "zeros = factor.new_zeros(shape)\n    return torch.cat([factor, zeros] if dim else [zeros, factor], dim)",
        f"{_PADDED}[False]",
    ),
    "alpha_of_another_rank": Fault(
        "a larger rank has a larger alpha",
        _ENGINE,
        "| _one_rank(r, scaling)",
        '| _one_rank(r, scaling) | ({} if config.use_rslora else {"lora_alpha": config.lora_alpha})',
        f"{_ENGINES}::test_the_largest_rank_may_be_that_of_a_pattern",
    ),
    "rslora_twice": Fault(
        "the root of rsLoRA is in the scale, and engines take no other",
        _ENGINE,
        '        "use_rslora": False,\n',
        "",
        f"{_SAME}[rslora]",
    ),
    "names_of_the_next_layer": Fault(
        "factors have the name of their own layer",
        _FORMAT,
        'return f"{PREFIX}{above}.{self.block or block}.{leaf}"',
        'above = re.sub(r"[0-9]+", lambda found: str(int(found[0]) ^ 1), above)\n'
        '        return f"{PREFIX}{above}.{self.block or block}.{leaf}"',
        f"{_ENGINES}::test_values_are_those_of_each_expert[qwen3_moe]",
    ),
    "rows_of_gate_and_up_exchanged": Fault(
        "gate gets its own rows of B",
        _FORMAT,
        "for name, index in rows.items()}\n\n\ndef join_rows",
        "for name, index in zip(rows, reversed(rows.values()), strict=True)}\n\n\ndef join_rows",
        f"{_SAME}[qwen3_moe]",
    ),
    "experts_exported_in_the_order_of_text": Fault(
        "the third expert is called 2, however many there are",
        _FORMAT,
        "for key, matrix in zip(of_side, stack.expand(num_experts, -1, -1), strict=True):",
        "for key, matrix in zip(sorted(of_side), stack.expand(num_experts, -1, -1), strict=True):",
        "tests/unit/test_expert_format.py::test_more_than_ten_experts_keep_their_order",
    ),
    "experts_imported_in_the_order_of_text": Fault(
        "expert 10 is read after expert 9",
        _FORMAT,
        "return torch.stack([tensors[key] for key in keys])",
        "return torch.stack([tensors[key] for key in sorted(keys)])",
        "tests/unit/test_expert_format.py::test_more_than_ten_experts_keep_their_order",
    ),
    "fresh_adapter_lost": Fault(
        "an adapter whose B is still zero keeps its A",
        _FORMAT,
        "if factors.a.any() or factors.b.any():",
        "if factors.a.any() and factors.b.any():",
        "tests/unit/test_expert_format.py::test_fresh_adapter_comes_back_from_engines",
    ),
    "scale_of_pieces_without_the_root": Fault(
        "with rsLoRA the scale of pieces is that of one of them",
        "adapter/targets/pieces.py",
        "growth = math.sqrt(number) if config.use_rslora else number",
        "growth = number",
        "tests/unit/test_pieces.py::test_scale_of_pieces_is_that_of_one_of_them",
    ),
    "rslora_lost_in_loralib": Fault(
        "loralib's alpha / r is the scale, with rsLoRA too",
        "meshlora_extra/paper/export.py",
        "factors[module] = Factors(a, b, rank, scaling * rank,",
        "root = math.sqrt(r) if config.use_rslora else 1\n"
        "        factors[module] = Factors(a, b, rank, scaling / root * rank,",
        f"{_LORALIB}::test_plain_adapter_with_patterns_and_biases_survives_both_ways",
    ),
    "pieces_of_loralib_from_the_first_on": Fault(
        "a piece that is enabled gets its own rows",
        "meshlora_extra/paper/export.py",
        "whole = to_blocks(own, rows=_equal_blocks(module, out_features), out_features=out_features)",
        "rows = dict(zip(pieces, _equal_blocks(module, out_features).values(), strict=False))\n"
        "    whole = to_blocks(own, rows=rows, out_features=out_features)",
        f"{_LORALIB}::test_pieces_become_a_merged_linear_with_the_same_update[enabled0]",
    ),
    "embedding_under_the_names_of_a_linear": Fault(
        "the factors of an embedding have the names that PEFT reads",
        "meshlora_extra/paper/export.py",
        'suffix = f"lora_embedding_{side}"',
        'suffix = f"lora_{side}.weight"',
        f"{_LORALIB}::test_embedding_survives_both_ways",
    ),
}
