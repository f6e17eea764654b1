"""benchmarks/step_kernels.py: its count is that of a real step, and the step keeps what it has gained."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from meshlora_extra.planner import fake
from meshlora_extra.planner.hardware import GPUS
from meshlora_ground.compat import replaced

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    """The module, with its folder in the path as a script has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import step_kernels

        yield step_kernels
        for name in ("step_kernels", "gpu_shapes", "processes", "table"):
            patch.delitem(sys.modules, name)


@pytest.fixture(scope="module")
def counted(kernels: ModuleType) -> dict[str, Any]:
    return kernels.count(kernels.real_shapes()[0])


@pytest.fixture(scope="module")
def mixture(kernels: ModuleType) -> dict[str, Any]:
    return kernels.count(next(shape for shape in kernels.real_shapes() if shape.name == "moe"))


def test_a_layer_of_8b_has_few_operators_and_no_cast_of_a_factor(kernels: ModuleType, counted: dict[str, Any]) -> None:
    parts = ("forward", "backward")
    (_, ours), (_, theirs), (_, least) = counted["meshlora"], counted["PEFT"], counted["least"]
    assert ours.casts(*parts) == 0
    assert theirs.casts(*parts) == 4 * 7
    assert least.number(*parts) < ours.number(*parts) <= 0.45 * theirs.number(*parts)


def test_a_step_of_8b_has_no_more_operators_than_it_had(kernels: ModuleType, counted: dict[str, Any]) -> None:
    """A change that adds some says so here, as one that saves some does."""
    found = {name: step.number(*kernels.PARTS) for name, (step, _) in counted.items()}
    assert (found["meshlora"], found["with liger"]) == (2615, 2102)
    assert (found["fused"], found["fused, in float8"]) == (1719, 2383)


def test_a_step_of_8b_is_as_short_as_was_asked_for(kernels: ModuleType, counted: dict[str, Any]) -> None:
    rates = {name: 4096 / step.seconds(GPUS["h100"], *kernels.PARTS) for name, (step, _) in counted.items()}
    assert rates["PEFT"] < kernels.TARGET_RATE <= rates["meshlora"] < rates["with liger"] < rates["least"]
    assert rates["and in float8"] > 1.15 * rates["with liger"]
    assert rates["fused"] > 15_300
    assert rates["fused, in float8"] > 18_800


def test_products_do_the_arithmetic_of_the_shape(kernels: ModuleType, counted: dict[str, Any]) -> None:
    shape = kernels.real_shapes()[0]
    asked = sys.modules["gpu_shapes"].flops_per_token(shape, [shape.seq_len]) * shape.seq_len
    for name, (step, _) in counted.items():
        done = sum(work.flops * n for part in kernels.PARTS for (_, work, _), n in step.operators[part].items())
        # The attention's backward computes one product again.
        assert 1 <= done / asked < 1.02, name


def test_sums_of_the_stream_have_their_low_rank_products(kernels: ModuleType, counted: dict[str, Any]) -> None:
    shape = kernels.real_shapes()[0]
    _, layer = counted["fused"]
    for part, name in (("forward", "stream_sum"), ("backward", "stream_back")):
        done = {work.flops: n for (own, work, _), n in layer.operators[part].items() if own == name}
        assert done == {2 * shape.seq_len * shape.config.hidden_size * kernels.RANK: 2}  # of o_proj and down_proj


def test_grouped_products_multiply_each_row_once(kernels: ModuleType, mixture: dict[str, Any]) -> None:
    shape = next(shape for shape in kernels.real_shapes() if shape.name == "moe")
    c, rows = shape.config, shape.seq_len * shape.config.num_experts_per_tok
    _, layer = mixture["meshlora"]
    done = 0
    for part in kernels.PARTS:
        for (name, work, _), n in layer.operators[part].items():
            if name == "_grouped_mm":
                done += work.flops * n
    asked = 0
    for inner, out in ((c.hidden_size, 2 * c.moe_intermediate_size), (c.moe_intermediate_size, c.hidden_size)):
        # Of the stacks forward and input gradient, of the factors their own gradient too.
        asked += 2 * rows * (2 * inner * out + 3 * kernels.RANK * (inner + out))
    assert done == asked


def test_peft_without_content_runs_the_operators_of_autocast(kernels: ModuleType) -> None:
    """torch has no autocast for tensors without content: what stands for it is compared with the real one."""
    shape = kernels.tiny(kernels.real_shapes()[0])
    torch.manual_seed(0)
    config = sys.modules["gpu_shapes"].resized(shape.config, num_hidden_layers=1)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = get_peft_model(base, shape.lora_config()).train()
    ids = torch.zeros(shape.batch_size, shape.seq_len, dtype=torch.int64)
    counting = kernels.Counting()
    with replaced(F, "scaled_dot_product_attention", fake._attention), counting:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
        counting.part = "backward"
        loss.backward()
    found = kernels.peft(shape, 1)
    for part in ("forward", "backward"):
        names, expected = (Counter[str](), Counter[str]())
        for counter, own in ((names, found), (expected, counting.found)):
            for (name, *_), n in own.operators[part].items():
                counter[name] += n
        assert names == expected, part


def test_a_list_of_tensors_is_one_operator_of_any_length(kernels: ModuleType, counted: dict[str, Any]) -> None:
    step, _ = counted["meshlora"]
    sizes = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)  # q, o; k, v; gate, up, down
    factors = kernels.RANK * 32 * sizes
    [(cost, number)] = [(c, n) for (name, c, _), n in step.operators["update"].items() if name == "_fused_adamw_"]
    assert number == 1
    assert cost.num_bytes == 7 * 4 * factors
    # And one of what is made of such a list: the norms of all gradients, squared.
    assert [n for (name, *_), n in step.operators["update"].items() if name == "pow"] == [1]


def test_a_mixture_is_counted_by_the_rule_of_a_dense_model(kernels: ModuleType, mixture: dict[str, Any]) -> None:
    assert list(mixture) == [name for name in kernels.SYSTEMS if name != "least"]
    for name, (step, layer) in mixture.items():
        grouped = sum(n for part in kernels.PARTS for (op, *_), n in layer.operators[part].items() if "grouped" in op)
        # Ours: forward and input gradient of 2 stacks and of 4 factors, and the gradients of these. PEFT adds factors
        # to the stacks, and needs the gradient of both.
        assert grouped == (6 if name == "PEFT" else 16), name
        assert step.reads == 1 + 12 * layer.reads, name


def test_a_layer_of_a_mixture_has_few_operators_and_no_read(kernels: ModuleType, mixture: dict[str, Any]) -> None:
    parts = ("forward", "backward")
    (step, ours), (_, theirs) = mixture["meshlora"], mixture["PEFT"]
    assert step.reads == 1
    assert ours.reads == 0
    assert ours.casts(*parts) == 0
    assert ours.number(*parts) <= 0.41 * theirs.number(*parts)
    assert step.number(*kernels.PARTS) <= 1558, "half of what a step was when its host waited"


def test_reads_of_the_host_in_a_layer_are_those_of_all_layers(kernels: ModuleType) -> None:
    one, two = (kernels.Counted({part: Counter() for part in kernels.PARTS}, reads) for reads in (5, 8))
    assert one.plus(two.minus(one), 11).reads == 5 + 11 * 3
