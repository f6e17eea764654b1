"""Routing recorded and replayed: every way in which routers of transformers choose, strictly."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from meshlora.wings.experts.routing import check_routed, check_routing, step_file
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.limits import time_limit
from meshlora_ground.routing import Routing, RoutingRecord
from meshlora_ground.topology import Topology
from tests.for_each import for_each

T, H, E, K = 10, 4, 8, 2


class Block(nn.Module):
    """A router as families have them; returns (chosen experts, weights)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.randn(E, H, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = (x @ self.weight.T).softmax(-1)
        if self.kind == "values":
            weights, index = torch.topk(scores, K, dim=-1)
            weights /= weights.sum(-1, keepdim=True)  # in place, as mixtral does
            return index, weights
        if self.kind == "method":
            weights, index = scores.topk(K, dim=1)
            return index, weights
        if self.kind == "argmax":
            return scores.argmax(-1, keepdim=True), scores
        by_group = scores.view(-1, 4, 2).topk(2, dim=-1)[0].sum(-1)
        groups = torch.topk(by_group, k=2, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(by_group).scatter(1, groups, 1).repeat_interleave(2, 1)
        weights, index = torch.topk(scores * mask, k=K, dim=-1, sorted=False)
        return index, weights


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.mlp = Block(kind)

    def forward(self, x: Tensor) -> Any:
        return self.mlp(x)


def _tokens(number: int = T) -> Tensor:
    return torch.randn(number, H, generator=torch.Generator().manual_seed(1))


def _recorded(model: Model, x: Tensor, tokens: Tensor) -> tuple[RoutingRecord, Any]:
    record = RoutingRecord(T, {"mlp": E})
    with Routing(model, record, replays=False) as routing:
        routing.tokens = tokens
        return record, model(x)


@pytest.mark.parametrize("kind", ["values", "method", "groups"])
def test_replay_takes_the_recorded_choices_in_any_order_of_tokens(kind: str) -> None:
    model, x = Model(kind), _tokens()
    record, (index, weights) = _recorded(model, x, torch.arange(T))
    order = torch.randperm(T, generator=torch.Generator().manual_seed(2))
    with Routing(model, record, replays=True) as routing:
        routing.tokens = order
        again, same = model(x[order])
        other, values = model(x)  # other tokens now have these choices
        values.sum().backward()
    assert torch.equal(again, index[order])
    assert torch.equal(same, weights[order])
    assert torch.equal(other, index[order])
    assert bool((values > 0).all())
    assert model.mlp.weight.grad is not None
    assert not torch.equal(model(x)[0], other)
    assert "forward" not in model.mlp.__dict__


@pytest.mark.parametrize("kind", ["values", "method", "groups"])
def test_weights_are_those_of_the_replayed_choices(kind: str) -> None:
    model, x = Model(kind), _tokens()
    record, _ = _recorded(model, x, torch.arange(T))
    with Routing(model, record, replays=True) as routing:
        routing.tokens = torch.arange(T - 1, -1, -1)
        index, weights = model(x)
    expected = (x @ model.mlp.weight.T).softmax(-1).gather(1, index)
    if kind == "values":
        expected /= expected.sum(-1, keepdim=True)
    assert torch.equal(weights, expected)


def test_each_layer_replays_its_own_choices() -> None:
    blocks = nn.ModuleDict({"first": Block("values"), "second": Block("values")})
    record, tokens = RoutingRecord(T, {"first": E, "second": E}), torch.arange(T)
    x, own = _tokens(), {"first": torch.arange(K).expand(T, K), "second": torch.arange(K, 2 * K).expand(T, K)}
    for name, choices in own.items():
        record.put(0, name, tokens, choices)
    with Routing(blocks, record, replays=True) as routing:
        routing.tokens = tokens
        assert all(torch.equal(blocks[name](x)[0], choices) for name, choices in own.items())


def test_padding_routes_itself_and_a_missing_token_is_an_error() -> None:
    model, x = Model("values"), _tokens()
    tokens = torch.arange(T)
    tokens[[2, 7]] = -1
    record, (index, _) = _recorded(model, x, tokens)
    with Routing(model, record, replays=True) as routing:
        routing.tokens = tokens
        assert torch.equal(model(x)[0], index)
        routing.tokens = torch.arange(T)
        with pytest.raises(UserError, match=r"step 1, mlp, token 2.*1 more"):
            model(x)
        routing.step = 1
        with pytest.raises(UserError, match="step 2, mlp: no choices"):
            model(x)


def test_what_cannot_be_replayed_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="does not choose by topk"):
        _recorded(Model("argmax"), _tokens(), torch.arange(T))
    with pytest.raises(UnsupportedError, match="it chooses for 9 rows, of a forward of 10 tokens"):
        _recorded(Model("values"), _tokens(9), torch.arange(T))
    record = RoutingRecord(T, {"mlp": E})
    record.put(0, "mlp", torch.arange(T), torch.zeros(T, 3, dtype=torch.int64))
    model = Model("values")
    with Routing(model, record, replays=True) as routing:
        routing.tokens = torch.arange(T)
        with pytest.raises(UserError, match="3 choices"):
            model(_tokens())


def test_file_keeps_everything_and_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    record, _ = _recorded(Model("values"), _tokens(), torch.arange(T))
    record.digest = "ab"
    record.save(tmp_path / "routing.safetensors")
    found = RoutingRecord.load(tmp_path / "routing.safetensors")
    assert (found.num_tokens, found.num_experts, found.digest) == (T, {"mlp": E}, "ab")
    assert torch.equal(found.choices[0, "mlp"], record.choices[0, "mlp"])
    record.choices[0, "mlp"][3, 0] = E
    record.save(tmp_path / "routing.safetensors")
    with pytest.raises(UserError, match="no choices among its experts"):
        RoutingRecord.load(tmp_path / "routing.safetensors")
    (tmp_path / "routing.safetensors").write_bytes(b"{}")
    with pytest.raises(UserError, match="no record of routing"):
        RoutingRecord.load(tmp_path / "routing.safetensors")


TABLE = torch.zeros(T, K, dtype=torch.int32)
SAID = {"num_tokens": str(T), "experts/mlp": str(E)}


@for_each(
    ("tensors", "said", "words"),
    [
        ({"0/mlp": TABLE}, SAID | {"num_tokens": str(10**18)}, "is no count"),
        ({"0/mlp": TABLE}, SAID | {"num_tokens": "9" * 5000}, "is no count"),
        ({"0/mlp": TABLE}, SAID | {"num_tokens": "-10"}, "is no count"),
        ({"0/mlp": TABLE}, SAID | {"num_tokens": "11"}, "of 11 tokens"),
        ({"0/mlp": TABLE}, SAID | {"experts/mlp": "9" * 4000}, "is no count"),
        ({"0/mlp": TABLE}, SAID | {"experts/mlp": "1"}, "choose among 1 experts"),
        ({"0/mlp": TABLE}, {"experts/mlp": str(E)}, "num_tokens"),
        ({"0/mlp": TABLE.double()}, SAID, "is F64"),
        ({"0/mlp": TABLE.to(torch.complex64)}, SAID, "is C64"),
        ({"0/mlp": TABLE[:, :0]}, SAID, "choose among 8 experts"),
        ({"0/mlp": TABLE[0]}, SAID, "'mlp' is I32 [2]"),
        ({"0/attn": TABLE}, SAID, "choose among 0 experts"),
        ({"0/" + "x" * 5000: TABLE}, SAID, "choose among 0 experts"),
        ({"-1/mlp": TABLE}, SAID, "is no count"),
        ({"9" * 5000 + "/mlp": TABLE}, SAID, "is no count"),
        ({}, SAID, "holds no choices"),
    ],
)
def test_hostile_record_is_one_short_message(
    tensors: dict[str, Tensor], said: dict[str, str], words: str, tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "hostile.safetensors", metadata=said)
    with pytest.raises(UserError) as error:
        RoutingRecord.load(tmp_path / "hostile.safetensors")
    assert words in str(error.value)
    assert len(str(error.value)) < 2000


def test_record_that_is_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    with time_limit(5), pytest.raises(UserError, match="no regular file"):
        RoutingRecord.load(tmp_path / "pipe.safetensors")


def test_missing_steps_are_counted_without_a_look_at_each(tmp_path: Path) -> None:
    plan: Any = SimpleNamespace(experts={"mlp.experts": None}, model_type="made_up")
    for name in ("step-000001.safetensors", "step-0000002.safetensors", "step-000000.safetensors"):
        (tmp_path / name).touch()
    with time_limit(5), pytest.raises(UserError, match=r"step-000002\.safetensors is not there \(9{18} of 10{18}"):
        check_routing(tmp_path, replays=True, steps=10**18, plan=plan, may_overwrite=False)
    step_file(tmp_path, 1).touch()
    check_routing(tmp_path, replays=True, steps=2, plan=plan, may_overwrite=False)


def _check(folder: Path, *, may_overwrite: bool = False) -> None:
    plan: Any = SimpleNamespace(experts={"mlp.experts": None}, model_type="made_up")
    check_routing(folder, replays=False, steps=3, plan=plan, may_overwrite=may_overwrite)


def test_folder_that_no_record_can_be_written_to_is_refused(tmp_path: Path) -> None:
    _check(tmp_path / "new" / "folder")
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=r"routing_record=.*file is a file, a folder is needed"):
            _check(folder, may_overwrite=True)
    with pytest.raises(UserError, match="/proc is not writable"):  # not even by root
        _check(Path("/proc/meshlora"))


def test_folder_that_holds_any_step_is_overwritten_only_where_asked(tmp_path: Path) -> None:
    (tmp_path / "step-best.safetensors").touch()  # no file of a record
    _check(tmp_path)
    step_file(tmp_path, 41).touch()
    with pytest.raises(UserError, match="holds a record already"):
        _check(tmp_path)
    _check(tmp_path, may_overwrite=True)


def _plan(*layers: int, pp: int = 1) -> Any:
    blocks = {
        f"model.layers.{layer}.mlp": SimpleNamespace(block=f"model.layers.{layer}.mlp", num_experts=E, num_choices=E)
        for layer in layers
    }
    return SimpleNamespace(experts=blocks, layers="model.layers", model_type="moe", topology=Topology(pp=pp))


def test_layers_of_a_record_are_all_or_those_with_experts() -> None:
    routed = np.arange(K, dtype=np.int16) + np.zeros((3, 2, 1), dtype=np.int16)
    assert check_routed(routed, _plan(3, 10)) == {"model.layers.3.mlp": 0, "model.layers.10.mlp": 1}
    whole = np.zeros((3, 12, K), dtype=np.int16)  # dense layers have zeros, as vLLM fills them
    whole[:, [3, 10]] = routed
    whole[-1] = -1  # a last token
    assert check_routed(whole, _plan(10, 3)) == {"model.layers.10.mlp": 10, "model.layers.3.mlp": 3}


@pytest.mark.parametrize(
    ("change", "plan", "words"),
    [
        ({}, _plan(), "moe has no routed experts"),
        ({}, _plan(1, pp=2), "on pp=2"),
        ({}, _plan(0, 1, 2), "of 2 layers, and 3 of moe have experts"),
        ({}, _plan(4), "of 2 layers, and 1 of moe have experts"),
        ({(2, 1, 0): 1}, _plan(0, 1), "to one expert twice"),
        ({(2, 1, 1): E}, _plan(0, 1), f"there are {E}"),
    ],
)
def test_experts_that_a_model_does_not_have_are_refused(change: dict[Any, int], plan: Any, words: str) -> None:
    routed = np.arange(K, dtype=np.int16) + np.zeros((3, 2, 1), dtype=np.int16)
    for place, expert in change.items():
        routed[place] = expert
    with pytest.raises(UserError, match=words):
        check_routed(routed, plan)
