"""Attention of all sequences of packed rows in one call: the kernel's contract, where it is taken, and its check."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshlora.loading.blueprint import make_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.wings.packed_rows import varlen
from meshlora.wings.packed_rows.by_sequence import keep_apart
from meshlora.wings.packed_rows.varlen import Ends, agrees, in_one_call, why_none
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config
from tests.unit.test_by_sequence import _LENGTHS, _model, _run

CPU = torch.device("cpu")


class StandIn:
    """`torch.nn.attention.varlen.varlen_attn` in plain torch, with the signature of torch 2.13 and what it asks of its
    arguments.
    """

    def __init__(self) -> None:
        self.ends: list[Tensor] = []

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: Tensor | None = None,
        block_table: Tensor | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        assert cu_seq_k is not None
        assert query.ndim == key.ndim == value.ndim == 3
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert enable_gqa or query.shape[1] == key.shape[1], "query and key have another number of heads"
        ends = cu_seq_q.tolist()
        assert ends[0] == 0
        assert ends[-1] == len(query)
        assert max(b - a for a, b in itertools.pairwise(ends)) <= max_q == max_k
        self.ends.append(cu_seq_q)
        out = []
        for a, b in itertools.pairwise(ends):
            q, k, v = (x[a:b].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            found = F.scaled_dot_product_attention(q, k, v, is_causal=window_size == (-1, 0), scale=scale)
            out.append(found[0].transpose(0, 1))
        return torch.cat(out)


class StandIn211(StandIn):
    """With the signature of torch 2.11, whose kernel takes fewer heads of keys without being asked."""

    def __call__(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        options: dict[str, Any] = {"scale": scale, "window_size": window_size, "enable_gqa": True}
        return super().__call__(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    monkeypatch.setattr(varlen, "_kernel", lambda: found)
    monkeypatch.setattr(varlen, "has_kernel", lambda query: True)
    agrees.cache_clear()
    return found


def _same(found: list[Tensor], right: list[Tensor]) -> None:
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11 * float(other.abs().max()))


@pytest.mark.parametrize("family", ["llama", "bloom", "granite"])
def test_one_call_a_layer_has_the_values_and_gradients_of_the_whole_mask(family: str, kernel: StandIn) -> None:
    if family == "bloom":  # has no sdpa, and adds to its scores
        model = _model(family, "eager")
        keep_apart(model)
        _run(model, _LENGTHS)
        assert not kernel.ends
        return
    model = _model(family, "sdpa")
    whole = _run(model, None)
    keep_apart(model)
    _same(_run(model, _LENGTHS), whole)
    assert len(kernel.ends) == model.config.num_hidden_layers
    assert len({id(ends) for ends in kernel.ends}) == 1, "made once a batch"
    assert kernel.ends[0].tolist() == [0, 13, 18, 21, 24, 35, 42]


def test_joined_rows_take_one_call_with_the_signature_of_torch_2_11(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = StandIn211()
    monkeypatch.setattr(varlen, "_kernel", lambda: kernel)
    agrees.cache_clear()
    assert agrees(CPU, torch.bfloat16, 16)
    monkeypatch.setattr(varlen, "has_kernel", lambda query: True)
    kernel.ends.clear()
    model = _model("llama", "sdpa")
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    whole = _run(model, None)
    keep_apart(model)
    _same(_run(model, _LENGTHS), whole)
    assert [ends.tolist() for ends in kernel.ends] == model.config.num_hidden_layers * [[0, 13, 18, 21, 24, 35, 42]]


def test_a_mistake_in_a_call_of_the_kernel_is_no_missing_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, scale: float, window_size: tuple[int, int]) -> Tensor:
        raise TypeError("a mistake")

    monkeypatch.setattr(varlen, "_kernel", lambda: broken)
    agrees.cache_clear()
    with pytest.raises(TypeError, match="a mistake"):
        agrees(CPU, torch.bfloat16, 16)


def test_a_window_that_cuts_a_sequence_goes_on_as_it_is(kernel: StandIn) -> None:
    model = _model("gemma3_text", "sdpa")
    of_layers = [kind == "full_attention" for kind in model.config.layer_types]
    assert len(set(of_layers)) == 2
    whole = _run(model, None)
    keep_apart(model)
    _same(_run(model, _LENGTHS), whole)
    assert len(kernel.ends) == sum(of_layers)

    kernel.ends.clear()
    short = [[7, 7, 7], [5, 6, 7, 3]]  # of 8
    _run(model, short, short)
    assert len(kernel.ends) == len(of_layers)


def test_rows_of_one_sequence_each_need_no_ends(kernel: StandIn) -> None:
    model = _model("llama", "sdpa")
    keep_apart(model)
    _run(model, [[21], [21]], [[21], [21]])
    assert not kernel.ends


@pytest.mark.parametrize("given", [{"dropout": 0.1}, {"is_causal": False}, {"position_bias": 1}, {"module": False}])
def test_what_is_not_plain_causal_does_not_fit(given: dict[str, Any], kernel: StandIn) -> None:
    module = torch.nn.Module()
    module.is_causal = given.pop("module", True)  # type: ignore[assignment]
    query = torch.randn(1, 2, 5, 8)
    fits = varlen.fits(module, query, query, query, [None], (), {"scaling": 1.0, "dropout": 0.0} | given)
    assert fits == (not given and bool(module.is_causal))
    assert varlen.fits(torch.nn.Module(), query, query, query, [None], (), {"sliding_window": 4})
    assert not varlen.fits(torch.nn.Module(), query, query, query, [None, query], (), {})
    assert not varlen.fits(torch.nn.Module(), query, query, query[..., :4], [None], (), {})


def _wrong() -> dict[str, Callable[..., Any]]:
    right = StandIn()

    def late(*given: Any, **rest: Any) -> Tensor:
        ends = given[3].clone()
        ends[1] += 1
        return right(*given[:3], ends, ends, *given[5:], **rest)

    def all_see(*given: Any, **rest: Any) -> Tensor:
        return right(*given, **rest | {"window_size": (-1, -1)})

    def unscaled(*given: Any, **rest: Any) -> Tensor:
        return right(*given, **rest | {"scale": 1.0})

    def of_keys(query: Tensor, key: Tensor, *given: Any, **rest: Any) -> Tensor:
        return right(query, key.detach(), *given, **rest)

    def other_torch(*given: Any, is_causal: bool = False) -> Tensor:
        raise AssertionError

    return {"late": late, "not causal": all_see, "unscaled": unscaled, "gradient": of_keys, "signature": other_torch}


@pytest.mark.parametrize("name", ["", *_wrong()])
def test_a_kernel_is_compared_with_its_definition(name: str, kernel: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    if name:
        monkeypatch.setattr(varlen, "_kernel", lambda: _wrong()[name])
    assert agrees(CPU, torch.bfloat16, 16) == (not name)


def test_on_a_cpu_nothing_changes() -> None:
    assert not varlen.has_kernel(torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16))


def test_ends_are_of_their_lengths() -> None:
    ends, one, other = Ends(), [[2, 3]], [[1], [1]]
    assert ends.of(one, CPU) is ends.of(one, CPU)
    assert ends.of(one, CPU).tolist() == [0, 2, 5]
    assert ends.of(other, CPU).tolist() == [0, 1, 2]


def test_rows_are_those_of_the_batch(kernel: StandIn) -> None:
    query = torch.randn(2, 4, 5, 8)
    assert in_one_call(query, query, query, [[5], [2, 3]], Ends(), scale=None).shape == (2, 5, 4, 8)


def test_joined_rows_that_have_no_kernel_are_known_before_they_run() -> None:
    def why(family: str, longest: int = 7, dtype: torch.dtype = torch.bfloat16) -> str | None:
        return why_none(make_blueprint(twin_config(family), Topology(), BaseOptions()).model, dtype, longest)

    assert why("llama") is None
    assert "heads of 8 in float32" in str(why("llama", dtype=torch.float32))
    assert "values of another width" in str(why("deepseek_v3"))
    assert "attn_implementation=eager" in str(why("gpt_oss"))
    # Without a word on each layer the window is of all; in a row that it does not cut it changes nothing.
    assert why("mistral") is None
    assert "a window of 8 tokens, and rows have up to 8" in str(why("mistral", 8))
    assert why("qwen3", 4096) is None
    assert "attention in chunks of 8 tokens" in str(why("llama4_text"))
