"""The operators of a whole training step of a real shape, counted without a GPU: real code on empty tensors.

Owns: counting, the systems whose steps are counted, eager and in a record of `train.cuda_graphs`. Does not own: what an
operator costs (`meshlora_extra.planner.fake`), what a step then takes (`step_prices`), the tables (`step_kernels`).
"""

from __future__ import annotations

import copy
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from peft import get_peft_model
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from gpu_shapes import RANK, Shape, resized
from meshlora.adapter.attach import active_factors
from meshlora.comm.groups import Mesh, simulated_job
from meshlora.layers import head_loss as vocabulary
from meshlora.layers.row_lengths import rows_of
from meshlora.loading.blueprint import Blueprint, make_blueprint
from meshlora.model.padding import is_causal
from meshlora.model.regions import tensors_in
from meshlora.plan.base_options import BaseOptions
from meshlora.run.step_sums import StepSums
from meshlora.train.batch import Batch
from meshlora.train.gradsync import clip_gradients_on_device, finish_gradients_on_device
from meshlora.train.losses import shifted_loss
from meshlora.wings.packed_rows.by_sequence import keep_apart
from meshlora_extra.planner import fake
from meshlora_extra.planner.fake import FakeRun, Work
from meshlora_extra.planner.trace import assemble, fake_mesh
from meshlora_ground.compat import replaced
from meshlora_ground.compat.torch_operators import TorchDispatchMode, schema_of
from meshlora_ground.compat.torch_tensors import multiply_each, norm_of_each
from meshlora_ground.topology import Topology

PARTS = ("forward", "backward", "update")
REPLAY = "replay"  # in the place of the first two, with `train.cuda_graphs`
_READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::masked_select"}


# --- counting -------------------------------------------------------------------------------------------------------


@dataclass
class Counted:
    """What a step gave the device, and how often the host read it. operators: part -> (name, its cost, whether it casts
    a factor) -> how often.
    """

    operators: dict[str, Counter[tuple[str, Work, bool]]] = field(default_factory=dict)
    reads: int = 0

    def number(self, *parts: str) -> int:
        """Operators of these parts."""
        return sum(self.operators[part].total() for part in parts)

    def num_bytes(self, *parts: str) -> int:
        """Bytes that they read and write."""
        return sum(work.num_bytes * n for part in parts for (_, work, _), n in self.operators[part].items())

    def casts(self, *parts: str) -> int:
        """Those of them that change the dtype of a factor, or of its gradient."""
        return sum(n for part in parts for (*_, casts), n in self.operators[part].items() if casts)

    def work(self, *parts: str) -> Counter[Work]:
        """The costs of their operators -> how often."""
        found = Counter[Work]()
        for part in parts:
            for (_, cost, _), n in self.operators[part].items():
                found[cost] += n
        return found

    def minus(self, other: Counted) -> Counted:
        """What this has beyond `other`, but for what is there once whatever the number of layers."""
        more: dict[str, Counter[tuple[str, Work, bool]]] = {}
        for part, own in self.operators.items():
            more[part] = own - other.operators[part]
            for key in self._once(other, part):
                del more[part][key]
        return Counted(more, self.reads - other.reads)

    def once_grown(self, longer: Counted, times: int) -> Counted:
        """This, with what is there once grown so many times by what `longer` has more in it."""
        grown = {}
        for part, own in self.operators.items():
            grown[part] = Counter(own)
            for key, (_, long, _) in zip(self._once(longer, part), longer._once(self, part), strict=True):
                name, short, casts = key
                del grown[part][key]
                cost = Work(0, short.num_bytes + times * (long.num_bytes - short.num_bytes))
                grown[part][name, cost, casts] += own[key]
        return Counted(grown, self.reads)

    def _once(self, other: Counted, part: str) -> list[tuple[str, Work, bool]]:
        """What a step has once: its update, and lists of tensors that `other` has not in this length. Those of a layer
        are alike, in any number."""
        if part == "update":
            return list(self.operators[part])
        lists = [key for key in self.operators[part] if key[0].startswith("_foreach_")]
        if part == REPLAY:  # the gradients of all factors too: joined, and as many added to those of the step
            joined = [key for key in self.operators[part] if key[0] == "cat"]
            added = {3 * key[1].num_bytes // 2 for key in joined}  # two read and one written, for one and one
            lists += [*joined, *(k for k in self.operators[part] if k[0] == "add_" and k[1].num_bytes in added)]
        return [key for key in lists if key not in other.operators[part]]

    def plus(self, other: Counted, times: int) -> Counted:
        """This, and `other` so many times."""
        grown = {part: Counter(own) for part, own in self.operators.items()}
        for part, more in other.operators.items():
            for key, n in more.items():
                grown[part][key] += times * n
        return Counted(grown, self.reads + times * other.reads)


class Counting(TorchDispatchMode):
    """Counts the operators of the code inside, by part. Entered inside a `FakeRun`, which runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counted({part: Counter() for part in (*PARTS, REPLAY)})
        self.part = PARTS[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = schema_of(func).name
        short = name.partition("::")[2]
        self.found.reads += name in _READS
        made = [result] if isinstance(result, Tensor) else list(tensors_in(result))
        if (cost := fake.work_of(func, args, kwargs, made)) is not None:
            casts = short in ("_to_copy", "copy_") and _is_cast_of_factor(list(tensors_in(args))[-1], made[0])
            self.found.operators[self.part][short, cost, casts] += 1
        return result

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, numbers that the host asks for are counted too: there are none, so each is 1."""

        def read(tensor: Tensor) -> Any:
            self.found.reads += 1
            return torch.ones(tensor.shape, device="cpu", dtype=torch.int64).numpy().tolist()

        with replaced(Tensor, "tolist", read):
            yield


def _is_cast_of_factor(given: Tensor, made: Tensor) -> bool:
    """Whether a tensor of the size of a factor changes its dtype."""
    return given.ndim == 2 and given.dtype != made.dtype and min(given.shape) in (RANK, 2 * RANK, 3 * RANK)


class _Autocast(TorchFunctionMode):
    """`torch.autocast` to bf16 for linears, all that Llama and Qwen3-MoE have of it: grouped products are none of its,
    and PEFT switches it off where it adds a product to a stack. For meta tensors torch itself has none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cached: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            args = tuple(self._cast(a) if isinstance(a, Tensor) else a for a in args)
        return func(*args, **(kwargs or {}))

    def _cast(self, tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad):
            return tensor.bfloat16()
        if id(tensor) not in self.cached:
            self.cached[id(tensor)] = tensor.bfloat16()
        return self.cached[id(tensor)]


# --- the systems ----------------------------------------------------------------------------------------------------


def ours(shape: Shape, num_layers: int, *, kernels: str = "none", is_replayed: bool = False, **more: Any) -> Counted:
    """A step of meshlora's trainer with so many layers. kernels: `model.kernels`. more: of `BaseOptions`.

    is_replayed: with `train.cuda_graphs`, from its second step on: `replay` is in the record, `update` beside it.
    """
    config = resized(shape.config, num_hidden_layers=num_layers)
    options = BaseOptions(dtype="bfloat16", attn_implementation="sdpa", **more)
    blueprint = make_blueprint(config, Topology(), options).with_adapter(shape.lora_config())
    mesh = fake_mesh(Topology(), blueprint.plan.copies, has_experts=bool(blueprint.plan.experts))
    counting, tokens = Counting(), shape.batch_size * shape.seq_len
    with FakeRun() as fake_run:
        model = _assembled(blueprint, mesh, fake_run, kernels)
        factors = active_factors(model)
        for factor in factors:
            factor.parameter.requires_grad_()
        ids, labels = _tokens(shape)
        rows, positions = [[shape.seq_len]] * shape.batch_size, torch.arange(shape.seq_len).expand_as(ids)
        batch = Batch(ids, torch.ones_like(ids), labels, tokens, ids, trained=torch.arange(tokens), pads_right=True)

        def loss_of(given: Batch) -> Tensor:
            with rows_of(model, rows):
                return shifted_loss(model, ids, None, labels, position_ids=positions, trained=given.trained)

        # What it reads is asserted on a GPU, by the GPU.
        with replaced(vocabulary, "_check_labels", lambda *_: None):
            if is_replayed:
                loss = _replayed(model, factors, counting, batch, loss_of)
            else:
                with counting, counting.reading():
                    loss = loss_of(batch)
                    counting.part = "backward"
                    loss.backward()
        counting.part = "update"
        with counting, counting.reading():
            sums = StepSums(mesh, [""])
            sums.add(0, batch, tokens, loss.detach(), {})
            totals = finish_gradients_on_device(mesh, [factors], [tokens])
            norms = clip_gradients_on_device(mesh, [factors], [1.0])
            sums.read(totals, norms, is_asked=False)
        _count_adamw(counting, [factor.parameter for factor in factors])
    return counting.found


def _assembled(blueprint: Blueprint, mesh: Mesh, fake_run: FakeRun, kernels: str) -> Any:
    built = copy.deepcopy(blueprint.model)
    if kernels != "none":
        fuse(built, kernels)
    model = assemble(built, blueprint, mesh, fake_run, optimizer="adamw")
    if kernels == "fused":
        from meshlora.wings.kernels.loss_chunk import chunk_kernels, note_logits

        note_logits(model, chunk_kernels())  # of the head, which is split only now
    keep_apart(model)  # as the trainer does, which knows on the host where sequences begin
    model.meshlora.is_causal = is_causal(blueprint.model, blueprint.plan)  # as loading does
    return model


def _replayed(model: Any, factors: Any, counting: Counting, batch: Batch, loss_of: Callable[[Batch], Tensor]) -> Tensor:
    """The loss of a micro-batch that is replayed. Counted are the record, and what the host does beside its replay."""
    from meshlora.layers.tokens import Share
    from meshlora.run.graphs.graphs import Graphs  # not of each commit that is compared

    class Once:
        """A recorder that counts what it is to record."""

        def record(self, run: Callable[[], None]) -> Callable[[], None]:
            counting.part = REPLAY
            with counting:
                run()
            return lambda: None

    graphs = Graphs(
        model,
        factors,
        Once(),
        label_smoothing=0.0,
        masks=lambda _: nullcontext(),
        share=lambda given: Share(None, given.tokens),
        eager=loss_of,
        say=None,
    )

    def no_difference(tensor: Tensor) -> Any:
        return torch.zeros(tensor.shape, device="cpu", dtype=torch.int64).numpy().tolist()

    assert [graphs.takes(batch) for _ in range(2)] == [False, True]
    graphs.begin()
    with replaced(Tensor, "tolist", no_difference):  # the record is compared with the eager micro-batch, once
        graphs.run(batch)
    counting.part = "update"
    with counting:
        graphs.begin()
        return graphs.run(batch)


def fuse(model: Any, kernels: str) -> None:
    """Let `model` call the kernels of liger-kernel, each one operator, which need a GPU: here of their shapes alone.

    kernels: `model.kernels`; `fused` has operators of its own, whose shapes come with them.
    """
    from meshlora.wings.kernels import fused, liger  # not of each commit that is compared

    def norm(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        y, r = torch.ops.counted.norm(x, weight)
        return y, r

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        new_q, new_k = torch.ops.counted.rotate(q, k, cos, sin)
        return new_q, new_k

    gate = liger.Gate(torch.ops.counted.gate, lambda *given: torch.ops.counted.gate_back(*given), F.silu)
    nothing: Any = None  # the norms of this shape have torch's backward
    more: dict[str, Any] = {}
    if kernels == "fused":
        from meshlora.wings.kernels.tails import tails

        more["tails"] = tails()
        if importlib.util.find_spec("meshlora.wings.kernels.stream_sums") is not None:
            from meshlora.wings.kernels.stream_sums import stream_kernels

            more["stream"] = stream_kernels()
    fused.fuse(model, liger.Kernels(norm, nothing, rotate, rotate, {"silu": gate}, **more))


_LIBRARY = torch.library.Library("counted", "DEF")
_KERNELS: dict[str, Any] = {
    "norm(Tensor x, Tensor weight) -> (Tensor, Tensor)": lambda x, _: (
        torch.empty_like(x),
        x.new_empty(*x.shape[:-1], 1, dtype=torch.float32),
    ),
    "rotate(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)": lambda q, k, *_: (
        torch.empty_like(q),
        torch.empty_like(k),
    ),
    "gate(Tensor gate, Tensor up) -> Tensor": lambda gate, _: torch.empty_like(gate),
    "gate_back(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)": lambda _, gate, up: (
        torch.empty_like(gate),
        torch.empty_like(up),
    ),
}
for _schema, _shapes in _KERNELS.items():
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.partition("(")[0], _shapes, "Meta")


def peft(shape: Shape, num_layers: int) -> Counted:
    """A step of PEFT in a plain loop."""
    config = resized(shape.config, num_hidden_layers=num_layers)
    counting = Counting()
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        model = get_peft_model(base, shape.lora_config()).train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {parameter.dtype for parameter in parameters} == {torch.float32}
    ids, labels = _tokens(shape)
    with FakeRun(), counting, counting.reading():
        # PEFT asks for none around its products of stacks, by the device: torch has none for meta.
        with _Autocast(), replaced(torch, "autocast", lambda **_: nullcontext()):
            logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        counting.part = "backward"
        loss.backward()
        counting.part = "update"
        # The operators of torch's `clip_grad_norm_`, which takes no meta tensors.
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        total = torch.linalg.vector_norm(torch.stack(norm_of_each(grads, dtype=torch.float32)))
        multiply_each(grads, (1.0 / (total + 1e-6)).clamp(max=1.0))
    _count_adamw(counting, parameters)
    return counting.found


def _tokens(shape: Shape) -> tuple[Tensor, Tensor]:
    ids = torch.zeros(shape.batch_size, shape.seq_len, dtype=torch.int64)
    return ids, torch.zeros_like(ids)


def _count_adamw(counting: Counting, parameters: list[Any]) -> None:
    """The fused step, which torch has not on the meta device: reads weight, gradient and moments, writes all but it."""
    moved = 7 * sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    counting.found.operators["update"]["_fused_adamw_", Work(0, moved), False] += 1


def least(shape: Shape, num_layers: int) -> Counted:
    """The least that a step of a dense Llama needs: see the module's docstring."""
    c, tokens = shape.config, shape.batch_size * shape.seq_len
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    h, f, q, kv = c.hidden_size, c.intermediate_size, c.num_attention_heads * head_dim, c.num_key_value_heads * head_dim
    forward, backward = Counter[tuple[str, Work, bool]](), Counter[tuple[str, Work, bool]]()

    def product(into: Counter[Any], rows: int, inner: int, columns: int) -> None:
        moved = 2 * (rows * inner + inner * columns + rows * columns)
        into["mm", Work(2 * rows * inner * columns, moved), False] += 1

    def between(into: Counter[Any], name: str, *widths: int) -> None:
        into[name, Work(0, 2 * tokens * sum(widths)), False] += 1

    for wide, outs in ((h, (q, kv, kv)), (q, (h,)), (h, (f, f)), (f, (h,))):
        rank = RANK * len(outs)
        product(forward, tokens, wide, rank)  # z of all linears that share x
        product(backward, rank, tokens, wide)  # their dA
        for out in outs:
            product(forward, tokens, wide + RANK, out)  # [x | z] [W | B]^T
            product(backward, tokens, out, RANK)  # dz
            product(backward, RANK, tokens, out)  # dB
            product(backward, tokens, out + RANK, wide)  # [g | dz] [W ; A]
    pairs = shape.batch_size * shape.seq_len**2 * q
    forward["attention", Work(2 * pairs, 2 * tokens * (2 * q + 2 * kv), True), False] += 1
    backward["attention", Work(5 * pairs, 2 * tokens * (4 * q + 4 * kv), True), False] += 1
    for _ in range(2):
        between(forward, "residual and norm", 4 * h)
        between(backward, "norm and residual", 4 * h)
    between(forward, "rotary", 2 * (q + kv))
    between(backward, "rotary", 2 * (q + kv))
    between(forward, "swiglu", 3 * f)
    between(backward, "swiglu", 6 * f)  # reads g, gate, up; writes both gradients and down's input again
    layer = Counted({"forward": forward, "backward": backward, "update": Counter()})
    nothing = Counted({part: Counter() for part in PARTS})
    whole = nothing.plus(layer, num_layers)
    product(whole.operators["forward"], tokens, h, c.vocab_size)
    product(whole.operators["forward"], tokens, c.vocab_size, h)
    whole.operators["forward"]["loss", Work(0, 4 * tokens * c.vocab_size), False] += 1
    factors = num_layers * RANK * sum(a + b for a, b in ((h, q), (h, kv), (h, kv), (q, h), (h, f), (h, f), (f, h)))
    whole.operators["update"]["update", Work(0, 28 * factors), False] += 1
    whole.reads = 1
    return whole


OURS: dict[str, dict[str, str]] = {"meshlora": {}}  # name -> options of `ours`; earlier commits have fewer
if importlib.util.find_spec("meshlora.wings.kernels.fused") is not None:
    OURS["with liger"] = {"kernels": "liger"}
if importlib.util.find_spec("meshlora.wings.quantized.float8_gpu") is not None:
    OURS["and in float8"] = {"kernels": "liger", "compute": "fp8"}
if importlib.util.find_spec("meshlora.wings.kernels.tails") is not None:
    OURS["fused"] = {"kernels": "fused"}
    OURS["fused, backward in float8"] = {"kernels": "fused", "compute": "fp8_backward"}
    OURS["fused, in float8"] = {"kernels": "fused", "compute": "fp8"}
SYSTEMS: dict[str, Callable[[Shape, int], Counted]] = {
    **{name: partial(ours, **options) for name, options in OURS.items()},  # type: ignore[arg-type] # of the literals
    "PEFT": peft,
    "least": least,
}


def count(shape: Shape) -> dict[str, tuple[Counted, Counted]]:
    """System -> (a step, one layer of it)."""
    # The least is said of dense layers alone.
    return {name: count_of(shape, it) for name, it in SYSTEMS.items() if not (name == "least" and shape.has_experts)}


def count_replayed(shape: Shape) -> dict[str, Counted]:
    """Of ours -> a step with `train.cuda_graphs`."""
    return {name: count_of(shape, partial(SYSTEMS[name], is_replayed=True))[0] for name in OURS}


def count_of(shape: Shape, system: Callable[[Shape, int], Counted]) -> tuple[Counted, Counted]:
    """(A step of so many layers as the shape has, one layer of it.)"""
    with simulated_job(2):
        one, two = system(shape, 1), system(shape, 2)
    layer, more = two.minus(one), shape.config.num_hidden_layers - 1
    return one.once_grown(two, more).plus(layer, more), layer
