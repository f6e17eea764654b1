"""A case on one process: the reference trace, and PEFT's reading of our files.

Owns: the files of a reference run, what it records, and in which precision. It runs in a separate process that never
makes a meshlora layer. Does not own: the model, its loss and its optimizer (`meshlora_judge.reference`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from meshlora_ground.errors import MeshloraError, UnsupportedError
from meshlora_ground.float64 import lift
from meshlora_ground.objectives.distillation import Distill
from meshlora_ground.objectives.labels import Embed
from meshlora_ground.routing import Routing
from meshlora_judge import reference
from meshlora_judge.batches import MicroBatch, micro_batches, micro_batches_of
from meshlora_judge.capture import CHOICES, SCORES, Capture, copy
from meshlora_judge.case import REFERENCE, TEACHER, Case
from meshlora_judge.dropout import Masks
from meshlora_judge.eva import eva_start
from meshlora_judge.experts import ROWS, adapted_stacks, expert_modules, in_experts
from meshlora_judge.float8 import exact_inputs
from meshlora_judge.inputs import write_adapter, write_twin
from meshlora_judge.noise import add_noise
from meshlora_judge.objectives import contrast
from meshlora_judge.ownership import fingerprints
from meshlora_judge.packed import load_base
from meshlora_judge.pieces import in_pieces
from meshlora_judge.quantized import quantize_base
from meshlora_judge.replay import after_step, as_the_engine, at_step, free, new_record, record_file, routed
from meshlora_judge.trace import Trace


def make_reference(case: Case, twin: PretrainedConfig | None, folder: str) -> None:
    """Make the inputs and run the reference.

    Writes to `folder`: `model/` for a twin, `adapter/`, `reference.safetensors` (float64), and for a lower precision
    `rounded-N.safetensors`, one for each way to train in it.
    """
    root, model = Path(folder), case.model
    if twin is not None:
        model = str(root / "model")
        write_twin(twin, root / "model", dtype=getattr(torch, case.dtype), seed=case.seed)
    options: dict[str, Any] = {"objective": case.objective, "trust_remote_code": case.trust_remote_code}
    of_lora: dict[str, Any] = {"pieces": case.pieces, "share_experts": case.share_experts}
    write_adapter(model, case.lora, root / "adapter", seed=case.seed, **options, **of_lora)
    if case.reference is not None:
        if case.reference == case.lora:
            options |= of_lora
        write_adapter(model, case.reference, root / REFERENCE, seed=case.seed + 1, **options)
    if _has_teacher(case):
        assert twin is not None  # of a whole model it is refused
        write_twin(twin, root / TEACHER, dtype=getattr(torch, case.dtype), seed=case.seed + 2)
    here = dataclasses.replace(case, model=model, adapter=str(root / "adapter"))
    try:
        trace = trace_case(here, precision="float64")
    except Exception as error:  # of any library, and raised again
        if not isinstance(error, MeshloraError):
            reference.check_forward(here.base, _case_batches(here, 0)[0], error)
        raise
    if case.eva is not None:
        trace.eva, trace.eva_scalings = eva_start(here, _case_model(here, here.adapter, "float64").unload())
    trace.save(root / "reference.safetensors")
    if case.dtype != "float64":
        trace_case(here, precision=case.dtype).save(root / "rounded-0.safetensors")
    if case.dtype == "bfloat16":
        trace_case(here, precision=case.dtype, autocast=True).save(root / "rounded-1.safetensors")


def trace_case(case: Case, *, precision: str, autocast: bool = False) -> Trace:
    """Run `case` on one process, computing in `precision` from weights stored in the case's dtype.

    autocast: PEFT computes the adapter of a bfloat16 model in float32 unless torch's autocast, as trainers use it,
    makes it bfloat16 too. If the case runs in several precisions, the first run, in float64, records its routing and
    the others replay it.
    """
    with torch.autocast(case.device, torch.bfloat16, enabled=autocast):
        model = _case_model(case, case.adapter, precision)
        policy, folder = None, Path(case.adapter).parent
        if case.reference is not None:
            policy = _case_model(case, folder / REFERENCE, precision).eval().requires_grad_(False)
        elif _has_teacher(case):
            policy = reference.teacher_model(case.base, folder / TEACHER)
        else:
            options: dict[str, Any] = {"objective": case.objective, "pad": case.pad_token_id}
            policy = reference.base_beside_biases(case.base, case.adapter, **options)
        if case.reference is None and policy is not None:
            policy = (policy if precision == case.dtype else policy.double()).to(case.device)
        if case.routed:
            with as_the_engine(model.get_base_model(), case) as routing:
                return _trace_case(case, model, routing, policy)
        if case.dtype == "float64" or not expert_modules(model):
            return _trace_case(case, model, None, policy)
        assert policy is None  # of experts in float64 alone
        if precision != "float64":
            with routed(model.get_base_model(), case) as routing:
                return _trace_case(case, model, routing)
        record = new_record(model.get_base_model(), case)
        try:
            with routed(model.get_base_model(), case, record) as routing:
                trace = _trace_case(case, model, routing)
        except UnsupportedError:  # a router that does not choose by topk: every run then routes by itself
            return _trace_case(case, _case_model(case, case.adapter, precision), None)
        record.save(record_file(case))
        return trace


def _has_teacher(case: Case) -> bool:
    return isinstance(case.objective, Distill) and case.objective.folder is not None


def _trace_case(case: Case, model: Any, routing: Routing | None, policy: Any = None) -> Trace:
    """policy: the frozen one of `base_logits`."""
    reference.freeze_outside_pieces(model, case.pieces)
    factors = reference.trainable(model)
    masks = Masks(model, seed=case.seed)
    add_noise(model, masks, alpha=case.neftune_alpha)
    rates = reference.rates_of(case)
    optimizer = reference.make_optimizer(model, case)
    inner = model.get_base_model()
    trace = Trace(initial=_apart(case, model, factors), scalings=reference.scalings(model), rates=rates)
    trace.stacks = adapted_stacks(model)
    trace.rows, trace.columns = fingerprints(inner)
    trace.dropouts = masks.rates
    trace.base, trace.row_norms = _base_values(case, factors, reference.token_rows(model))
    for step, rate in enumerate(rates):
        at_step(routing, step)
        masks.step = step
        batches = _case_batches(case, step)
        optimizer.zero_grad(set_to_none=True)
        with free(case, routing):
            before = reference.before_losses(model, batches, case.objective, policy, masks)
        with Capture(inner) if step == 0 else contextlib.nullcontext() as capture:
            loss, aux = reference.accumulate(model, batches, case, before=before, masks=masks)
        if capture is not None:
            trace.micro_batches = capture.micro_batches
            _forget_head(trace, inner)
            trace.order = [n for n in capture.micro_batches[0].forward if not n.endswith((SCORES, CHOICES))]
            trace.gradients = _apart(case, model, _gradients(factors))
        norm = torch.nn.utils.clip_grad_norm_(list(factors.values()), case.max_grad_norm_at(step))
        trace.clipped.append(_apart(case, model, _gradients(factors)))
        reference.set_rate(optimizer, rate)
        optimizer.step()
        trace.losses.append(loss)
        if aux is not None:
            trace.aux_losses.append(aux)
        trace.grad_norms.append(float(norm))
        trace.num_tokens.append(sum(batch.num_tokens for batch in batches))
        after_step(routing, step, case)
        if step + 1 == case.steps or (step + 1) % case.eval_every == 0:
            with free(case, routing):
                trace.eval_losses.append(evaluate(case, model, policy))
    trace.final = _apart(case, model, factors)
    with free(case, routing):
        trace.final_logits = _first_logits(case, model)
    return trace


def _gradients(factors: Mapping[str, nn.Parameter]) -> dict[str, Tensor | None]:
    return {name: factor.grad for name, factor in factors.items()}


def _forget_head(trace: Trace, model: Any) -> None:
    """Drop the head's output and gradient: our side never computes the logits of all tokens in training."""
    head = model.get_output_embeddings()
    names = set[str]()
    for path, module in model.named_modules():
        if module is head:
            name = path.replace(".base_layer", "")
            while name:  # in some composites the text part has the head, and returns logits too
                names.add(name)
                name = name.rpartition(".")[0]
    for micro in trace.micro_batches:
        for found in (micro.forward, micro.backward, micro.base):
            for name in names:
                found.pop(name, None)
        micro.backward.pop("", None)


def _base_values(
    case: Case, factors: dict[str, nn.Parameter], rows: Mapping[str, list[int]]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(base values of trained base parameters, row norms of weights that DoRA scales). rows: trained rows -> tokens."""
    wanted = {name for name in factors if ".lora_" not in name}
    scaled = [name for name in factors if name.endswith(".lora_magnitude_vector")]
    if not wanted and not scaled:
        return {}, {}
    # From the checkpoint, because PEFT trains biases in place.
    options = {"local_files_only": True, "trust_remote_code": case.trust_remote_code}
    config = AutoConfig.from_pretrained(case.model, **options)
    case.objective.configure(config)
    fresh = load_base(case.model, config, dtype=getattr(torch, case.dtype), **options)
    quantize_base(fresh, case.quantization)
    base = {name: copy(parameter).double() for name, parameter in fresh.named_parameters(remove_duplicate=False)}
    for name, tokens in rows.items():
        base[name] = base[name.replace(ROWS, ".weight")][tokens]
    norms = {}
    for name in scaled:
        module = name.rpartition(".lora_")[0]
        inputs = 0 if isinstance(fresh.get_submodule(module), Conv1D | nn.Embedding) else 1  # [in, out], or [out, in]
        norms[name] = base[f"{module}.weight"].norm(dim=inputs)
    return {name: base[name] for name in wanted}, norms


@torch.no_grad()
def evaluate(case: Case, model: Any, policy: Any = None) -> float:
    """Mean loss over all sequences of the case. policy: the frozen one of `base_logits`."""
    total, number, objective, every = 0.0, 0, case.objective, range(case.data.num_examples)
    size = len(every)
    if objective.is_of_step:  # texts, and pairs, are compared as in training
        size = case.batch_size
    for start in range(0, len(every), size):
        found = micro_batches(case.data, every[start : start + size], case, pad_token_id=case.pad_token_id)
        batches = [batch.to(case.device) for batch in found]
        bases, point = reference.before_losses(model, batches, objective, policy)
        of_each = []
        for batch, base in zip(batches, bases, strict=True):
            each, _ = reference.losses_of(model, batch, objective=objective, base=base, point=point)
            of_each.append(each)
        each = torch.cat(of_each)
        if isinstance(objective, Embed):
            with lift(each.dtype == torch.float64):
                each = contrast(objective, each, batches[0].each)
        total, number = total + float(each.sum()), number + len(each)
    return total / number


def read_back(case: Case, saved: str | Path) -> tuple[dict[str, Tensor], Tensor, dict[str, float]]:
    """(factors, logits of the first micro-batch, scales) of the adapter folder `saved`, read by PEFT in float64."""
    model = _case_model(case, saved, "float64", is_stock=True)
    Masks(model, seed=case.seed)  # outside of a training step there is no dropout
    copies = {name: copy(parameter) for name, parameter in reference.trainable(model).items()}
    stacks = adapted_stacks(model, is_shared=case.share_experts)
    factors = in_pieces(model.get_base_model().config, in_experts(copies, stacks, in_file=True), case.pieces)
    with routed(model.get_base_model(), case) as routing:
        at_step(routing, case.steps)
        return factors, _first_logits(case, model), reference.scalings(model)


def _case_model(case: Case, adapter: str | Path, precision: str, *, is_stock: bool = False) -> Any:
    """The case's model; float64 of a model stored in lower precision has the same values, computed without rounding."""
    model = reference.reference_model(
        case.base, adapter, objective=case.objective, is_stock=is_stock, dropouts=case.dropout, pad=case.pad_token_id
    )
    if precision != case.dtype:
        model = model.double()
    return model.to(case.device)


def _case_batches(case: Case, step: int) -> list[MicroBatch]:
    batches = micro_batches_of(case.data, case, step, pad_token_id=case.pad_token_id)
    return [batch.to(case.device) for batch in batches]


@torch.no_grad()
def _first_logits(case: Case, model: Any) -> Tensor:
    case = dataclasses.replace(case, micro_batch_size=2)  # the same sequences for every micro-batch size
    with exact_inputs():
        return copy(reference.losses_of(model, _case_batches(case, 0)[0])[1])


def _apart(case: Case, model: Any, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Copies of factors, or of their gradients, separated by expert and by piece."""
    copies = {name: copy(tensor) for name, tensor in tensors.items() if tensor is not None}
    return in_pieces(model.get_base_model().config, in_experts(copies, adapted_stacks(model)), case.pieces)
