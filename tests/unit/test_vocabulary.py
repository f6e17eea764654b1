"""The loss from hidden states on one rank against torch's, and the recipe against real models' logits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from meshlora.comm.groups import Axis
from meshlora.layers import head_loss as vocabulary
from meshlora.layers.head_loss import IGNORED, summed_cross_entropy_from_hidden
from meshlora.layers.logits_recipe import LogitsRecipe
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.float64 import lift
from tests.for_each import for_each

ALONE = Axis(1, 0, (0,), None)
T, H, V, R = 23, 6, 31, 2


def _inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, A, B and labels of which every fourth is untrained."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((T, H), (V, H), (R, H), (V, R))
    hidden, weight, a, b = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    labels = torch.randint(0, V, (T,), generator=generator)
    labels[::4] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), a.requires_grad_(), b.requires_grad_(), labels


def _capped(weight: Tensor, a: Tensor, b: Tensor) -> Callable[[Tensor], Tensor]:
    """A head with LoRA and gemma's soft cap."""
    return lambda x: 5.0 * torch.tanh((x @ weight.T + 0.5 * (x @ a.T) @ b.T) / 5.0)


def _off(ours: Tensor, expected: Tensor) -> float:
    return float(((ours - expected).norm() / expected.norm()).detach())


def _in_chunks(tokens: int | None) -> contextlib.AbstractContextManager[object]:
    """Inside the block so many tokens pass the head at once; None: as many as in training."""
    how_many = mock.patch.object(vocabulary, "chunk_tokens", return_value=tokens)
    return contextlib.nullcontext() if tokens is None else how_many


@for_each("chunk_tokens", [1, 7, T, None])
@for_each("label_smoothing", [0.0, 0.1])
def test_loss_and_gradients_are_those_of_the_whole(chunk_tokens: int | None, label_smoothing: float) -> None:
    hidden, *parameters, labels = _inputs()
    head = _capped(*parameters)
    with _in_chunks(chunk_tokens):
        ours = summed_cross_entropy_from_hidden(
            hidden, head, labels, parameters, axis=ALONE, vocab=V, label_smoothing=label_smoothing
        )
    whole = F.cross_entropy(head(hidden), labels, reduction="sum", label_smoothing=label_smoothing)
    assert _off(ours, whole) < 1e-14
    leaves = [hidden, *parameters]
    # A factor other than 1 comes in, as from a loss that is scaled afterwards.
    for got, expected in zip(
        torch.autograd.grad(3 * ours, leaves), torch.autograd.grad(3 * whole, leaves), strict=True
    ):
        assert _off(got, expected) < 1e-14


def test_only_listed_parameters_that_train_get_a_gradient() -> None:
    hidden, weight, a, b, labels = _inputs()
    hidden.requires_grad_(False)
    b.requires_grad_(False)
    head = _capped(weight, a, b)
    summed_cross_entropy_from_hidden(hidden, head, labels, (a, b), axis=ALONE, vocab=V).backward()
    [expected] = torch.autograd.grad(F.cross_entropy(head(hidden), labels, reduction="sum"), [a])
    assert weight.grad is None
    assert b.grad is None
    assert a.grad is not None
    assert _off(a.grad, expected) < 1e-14


def test_a_graph_that_is_kept_gives_the_same_gradient_again() -> None:
    hidden, weight, *_, labels = _inputs()
    loss = summed_cross_entropy_from_hidden(hidden, lambda x: x @ weight.T, labels, (weight,), axis=ALONE, vocab=V)
    first = torch.autograd.grad(loss / 7, [hidden, weight], retain_graph=True)
    again = torch.autograd.grad(loss / 7, [hidden, weight])
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_a_batch_without_trained_tokens_is_zero_and_still_connected() -> None:
    hidden, weight, *_, labels = _inputs()

    def head(x: Tensor) -> Tensor:
        raise AssertionError("the head is called for nothing")

    loss = summed_cross_entropy_from_hidden(
        hidden, head, torch.full_like(labels, IGNORED), (weight,), axis=ALONE, vocab=V
    )
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_untrained_tokens_never_reach_the_head() -> None:
    hidden, weight, *_, labels = _inputs()
    seen = []

    def head(x: Tensor) -> Tensor:
        seen.append(x.detach().clone())
        return x @ weight.T

    with _in_chunks(4):
        summed_cross_entropy_from_hidden(hidden, head, labels, axis=ALONE, vocab=V)
    assert torch.equal(torch.cat(seen), hidden[labels != IGNORED])


def test_without_gradients_nothing_is_differentiated() -> None:
    hidden, weight, *_, labels = _inputs()
    is_on = []

    def head(x: Tensor) -> Tensor:
        is_on.append(torch.is_grad_enabled())
        return x @ weight.T

    with torch.no_grad():
        loss = summed_cross_entropy_from_hidden(hidden, head, labels, (weight,), axis=ALONE, vocab=V)
        assert _off(loss, F.cross_entropy(head(hidden), labels, reduction="sum")) < 1e-14
    assert not any(is_on)
    assert not loss.requires_grad


def test_no_logit_is_too_large() -> None:
    """Without the greatest logit taken off first, exp overflows."""
    hidden, weight, *_, labels = _inputs()
    head = lambda x: 1e4 * (x @ weight.T)  # noqa: E731
    loss = summed_cross_entropy_from_hidden(hidden, head, labels, axis=ALONE, vocab=V)
    assert _off(loss, F.cross_entropy(head(hidden), labels, reduction="sum")) < 1e-14


@pytest.mark.parametrize("label", [V, -1])
def test_a_label_outside_the_vocabulary_is_refused(label: int) -> None:
    hidden, weight, *_, labels = _inputs()
    labels[5] = label
    padded = F.pad(weight, (0, 0, 0, 3))  # its logit exists
    with pytest.raises(UserError, match=f"label {label}"):
        summed_cross_entropy_from_hidden(hidden, lambda x: x @ padded.T, labels, axis=ALONE, vocab=V)


def test_a_gradient_in_bf16_is_scaled_in_fp32() -> None:
    """A GPU rounds a number `[]` to the dtype of the tensor. A CPU does not: looked at is what torch is asked for."""
    tensor, factor, seen = torch.ones(3, 2, dtype=torch.bfloat16), torch.tensor(1 / 13), []

    def multiply(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
        seen.append((torch.result_type(left, right), out.dtype))
        return out

    with mock.patch.object(torch, "mul", multiply):
        vocabulary._scaled(tensor, factor)
        vocabulary._scaled(tensor, factor.expand(3, 1))
    assert seen == [(torch.float32, torch.bfloat16)] * 2


def test_bf16_is_computed_in_fp32() -> None:
    """Each logit is rounded to bf16, as the model's own; nothing after it is."""
    hidden, weight, *_, labels = _inputs(torch.bfloat16)
    loss = summed_cross_entropy_from_hidden(hidden, lambda x: x @ weight.T, labels, (weight,), axis=ALONE, vocab=V)
    whole = F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")
    assert loss.dtype == torch.float32
    assert _off(loss, whole) < 1e-6
    # 1/13 is no bf16 number: rounded, it would shift all gradients the same way.
    ours = torch.autograd.grad(loss / 13, [hidden, weight])
    for got, expected in zip(ours, torch.autograd.grad(whole / 13, [hidden, weight]), strict=True):
        assert got.dtype == torch.bfloat16
        ratio = (got.double() * expected.double()).sum() / expected.double().square().sum()
        assert abs(float(ratio) - 1) < 5e-4


# --- the recipe -----------------------------------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "gemma2": lambda: Gemma2Config(**TINY, head_dim=8, final_logit_softcapping=0.5),
    "cohere": lambda: CohereConfig(**TINY, logit_scale=0.0625),
    "granite": lambda: GraniteConfig(**TINY, logits_scaling=8.0),
    "llama": lambda: LlamaConfig(**TINY),
}


class _RecipeHead(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return LogitsRecipe(hidden, vocab=TINY["vocab_size"])


@for_each("dtype", [torch.float32, torch.bfloat16, torch.float64])
@for_each("family", MODELS)
def test_replay_gives_the_logits_of_the_models_own_forward(family: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[family](), dtype=dtype).eval()
    ids = torch.randint(3, 40, (2, 5))
    with lift(dtype == torch.float64):
        expected = model(input_ids=ids, use_cache=False).logits
        head, model.lm_head = model.lm_head, _RecipeHead()
        recipe = model(input_ids=ids, use_cache=False).logits
        assert isinstance(recipe, LogitsRecipe)
        replayed = recipe.replay(head(recipe.hidden.flatten(0, 1)))
    assert bool(recipe.operations) == (family != "llama")
    assert (recipe.shape, recipe.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(replayed, expected.flatten(0, 1))


SCALAR = torch.tensor(2.5)
RECORDED: dict[str, Callable[[Tensor], Tensor]] = {
    "operators": lambda x: -(3 - ((2 * x + 1) / 3 - 0.5) ** 2),
    "functions": lambda x: torch.mul(torch.tanh(torch.div(x, 0.7)), 0.7),
    "methods": lambda x: x.div(0.7).tanh().mul(0.7).clamp(min=-0.5),
    "in place": lambda x: x.clone().div_(0.7).tanh_().mul_(0.7) if type(x) is Tensor else x.div_(0.7).tanh_().mul_(0.7),
    "tensor of one element": lambda x: x.mul(SCALAR) / SCALAR.reshape(1) + SCALAR.reshape(1, 1, 1, 1)[0],
    "scalar first": lambda x: torch.sub(SCALAR, x),
    "casts": lambda x: x.to(torch.bfloat16).float().half().to(dtype=torch.float64),
    "bf16 in place with fp32": lambda x: x.bfloat16().mul_(torch.tensor([1.2345])),
    "bf16 with fp32": lambda x: x.bfloat16().mul(torch.tensor([1.2345])),
}


@for_each("name", RECORDED)
def test_what_acts_on_each_logit_is_recorded(name: str) -> None:
    hidden, logits = torch.randn(2, 3, H), torch.randn(2, 3, V)
    before = logits.clone()
    result = RECORDED[name](LogitsRecipe(hidden, vocab=V))
    expected = RECORDED[name](logits)
    assert isinstance(result, LogitsRecipe)
    assert result.hidden is hidden
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(result.replay(before), expected)
    assert torch.equal(result.replay(before.flatten(0, 1)), expected.flatten(0, 1))


def test_a_change_in_place_is_seen_by_all_who_hold_the_logits() -> None:
    recipe = LogitsRecipe(torch.randn(2, 3, H), vocab=V)
    recipe.float().mul_(2)  # float() of fp32 gives the very same tensor
    logits = torch.randn(4, V)
    assert torch.equal(recipe.replay(logits), 2 * logits)


def test_replay_leaves_its_input_alone() -> None:
    recipe = LogitsRecipe(torch.randn(2, 3, H), vocab=V).mul_(2)
    logits = torch.ones(4, V)
    recipe.replay(logits)
    assert bool((logits == 1).all())


def test_rows_that_a_model_cuts_off_the_end_are_no_part_of_the_vocabulary() -> None:
    """As of inkling's head: what is replayed is unchanged, and the loss is over fewer entries."""
    recipe = LogitsRecipe(torch.randn(2, 3, H), vocab=V).float() * 2
    cut = recipe[..., : V - 1]
    assert isinstance(cut, LogitsRecipe)
    assert (cut.shape, cut.dtype, cut.operations) == ((2, 3, V - 1), recipe.dtype, recipe.operations)
    assert cut.hidden is recipe.hidden


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "index": lambda x: x[:, -1],
    "beginning": lambda x: x[..., 1:],
    "every second": lambda x: x[..., : V - 1 : 2],
    "nothing": lambda x: x[..., :0],
    "tokens": lambda x: x[:, :1],
    "argmax": lambda x: x.argmax(-1),
    "softmax": lambda x: x.softmax(-1),
    "product": lambda x: x @ torch.ones(V, 2),
    "bias": lambda x: x + torch.ones(V),
    "itself": lambda x: x * x,
    "view": lambda x: x.view(-1, V),
    "mask": lambda x: x.masked_fill(torch.zeros(V, dtype=torch.bool), 0.0),
    "trained scale": lambda x: x * nn.Parameter(torch.ones(())),
    "out": lambda x: torch.tanh(x, out=torch.empty(2, 3, V)),
    "device": lambda x: x.to("meta"),
    "values": lambda x: x.data,
    "loss": lambda x: F.cross_entropy(x.float(), torch.zeros(2, 3, dtype=torch.long)),
}


@for_each("name", REFUSED)
def test_what_does_not_is_refused(name: str) -> None:
    recipe = LogitsRecipe(torch.randn(2, 3, H), vocab=V)
    with pytest.raises(UnsupportedError, match="use tp=1"):
        REFUSED[name](recipe)
    assert recipe.operations == ()


def test_a_recipe_looks_like_logits() -> None:
    recipe = LogitsRecipe(torch.randn(2, 3, H, dtype=torch.bfloat16), vocab=V)
    assert isinstance(recipe, Tensor)
    assert (recipe.shape, recipe.size(-1), recipe.dim(), recipe.ndim, len(recipe)) == ((2, 3, V), V, 3, 3, 2)
    assert (recipe.dtype, recipe.device, recipe.requires_grad) == (torch.bfloat16, torch.device("cpu"), False)
    assert recipe.is_floating_point()
    assert "operations=['mul']" in repr(recipe * 2)


@pytest.mark.parametrize(("size", "expected"), [(128_256, 256), (32_000, 1024), (200_000, 167), (10**9, 1)])
def test_a_chunk_is_of_whole_tiles_where_it_holds_one(size: int, expected: int) -> None:
    assert vocabulary.chunk_tokens(size, torch.float32, is_cpu=True) == expected
    assert expected == 1 or expected * size * 4 <= vocabulary.CHUNK_BYTES


@pytest.mark.parametrize(("size", "expected"), [(128_256, 1024), (32_000, 4096), (200_000, 512), (10**9, 1)])
def test_a_chunk_on_a_gpu_holds_more(size: int, expected: int) -> None:
    assert vocabulary.chunk_tokens(size, torch.float32, is_cpu=False) == expected
    assert expected == 1 or expected * size * 4 <= vocabulary.CHUNK_BYTES_OF_GPU
