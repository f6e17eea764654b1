"""TRL's trainers around a split model: `on_mesh(trl.SFTTrainer)`.

Owns: the class of such a trainer, the head that TRL asks for by `fused_lm_head=True`, and the frozen base as reference
model. Does not own: Trainer's part (`meshlora_extra.hf.trainer`), TRL's losses, which are its own.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import set_seed
from transformers.utils import ModelOutput

from meshlora.adapter.attach import active_factors, adapter_factors, draw_adapter, in_use, runtime
from meshlora.plan.pairs import check
from meshlora.run.feeding import fitted
from meshlora.run.packing_check import check_packing
from meshlora.train.losses import token_scores
from meshlora_extra.hf.processes import numbered_by
from meshlora_extra.hf.rows import ROWS, STANDS_IN, gathered_rows
from meshlora_extra.hf.shares import check_equal_shares, check_shares, labels_of_all, switch_off_dropout, weight_of
from meshlora_extra.hf.trainer import OnMesh
from meshlora_extra.hf.trl_engine import MeshEngine
from meshlora_ground.compat.transformers_models import attention_of
from meshlora_ground.errors import UnsupportedError, UserError

_REFERENCE = "ref"  # TRL's name
_REFUSED = ("use_transformers_continuous_batching", "sync_ref_model")


@dataclass
class ScoredOutput(ModelOutput):
    """What TRL reads of a forward with `fused_lm_head=True`, `[B, S - 1]` each: see `train.losses.TokenScores`."""

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None


class _Reference(nn.Module):
    """The model with its adapter as it is now, as a model of its own: the reference of DPO and GRPO.

    As TRL does for an adapter that is trained further; of a fresh one it is the base.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        state = runtime(model)
        assert state.active is not None
        # Any values: they are replaced below.
        draw_adapter(model, _REFERENCE, state.adapters[state.active].plan, seed=0)
        now = {factor.name: factor.parameter for factor in active_factors(model)}
        for factor in adapter_factors(model, _REFERENCE):
            factor.parameter.data.copy_(now[factor.name].detach())
        self.config, self._model = model.config, (model,)  # in a tuple: not a module of this one

    def forward(self, *args: Any, **options: Any) -> Any:
        model = self._model[0]
        was_training = model.training
        model.eval()  # a frozen policy, without dropout
        try:
            with in_use(model, _REFERENCE):
                return model(*args, **options)
        finally:
            model.train(was_training)


@functools.cache
def on_mesh(trainer: type) -> type:
    """`trainer`, a class of TRL or a subclass of `transformers.Trainer`, for models of `meshlora.load`.

        trainer = meshlora_extra.hf.on_mesh(trl.DPOTrainer)(model=model, args=args, train_dataset=data, ...)

    SFTTrainer, DPOTrainer, GRPOTrainer and RewardTrainer (of a model of `meshlora.adopt`) are proved, with dp, tp, sp.
    """
    is_trl = any(kind.__module__.startswith("trl.") for kind in trainer.__mro__)
    return type(f"Mesh{trainer.__name__}", (_OnMeshOfTrl if is_trl else OnMesh, trainer), {})


class _OnMeshOfTrl(OnMesh):
    weighs_its_loss = True

    def __init__(self, model: Any = None, *given: Any, **options: Any) -> None:
        name = next(kind.__name__ for kind in type(self).__mro__ if kind.__module__.startswith("trl."))
        options |= dict(zip(_NAMES.get(name, ("args",)), given, strict=False))  # TRL's own order of arguments
        args: Any = options.get("args")
        _check_given(name, args, model, options)
        state, self._name = runtime(model), name
        _check(name, args, model)
        if getattr(args, "disable_dropout", False):
            switch_off_dropout(model)
        if name == "GRPOTrainer":
            # Its arguments counted every process of the job as one with prompts of its own.
            args.generation_batch_size = args.generation_batch_size // args.world_size * state.mesh.dp.size
        engine = None
        if getattr(args, "use_vllm", False):
            # TRL would look for vLLM here, to send it whole weights.
            engine, args.use_vllm = MeshEngine(model, args), False
        beta = getattr(args, "beta", 0.0)
        reference = None
        if name == "DPOTrainer" or beta:
            reference = _Reference(model)
        if name == "DPOTrainer":
            if options.get("ref_model") is None:
                options["ref_model"] = reference
        elif beta:
            args.beta = 0.0  # else it would load the base a second time, whole, on every rank
        super().__init__(model=model, **options)
        if name != "DPOTrainer" and beta:
            self.args.beta = self.beta = beta
            self.ref_model = reference
        if reference is not None:
            vars(reference).pop("forward", None)  # TRL's head, which would look for whole layers
        if name == "GRPOTrainer" and state.mesh.dp.size > 1:  # which draws: replicas must not draw alike
            set_seed(self.args.seed + state.mesh.dp.rank)
        if engine is not None:
            self.vllm_generation, self._last_loaded_step = engine, -1
            self.use_vllm = self.args.use_vllm = True
        temperature = float(getattr(self, "temperature", 1.0))
        model.forward = types.MethodType(functools.partial(_scored, temperature=temperature), model)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's loss of this rank's rows, by what they weigh."""
        dp = self._mesh.dp
        if self._name == "SFTTrainer" and num_items_in_batch is None and "labels" in inputs:  # in an evaluation
            num_items_in_batch = labels_of_all(inputs["labels"], dp)
        weight = weight_of(self._name, self.args, inputs, dp)
        options = {"return_outputs": return_outputs, "num_items_in_batch": num_items_in_batch}
        found = super(OnMesh, self).compute_loss(model, inputs, **options)
        if not return_outputs:
            return found * weight
        loss, outputs = found
        return loss * weight, outputs

    def _prepare_inputs(self, inputs: Any) -> Any:
        if self._name == "RewardTrainer":
            return super()._prepare_inputs(inputs)
        # Rows are fitted in the forward: TRL makes some itself.
        if isinstance(inputs, Mapping):
            self._stands_in = bool(inputs.get(STANDS_IN))
            inputs = {name: value for name, value in inputs.items() if name not in (STANDS_IN, ROWS)}
        return super(OnMesh, self)._prepare_inputs(inputs)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        check_equal_shares(len(inputs), self._mesh.dp, self._mesh.device)
        # Of the advantages of all ranks each takes its own by this number.
        with numbered_by(self._mesh.dp, self.accelerator):
            return super()._generate_and_score_completions(inputs)

    def _calculate_rewards(self, *args: Any, **options: Any) -> Any:
        return gathered_rows(super()._calculate_rewards(*args, **options), self._mesh.dp)


def _check_given(name: str, args: Any, model: Any, options: Mapping[str, Any]) -> None:
    """Refuse what TRL would make itself. Raises: UserError."""
    if isinstance(model, str) or options.get("peft_config") is not None:
        given_as = "peft_config" if options.get("peft_config") is not None else f"model={model!r}"
        raise UserError(f"{name}({given_as})", "the model is split before", "give meshlora.load(..., lora=...)")
    config = f"{name.removesuffix('Trainer')}Config"
    if config not in {kind.__name__ for kind in type(args).__mro__}:
        given_args = "no args"
        if args is not None:
            given_args = f"args of {type(args).__name__}"
        rule = "TRL would make new ones, which count the processes anew"
        raise UserError(f"{name} with {given_args}", rule, f"give args=trl.{config}(...)")


def _check(name: str, args: Any, model: Any) -> None:
    """Refuse arguments of a trainer of TRL that a mesh cannot keep. Raises: UserError."""
    state, rate = runtime(model), 0.0
    if state.active is not None and not getattr(args, "disable_dropout", False):
        rate = state.adapters[state.active].plan.stored.lora_dropout
    check({"topology": state.mesh.topology, "door": f"trl.{name}", "lora_dropout": rate})
    for refused in _REFUSED:
        if value := getattr(args, refused, False):
            check({"topology": state.mesh.topology, "argument": f"{refused}={value}"})
    check_shares(name, args, state.mesh.topology)
    if getattr(args, "packing", False) or getattr(args, "padding_free", False):
        attention = attention_of(model.config)
        check({"data.packing": True, "model.attn_implementation": attention})
        check_packing(model.config, attn_implementation=attention, trust_remote_code=False)


_SCORED = ("input_ids", "attention_mask", "position_ids")
# What TRL says of packed rows to kernels; position ids say the same.
_OF_PACKED_ROWS = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
_NAMES = {"GRPOTrainer": ("reward_funcs", "args"), "DPOTrainer": ("ref_model", "args")}


def _scored(
    model: Any, *args: Any, temperature: float, fused_lm_head: bool = False, labels: Tensor | None = None, **inputs: Any
) -> Any:
    """The forward of a split model, with the head that TRL adds to whole ones: no rank has whole logits."""
    if not fused_lm_head:
        if labels is not None:
            inputs["labels"] = labels
        return type(model).forward(model, *args, **inputs)
    assert labels is not None
    assert not args
    if inputs.get("output_router_logits"):
        raise UnsupportedError("router_aux_loss_coef", "its loss is not proved on a mesh", "set it to 0")
    length = labels.shape[1]
    own = {name: value for name, value in inputs.items() if name in _SCORED}
    for name, value in inputs.items():
        if "position_ids" in own and name in _OF_PACKED_ROWS:
            continue
        if isinstance(value, Tensor) and name not in (*_SCORED, "num_items_in_batch"):
            raise UnsupportedError(f"the model's input {name}", "only tokens are scored on a mesh", "leave it out")
    pad = model.config.get_text_config().pad_token_id or 0
    # Filled up to what sp and cp can split.
    own = fitted({**own, "labels": labels}, runtime(model).mesh.topology, pad_token_id=pad)
    scores = token_scores(
        model,
        own["input_ids"],
        own.get("attention_mask"),
        own["labels"],
        temperature=temperature,
        position_ids=own.get("position_ids"),
    )
    log_probs, entropy, mean_logits, is_top1, squares = (value[:, 1:length] for value in scores)
    mask = labels[:, 1:] != -100  # the token that each position predicts
    number = inputs.get("num_items_in_batch")
    if number is None:
        number = mask.sum().clamp(min=1)
    loss = -log_probs.sum() / number
    return ScoredOutput(loss, log_probs, entropy, mean_logits, is_top1 > 0, squares, mask)
