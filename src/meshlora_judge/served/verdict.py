"""Which hypothesis a server's log-probabilities fit: the adapter as it should be applied, or a named fault.

Owns: distances, the noise of the engine's dtype, and the verdict. A distance is the root mean square, over all tokens,
of differences of log-probabilities. A hypothesis fits within `_WITHIN` times the noise: what rounding to the dtype does
to transformers + peft themselves, or to the server's own base. Where the adapter moves less than `_AWAY` such limits,
nothing is said of it.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from meshlora_ground.errors import UserError
from meshlora_judge.attached import Part, scale_words
from meshlora_judge.served.computed import Computed
from meshlora_judge.settings import Base

_WITHIN, _AWAY = 4.0, 3.0
_FLOOR = 2e-6  # of numbers that travel as float32
FULL, BARE = "base + adapter", "the bare base"
# Right, too: what a merged checkpoint of these holds.
MERGES = {dtype: f"a merge rounded to {dtype}" for dtype in ("bfloat16", "float16")}
_FEW_BITS = ("fp8", "int8", "nf4")
_MOST_GROUPS = 64  # of one fit
_ATTENTION, _MLP = ("attn", "attention"), ("mlp", "feed_forward", "ffn")


@dataclass
class Verdict:
    """What was found.

    Attributes:
        is_proved: None: undecided. found: the hypotheses that fit, nearest first.
        dtype, noise, limit: of the engine; what rounding to it does, and how far away a hypothesis may be.
        effect: distance of base + adapter from the bare base. distances: of the hypotheses that were computed.
        unseen: kinds of modules that move these prompts by less than can be told.
    """

    is_proved: bool | None = None
    found: list[str] = field(default_factory=list)
    dtype: str = ""
    noise: float = 0.0
    limit: float = 0.0
    effect: float = 0.0
    num_tokens: int = 0
    distances: dict[str, float] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)


def rms(difference: Tensor) -> float:
    return float(difference.square().mean().sqrt())


class Comparison:
    """Served log-probabilities, of the adapter and perhaps of the base, beside those of one process.

    dtypes: of the engine, the finest first, if nobody says which it has.
    """

    def __init__(self, computed: Computed, served: Tensor, served_base: Tensor | None, dtypes: Sequence[str]) -> None:
        self.computed, self.served, self.served_base, self.dtypes = computed, served, served_base, dtypes
        self.full, self.bare = computed.log_probs(), computed.log_probs(lambda _: 0.0)
        if not (self.full.isfinite().all() and self.bare.isfinite().all()):
            raise UserError(f"adapter {computed.adapter}", "one process computes infinite log-probabilities with it")
        self.verdict = Verdict(effect=rms(self.full - self.bare), num_tokens=len(served))
        self._left = self._hypotheses()
        self._noises: dict[str, float] = {}
        self._of_engine = 0.0

    def judge(self) -> Verdict:
        """Raises: UserError: the server's base is another model."""
        verdict = self.verdict
        for dtype in self._dtypes():
            verdict.dtype, verdict.limit = dtype, self._limit(dtype)
            fits = self._fitting()
            if not fits:
                continue
            if verdict.effect >= _AWAY * verdict.limit:  # else undecided: what fits would be chance
                verdict.found, verdict.is_proved = fits, fits[0] in (FULL, *MERGES.values())
                for kind in self._kinds():
                    if rms(self._without([kind]) - self.full) < 2 * verdict.limit:
                        verdict.unseen.append(kind)
            return verdict
        verdict.is_proved = False
        return verdict

    def _dtypes(self) -> list[str]:
        """The dtype whose rounding explains the server's base, or all that may be."""
        if self.served_base is None:
            return list(self.dtypes)
        away = rms(self.served_base - self.bare)
        for dtype in self.dtypes:
            if away <= self._limit(dtype):
                self._of_engine = away
                return [dtype]
        raise UserError(
            f"the server's base is {away:.1e} from the base given by --model",
            f"rounding to {self.dtypes[-1]} explains {self._limit(self.dtypes[-1]):.1e}: it is another model",
            "give its --model and --base-name, its --dtype, or --quantization if its weights are rounded",
        )

    def _limit(self, dtype: str) -> float:
        """What rounding to `dtype` may do: measured on the same computation here, and on the server's own base."""
        if dtype not in self._noises:
            low = Computed(replace(self.computed.base, dtype=dtype), self.computed.adapter, self.computed.prompts)
            of_base = rms(low.log_probs(lambda _: 0.0) - self.bare)
            self._noises[dtype] = max(rms(low.log_probs() - self.full), of_base)
        self.verdict.noise = max(self._noises[dtype], self._of_engine)
        return _WITHIN * self.verdict.noise + _FLOOR

    def _fitting(self) -> list[str]:
        """The names of hypotheses within the limit, nearest first, of the first stage which has any. Later stages cost
        more, and are computed once."""
        verdict, stage = self.verdict, list[str]()
        # What an earlier dtype computed is measured again against the wider limit of this one.
        for name in [*verdict.distances]:
            if verdict.distances[name] <= verdict.limit:
                stage.append(name)
        while not stage:
            computed = next(self._left, None)
            if computed is None:
                return []
            for name, values in computed.items():
                verdict.distances[name] = rms(self.served - values)
                if verdict.distances[name] <= verdict.limit:
                    stage.append(name)
        return sorted(stage, key=lambda name: (name != FULL, verdict.distances[name]))

    def _hypotheses(self) -> Iterator[dict[str, Tensor]]:
        """Stages of hypotheses, name -> log-probabilities; what is cheap and simple first."""
        yield {FULL: self.full, BARE: self.bare}
        yield {f"base + adapter without {name}": self._without(kinds) for name, kinds in self._groups().items()}
        yield self._moved()
        yield {name: self.computed.merged(dtype) for dtype, name in MERGES.items()}
        # Fits have free numbers, and explain more by chance than the stages before.
        yield self._fitted("scaled", lambda part: "the adapter" if part.scale is not None else None)
        yield self._fitted("kinds", lambda part: part.kind if part.scale is not None else None)
        yield self._fitted("layers", lambda part: f"layer {part.layer}" if part.scale is not None else None)
        for kind in _FEW_BITS:
            if kind == "fp8" or importlib.util.find_spec("bitsandbytes"):
                yield self._in_few_bits(kind)

    def _kinds(self) -> list[str]:
        return sorted({part.kind for part in self.computed.parts})

    def _groups(self) -> dict[str, list[str]]:
        """Name -> kinds: each kind, then blocks of several."""
        kinds = self._kinds()
        if len(kinds) == 1:
            return {}
        groups = {kind: [kind] for kind in kinds}
        blocks: dict[str, set[str]] = {"experts": set(), "attention": set(), "MLP": set()}
        for part in self.computed.parts:
            path = part.name.lower()
            if part.kind.startswith("experts."):
                blocks["experts"].add(part.kind)
            elif any(word in path for word in _ATTENTION):
                blocks["attention"].add(part.kind)
            elif any(word in path for word in _MLP):
                blocks["MLP"].add(part.kind)
        for name, of in blocks.items():
            if 0 < len(of) < len(kinds):
                if len(of) == 1:  # one name for one thing
                    groups.pop(next(iter(of)), None)
                groups[name] = sorted(of)
        return groups

    def _without(self, kinds: Sequence[str]) -> Tensor:
        return self.computed.log_probs(lambda part: 0.0 if part.kind in kinds else 1.0)

    def _moved(self) -> dict[str, Tensor]:
        computed, found = self.computed, {}
        for by, sides, is_rolled in itertools.product((1, -1), ("AB", "A", "B"), (False, True)):
            with computed.shifted(by, sides, is_rolled=is_rolled):
                what = "A and B" if sides == "AB" else sides
                name = f"{what} of layers shifted by {by}{' in a circle' if is_rolled else ''}"
                found[name] = computed.log_probs()
        for one, other in itertools.combinations(self._kinds(), 2):
            if computed.pairs(one, other):
                with computed.exchanged(one, other):
                    found[f"the factors of {one} and {other} exchanged"] = computed.log_probs()
        return found

    def _in_few_bits(self, kind: str) -> dict[str, Tensor]:
        rounded = Computed(replace(self.computed.base, quantization=kind), self.computed.adapter, self.computed.prompts)
        return {
            f"a merge rounded to {kind}": self.computed.merged(kind),
            f"the adapter on a base rounded to {kind}": rounded.log_probs(),
            f"the bare base rounded to {kind}": rounded.log_probs(lambda _: 0.0),
        }

    def _fitted(self, what: str, group_of: Callable[[Part], str | None]) -> dict[str, Tensor]:
        """The best scale of each group of parts, as a hypothesis with a name that says which are not 1."""
        groups = list(dict.fromkeys(filter(None, map(group_of, self.computed.parts))))
        if not groups or (what != "scaled" and not 1 < len(groups) <= _MOST_GROUPS):
            return {}

        def values(scales: Tensor) -> Tensor:
            by = dict(zip(groups, scales.tolist(), strict=True))
            return self.computed.log_probs(lambda part: by.get(group_of(part) or "", 1.0))

        starts = [torch.full((len(groups),), scale, dtype=torch.float64) for scale in (1.0, 0.0, 2.0, 0.5, 4.0, -1.0)]
        scales = _least_squares(values, self.served, starts)
        named, config = [], self.computed.model.peft_config["default"]
        for name, scale in zip(groups, scales.tolist(), strict=True):
            if abs(scale - 1) > 0.03:
                named.append(f"without {name}" if abs(scale) < 0.03 else f"{name} {scale_words(config, scale)}")
        return {f"base + adapter, {', '.join(named)}": values(scales)} if named else {}


def _least_squares(values: Callable[[Tensor], Tensor], served: Tensor, starts: Sequence[Tensor]) -> Tensor:
    """The scales whose values are nearest to `served`: Gauss-Newton from the best start, with shorter steps where a
    whole one leads away."""
    at = min(starts, key=lambda start: rms(served - values(start)))
    now = values(at)
    for _ in range(8):
        columns = []
        for place in range(len(at)):
            moved = at.clone()
            moved[place] += 1e-3
            columns.append((values(moved) - now) / 1e-3)
        jacobian, left = torch.stack(columns, 1), served - now
        # A kind without any effect has a column of zeros: the smallest step is the solution wanted.
        step = torch.linalg.pinv(jacobian, rtol=1e-9) @ left
        for share in (1.0, 0.5, 0.25, 0.1):
            tried = values(at + share * step)
            if rms(served - tried) < rms(left):
                at, now = at + share * step, tried
                break
        else:
            break
        if rms(served - now) > 0.999 * rms(left):
            break
    return at


def judge_served(
    base: Base,
    adapter: Path,
    prompts: Sequence[Sequence[int]],
    served: Tensor,
    served_base: Tensor | None = None,
    *,
    dtypes: Sequence[str],
) -> Verdict:
    """The verdict on log-probabilities `[N]` that a server gave to `prompts`.

        judge_served(Base("model", dtype="float64"), Path("adapter"), [[5, 6, 7]], served, dtypes=["float32"])

    base: with the dtype of the computation here. served_base: of the server's base under its own name.
    """
    return Comparison(Computed(base, adapter, prompts), served, served_base, dtypes).judge()
