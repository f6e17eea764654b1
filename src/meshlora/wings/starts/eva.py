"""`init_lora_weights: eva` (Paischer et al., 2024): A from the inputs of a target, ranks by what each explains of them.

PEFT's own algorithm, `get_eva_state_dict`, runs on rank 0 alone: an incremental decomposition of the inputs of each
target, step by step, until its vectors stop moving. What it sees is what one process sees: the inputs of the whole
global batch, in its order, whoever computed them. All ranks compute them and follow rank 0, which says for which step.
So signs and ranks are PEFT's (the largest element of each row of A is positive), and no two ranks can disagree on them.

Owns: those inputs, and putting the new factors in place of the drawn ones. Does not own: which steps there are
(`run.calibration`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from peft import EvaConfig, LoraConfig, get_eva_state_dict
from torch import Tensor, nn

from meshlora.adapter.attach import attach, disable_adapter, runtime, set_adapter
from meshlora.adapter.initialization import Start, draw_factors
from meshlora.adapter.plan import AdapterPlan, plan_adapter
from meshlora.adapter.targets.options import pattern_key
from meshlora.adapter.targets.resolve import Target
from meshlora.comm.collectives import all_gather, broadcast_in_place, broadcast_text
from meshlora.layers.linear import ParallelLinear
from meshlora.model.inject import parallel_leaves
from meshlora.plan.layout import Split
from meshlora.plan.rules import ModelPlan
from meshlora.train.batches import Batching, Step
from meshlora.train.losses import batch_log_probabilities
from meshlora_ground.errors import UnsupportedError, UserError, did_you_mean, reason
from meshlora_ground.float64 import lift
from meshlora_ground.masks import POSITION_BITS

# PEFT goes on for ever where nothing settles: with tau=1, or if no step has as many tokens as there are vectors.
_MOST_STEPS = 1000
_LARGEST_RHO = 1000  # from which on PEFT has a rule of its own
_END = -1


def check_words(lora: Mapping[str, Any]) -> None:
    """Refuse a key of `eva_config` that PEFT passes over. Raises: UserError: names it."""
    known = {field.name for field in dataclasses.fields(EvaConfig)}
    for key in lora.get("eva_config") or ():
        if key not in known:
            raise UserError(f"eva_config: {key}", "PEFT has no such key", did_you_mean(str(key), known))


class Eva(Start):
    """Drawn as usual until the data are there."""

    looks_at_data = True

    def check(self, config: LoraConfig, targets: Mapping[str, Target], plan: ModelPlan) -> None:
        """Raises: UserError: more vectors are asked for than the input of a target has features."""
        rho = config.eva_config.rho
        if rho > _LARGEST_RHO:
            raise UserError(f"eva_config: rho={rho:g}", f"it is at most {_LARGEST_RHO}", "2 is usual")
        number = round(config.r * rho)  # of the rank before any is redistributed: a saved one has others
        for target in targets.values():
            if number > target.in_features:
                given = f"init_lora_weights='eva' on {target.name}"
                rule = f"its input has {target.in_features} features, and r * rho = {number} are asked for"
                raise UserError(given, rule, "use a lower r, or eva_config: {rho: 1}")

    def draw(self, target: Target, *, seed: int) -> dict[str, Tensor]:
        """As with `init_lora_weights: true`."""
        return draw_factors(target, init=True, seed=seed)


def initialize_eva(model: Any, name: str, batching: Batching, steps: int, step: Callable[[int], Step]) -> AdapterPlan:
    """Begin the adapter `name` as EVA says, in place of its drawn factors; returns its new plan. Collective.

    batching: of rows that are not packed. steps: how many there are, which are taken in turn, again from the first one
    if need be; step: each by number.

    Raises:
        UserError: nothing settles on these data.
    """
    state = runtime(model)
    planned = state.adapters[name].plan
    with disable_adapter(model):
        vectors = _vectors(model, planned, batching, steps, step)
    config = redistributed(planned, {target: len(rows) for target, rows in vectors.items()})
    begun = plan_adapter(state.whole.model, state.whole.plan, config)
    set_adapter(model, None)
    for leaf in parallel_leaves(model).values():
        if isinstance(leaf, ParallelLinear):
            _take_off(leaf, name)
    del state.adapters[name]

    def full(target: Target) -> dict[str, Tensor]:
        return {"A": vectors[target.name], "B": torch.zeros(target.out_features, target.r)}

    attach(model, name, begun, full)
    set_adapter(model, name)
    return begun


def _take_off(leaf: ParallelLinear, name: str) -> None:
    """Take the adapter `name` off a leaf, which may be no target any more."""
    for held in (leaf.lora_A, leaf.lora_B, leaf.variants):
        if name in held:
            del held[name]
    for fact in (leaf.scaling, leaf.pieces, leaf.dropout):
        fact.pop(name, None)


def redistributed(planned: AdapterPlan, ranks: Mapping[str, int]) -> LoraConfig:
    """The configuration with the `ranks` of its targets, as PEFT stores it: those of rank 0 are targets no more."""
    config = planned.config
    kept, rank_pattern, alpha_pattern = list[str](), dict[str, int](), dict[str, float]()
    for name, rank in ranks.items():
        before = config.rank_pattern.get(pattern_key(config.rank_pattern, name), config.r)
        alpha = config.alpha_pattern.get(pattern_key(config.alpha_pattern, name), config.lora_alpha)
        if rank == 0:
            continue
        if rank != before and config.eva_config.adjust_scaling_factors:
            alpha *= rank / before
        kept.append(name)
        if rank != config.r:
            rank_pattern[name] = rank
        if alpha != config.lora_alpha:
            alpha_pattern[name] = alpha
    return dataclasses.replace(config, target_modules=set(kept), rank_pattern=rank_pattern, alpha_pattern=alpha_pattern)


def _vectors(
    model: Any, planned: AdapterPlan, batching: Batching, steps: int, step: Callable[[int], Step]
) -> dict[str, Tensor]:
    """Target -> A `[rank, in]`, in module order; of rank 0 for those that get none. On all ranks."""
    mesh, config = runtime(model).mesh, planned.config
    names = [name for name, _ in runtime(model).whole.model.named_modules() if name in planned.targets]
    inputs = Inputs(model, names, batching, use_label_mask=config.eva_config.use_label_mask)
    taken = 0

    def forward(stand: nn.Module, number: Tensor) -> None:
        nonlocal taken
        taken += 1
        if taken > _MOST_STEPS:
            raise UserError("init_lora_weights: eva", f"nothing settles in {_MOST_STEPS} steps")
        broadcast_in_place(number.to(mesh.device, copy=True), mesh.world)
        for name, rows in inputs.of_step(step(int(number))).items():
            stand.get_submodule(name)(rows)

    found, failure = dict[str, Tensor](), ""
    if mesh.rank == 0:
        try:
            numbers = list(torch.arange(steps).unsqueeze(1))
            found = _by_peft(planned, names, numbers, forward)
        except (UserError, ValueError) as error:
            failure = reason(error)
    number = torch.tensor([_END], device=mesh.device)
    while int(broadcast_in_place(number, mesh.world)) != _END:
        inputs.of_step(step(int(number)))
    if failure := broadcast_text(failure, mesh.world, mesh.device):
        way_out = "raise train.batch_size, or lower tau or rho of eva_config"
        raise UserError("init_lora_weights: eva on these data", failure, way_out)
    vectors = {}
    for name in names:
        rank = torch.tensor([len(found.get(name, ()))], device=mesh.device)
        broadcast_in_place(rank, mesh.world)
        a = torch.empty(int(rank), planned.targets[name].in_features, device=mesh.device)
        if mesh.rank == 0:
            a.copy_(found[name])
        vectors[name] = broadcast_in_place(a, mesh.world) if len(a) else a
    return vectors


def _by_peft(
    planned: AdapterPlan, names: list[str], numbers: list[Tensor], forward: Callable[[nn.Module, Tensor], None]
) -> dict[str, Tensor]:
    """`get_eva_state_dict` of modules that stand for the targets. forward: calls each with its inputs `[N, in]`."""
    stand = nn.Module()
    for name in names:
        *path, last = name.split(".")
        owner = stand
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.add_module(last, _Standing())
    ranks = {name: planned.targets[name].r for name in names}
    config = LoraConfig(
        r=planned.config.r,
        target_modules=names,
        init_lora_weights="eva",
        eva_config=planned.config.eva_config,
        rank_pattern=ranks,
    )
    found: dict[str, Tensor] = get_eva_state_dict(
        stand,
        numbers,
        config,
        forward_fn=forward,
        # Which tokens count is known already.
        prepare_model_inputs_fn=None,
        prepare_layer_inputs_fn=None,
        gather_distributed_inputs=False,
        show_progress_bar=False,
    )
    return found


def whole_features(leaf: ParallelLinear, rows: Tensor) -> Tensor:
    """`[n, in_local]` -> `[n, in]`: the input of `leaf` with the features of all tp ranks. Collective over tp."""
    if leaf.rule.split is not Split.ROW or leaf.rule.layout is None:
        return rows
    return leaf.rule.layout.join(list(all_gather(rows.unsqueeze(0).contiguous(), leaf.tp)), 1)


class _Standing(nn.Linear):
    """A module in the place of a target, on which PEFT has its hooks."""

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Inputs:
    """The inputs of `names` in a forward of the base: of the tokens that count, of all ranks, in the global order."""

    def __init__(self, model: Any, names: list[str], batching: Batching, *, use_label_mask: bool) -> None:
        self.model, self.batching, self.use_label_mask = model, batching, use_label_mask
        leaves = parallel_leaves(model)
        self.leaves = {name: leaves[name] for name in names}

    @torch.no_grad()
    def of_step(self, step: Step) -> dict[str, Tensor]:
        """Name -> `[N, in]` in float32, on rank 0; {} elsewhere. Collective."""
        state, counted = runtime(self.model), self.counted(step).to(runtime(self.model).mesh.device)
        held: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in self.leaves}
        handles = []
        for name, leaf in self.leaves.items():
            handles.append(leaf.register_forward_pre_hook(self._recording(name, counted, held[name])))
        is_training = self.model.training
        self.model.eval()
        try:
            for batch in self.batching.batches(*step):
                # Padding, and a rank that has run out, have numbers of tokens too.
                is_token = batch.attention_mask.bool() & (not batch.is_dummy)
                numbers = torch.where(is_token, batch.tokens, _END)
                with state.dropout.at(0, 0, numbers), lift(self.model.dtype == torch.float64):
                    batch_log_probabilities(self.model, batch)
        finally:
            self.model.train(is_training)
            for handle in handles:
                handle.remove()
        found = {}
        for name, leaf in self.leaves.items():
            whole = self._whole(name, leaf, held.pop(name), counted)
            if whole is not None:
                found[name] = whole
        return found

    def counted(self, step: Step) -> Tensor:
        """The numbers of the tokens that count, in order: those that are trained, or all."""
        data, rows = step
        found = []
        for place, row in enumerate(rows.tolist()):
            sequence = data[row]
            places = np.arange(len(sequence.input_ids))
            if self.use_label_mask:
                places = np.flatnonzero(sequence.is_trained)
            found.append(torch.from_numpy(places) + (place << POSITION_BITS))
        return torch.cat(found)

    def _recording(self, name: str, counted: Tensor, held: list[tuple[Tensor, Tensor]]) -> Callable[..., None]:
        """A hook that keeps the input of the tokens `counted`, with their numbers."""
        tokens = runtime(self.model).dropout

        def keep(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            rows = given[0].reshape(-1, given[0].shape[-1])
            (part,) = tokens.parts(name, len(rows))
            is_counted = torch.isin(part.tokens.to(counted.device), counted)
            held.append((part.tokens.to(counted.device)[is_counted], rows[is_counted]))

        return keep

    def _whole(self, name: str, leaf: nn.Module, held: list[tuple[Tensor, Tensor]], counted: Tensor) -> Tensor | None:
        """The rows of all ranks in the order of `counted`, on rank 0. Collective."""
        assert isinstance(leaf, ParallelLinear), name
        mesh = runtime(self.model).mesh
        numbers = torch.cat([of_rows for of_rows, _ in held])
        rows = torch.cat([rows for _, rows in held]).to(torch.float32)  # as PEFT decomposes them
        rows = whole_features(leaf, rows)
        most = int(all_gather(torch.tensor([len(numbers)], device=mesh.device), mesh.world).max())
        padded = numbers.new_full((most,), _END)
        padded[: len(numbers)] = numbers
        whole = rows.new_zeros(most, rows.shape[1])
        whole[: len(rows)] = rows
        every_number, every_row = all_gather(padded, mesh.world), all_gather(whole, mesh.world)
        if mesh.rank != 0:
            return None
        is_there = every_number != _END
        places = torch.searchsorted(counted, every_number[is_there])
        # Ranks that hold the same tokens write the same row.
        found, is_found = rows.new_zeros(len(counted), rows.shape[1]), torch.zeros_like(counted, dtype=torch.bool)
        found[places], is_found[places] = every_row[is_there], True
        if not is_found.all():
            rule = f"it takes {int(is_found.sum())} of {len(counted)} tokens"
            raise UnsupportedError(f"init_lora_weights='eva' on {name}", rule, "leave it out of target_modules")
        return found
