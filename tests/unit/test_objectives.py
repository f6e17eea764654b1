"""Each objective is the formula of its paper, written out in plain torch; and what it reports beside its loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshlora.common.float64 import lift
from meshlora.config.objective import KINDS, Dpo, Kto, Objective, Orpo, Policy, Sft
from meshlora.data import Batch
from meshlora.train import losses, objectives
from meshlora.train.objectives import Seen, count, loss_sums

# Sequences of unequal length, with starts that are not trained.
ROWS, LENGTH, VOCAB = 4, 6, 7
LABELS = torch.tensor([[-100, 3, 2, 5, -100, -100], [-100, -100, 1, 6, 4, 2], [2, 3, -100, -100, -100, -100], [6] * 6])


class Model:
    """Its logits, and those of its base, are what they are."""

    training = True

    def __init__(self) -> None:
        self.logits, self.of_base = (torch.randn(ROWS, LENGTH, VOCAB, dtype=torch.float64) for _ in range(2))
        self.logits.requires_grad_()


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    torch.manual_seed(1)
    made = Model()
    monkeypatch.setattr(losses, "_forward", lambda model, *_: model.logits)
    state = SimpleNamespace(pipeline=SimpleNamespace(is_last=True, earlier=list))  # one process has all layers
    for module in (losses, objectives):
        monkeypatch.setattr(module, "runtime", lambda _: state)
    return made


def batch_of(columns: dict[str, Tensor] | None = None, rows: int = 1) -> Batch:
    ids = torch.ones_like(LABELS)
    trained = (LABELS.flatten() >= 0).nonzero().squeeze(1)
    return Batch(ids, ids, LABELS, len(trained), ids, columns or {}, trained=trained, rows_per_example=rows)


def sums(logits: Tensor) -> list[Tensor]:
    """log p of each completion."""
    table = torch.log_softmax(logits, -1)
    return [sum(table[b, t, label] for t, label in enumerate(row) if label >= 0) for b, row in enumerate(LABELS)]  # type: ignore[misc]


def sft(model: Model, columns: dict[str, Tensor]) -> Tensor:
    table = torch.log_softmax(model.logits, -1)
    each = [
        0.7 * -table[b, t, label] + 0.3 * -table[b, t].mean()
        for b, row in enumerate(LABELS)
        for t, label in enumerate(row)
        if label >= 0
    ]
    return torch.stack(each).mean()


def policy(model: Model, columns: dict[str, Tensor]) -> Tensor:
    table, of_base = torch.log_softmax(model.logits, -1), torch.log_softmax(model.of_base, -1)
    each = []
    for b, row in enumerate(LABELS):
        for t, label in enumerate(row):
            if label < 0:
                continue
            a, w = columns["advantage"][b, t], columns["weight"][b, t]
            log_p, log_ref = table[b, t, label], of_base[b, t, label]
            ratio = torch.exp(log_p - columns["old_log_prob"][b, t])
            kl = torch.exp(log_ref - log_p) - (log_ref - log_p) - 1
            each.append(w * (-torch.min(ratio * a, torch.clamp(ratio, 0.9, 1.4) * a) + 0.25 * kl))
    return torch.stack(each).mean()


def dpo(model: Model, columns: dict[str, Tensor]) -> Tensor:
    pi, ref = sums(model.logits), sums(model.of_base)
    margins = [0.3 * ((pi[n] - ref[n]) - (pi[n + 1] - ref[n + 1])) for n in (0, 2)]
    each = [-0.8 * torch.log(torch.sigmoid(m)) - 0.2 * torch.log(torch.sigmoid(-m)) for m in margins]
    return torch.stack(each).mean()


def orpo(model: Model, columns: dict[str, Tensor]) -> Tensor:
    sizes = [3, 4, 2, 6]
    p = [torch.exp(one / size) for one, size in zip(sums(model.logits), sizes, strict=True)]
    each = []
    for n in (0, 2):
        log_odds_ratio = torch.log(p[n] / (1 - p[n])) - torch.log(p[n + 1] / (1 - p[n + 1]))
        each.append(-torch.log(p[n]) + 0.3 * -torch.log(torch.sigmoid(log_odds_ratio)))
    return torch.stack(each).mean()


POINT = 0.4  # of rewards, some of which are above it and some below


def kto(model: Model, columns: dict[str, Tensor]) -> Tensor:
    pi, ref = sums(model.logits), sums(model.of_base)
    each = []
    for n, is_liked in enumerate((True, False, False, True)):
        reward = pi[n] - ref[n]
        liked, disliked = torch.sigmoid(0.3 * (reward - POINT)), torch.sigmoid(0.3 * (POINT - reward))
        each.append(1.5 - 1.5 * liked if is_liked else 0.7 - 0.7 * disliked)  # lambda_y - v(x, y)
    return torch.stack(each).mean()


# With no parameter at its default.
PAPERS: dict[str, tuple[Objective, Any]] = {
    "sft": (Sft(label_smoothing=0.3), sft),
    "policy": (Policy(clip_low=0.1, clip_high=0.4, kl_coef=0.25), policy),
    "dpo": (Dpo(beta=0.3, label_smoothing=0.2), dpo),
    "orpo": (Orpo(beta=0.3), orpo),
    "kto": (Kto(beta=0.3, desirable_weight=1.5, undesirable_weight=0.7), kto),
}


@pytest.mark.parametrize("kind", PAPERS)
def test_objective_is_the_formula_of_its_paper(kind: str, model: Model) -> None:
    objective, formula = PAPERS[kind]
    assert all(value != getattr(KINDS[kind](), name) for name, value in vars(objective).items() if name != "kind")
    shape = (ROWS, LENGTH)
    columns = {
        "advantage": torch.randn(shape),
        "weight": torch.rand(shape),
        "old_log_prob": -torch.rand(shape) * 4,
        "desirable": (LABELS >= 0) * torch.tensor([[1.0], [-1.0], [-1.0], [1.0]]),
    }
    batch = batch_of(columns, rows=2 if objective.per == "pair" else 1)
    expected = formula(model, {name: column.double() for name, column in columns.items()})
    (gradient,) = torch.autograd.grad(expected, model.logits)
    with lift(True):
        base = None
        if objective.needs_base:
            base = losses.batch_log_probabilities(type("Base", (), {"logits": model.of_base})(), batch)
        point = torch.tensor(POINT, dtype=torch.float64)
        ((total, _),) = loss_sums(objective, model, batch, [("", batch)], base, [point])
    found = total / count(objective, batch)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(torch.autograd.grad(found, model.logits)[0], gradient, rtol=1e-10, atol=1e-14)


def test_clipped_tokens_are_those_whose_gradient_is_cut() -> None:
    # ratio, advantage, and whether the clipped product is the smaller one, at 0.8 and 1.3.
    tokens = [
        (1.0, 2.0, 0),
        (1.25, 2.0, 0),
        (2.0, 2.0, 1),
        (0.5, 2.0, 0),
        (2.0, -3.0, 0),
        (0.5, -3.0, 1),
        (2.0, 0.0, 0),
    ]
    ratio, advantage, is_cut = (torch.tensor([values], dtype=torch.float64) for values in zip(*tokens, strict=True))
    columns = {"advantage": advantage, "old_log_prob": -ratio.log(), "weight": torch.ones_like(ratio)}
    seen = Seen(torch.zeros_like(ratio), None, torch.ones_like(ratio).bool(), columns, True)
    loss, values = objectives.policy(Policy(clip_low=0.2, clip_high=0.3), seen)
    assert values["clip_fraction"].sum().item() == is_cut.sum().item()
    cut = ratio.clamp(0.8, 1.3)
    expected = torch.where(is_cut > 0, cut, ratio) * advantage
    assert loss.sum().item() == pytest.approx(-expected.sum().item(), abs=1e-12)
