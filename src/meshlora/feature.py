"""What a wing brings to the core, and which wings there are.

Owns: the interface, and the list. Does not own: what a wing does: that is in its folder in `wings`, whose `feature.py`
has its `Wing`. The core imports no wing: it asks all of them, at the places that the methods below name. A wing that
has nothing to say at a place leaves its method out.

A wing is one folder and one line of `WINGS`; docs/adding/wing.md shows one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import EP, ETP, SEQUENCES, TP, Topology

if TYPE_CHECKING:
    from peft import LoraConfig

    from meshlora.adapter.initialization import Start
    from meshlora.adapter.plan import AdapterPlan
    from meshlora.adapter.targets.resolve import Target
    from meshlora.adapter.targets.token_rows import TokenRows
    from meshlora.comm.groups import Mesh
    from meshlora.layers.adapted import AdaptedLeaf, Placement
    from meshlora.layers.frozen import FewBits
    from meshlora.layers.held_tokens import ContextCut
    from meshlora.model.pipeline import Pipeline
    from meshlora.model.stored import Place, StoredTensor
    from meshlora.model.weights import Source
    from meshlora.plan.base_options import BaseOptions
    from meshlora.plan.families.family import FamilyPlan
    from meshlora.plan.rules import ExpertsRule, LinearRule, ModelPlan, Packing, PlannedBlock, Region

_Answer = TypeVar("_Answer")
# In the order in which they are asked.
WINGS: tuple[str, ...] = ("stages", "experts", "mixers", "variants", "quantized", "kernels", "context", "packed_rows")
WINGS += ("generation", "invoked", "combined", "hub", "starts", "vocabulary", "tables", "found", "names")
WINGS += ("encoders", "proved")


class Feature:
    """What a wing brings: each method is called where its first line says, for every model.

    Attributes:
        axes: of the mesh, whose ranks the core alone would run as if there were one.
    """

    axes: Collection[str] = ()

    def folder_of(self, given: str, kind: Literal["model", "adapter"], *, trust_remote_code: bool) -> str:
        """`loading.load`, first: the path of what may be given by a name.

        Raises:
            UserError: it is a name whose files are not to be had.
        """
        return given

    def opened_adapter(self, file: Path) -> AbstractContextManager[Any] | None:
        """`formats.adapter_file`: what opens `file` of an adapter if its tensors are in another kind of file."""
        return None

    def planned_block(
        self, model_type: str, path: str, module: nn.Module, linears: Mapping[str, LinearRule], *, name: str, tp: int
    ) -> PlannedBlock | None:
        """`plan.derive`, of each block of a layer: the plan of `module`, at `path` of its layer; None: the family's.

        linears: the rules of all linears of the model, as if each was whole. name: of the block.
        """
        return None

    def with_stages(self, model: Any, plan: ModelPlan) -> ModelPlan:
        """`plan.derive`, when a split model is planned: its plan, with the cut of its layers into stages.

        Raises:
            UserError, UnsupportedError: there is none that is proved.
        """
        return plan

    def with_mixers(self, model: Any, plan: ModelPlan) -> ModelPlan:
        """`plan.derive`, when a split model is planned: its plan, with what sees tokens of other ranks.

        Raises:
            UnsupportedError: something sees them in a way that is not known.
        """
        return plan

    def plan_of_rank(self, plan: ModelPlan, rank: int) -> ModelPlan:
        """`loading.load`, when ranks are known: what of `plan` pp rank `rank` has."""
        return plan

    def check_adapter(self, model: Any, plan: ModelPlan, adapter: AdapterPlan) -> None:
        """`adapter.plan`, when an adapter is planned: refuse one that cannot be trained on the plan of the model.

        Raises:
            UnsupportedError: names what cannot be.
        """

    def pipeline(self, model: Any, plan: ModelPlan, mesh: Mesh) -> Pipeline | None:
        """`model.inject`, before anything else: the way of forwards through the layers that this rank has.

        What other ranks have is taken out of `model`. None: this rank has all of it.
        """
        return None

    def borders(self, model: Any, plan: ModelPlan, context: ContextCut) -> None:
        """`model.regions`, when the borders of a split model's layers are installed: install those of the wing.

        context: the cut of the model's forwards over cp.
        """

    def check_stored_quantization(self, quantization: Mapping[str, Any], model_type: str | None, what: str) -> None:
        """`loading.blueprint`, of a checkpoint with a `quantization_config`: refuse one whose weights cannot be read.

        Raises:
            UserError: it is malformed. UnsupportedError: another method, or a variant of one.
        """

    def kept_packed(
        self, source: Path | None, model: Any, stored: Mapping[str, Any] | None, quantization: str | None
    ) -> Mapping[str, Packing]:
        """`loading.blueprint`, before the plan: parameter -> how it stays packed in memory; none: {}.

        stored: the `quantization_config` of the checkpoint. quantization: what is asked for.
        """
        return {}

    def with_quantization(
        self, plan: ModelPlan, kind: str | None, stored: Mapping[str, Packing] | None = None
    ) -> ModelPlan:
        """`loading.blueprint`, when a plan is made: it, with what is held in few bits. stored: of `kept_packed`."""
        return plan

    def with_compute(self, plan: ModelPlan, compute: str | None) -> ModelPlan:
        """`loading.blueprint`, after `with_quantization`: the plan, with the linears whose products are in float8.

        compute: `model.compute` of a run file.

        Raises:
            UserError: no linear can be; a cut crosses a block of numbers with one scale.
        """
        return plan

    def lacking_conversions(self, model: Any) -> Iterable[Any]:
        """`model.stored`: conversions of stored tensors, as transformers has them, that it lacks for this model."""
        return ()

    def packed_weights(
        self, tensors: Mapping[str, StoredTensor], quantization: Mapping[str, Any], value: Callable[[str], Tensor]
    ) -> Iterable[Place]:
        """`model.stored`, of a checkpoint with a `quantization_config`: the place of each weight in few bits.

        value: reads a whole tensor by key.
        """
        return ()

    def read_packed(
        self,
        name: str,
        where: Placement,
        source: Source,
        mesh: Mesh,
        packing: Packing,
        *,
        dtype: torch.dtype,
        quantization: str | None,
    ) -> FewBits | None:
        """`model.weights`, of a weight that is held in few bits: this rank's part; None: another wing's."""
        return None

    def check_trained_base(self, plan: ModelPlan, parameter: str) -> None:
        """`adapter.plan`, for each parameter of the base that is trained, whole or in rows: refuse what cannot be.

        Raises:
            UnsupportedError: it cannot be trained.
        """

    def as_tied(self, model: Any, plan: ModelPlan, config: LoraConfig) -> LoraConfig:
        """`adapter.plan`, first: `config` with what `ensure_weight_tying` makes of it.

        Raises:
            UnsupportedError: it makes something that is not proved.
        """
        return config

    def token_rows(
        self, model: Any, plan: ModelPlan, config: LoraConfig, *, targets: Collection[str], copies: Collection[str]
    ) -> Mapping[str, TokenRows]:
        """`adapter.plan`, when targets are known: module -> the rows of its vocabulary that are trained.

        Raises:
            UserError, UnsupportedError: the option does not fit the model, or what else is trained.
        """
        return {}

    def configure(self, config: Any, options: BaseOptions) -> None:
        """`loading.blueprint`, before a model is built: write into its configuration what `options` say of its plan.

        Raises:
            UserError: they name a file that cannot be read.
        """

    def known_plan(self, config: Any) -> FamilyPlan | None:
        """`plan.families.styles`, first: the plan that a table has of the family of a text part's `config`, or None."""
        return None

    def found_plan(self, model: Any, layers_name: str, experts: Collection[str]) -> FamilyPlan | None:
        """`plan.families.styles`, of a family that has a plan nowhere: one that is found; None: none is.

        experts: names of the routed experts modules and their blocks.
        """
        return None

    def find_experts(self, model: Any, topology: Topology) -> Mapping[str, ExpertsRule]:
        """`plan.derive`, first: name -> rule of every routed experts module.

        Raises:
            UserError: the axes do not fit the model. UnsupportedError: experts of an unknown form.
        """
        return {}

    def replace(self, model: nn.Module, plan: ModelPlan, mesh: Mesh, *, dtype: torch.dtype) -> None:
        """`model.inject`, when linears and the vocabulary are replaced: replace what else is split, on the meta device.

        dtype: of the base.
        """

    def adopt(self, module: nn.Module, plan: ModelPlan, name: str) -> AdaptedLeaf | None:
        """`model.inject`, of the model's own `module` that gets an adapter: the leaf around it; None: another's."""
        return None

    def vary(self, model: Any, leaf: Any, adapter: str, target: Target, parts: Mapping[str, Tensor]) -> None:
        """`adapter.attach`, of a target with more than A and B, when its leaf has these: give the leaf the variant that
        computes with them.

        parts: those of `target.further` that there are values of, this rank's; others begin as the base has it.
        """

    def watch(self, model: Any) -> None:
        """`loading.load`, of a model that lacks nothing but its adapters: watch its forwards by hooks."""

    def with_names_of_model(self, config: LoraConfig, plan: ModelPlan) -> LoraConfig:
        """`adapter.targets`, before anything is matched: the configuration, in names that the model has."""
        return config

    def targets_among_parameters(self, model: Any, plan: ModelPlan, config: LoraConfig) -> Collection[str]:
        """`adapter.targets`: what `target_parameters` match, in order.

        Raises:
            UserError: an entry matches nothing. UnsupportedError: it matches what can have no adapter.
        """
        return ()

    def check_targets(
        self, config: LoraConfig, modules: Collection[str], by_weight: Collection[str], plan: ModelPlan
    ) -> None:
        """`adapter.targets`, when all is matched: refuse options that some targets cannot have.

        modules: the matches of `target_modules`. by_weight: those of `target_parameters`.

        Raises:
            UserError, UnsupportedError: names option and target.
        """

    def start_of(self, config: LoraConfig) -> Start | None:
        """`adapter.targets`, `adapter.attach`: how the factors of an adapter begin; None: as the core draws them.
        Raises: UserError, UnsupportedError: an option, in words of the wing's own."""
        return None

    def names_in_file(self, model: Any, targets: Mapping[str, Target]) -> Mapping[str, tuple[str, str]]:
        """`adapter.targets`, last: target -> its module and that module's name in PEFT's file, where it is another.
        Raises: UnsupportedError: PEFT changes its own name, and takes no other for it."""
        return {}

    def with_stored_parameters(self, config: LoraConfig, targets: Iterable[str], plan: ModelPlan) -> LoraConfig:
        """`adapter.plan`: the configuration with the `target_parameters` to store."""
        return config

    def as_peft_reads(self, config: LoraConfig, modules: Iterable[str], model_type: str) -> LoraConfig:
        """`adapter.plan`, last: the configuration to store in words that PEFT reads as they are meant.

        modules: the targets among linears and the embedding.
        """
        return config

    def config_of_file(self, file: Path, config: LoraConfig, plan: ModelPlan) -> LoraConfig:
        """`adapter.formats`, of an adapter file that may have another layout than PEFT's: the configuration it implies.

        Raises:
            UserError: it is damaged, or of another model. UnsupportedError: it holds what is not read.
        """
        return config

    def factors_of_file(
        self, file: Path, targets: Mapping[str, Target], plan: ModelPlan
    ) -> dict[str, dict[str, Tensor]] | None:
        """`adapter.formats`: target -> part -> full factor, checked, of such a layout; None: it has none of these.

        Raises:
            UserError: names, shapes or types do not fit the model, or values are not finite.
        """
        return None

    def attached(self, model: Any, name: str, adapter: AdapterPlan) -> None:
        """`adapter.attach`, when `model` has the factors of `adapter` under `name`: change the leaves with them."""

    def finish_model(self, model: Any) -> None:
        """`model.inject`, when a model has its leaves and its borders: change what else the wing changes in it."""

    def check_loading(
        self, model: nn.Module, plan: ModelPlan, options: BaseOptions, *, dtype: torch.dtype, device: str
    ) -> None:
        """`meshlora.load`, before its processes meet: refuse options that this model or device cannot have.

        model: on the meta device. device: as the user said it.
        """

    def connect_linears(self, model: nn.Module, plan: ModelPlan) -> None:
        """`model.inject`, when linears have become parallel ones, and again after one that does so for an adapter:
        set their `enter`.
        """

    def change_modules(
        self, model: nn.Module, plan: ModelPlan, options: BaseOptions, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`model.inject`, when all leaves are parallel, before borders: give modules another forward of the same
        numbers.
        """

    def gather_input(
        self, gather: Callable[[Tensor], Tensor], model: nn.Module, plan: ModelPlan, region: Region
    ) -> Callable[[Tensor], Tensor]:
        """`model.regions`, for each split region under sp: how its input is made whole, `[1, B*S/tp, H]` ->
        `[B, S, H]`, given how without this wing.
        """
        return gather

    def methods(self, model: Any) -> Mapping[str, Callable[..., Any]]:
        """`loading.guards`, when a model has its weights: name -> a function of the model and of its
        arguments, in place of a method that knows nothing of the mesh.
        """
        return {}

    def is_proved_causal(self, model_type: str) -> bool:
        """`model.padding`, when a model is loaded: if its family is proved, and sees no later token."""
        return False

    def is_proved(self, plan: ModelPlan) -> bool:
        """`check_proved`, before a model is loaded that no run has proved: whether its split is.

        False: another wing's to say.

        Raises:
            UnsupportedError: it is not proved with the installed libraries.
        """
        return False


@functools.cache
def features() -> tuple[Feature, ...]:
    """Those of all wings."""
    return tuple(importlib.import_module(f"meshlora.wings.{name}.feature").Wing() for name in WINGS)


def first_answer(ask: Callable[[Feature], _Answer | None]) -> _Answer | None:
    """The answer of the first wing that has one: `first_answer(lambda wing: wing.known_plan(config))`."""
    return next((answer for feature in features() if (answer := ask(feature)) is not None), None)


def check_axes(topology: Topology) -> None:
    """Refuse several ranks along an axis whose wing is not there. Raises: UserError: names the axis."""
    known = {*SEQUENCES, TP}.union(*(feature.axes for feature in features()))
    for axis, size in (topology.sizes | {EP: topology.ep, ETP: topology.etp}).items():
        if size > 1 and axis not in known:
            raise UserError(f"{axis}={size}", "its wing is not in WINGS of meshlora/feature.py", f"use {axis}=1")


def check_proved(plan: ModelPlan) -> None:
    """Refuse a split that is not proved with the installed libraries.

    Raises:
        UnsupportedError: the wing of proofs says so, or it is not there.
    """
    if not any(feature.is_proved(plan) for feature in features()) and plan.topology.is_split:
        rule = "no wing in WINGS of meshlora/feature.py knows whether its split is proved"
        raise UnsupportedError(f"model_type {plan.model_type!r} on {plan.topology}", rule, "use dp alone")
