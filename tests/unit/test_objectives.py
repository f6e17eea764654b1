"""Each objective is the formula of its paper, written out in plain torch; and what it reports beside its loss."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from meshlora.run import objectives
from meshlora.run.advantages import with_advantages
from meshlora.run.formulas import policies, preferences
from meshlora.run.formulas.seen import Seen
from meshlora.run.objectives import count, loss_sums
from meshlora.train import losses
from meshlora.train.batch import Batch
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.float64 import lift
from meshlora_ground.objective import Objective, Sft
from meshlora_ground.objectives.policies import Grpo, Policy
from meshlora_ground.objectives.preferences import Dpo, Kto, Orpo, Simpo

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
    monkeypatch.setattr(losses, "to_head", lambda model, *_: model.logits)
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


def _tokens(model: Model, row: int) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[int]]:
    """log pi, log ref and entropy at each trained token of a row, and its positions."""
    table, of_base = torch.log_softmax(model.logits, -1)[row], torch.log_softmax(model.of_base, -1)[row]
    places = [t for t, label in enumerate(LABELS[row]) if label >= 0]
    chosen = [int(LABELS[row, t]) for t in places]
    entropies = [-sum(torch.exp(one) * one for one in table[t]) for t in places]
    of = ([log_p[t, label] for t, label in zip(places, chosen, strict=True)] for log_p in (table, of_base))
    return *of, entropies, places  # type: ignore[return-value]


def policy(model: Model, columns: dict[str, Tensor]) -> Tensor:
    """Clipped ratios of tokens, the third estimate of the divergence, a mean over tokens."""
    each = []
    for b in range(ROWS):
        for log_p, log_ref, entropy, t in zip(*_tokens(model, b), strict=True):
            a, w, old, engine = (columns[name][b, t] for name in COLUMNS)
            ratio = torch.exp(log_p - old)
            kl = torch.exp(log_ref - log_p) - (log_ref - log_p) - 1
            surrogate = torch.min(ratio * a, torch.clamp(ratio, 0.9, 1.4) * a)
            each.append(w * (-min(torch.exp(old - engine), 1.5) * surrogate + 0.25 * kl - 0.3 * entropy))
    return torch.stack(each).mean()


def gspo(model: Model, columns: dict[str, Tensor]) -> Tensor:
    """One ratio a sequence, the first estimate, the mean of each sequence; uncorrected for the engine."""
    each = []
    for b in range(ROWS):
        log_ps, log_refs, _, places = _tokens(model, b)
        of = [(columns["advantage"][b, t], columns["weight"][b, t]) for t in places]
        ratio = torch.exp(sum(p - columns["old_log_prob"][b, t] for p, t in zip(log_ps, places, strict=True)) / len(of))
        terms = [
            w * (-torch.min(ratio * a, torch.clamp(ratio, 0.7, 1.1) * a) + 0.2 * (log_p - log_ref))
            for (a, w), log_p, log_ref in zip(of, log_ps, log_refs, strict=True)
        ]
        each.append(sum(terms) / len(terms))
    return torch.stack(each).mean()


def cispo(model: Model, columns: dict[str, Tensor]) -> Tensor:
    """A clipped ratio without gradient, the second estimate, sums over sequences by a constant."""
    each = []
    for b in range(ROWS):
        total = torch.zeros((), dtype=torch.float64)
        for log_p, log_ref, _, t in zip(*_tokens(model, b), strict=True):
            a, w, old, engine = (columns[name][b, t] for name in COLUMNS)
            held = min(max(torch.exp(log_p - old).item(), 0.6), 1.3)
            weight = min(torch.exp(old - engine).item(), 2.0)
            total = total + w * (-weight * held * a * log_p + 0.5 * (log_p - log_ref) ** 2 / 2)
        each.append(total / 9)
    return torch.stack(each).mean()


def dft(model: Model, columns: dict[str, Tensor]) -> Tensor:
    """Each token by its own probability, which is a constant."""
    table = torch.log_softmax(model.logits, -1)
    chosen = [(b, t, label) for b, row in enumerate(LABELS.tolist()) for t, label in enumerate(row) if label >= 0]
    return torch.stack([-torch.exp(table[place]).item() * table[place] for place in chosen]).mean()


def sapo(model: Model, columns: dict[str, Tensor]) -> Tensor:
    """A squashed ratio, engines by sequence, left out beyond 0.1 to 9; the divergence weighted by the ratio."""
    each = []
    for b in range(ROWS):
        log_ps, log_refs, _, places = _tokens(model, b)
        gaps = [(columns["old_log_prob"] - columns["engine_log_prob"])[b, t].item() for t in places]
        weight = math.exp(sum(gaps))
        weight = weight if 0.1 <= weight <= 9 else 0.0
        for log_p, log_ref, t in zip(log_ps, log_refs, places, strict=True):
            a, w, old, _ = (columns[name][b, t] for name in COLUMNS)
            ratio, temperature = torch.exp(log_p - old), 1.4 if a > 0 else 0.7
            gain = 4 / temperature * torch.sigmoid(temperature * (ratio - 1)) * a
            kl = ratio * (torch.exp(log_ref - log_p) - (log_ref - log_p) - 1)
            each.append(w * (-weight * gain + 0.25 * kl))
    return torch.stack(each).mean()


def vespo(model: Model, columns: dict[str, Tensor]) -> Tensor:
    """w^k exp(l (1 - w)), w the ratio of a sequence, engines included up to 1.5 a token."""
    each = []
    for b in range(ROWS):
        log_ps, _, _, places = _tokens(model, b)
        gaps = [(columns["old_log_prob"] - columns["engine_log_prob"])[b, t].item() for t in places]
        since = [log_p.item() - columns["old_log_prob"][b, t].item() for log_p, t in zip(log_ps, places, strict=True)]
        w = math.exp(sum(since) + sum(min(gap, math.log(1.5)) for gap in gaps))
        for log_p, t in zip(log_ps, places, strict=True):
            a, scale = columns["advantage"][b, t], columns["weight"][b, t]
            k, slope = (0.7, 0.9) if a >= 0 else (0.4, 0.6)
            each.append(-scale * w**k * math.exp(slope * (1 - w)) * a * log_p)
    return torch.stack(each).mean()


def bounded(model: Model, columns: dict[str, Tensor]) -> Tensor:
    """Ratios of at most 2.5, and no loss from a sequence that is far off."""
    each = []
    for b in range(ROWS):
        log_ps, _, _, places = _tokens(model, b)
        off = sum(
            columns["engine_log_prob"][b, t].item() - log_p.item() for log_p, t in zip(log_ps, places, strict=True)
        )
        for log_p, t in zip(log_ps, places, strict=True):
            a, w, old, engine = (columns[name][b, t] for name in COLUMNS)
            ratio, is_left_out = torch.exp(log_p - old), a < 0 and off / len(places) > 0.1
            gain = torch.min(torch.clamp(ratio, max=2.5) * a, torch.clamp(ratio, 0.8, 1.2) * a)
            each.append(-w * min(torch.exp(old - engine).item(), 2.0) * gain * (0 if is_left_out else 1))
    return torch.stack(each).mean()


def by_length(model: Model, columns: dict[str, Tensor]) -> Tensor:
    """IPO, the longer answer's end at 0.3, and the likelihood of the better one."""
    each = []
    for n in (0, 2):
        sides, sizes = [], [int((LABELS[b] >= 0).sum()) for b in (n, n + 1)]
        for b, size in zip((n, n + 1), sizes, strict=True):
            log_ps, log_refs, _, _ = _tokens(model, b)
            gains = [log_p - ref for log_p, ref in zip(log_ps, log_refs, strict=True)]
            sides.append((sum(gains[: min(sizes)]) + 0.3 * sum(gains[min(sizes) :])) / size)
        nll = -sum(_tokens(model, n)[0]) / sizes[0]
        each.append(0.8 * (sides[0] - sides[1] - 1 / 0.6) ** 2 + 0.5 * nll)
    return torch.stack(each).mean()


def discovered(model: Model, columns: dict[str, Tensor]) -> Tensor:
    """DiscoPOP of rewards of an alpha divergence."""
    pi, ref = sums(model.logits), sums(model.of_base)
    scores = [(torch.exp(-0.6 * (a - b)) - 1) / -0.6 for a, b in zip(pi, ref, strict=True)]
    each = []
    for n in (0, 2):
        m = 0.3 * (scores[n] - scores[n + 1])
        share = torch.sigmoid(m / 0.6)
        each.append((1 - share) * -torch.log(torch.sigmoid(m)) + share * torch.exp(-m))
    return torch.stack(each).mean()


def simpo(model: Model, columns: dict[str, Tensor]) -> Tensor:
    means = [one / int((row >= 0).sum()) for one, row in zip(sums(model.logits), LABELS, strict=True)]
    margins = [1.7 * (means[n] - means[n + 1]) - 0.4 for n in (0, 2)]
    each = [-0.8 * torch.log(torch.sigmoid(m)) - 0.2 * torch.log(torch.sigmoid(-m)) for m in margins]
    return torch.stack(each).mean()


def apo(model: Model, columns: dict[str, Tensor]) -> Tensor:
    rewards = [torch.sigmoid(0.1 * (a - b)) for a, b in zip(sums(model.logits), sums(model.of_base), strict=True)]
    return torch.stack([1 - rewards[0], rewards[1], rewards[2], 1 - rewards[3]]).mean()


def dpo(model: Model, columns: dict[str, Tensor]) -> Tensor:
    pi, ref = sums(model.logits), sums(model.of_base)
    margins = [0.3 * ((pi[n] - ref[n]) - (pi[n + 1] - ref[n + 1])) for n in (0, 2)]
    each = [-0.8 * torch.log(torch.sigmoid(m)) - 0.2 * torch.log(torch.sigmoid(-m)) for m in margins]
    return torch.stack(each).mean()


def wpo(model: Model, columns: dict[str, Tensor]) -> Tensor:
    pi, ref = sums(model.logits), sums(model.of_base)
    each = []
    for n in (0, 2):
        weight = torch.tensor(1.0, dtype=torch.float64)
        for row in (n, n + 1):
            is_trained = LABELS[row] >= 0
            p = model.logits[row].detach().softmax(-1)[is_trained]
            own = p.gather(1, LABELS[row][is_trained].unsqueeze(1)).squeeze(1)
            weight = weight * (own / (p**2).sum(1)).log().mean().exp()
        m = 0.3 * ((pi[n] - ref[n]) - (pi[n + 1] - ref[n + 1]))
        each.append(-weight * torch.log(torch.sigmoid(m)))
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


COLUMNS = ("advantage", "weight", "old_log_prob", "engine_log_prob")
_CLIPPED = {"clip_low": 0.1, "clip_high": 0.4, "kl_coef": 0.25, "importance_cap": 1.5, "entropy_coef": 0.3}
_OF_SEQUENCES = {"ratio": "sequence", "mean_over": "sequence", "clip_low": 0.3, "clip_high": 0.1, "kl_coef": 0.2}
_BY_CONSTANT = {"mean_over": "constant", "max_completion_length": 9, "clip_low": 0.4, "clip_high": 0.3, "kl_coef": 0.5}
_SQUASHED = {"loss": "sapo", "sapo_temperature_pos": 1.4, "sapo_temperature_neg": 0.7, "kl_coef": 0.25}
_SQUASHED |= {"correction": "sequence_mask", "importance_cap": 9.0, "importance_floor": 0.1, "kl_correction": True}
_WEIGHTED = {"loss": "vespo", "vespo_k_pos": 0.7, "vespo_lambda_pos": 0.9, "vespo_k_neg": 0.4, "vespo_lambda_neg": 0.6}
# Each parameter of a kind is off its default in one of its cases.
PAPERS: dict[str, tuple[Objective, Any]] = {
    "sft": (Sft(label_smoothing=0.3), sft),
    **{
        f"{kind.kind}{name}": (kind(**options), formula)
        for kind in (Policy, Grpo)
        for name, options, formula in (
            ("", _CLIPPED, policy),
            ("-of sequences", {**_OF_SEQUENCES, "kl": "k1", "importance_cap": None}, gspo),
            ("-by a constant", {**_BY_CONSTANT, "kl": "k2", "loss": "cispo"}, cispo),
            ("-squashed", _SQUASHED, sapo),
            ("-of a weight", {**_WEIGHTED, "importance_cap": 1.5}, vespo),
            ("-bounded", {"delta": 2.5, "off_policy_mask": 0.1}, bounded),
        )
    },
    "dpo": (Dpo(beta=0.3, label_smoothing=0.2), dpo),
    "dpo-by length": (Dpo(beta=0.3, loss=["ipo", "sft"], loss_weights=[0.8, 0.5], length_weight=0.3), by_length),
    "dpo-discovered": (
        Dpo(beta=0.3, loss="discopop", discopop_tau=0.6, f_divergence="alpha_divergence", f_alpha=0.4),
        discovered,
    ),
    "dpo-weighted": (Dpo(beta=0.3, weighted=True), wpo),
    "simpo": (Simpo(beta=1.7, gamma=0.4, label_smoothing=0.2), simpo),
    "sft-dft": (Sft(loss="dft"), dft),
    "kto-apo": (Kto(loss="apo_zero_unpaired"), apo),
    "orpo": (Orpo(beta=0.3), orpo),
    "kto": (Kto(beta=0.3, desirable_weight=1.5, undesirable_weight=0.7), kto),
}


@pytest.mark.parametrize("kind", PAPERS)
def test_objective_is_the_formula_of_its_paper(kind: str, model: Model) -> None:
    objective, formula = PAPERS[kind]
    cases, usual = [one for one, _ in PAPERS.values() if type(one) is type(objective)], type(objective)()
    # Of a run; of the advantages, below; of the data; of a step: test_trl_formulas.py.
    names = set(vars(objective)) - {"kind", "reference", "scale_rewards", "mask_truncated", "top_entropy"}
    assert all(any(getattr(one, name) != getattr(usual, name) for one in cases) for name in names)
    shape = (ROWS, LENGTH)
    columns = {
        "advantage": torch.randn(shape),
        "weight": torch.rand(shape),
        "old_log_prob": -torch.rand(shape) * 4,
        "engine_log_prob": -torch.rand(shape) * 4,
        "desirable": (LABELS >= 0) * torch.tensor([[1.0], [-1.0], [-1.0], [1.0]]),
    }
    batch = batch_of(columns, rows=2 if objective.per == "pair" else 1)
    expected = formula(model, {name: column.double() for name, column in columns.items()})
    (gradient,) = torch.autograd.grad(expected, model.logits)
    with lift(True):
        base = None
        if objective.needs_base:
            base = losses.batch_log_probabilities(type("Base", (), {"logits": model.of_base})(), batch)
        has_point = isinstance(objective, Kto) and objective.has_first_pass
        point = torch.tensor(POINT, dtype=torch.float64) if has_point else None
        ((total, _),) = loss_sums(objective, model, batch, [("", batch)], base, [point])
    found = total / count(objective, batch)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(torch.autograd.grad(found, model.logits)[0], gradient, rtol=1e-10, atol=1e-14)


def test_reported_accuracy_is_of_any_margin_above_zero() -> None:
    """And margins are those of the loss: of sums over tokens, times beta."""
    log_p = torch.tensor([[-1.0, -1.0], [-1.5, -1.0], [-2.0, -1.0], [-1.5, -1.0]], dtype=torch.float64)
    seen = Seen(log_p, torch.full_like(log_p, -1.0), torch.ones_like(log_p).bool(), {}, True)
    _, values = preferences.dpo(Dpo(beta=0.1), seen)
    assert values["margin"].tolist() == pytest.approx([0.05, -0.05])
    assert values["accuracy"].tolist() == [1.0, 0.0]


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
    unknown = torch.full_like(ratio, torch.nan)
    columns = dict(zip(COLUMNS, (advantage, torch.ones_like(ratio), -ratio.log(), unknown), strict=True))
    seen = Seen(torch.zeros_like(ratio), None, torch.ones_like(ratio).bool(), columns, True)
    loss, values = policies.policy(Policy(clip_low=0.2, clip_high=0.3), seen)
    assert values["clip_fraction"].sum().item() == is_cut.sum().item()
    cut = ratio.clamp(0.8, 1.3)
    expected = torch.where(is_cut > 0, cut, ratio) * advantage
    assert loss.sum().item() == pytest.approx(-expected.sum().item(), abs=1e-12)


# Of 3, 1, 4, 0, 4, 4 in groups a, a, b, c, c, b: deviations sqrt(2), 0, sqrt(8); of all sqrt(46 / 15).
@pytest.mark.parametrize(
    ("scale", "divisors"),
    [
        ("none", [1.0] * 6),
        ("group", [2**0.5 + 1e-4] * 2 + [1.0] + [8**0.5 + 1e-4] * 2 + [1.0]),
        ("batch", [(46 / 15) ** 0.5 + 1e-4] * 6),
    ],
)
def test_rewards_are_compared_within_their_group(scale: Any, divisors: list[float]) -> None:
    rewards, since = [3.0, 1.0, 4.0, 0.0, 4.0, 4.0], [0, 1, 0, 0, 1, 3]
    targets = np.array([rewards, since], dtype=np.float32).T
    offsets = np.arange(0, 13, 2, dtype=np.int64)
    data = TokenizedDataset(np.arange(12, dtype=np.int32), np.ones(12, dtype=bool), offsets, targets=targets)
    found = with_advantages(Grpo(scale_rewards=scale), data)
    assert found.targets is None
    expected = np.array([1.0, -1.0, 0.0, -2.0, 2.0, 0.0]) / divisors
    assert found.columns["advantage"] == pytest.approx(np.repeat(expected, 2), rel=1e-6)
