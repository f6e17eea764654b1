"""A whole training step of a real shape without a GPU: operators, bytes and host reads, priced by a GPU's roofline.

    python benchmarks/step_kernels.py [--gpu h100] [--shape 8b|1b|moe] [--json FILE]
    python benchmarks/step_kernels.py --commits OLD ... NEW     # what each commit of these changed

Nothing is computed and nothing is timed: the real code of both systems runs on tensors without content (those of the
planner), and each operator that it gives the device is counted with the bytes it must read and write. Each then takes
the longest of its arithmetic, its bytes and its launch, by the planner's numbers for that GPU: a sum, no measurement.

The systems are those of gpu.py: a bf16 base with SDPA, LoRA r=16 on all linears; ours by the parts of its trainer
(loss, backward, finished gradients, clipping, sums, AdamW), with `model.kernels: none`, with liger and with fused, a
kernel as one operator; PEFT in a plain loop with fp32 factors under autocast, as its Trainer would (which reads the
host twice more a step, for its filter of NaN). "Least" is no program: each product once with what it reads and writes,
and between products one operator that reads and writes each tensor once; of a mixture it is not said.

Models of one and of two layers are run; a step is the first, and the difference for each further layer. Counted is what
launches a kernel: no views and no allocations. A row that is gathered counts with its own bytes, an expanded dimension
with its stored ones. Attention is one operator each way, a list of tensors (foreach, AdamW) one; an update has as many
for two layers as for one.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import get_peft_model
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from gpu_shapes import RANK, Shape, real_shapes, resized, tiny
from meshlora.adapter.attach import active_factors
from meshlora.comm.groups import simulated_job
from meshlora.layers import head_loss as vocabulary
from meshlora.layers.row_lengths import rows_of
from meshlora.loading.blueprint import make_blueprint
from meshlora.model.regions import tensors_in
from meshlora.plan.base_options import BaseOptions
from meshlora.run.step_sums import StepSums
from meshlora.train.batch import Batch
from meshlora.train.gradsync import clip_gradients_on_device, finish_gradients_on_device
from meshlora.train.losses import shifted_loss
from meshlora.wings.packed_rows.by_sequence import keep_apart
from meshlora_extra.planner import fake
from meshlora_extra.planner.fake import FakeRun, Work
from meshlora_extra.planner.hardware import Hardware, hardware_named
from meshlora_extra.planner.trace import assemble, fake_mesh
from meshlora_ground.compat import replaced
from meshlora_ground.compat.torch_operators import TorchDispatchMode, schema_of
from meshlora_ground.compat.torch_tensors import multiply_each, norm_of_each
from meshlora_ground.topology import Topology
from processes import be_quiet
from table import RESULTS, Findings, Parity, greater, parser, run, smaller

TARGET_RATE = 13_000  # tokens/s of the 8B shape on one H100
TARGET_OPERATORS = 0.7  # of PEFT's in a layer
MOST_OPERATORS = {"moe": 1558}  # of a step: half of those before its experts' sizes stayed on the device
PARTS = ("forward", "backward", "update")
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

    def seconds(self, gpu: Hardware, *parts: str) -> float:
        """Their time on `gpu`."""
        work = Counter[Work]()
        for part in parts:
            for (_, cost, _), n in self.operators[part].items():
                work[cost] += n
        return gpu.work_s(work, is_half=True)

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
        self.found = Counted({part: Counter() for part in PARTS})
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


def ours(shape: Shape, num_layers: int, *, kernels: str = "none", **more: Any) -> Counted:
    """A step of meshlora's trainer with so many layers. kernels: `model.kernels`. more: of `BaseOptions`."""
    config = resized(shape.config, num_hidden_layers=num_layers)
    options = BaseOptions(dtype="bfloat16", attn_implementation="sdpa", **more)
    blueprint = make_blueprint(config, Topology(), options).with_adapter(shape.lora_config())
    mesh = fake_mesh(Topology(), blueprint.plan.copies, has_experts=bool(blueprint.plan.experts))
    counting, tokens = Counting(), shape.batch_size * shape.seq_len
    with FakeRun() as fake_run:
        built = copy.deepcopy(blueprint.model)
        if kernels != "none":
            fuse(built, kernels)
        model = assemble(built, blueprint, mesh, fake_run, optimizer="adamw")
        if kernels == "fused":
            from meshlora.wings.kernels.loss_chunk import chunk_kernels, note_logits

            note_logits(model, chunk_kernels())  # of the head, which is split only now
        factors = active_factors(model)
        for factor in factors:
            factor.parameter.requires_grad_()
        ids, labels = _tokens(shape)
        keep_apart(model)  # as the trainer does, which knows on the host where sequences begin
        rows, positions = [[shape.seq_len]] * shape.batch_size, torch.arange(shape.seq_len).expand_as(ids)
        # What it reads is asserted on a GPU, by the GPU.
        with replaced(vocabulary, "_check_labels", lambda *_: None), counting, counting.reading():
            with rows_of(model, rows):
                loss = shifted_loss(model, ids, None, labels, position_ids=positions, trained=torch.arange(tokens))
            counting.part = "backward"
            loss.backward()
            counting.part = "update"
            sums = StepSums(mesh, [""])
            sums.add(0, Batch(ids, None, labels, tokens, ids), tokens, loss.detach(), {})
            totals = finish_gradients_on_device(mesh, [factors], [tokens])
            norms = clip_gradients_on_device(mesh, [factors], [1.0])
            sums.read(totals, norms, is_asked=False)
        _count_adamw(counting, [factor.parameter for factor in factors])
    return counting.found


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


def ours_with_liger(shape: Shape, num_layers: int) -> Counted:
    """A step of meshlora's trainer with `model.kernels: liger`."""
    return ours(shape, num_layers, kernels="liger")


def ours_in_float8(shape: Shape, num_layers: int) -> Counted:
    """The same with `model.compute: fp8`."""
    return ours(shape, num_layers, kernels="liger", compute="fp8")


def ours_fused(shape: Shape, num_layers: int) -> Counted:
    """A step of meshlora's trainer with `model.kernels: fused`."""
    return ours(shape, num_layers, kernels="fused")


def ours_fused_in_float8(shape: Shape, num_layers: int) -> Counted:
    """The same with `model.compute: fp8`."""
    return ours(shape, num_layers, kernels="fused", compute="fp8")


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


SYSTEMS = {"meshlora": ours, "PEFT": peft, "least": least}
if importlib.util.find_spec("meshlora.wings.kernels.fused") is not None:  # earlier commits have none
    SYSTEMS = {"meshlora": ours, "with liger": ours_with_liger, "PEFT": peft, "least": least}
if importlib.util.find_spec("meshlora.wings.quantized.float8_gpu") is not None:
    SYSTEMS = {"meshlora": ours, "with liger": ours_with_liger, "and in float8": ours_in_float8, **SYSTEMS}
if importlib.util.find_spec("meshlora.wings.kernels.tails") is not None:
    SYSTEMS = {name: SYSTEMS.pop(name) for name in ("meshlora", "with liger", "and in float8")} | {
        "fused": ours_fused,
        "fused, in float8": ours_fused_in_float8,
        **SYSTEMS,
    }


def count(shape: Shape) -> dict[str, tuple[Counted, Counted]]:
    """System -> (a step, one layer of it)."""
    found = {}
    with simulated_job(2):
        for name, system in SYSTEMS.items():
            if name == "least" and shape.has_experts:
                continue  # it is said for dense layers alone
            one, two = system(shape, 1), system(shape, 2)
            layer, more = two.minus(one), shape.config.num_hidden_layers - 1
            found[name] = one.once_grown(two, more).plus(layer, more), layer
    return found


# --- output ---------------------------------------------------------------------------------------------------------


def numbers(step: Counted, layer: Counted, shape: Shape, gpu: Hardware) -> dict[str, float]:
    """The numbers of a system, by name."""
    seconds = step.seconds(gpu, *PARTS)
    per_layer = layer.seconds(gpu, "forward", "backward")
    layers = shape.config.num_hidden_layers
    return {
        "operators of a layer, forward": layer.number("forward"),
        "– backward": layer.number("backward"),
        "– together": layer.number("forward", "backward"),
        "– casts of factors and their gradients": layer.casts("forward", "backward"),
        "GB that a layer reads and writes": layer.num_bytes("forward", "backward") / 1e9,
        "ms a layer": 1e3 * per_layer,
        "ms outside layers": 1e3 * (seconds - layers * per_layer),
        "operators of a step": step.number(*PARTS),
        "host reads of a step": step.reads,
        "ms a step": 1e3 * seconds,
        "tokens/s": shape.batch_size * shape.seq_len / seconds,
    }


def markdown(found: dict[str, dict[str, float]]) -> str:
    """One column for each system, or commit."""
    lines = [["", *found], ["---"] * (1 + len(found))]
    names = next(iter(found.values()))
    lines += [[name, *(_shown(own[name]) for own in found.values())] for name in names]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.2f}"


def kinds(step: Counted, gpu: Hardware) -> dict[str, tuple[int, float]]:
    """Operator -> (how often in a step, ms), the costliest first."""
    found: dict[str, tuple[int, float]] = {}
    for part in PARTS:
        for (name, work, _), n in step.operators[part].items():
            number, ms = found.get(name, (0, 0.0))
            found[name] = number + n, ms + 1e3 * gpu.work_s({work: n}, is_half=True)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def measure(options: argparse.Namespace) -> Findings:
    """Count all systems, and compare ours with PEFT's."""
    shape = next(one for one in real_shapes() if one.name == options.shape)
    shape = tiny(shape) if options.tiny else shape
    gpu = hardware_named(options.gpu)
    counted = count(shape)
    found = {name: numbers(*both, shape, gpu) for name, both in counted.items()}
    mine, peer = found["meshlora"], found["PEFT"]
    names = {"ours_name": "meshlora", "peer_name": "PEFT"}
    together, rate = "– together", "tokens/s"
    reads = "host reads of a step"
    rows = [
        smaller("operators of a layer", [mine[together]], [peer[together]], unit="", target=TARGET_OPERATORS, **names),
        smaller("predicted step", [mine["ms a step"]], [peer["ms a step"]], unit="ms", **names),
    ]
    asked: dict[str, Any] = {"ours_name": "meshlora", "peer_name": "asked for", "target": 1.0}
    if shape.name == "8b":
        target = [float(TARGET_RATE)]
        rows.append(greater(f"predicted rate, {gpu.name}", [mine[rate]], target, unit="tokens/s", **asked))
    if shape.name in MOST_OPERATORS:
        most = [float(MOST_OPERATORS[shape.name])]
        rows.append(smaller("operators of a step", [mine["operators of a step"]], most, unit="", **asked))
    rows.append(smaller("host reads of a step", [mine[reads]], [1.0], unit="", **asked))
    costliest = kinds(counted["meshlora"][0], gpu)
    lines = [f"| {name} | {n:,} | {ms:.1f} |" for name, (n, ms) in list(costliest.items())[:16]]
    sizes = f"{shape.batch_size} × {shape.seq_len} tokens, {shape.config.num_hidden_layers} layers"
    head = ["The costliest operators of our step:", "", "| operator | in a step | ms |", "|---|---|---|"]
    page = "\n".join([f"{shape.name} on {gpu.name}: {sizes}.", "", markdown(found), "", *head, *lines])
    details = {"gpu": gpu.name, "shape": shape.name, "systems": found, "operators": costliest}
    return Findings(Parity("nothing is computed, so nothing can differ", None, None, agrees=True), rows, details, page)


# --- commits --------------------------------------------------------------------------------------------------------


def of_commits(names: list[str], options: argparse.Namespace) -> None:
    """Print what each commit's `src` needs, and the gain of each over the one before."""
    own = Path(__file__).resolve()
    found: dict[str, dict[str, float]] = {}
    for name in names:
        archive = subprocess.run(["git", "archive", name, "src"], cwd=own.parents[1], check=True, capture_output=True)
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            stack.enter_context(tarfile.open(fileobj=BytesIO(archive.stdout))).extractall(folder, filter="data")
            file = Path(folder) / "found.json"
            command = [sys.executable, str(own), "--gpu", options.gpu, "--shape", options.shape, "--json", str(file)]
            environment = {**os.environ, "PYTHONPATH": str(Path(folder) / "src")}
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            found[name] = json.loads(file.read_text())["details"]["systems"]["meshlora"]
    columns = {"operators of a layer": "– together", "casts": "– casts of factors and their gradients"}
    print(f"| commit | {' | '.join(columns)} | ms a step | gained | tokens/s |\n|{'---|' * (len(columns) + 4)}")
    before: float | None = None
    for name, own_numbers in found.items():
        ms = own_numbers["ms a step"]
        gained = "–" if before is None else f"{before - ms:.1f} ms"
        command = ["git", "log", "-1", "--format=%s", name]
        subject = subprocess.run(command, cwd=own.parents[1], check=True, capture_output=True, text=True).stdout
        cells = [subject.strip(), *(f"{own_numbers[key]:.0f}" for key in columns.values()), f"{ms:.1f}", gained]
        print(f"| {' | '.join(cells)} | {own_numbers['tokens/s']:,.0f} |")
        before = ms


def main() -> int:
    own = parser(__doc__)
    own.add_argument("--gpu", default="h100", help="of the planner's table")
    own.add_argument("--shape", default="8b", choices=["8b", "1b", "moe"], help="of gpu_shapes.py")
    own.add_argument("--commits", nargs="+", help="compare the src of these, the oldest first")
    options = own.parse_args()
    be_quiet()
    if options.commits:
        of_commits(options.commits, options)
        return 0
    if options.json is None and not (options.quick or options.tiny):  # no hardware: the machine here changes nothing
        of_shape = "" if options.shape == "8b" else f"{options.shape}_"
        options.json = RESULTS / f"step_kernels_{of_shape}{options.gpu}_{time.strftime('%Y%m')}.json"
    return run("A step without a GPU", options, measure, name="step_kernels")


if __name__ == "__main__":
    sys.exit(main())
