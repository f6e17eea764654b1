"""transformers' continuous batching (`model.generate_batch`) with this rank's heads.

Owns: what its scheduler asks of other ranks, by our collectives, and the refusals. Does not own: the scheduler and its
paged cache, which are transformers'; plain generation (`wings.generation.rows`).

tp ranks must compute the same batches: the first decides which requests there are, and the others follow. transformers
has this for meshes of its own, whose groups it opens and closes by itself; here the groups are the model's. Its cache
holds `num_key_value_heads / tp` heads of each layer, as the layers have them.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor

from meshlora.adapter.attach import runtime
from meshlora.comm.collectives import all_gather, broadcast_in_place
from meshlora.comm.groups import Axis, Mesh
from meshlora.layers.linear import ParallelLinear
from meshlora.plan.layout import Split
from meshlora.plan.pairs import check
from meshlora.wings.generation.rows import in_step, replica, whole_tokens
from meshlora_ground.compat import replaced
from meshlora_ground.errors import UnsupportedError


def generate_batch(model: Any, *args: Any, **options: Any) -> Any:
    """transformers' `generate_batch` of a parallel model, with its arguments; the ranks of a replica call it with the
    same prompts.

        outputs = model.generate_batch(inputs=[ids, ids], generation_config=GenerationConfig(max_new_tokens=64))

    Raises:
        UnsupportedError: a mesh whose replicas need each other, or one on which it was not tried.
    """
    own, mesh = type(model).generate_batch, runtime(model).mesh
    if mesh.topology.world == 1:
        return own(model, *args, **options)
    _check(model, mesh)
    from transformers.generation.continuous_batching import continuous_api

    of_ranks = _helper(continuous_api.DistributedHelper, mesh)
    # The model's own attribute refuses; inside of this call transformers' method is in its place.
    start = type(model).init_continuous_batching.__get__(model)
    with (
        whole_tokens(model),
        replaced(continuous_api, "DistributedHelper", of_ranks),
        replaced(model, "init_continuous_batching", start),
    ):
        return own(model, *args, **options)


def refuse_manager(model: Any, *args: Any, **options: Any) -> Any:
    """In place of `init_continuous_batching`, whose manager runs on after the call that made it.

    Raises:
        UnsupportedError: on more than one process.
    """
    check({"topology": runtime(model).mesh.topology, "door": "a manager of continuous batching"})
    return type(model).init_continuous_batching(model, *args, **options)


def _check(model: Any, mesh: Mesh) -> None:
    """Refuse what `generate_batch` would do wrong, or has not been compared on."""
    check({"topology": mesh.topology, "door": "generate_batch"})
    topology, heads = mesh.topology, getattr(model.config.get_text_config(), "num_key_value_heads", None)
    rule = ""
    if in_step(model) is not None:
        rule = "replicas need each other's forwards, and each makes batches of its own"
    elif mesh.tp.size > 1 and mesh.pp.size > 1:
        rule = "its cache has as many key/value heads as its ranks say, and those of tp and of pp say it otherwise"
    elif _shares_heads(model, mesh.tp):
        rule = f"its cache has {heads} key/value heads divided by tp, and here ranks share some"
    if rule:
        raise UnsupportedError(f"generate_batch on {topology}", rule, "use model.generate")


def _shares_heads(model: Any, tp: Axis) -> bool:
    """Whether a rank's keys are not its share of all heads: several ranks have the same head, or it is not known."""
    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    whole = getattr(config, "num_key_value_heads", config.num_attention_heads)
    widths = set[int]()  # of all ranks' keys together
    for name, leaf in model.named_modules():
        if isinstance(leaf, ParallelLinear) and name.endswith("k_proj") and leaf.rule.split is Split.COLUMN:
            widths.add(leaf.out_features * tp.size)
    return tp.size > 1 and widths != {whole * size}


def _helper(base: type, mesh: Mesh) -> type:
    """The class of what transformers' scheduler asks of other ranks, for those along tp and pp."""
    tp, together = mesh.tp, replica(mesh)

    class OnMesh(base):
        def __init__(self, *_: Any, **__: Any) -> None:
            # No group is its own: it would open one by gloo, and close it.
            self.dist_on, self.device_mesh, self.cpu_comm_group = True, None, None
            self.global_rank, self.world_size = mesh.rank, mesh.topology.world
            self.tp_size, self.tp_local_rank, self.tp_root_global_rank = together.size, together.rank, together.ranks[0]
            self.tp_group = tp.group
            self.is_tp_driver = together.rank == 0
            self.dp_rank, self.dp_size = mesh.data.rank, mesh.data.size

        def are_kv_heads_tp_ed(self) -> bool:
            return tp.size > 1

        def tp_broadcast_from_rank_0(self, value: Tensor) -> Tensor:
            own = value.to(mesh.device).reshape(1)  # a seed
            value.copy_(broadcast_in_place(own, together).view_as(value))
            return value

        def tp_all_reduce_state(
            self, payload_size: int, stop_status: int, pause_requested: int = 0
        ) -> tuple[int, int, int]:
            own = torch.tensor([[payload_size, stop_status, int(pause_requested)]], device=mesh.device)
            size, stops, pauses = all_gather(own, together).amax(0).tolist()
            return size, stops, pauses

        def tp_all_reduce_min(self, value: Tensor, on_cpu: bool = False) -> Tensor:
            every = all_gather(value.to(mesh.device).reshape(1, -1), together)
            # In place, as transformers reads its own tensor afterwards.
            value.copy_(every.amin(0).view_as(value))
            return value

        def tp_broadcast_object_from_rank_0(self, obj: Any) -> Any:
            # Between ranks of one job, by none of whose users it was written.
            own = pickle.dumps(obj) if together.rank == 0 else b""
            length = broadcast_in_place(torch.tensor([len(own)], device=mesh.device), together)
            sent = torch.empty(int(length), dtype=torch.uint8, device=mesh.device)
            if together.rank == 0:
                sent.copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
            received = broadcast_in_place(sent, together).cpu().numpy().tobytes()
            return obj if together.rank == 0 else pickle.loads(received)

        def maybe_warn_nccl_graph_mixing(self) -> None:
            return None

    return OnMesh
