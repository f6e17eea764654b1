"""Several adapters on one linear, in one file, in one step: what is whose, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from meshlora.comm.groups import Axis
from meshlora.layers import linear, tokens
from meshlora.layers.linear import ParallelLinear
from meshlora.layers.products import LoraLinearFunction
from meshlora.layers.tokens import ForwardTokens, Mask, Part, Segment, Share, are_alike
from meshlora.plan.layout import Split
from meshlora.plan.rules import LinearRule
from meshlora.run.config.file import read_run, read_runs
from meshlora.run.together import prepare_runs
from meshlora.wings.quantized.quantized import Packed, pack
from meshlora_ground.errors import UnsupportedError, UserError
from tests.for_each import for_each
from tests.run_files import EXAMPLES, write_run_file

ALONE = Axis(1, 0, (0,), None)
IN, OUT, SEQ = 6, 5, 4
RANKS = {"a": 2, "b": 3, "c": 1}


def _linear(
    names: str,
    *,
    ranks: dict[str, int] = RANKS,
    dropout: dict[str, float] | None = None,
    width: int = IN,
    packed: str | None = None,
) -> ParallelLinear:
    torch.manual_seed(0)
    rule = LinearRule("proj", Split.WHOLE, width, OUT, has_bias=True)
    leaf = ParallelLinear(rule, ALONE, scatters_tokens=False, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        leaf.weight.normal_()
        assert leaf.bias is not None
        leaf.bias.normal_()
    if packed is not None:
        leaf.hold(pack(leaf.weight, packed))
    forward = ForwardTokens(ALONE, sp=False)
    for number, name in enumerate(names):
        r = ranks[name]
        factors = {"A": torch.randn(r, width, dtype=torch.float64), "B": torch.randn(OUT, r, dtype=torch.float64)}
        leaf.add_adapter(name, factors, scaling=0.5 + number)
        leaf.set_dropout(name, (dropout or {}).get(name, 0.0), forward)
    for factor in (*leaf.lora_A.values(), *leaf.lora_B.values()):
        factor.requires_grad_(True)
    return leaf


def _shares(rows: dict[str, int]) -> list[Share]:
    """Each adapter's tokens count from 0: they are numbers in its own step."""
    return [
        Share(name, torch.arange(number * SEQ).view(number, SEQ), seed=ord(name), step=3)
        for name, number in rows.items()
    ]


def _together(leaf: ParallelLinear, x: Tensor, g: Tensor, rows: dict[str, int]) -> list[Tensor]:
    assert leaf.tokens is not None
    leaf.zero_grad()
    x = x.clone().requires_grad_()
    with leaf.tokens.of(_shares(rows), [*leaf.scaling]):
        y = leaf(x)
        y.backward(g)
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in leaf.parameters() if p.requires_grad]
    assert x.grad is not None
    return [y.detach(), x.grad, *(grad.clone() for grad in grads)]


def _one_by_one(leaf: ParallelLinear, x: Tensor, g: Tensor, rows: dict[str, int]) -> list[Tensor]:
    """The same with the linear of one adapter, of whom these tokens are."""
    leaf.zero_grad()
    ys, dxs, start = [], [], 0
    for share, number in zip(_shares(rows), rows.values(), strict=True):
        own = x[start : start + number].clone().requires_grad_()
        leaf.active = share.adapter
        assert leaf.tokens is not None
        with leaf.tokens.at(share.seed, share.step, share.tokens):
            y = leaf(own)
        y.backward(g[start : start + number])
        assert own.grad is not None
        ys.append(y.detach())
        dxs.append(own.grad)
        start += number
    leaf.active = None
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in leaf.parameters() if p.requires_grad]
    return [torch.cat(ys), torch.cat(dxs), *(grad.clone() for grad in grads)]


def _largest(ours: list[Tensor], alone: list[Tensor]) -> float:
    """The largest relative difference of any tensor."""
    pairs = zip(ours, alone, strict=True)
    return max(float((a - b).norm() / b.norm().clamp_min(1e-300)) for a, b in pairs)


CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "unequal": ({"a": 1, "b": 3, "c": 2}, {}),
    "with dropout": ({"a": 1, "b": 3, "c": 2}, {"dropout": {"b": 0.5}}),
    "with dropouts of their own": ({"a": 1, "b": 3, "c": 2}, {"dropout": {"a": 0.2, "c": 0.5}}),
    "alike": ({"a": 2, "b": 2, "c": 2}, {"ranks": dict.fromkeys("abc", 2)}),
    "one of them alone": ({"b": 2}, {}),
    "in another order": ({"c": 1, "a": 2, "b": 1}, {}),
    "of 4 bits": ({"a": 1, "b": 3, "c": 2}, {"width": 64, "packed": "nf4"}),
    "alike, of 8 bits": ({"a": 2, "b": 2, "c": 2}, {"ranks": dict.fromkeys("abc", 2), "width": 64, "packed": "int8"}),
}


def _inputs(leaf: ParallelLinear, rows: dict[str, int]) -> tuple[Tensor, Tensor]:
    """(the input, the gradient of the output)"""
    shape = sum(rows.values()), SEQ
    x = torch.randn(*shape, leaf.in_features, dtype=torch.float64)
    return x, torch.randn(*shape, OUT, dtype=torch.float64)


@pytest.mark.parametrize("case", CASES)
def test_each_adapter_of_many_computes_what_it_computes_alone(case: str) -> None:
    rows, options = CASES[case]
    leaf = _linear("abc", **options)
    x, g = _inputs(leaf, rows)
    assert _largest(_together(leaf, x, g, rows), _one_by_one(leaf, x, g, rows)) < 1e-14


def test_each_adapter_drops_at_its_own_rate() -> None:
    """Above both sides would drop at another's."""
    leaf = _linear("abc", dropout={"a": 0.2, "c": 0.5})
    assert leaf.tokens is not None
    rates = {}
    for share in _shares({"a": 1, "c": 1}):
        assert share.adapter is not None
        leaf.active = share.adapter
        with leaf.tokens.at(share.seed, share.step, share.tokens):
            mask = leaf.mask(share.adapter, torch.ones(1, SEQ, IN))
        assert mask is not None
        rates[share.adapter] = mask.p
    assert rates == {"a": 0.2, "c": 0.5}


def _boundary_off_by_one(patch: pytest.MonkeyPatch) -> None:
    parts = ForwardTokens.parts

    def shifted(self: ForwardTokens, module: str, num_rows: int) -> list[Part]:
        found = parts(self, module, num_rows)
        last = len(found) - 1
        return [
            replace(part, start=max(part.start - 1, 0), stop=part.stop - (place < last))
            for place, part in enumerate(found)
        ]

    patch.setattr(ForwardTokens, "parts", shifted)


def _scale_of_the_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(linear, "Segment", lambda start, stop, scale, mask: Segment(start, stop, 0.5, mask))


def _mask_of_another_step(patch: pytest.MonkeyPatch) -> None:
    key = tokens.mask_key
    patch.setattr(tokens, "mask_key", lambda seed, step, module: key(seed, step + 1, module))


def _tokens_counted_through(patch: pytest.MonkeyPatch) -> None:
    """The mask sees a token's place in the batch, not its number in the adapter's own step."""
    patch.setattr(tokens, "Mask", lambda key, tokens, features, p: Mask(key, tokens + SEQ, features, p))


def _other_weight_in_the_backward(patch: pytest.MonkeyPatch) -> None:
    """What is unpacked the second time is not what was unpacked the first time."""
    unpack, calls = Packed.whole, itertools.count()
    patch.setattr(Packed, "whole", lambda self: unpack(self) * (1 + next(calls) % 2))


def _factors_of_the_next(patch: pytest.MonkeyPatch) -> None:
    apply = LoraLinearFunction.apply
    patch.setattr(LoraLinearFunction, "apply", lambda *given: apply(*given[:6], *given[8:], *given[6:8]))


@for_each(
    ("case", "fault"),
    [
        ("unequal", _boundary_off_by_one),
        ("unequal", _scale_of_the_first),
        ("unequal", _factors_of_the_next),
        ("with dropout", _mask_of_another_step),
        ("with dropout", _tokens_counted_through),
        ("of 4 bits", _other_weight_in_the_backward),
        ("alike, of 8 bits", _other_weight_in_the_backward),
        ("alike", _scale_of_the_first),
        ("alike", _factors_of_the_next),
    ],
)
def test_fault_in_a_linear_with_many_shows(
    case: str, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, options = CASES[case]
    leaf = _linear("abc", **options)
    x, g = _inputs(leaf, rows)
    alone = _one_by_one(leaf, x, g, rows)
    fault(monkeypatch)
    assert _largest(_together(leaf, x, g, rows), alone) > 1e-3


def test_segments_that_are_alike_are_one_batched_product() -> None:
    a, b = torch.zeros(2, IN), torch.zeros(OUT, 2)
    pair = (Segment(4, 8, 1.0), Segment(8, 12, 2.0))
    assert are_alike(pair, (a, b, a, b))
    assert not are_alike(pair, (a, b, a[:1], b[:, :1]))
    assert not are_alike((pair[0], Segment(8, 11, 1.0)), (a, b, a, b))
    assert not are_alike((pair[1], pair[0]), (a, b, a, b))


@pytest.mark.parametrize("ranks", [RANKS, dict.fromkeys("abc", 2)])
def test_infinity_of_one_adapter_does_not_reach_the_others(ranks: dict[str, int]) -> None:
    leaf = _linear("abc", ranks=ranks)
    x, g = torch.randn(6, SEQ, IN, dtype=torch.float64), torch.randn(6, SEQ, OUT, dtype=torch.float64)
    x[2, 1, 0] = float("inf")
    _together(leaf, x, g, {"a": 2, "b": 2, "c": 2})
    for name in "abc":
        gradient = leaf.lora_A[name].grad
        assert gradient is not None
        assert bool(gradient.isfinite().all()) == (name != "b")


@pytest.mark.parametrize("rank", [0, 1])
def test_under_sp_a_rank_has_its_slice_of_every_share(rank: int) -> None:
    forward = ForwardTokens(Axis(2, rank, (0, 1), None), sp=True)
    with forward.of(_shares({"a": 1, "b": 3, "c": 2}), "abc"):  # 24 tokens, 12 a rank
        found = [(part.share.adapter, part.start, part.stop, part.tokens.tolist()) for part in forward.parts("m", 12)]
        expected = {
            0: [("a", 0, 4, [0, 1, 2, 3]), ("b", 4, 12, [*range(8)]), ("c", 12, 12, [])],
            1: [("a", 0, 0, []), ("b", 0, 4, [8, 9, 10, 11]), ("c", 4, 12, [*range(8)])],
        }
        assert found == expected[rank]
        with pytest.raises(UnsupportedError, match="7 rows for 24 tokens"):
            forward.parts("m", 7)


# --- the run file -----------------------------------------------------------------------------------------------------


def _file(folder: Path, **changes: Any) -> Path:
    tree: dict[str, Any] = {
        "model": {},
        "data": {"train": str(EXAMPLES / "docstrings" / "pairs.jsonl")},
        "lora": {"r": 4, "target_modules": ["q_proj"]},
        "train": {"batch_size": 2},
        "adapters": {"one": {}, "two": {"lora": {"r": 8}, "train": {"lr": 1e-3, "epochs": 1}}},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = tree
        for key in parents:
            place = place.setdefault(key, {})
        place[last] = value
    return write_run_file(folder / "out.yaml", **tree)


def test_an_adapter_has_what_it_gives_in_the_place_of_what_is_for_all(tmp_path: Path) -> None:
    runs = read_runs(_file(tmp_path, adapters__three={"adapter": "folder"}))
    assert list(runs) == ["one", "three", "two"]
    assert runs["one"].lora == {"r": 4, "target_modules": ["q_proj"]}
    assert runs["two"].lora == {"r": 8, "target_modules": ["q_proj"]}
    assert (runs["three"].lora, runs["three"].adapter) == (None, "folder")
    assert (runs["two"].train.steps, runs["two"].train.epochs, runs["two"].train.lr) == (None, 1, 1e-3)
    assert [Path(run.train.output).name for run in runs.values()] == ["one", "three", "two"]


def test_override_reaches_one_adapter_or_all(tmp_path: Path) -> None:
    runs = read_runs(_file(tmp_path), ["train.batch_size=5", "adapters.two.train.lr=0.5"])
    assert [run.train.batch_size for run in runs.values()] == [5, 5]
    assert [run.train.lr for run in runs.values()] == [2e-4, 0.5]


def test_file_without_adapters_is_one_run(tmp_path: Path) -> None:
    file = _file(tmp_path)
    tree = yaml.safe_load(file.read_text())
    del tree["adapters"]
    file.write_text(yaml.safe_dump(tree))
    assert list(read_runs(file)) == [""]
    assert read_runs(file)[""] == read_run(file)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no adapters": ({"adapters": {}}, "maps names to what each adapter has"),
    "a list": ({"adapters": ["one"]}, "maps names to what each adapter has"),
    "a name with a slash": ({"adapters__a/b": {}}, "letters, digits"),
    "the folder of logs": ({"adapters__logs": {}}, "keeps something else under this name"),
    "a group that is for all": ({"adapters__one__model": {"path": "x"}}, "adapters.one.model"),
    "a key that is for all": ({"adapters__one__train": {"micro_batch_size": 2}}, "outside of adapters:, for all"),
    "an unknown key": ({"adapters__one__train": {"batchsize": 2}}, "did you mean 'batch_size'"),
    "a value out of range": ({"adapters__one__train": {"lr": -1}}, "adapters.one: train.lr=-1"),
    "trackers that follow one run a process": ({"train__track": ["wandb"]}, "train.track"),
    "a loss of routers": ({"train__router_aux_loss_coef": 0.01}, "train.router_aux_loss_coef"),
    "float16": ({"model__dtype": "float16"}, "float16 with 2 adapters: their loss scale"),
    "PiSSA": ({"adapters__one__lora": {"init_lora_weights": "pissa"}}, "adapter one: init_lora_weights"),
    "a norm in full": ({"adapters__one__lora": {"modules_to_save": ["norm"]}}, "adapter one: modules_to_save"),
    "trained biases": ({"adapters__one__lora": {"bias": "all"}}, "adapter one: bias='all'"),
    "no such module": ({"adapters__two__lora": {"target_modules": ["qq"]}}, "adapter two: target_modules"),
}


@for_each("mistake", MISTAKES)
def test_mistake_with_several_adapters_is_said(mistake: str, tmp_path: Path) -> None:
    changes, said = MISTAKES[mistake]
    changes = {"data__train": str(EXAMPLES / "docstrings" / "eval.jsonl"), **changes}
    with pytest.raises(UserError) as raised:
        prepare_runs(read_runs(_file(tmp_path, **changes)), world=1)
    assert said in str(raised.value)


def test_several_adapters_go_on_from_their_own_checkpoints_only(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="use --resume auto"):
        prepare_runs(read_runs(_file(tmp_path)), world=1, resume="folder")


def test_other_commands_name_the_adapters_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="with adapters: one, two"):
        read_run(_file(tmp_path))
