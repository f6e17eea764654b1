"""All objectives, by kind."""

from __future__ import annotations

from typing import get_args

from meshlora_ground.objective import Objective, Sft
from meshlora_ground.objectives.distillation import Distill
from meshlora_ground.objectives.labels import Classify, ClassifyTokens, Embed
from meshlora_ground.objectives.policies import Grpo, Policy
from meshlora_ground.objectives.preferences import Dpo, Kto, Orpo, Simpo
from meshlora_ground.objectives.rewards import Reward

AnyObjective = Sft | Policy | Grpo | Dpo | Orpo | Simpo | Kto | Distill | Reward | Classify | ClassifyTokens | Embed
KINDS: dict[str, type[Objective]] = {kind.kind: kind for kind in get_args(AnyObjective)}
