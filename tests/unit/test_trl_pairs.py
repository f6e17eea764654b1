"""Our losses of pairs are TRL's on the same log-probabilities, in float64: loss and gradient; and so is the judge's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from meshlora.run.formulas.pairs import length_weights
from meshlora.run.formulas.preferences import dpo, kto, simpo
from meshlora.run.formulas.seen import Seen
from meshlora.run.objectives import dft
from meshlora.run.ordered_pairs import partners
from meshlora_ground.float64 import lift
from meshlora_ground.objective import Sft
from meshlora_ground.objectives.preferences import Dpo, Kto, Simpo
from meshlora_judge.batches import UNTRAINED, MicroBatch
from meshlora_judge.formulas.pairs import said
from meshlora_judge.objectives import losses as judged

PAIRS, LENGTH, VOCAB = 3, 7, 6
LENGTHS = torch.tensor([5, 3, 2, 6, 4, 4])  # better, worse, better, ...
MASK = torch.arange(LENGTH) < LENGTHS.unsqueeze(1)
BETA = 0.3

SQUARES = torch.where(MASK, -torch.rand(MASK.shape, generator=torch.Generator().manual_seed(9)).double(), 0.0)

# Ours -> options of TRL's `DPOConfig`.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{name: ({"loss": name}, {"loss_type": [name]}) for name in ("sigmoid", "sigmoid_norm", "hinge", "ipo")},
    **{name: ({"loss": name}, {"loss_type": [name]}) for name in ("nca_pair", "bco_pair", "sppo_hard")},
    **{name: ({"loss": name}, {"loss_type": [name]}) for name in ("apo_zero", "apo_down")},
    "exo_pair": ({"loss": "exo_pair", "label_smoothing": 0.1}, {"loss_type": ["exo_pair"], "label_smoothing": 0.1}),
    "robust": ({"loss": "robust", "label_smoothing": 0.2}, {"loss_type": ["robust"], "label_smoothing": 0.2}),
    "discopop": ({"loss": "discopop", "discopop_tau": 0.2}, {"loss_type": ["discopop"], "discopop_tau": 0.2}),
    "several": (
        {"loss": ["sigmoid", "bco_pair", "apo_down"], "loss_weights": [0.8, 0.2, 1.5]},
        {"loss_type": ["sigmoid", "bco_pair", "apo_down"], "loss_weights": [0.8, 0.2, 1.5]},
    ),
    "aot": ({"loss": "aot", "label_smoothing": 0.1}, {"loss_type": ["aot"], "label_smoothing": 0.1}),
    "aot_unpaired": (
        {"loss": ["aot_unpaired", "aot", "hinge"], "label_smoothing": 0.1, "length_weight": 0.3},
        {"loss_type": ["aot_unpaired", "aot", "hinge"], "label_smoothing": 0.1, "ld_alpha": 0.3},
    ),
    "weighted": (
        {"loss": ["sigmoid", "ipo"], "weighted": True, "loss_weights": [0.8, 0.3]},
        {"loss_type": ["sigmoid", "ipo"], "use_weighting": True, "loss_weights": [0.8, 0.3]},
    ),
    "length_weight": (
        {"loss": ["sigmoid", "ipo"], "length_weight": 0.3},
        {"loss_type": ["sigmoid", "ipo"], "ld_alpha": 0.3},
    ),
    "forward_kl": (
        {"loss": ["sigmoid", "hinge"], "f_divergence": "forward_kl"},
        {"loss_type": ["sigmoid", "hinge"], "f_divergence_type": "forward_kl"},
    ),
    "js_divergence": (
        {"loss": "ipo", "f_divergence": "js_divergence"},
        {"loss_type": ["ipo"], "f_divergence_type": "js_divergence"},
    ),
    "alpha_divergence": (
        {"loss": "sigmoid", "f_divergence": "alpha_divergence", "f_alpha": 0.4},
        {"loss_type": ["sigmoid"], "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.4},
    ),
}


def _drawn(scale: float, seed: int) -> Tensor:
    return scale * torch.randn(2 * PAIRS, LENGTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("kind", CASES)
def test_loss_of_pairs_and_gradient_are_those_of_trl(kind: str) -> None:
    ours, theirs = CASES[kind]
    log_p, ref = (torch.where(MASK, _drawn(0.6, seed) - 2, 0.0) for seed in (1, 2))
    log_p = log_p.requires_grad_()
    objective = Dpo(beta=BETA, **ours)
    each, _ = dpo(objective, _seen(objective, log_p, ref))
    narrow = kind in ("alpha_divergence", "exo_pair")  # the first knows no float64 in TRL, the other rounds its epsilon
    expected = _of_trl(log_p.float() if narrow else log_p, ref.float() if narrow else ref, theirs)
    assert each.mean().item() == pytest.approx(expected.item(), rel=1e-6 if narrow else 1e-12)
    found, wanted = (torch.autograd.grad(loss, log_p)[0] for loss in (each.mean(), expected))
    assert torch.allclose(found, wanted, rtol=1e-5 if narrow else 1e-10, atol=1e-8 if narrow else 1e-15)


def _seen(objective: Dpo, log_p: Tensor, ref: Tensor) -> Seen:
    """Of a micro-batch that is the whole step."""
    point = None
    if objective.is_of_step:
        weights = length_weights(objective, MASK)
        point = partners((log_p * weights).sum(1).detach(), (ref * weights).sum(1))
    return Seen(log_p, ref, MASK, {}, True, point, SQUARES if objective.weighted else None)


def test_likelihood_beside_a_loss_is_that_of_trl_for_answers_of_one_length() -> None:
    """TRL's is a mean over the tokens of a micro-batch, ours, as the paper's, over those of each answer."""
    log_p, ref = (torch.where(MASK[:2], _drawn(0.6, seed)[:2] - 2, 0.0) for seed in (1, 2))
    weights = {"loss_weights": [1.0, 0.6]}
    each, _ = dpo(Dpo(beta=BETA, loss=["sigmoid", "sft"], **weights), Seen(log_p, ref, MASK[:2], {}, True))
    expected = _of_trl(log_p, ref, {"loss_type": ["sigmoid", "sft"], **weights})
    assert each.mean().item() == pytest.approx(expected.item(), rel=1e-12)


def test_label_smoothing_of_sigmoid_is_ours_alone() -> None:
    """TRL 1.16 reads it in other losses only; the documented difference is that of the papers' formula."""
    log_p, ref = (torch.where(MASK, _drawn(0.6, seed) - 2, 0.0) for seed in (1, 2))
    each, values = dpo(Dpo(beta=BETA, label_smoothing=0.1), Seen(log_p, ref, MASK, {}, True))
    theirs = _of_trl(log_p, ref, {"loss_type": ["sigmoid"], "label_smoothing": 0.1})
    assert (each.mean() - theirs).item() == pytest.approx(0.1 * values["margin"].mean().item(), rel=1e-12)


def _of_trl(log_p: Tensor, ref: Tensor, options: dict[str, Any]) -> Tensor:
    """The loss of `DPOTrainer` on given log-probabilities, whose rows are chosen ones, then rejected ones."""
    from trl import DPOTrainer

    def sides(rows: Tensor) -> Tensor:
        return torch.cat([rows[0::2], rows[1::2]])

    is_trained = sides(log_p != 0)
    usual = {
        "label_smoothing": 0.0,
        "ld_alpha": None,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
        "use_weighting": False,
    }
    given = usual | {"loss_weights": [1.0] * len(options["loss_type"])} | options
    itself = mock.MagicMock(
        beta=BETA,
        loss_types=given.pop("loss_type"),
        precompute_ref_logps=False,
        aux_loss_enabled=False,
        args=SimpleNamespace(discopop_tau=given.pop("discopop_tau", 0.05), gradient_checkpointing_kwargs=None),
        **given,
    )
    itself.model.is_gradient_checkpointing = False
    itself.accelerator.device = "cpu"
    itself.accelerator.gather = itself.accelerator.gather_for_metrics = lambda value: value
    zeros = torch.zeros_like(log_p)
    itself.ref_model.return_value = SimpleNamespace(log_probs=sides(ref))
    model = mock.MagicMock(training=True)
    model.return_value = SimpleNamespace(
        log_probs=sides(log_p),
        log_sum_sq_probs=sides(SQUARES[: len(log_p)]),
        entropy=zeros,
        mean_logits=zeros,
        is_top1=zeros.bool(),
        aux_loss=None,
    )
    ids = torch.zeros(len(log_p), LENGTH + 1, dtype=torch.int64)
    mask = torch.nn.functional.pad(is_trained.long(), (1, 0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask}
    with mock.patch("trl.trainer.dpo_trainer.is_peft_model", return_value=False):
        found: Tensor = DPOTrainer._compute_loss(itself, model, inputs, False)
    return found


def test_simpo_is_that_of_trl() -> None:
    from trl.experimental.cpo import CPOTrainer

    log_p = torch.where(MASK, _drawn(0.6, 3) - 2, 0.0).requires_grad_()
    each, _ = simpo(Simpo(beta=1.7, gamma=0.4, label_smoothing=0.1), Seen(log_p, None, MASK, {}, True))
    itself = mock.MagicMock(alpha=0.0, beta=1.7, simpo_gamma=0.4, label_smoothing=0.1, loss_type="simpo")
    itself.accelerator.device = "cpu"
    means = log_p.sum(1) / LENGTHS
    expected = CPOTrainer.cpo_loss(itself, means[0::2], means[1::2])[0]
    assert torch.allclose(each, expected, rtol=1e-12)
    found, wanted = (torch.autograd.grad(loss.sum(), log_p, retain_graph=True)[0] for loss in (each, expected))
    assert torch.allclose(found, wanted, rtol=1e-10)


JUDGED: dict[str, Any] = {
    **{name: Dpo(beta=BETA, **ours) for name, (ours, _) in CASES.items()},
    "sft": Dpo(beta=BETA, loss=["sigmoid", "sft"], loss_weights=[1.0, 0.6], length_weight=0.2),
    "simpo": Simpo(beta=1.7, gamma=0.4, label_smoothing=0.1),
    "apo_zero_unpaired": Kto(beta=BETA, loss="apo_zero_unpaired", desirable_weight=1.3),
    "dft": Sft(loss="dft"),
}


@pytest.mark.parametrize("kind", JUDGED)
def test_judge_has_the_same_loss_from_whole_logits(kind: str) -> None:
    generator = torch.Generator().manual_seed(4)
    logits, base = (torch.randn(2 * PAIRS, LENGTH, VOCAB, generator=generator, dtype=torch.float64) for _ in range(2))
    labels = torch.randint(0, VOCAB, MASK.shape, generator=generator).masked_fill(~MASK, UNTRAINED)
    desirable = torch.where(MASK, torch.tensor([1.0, -1.0] * PAIRS).unsqueeze(1), 0.0)
    batch = MicroBatch(labels.clamp(min=0), MASK.long(), labels, {"desirable": desirable})

    def of_labels(values: Tensor) -> Tensor:
        table = values.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return torch.where(MASK, table, 0.0)

    objective = JUDGED[kind]
    formula = {Dpo: dpo, Simpo: simpo, Kto: kto, Sft: dft}[type(objective)]
    seen = Seen(of_labels(logits), of_labels(base), MASK, {"desirable": desirable.double()}, True)
    point = torch.tensor(0.7, dtype=torch.float64) if kind == "apo_zero_unpaired" else None
    if isinstance(objective, Dpo):
        of_pairs = _seen(objective, seen.log_p, seen.log_ref)  # type: ignore[arg-type]
        squares = logits.softmax(-1).square().sum(-1).log().where(MASK, 0.0)
        seen = replace(seen, point=of_pairs.point, score=squares if objective.weighted else None)
    ours = formula(objective, seen)[0].sum()
    with lift(True):
        if objective.is_of_step:
            point = said(objective, logits, base, batch)
        theirs = judged(objective, logits, batch, base, is_training=True, point=point).sum()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
