"""Inputs of recomputed layers in host memory: a GPU holds those of two layers, however many there are.

Owns: the copies out and back, their order beside the computation, and how much of the host they take. Does not own:
which layers run twice, and how (`run.recompute`).

The input of a layer is copied out while the layer runs, and its buffer let go where the next layer begins. In the
backward the input of the layer before is fetched while a layer runs again. On a GPU copies are on a stream of their
own. A buffer is let go where the computation has waited for its copy, not by `record_stream`: that would free it once
the host sees the copy's end, and a host that runs ahead would meanwhile take new memory for every layer. On a CPU the
same copies are made at once, so that a proof runs them.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshlora.loading.blueprint import Blueprint
from meshlora.plan.derive import decoder_layers, num_streams
from meshlora.processes.launchers import ranks_on_host
from meshlora.run.config.run_file import RunConfig
from meshlora_ground.compat.torch_tensors import version_of
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UserError

Event = torch.cuda.Event | None


class Lane:
    """Copies between a device and its host, in order, beside what `device` computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def out(self, tensor: Tensor) -> tuple[Tensor, Event]:
        """(a copy on the host, there once the event is)."""
        # Pinned: else the host would wait for each copy.
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._side is not None)
        return host, self._copy(host, tensor)

    def back(self, host: Tensor) -> tuple[Tensor, Event]:
        """(a copy on the device, there once the event is)."""
        # In memory of the side stream, which writes to it first, and again after all that read it: see `_copy`.
        with torch.cuda.stream(self._side):
            here = torch.empty_like(host, device=self._device, pin_memory=False)
        return here, self._copy(here, host)

    def wait(self, event: Event) -> None:
        """What is computed from here on waits for `event`; the host does not."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def _copy(self, to: Tensor, source: Tensor) -> Event:
        if self._side is None:
            to.copy_(source)
            return None
        self._side.wait_stream(torch.cuda.current_stream(self._device))  # until then `to` may be read, or no source be
        with torch.cuda.stream(self._side):
            to.copy_(source, non_blocking=True)
        return self._side.record_event()


class Checkpoint:
    """The input of one layer, for one micro-batch, in the place of a saved tensor of autograd.

    before: the checkpoint of the layer before, if it still exists and is of this forward.
    """

    def __init__(self, tensor: Tensor, lane: Lane, before: Callable[[], Checkpoint | None]) -> None:
        self._lane, self.before = lane, before
        self._here: Tensor | None = tensor
        # Nothing of its memory, but its count of writes: a copy may still be under way when its source is written to.
        self._counted, self._saved = tensor.detach(), version_of(tensor)
        self._counted.data = tensor.new_empty(0)
        self.host, self._event = lane.out(tensor)

    def leave(self) -> None:
        """Let go of the device's buffer: what is computed from here on may write to it."""
        self._lane.wait(self._event)
        self._here = None

    def fetch(self) -> None:
        """Begin to copy it back, if it has left."""
        if self._here is None:
            self._here, self._event = self._lane.back(self.host)

    def back(self) -> Tensor:
        """Itself, on the device; the layer before is fetched meanwhile.

        Raises:
            RuntimeError: it was written to since, as torch says of what it saves itself.
        """
        if (version := version_of(self._counted)) != self._saved:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: the "
                f"input {list(self.host.shape)} of a layer is at version {version}; expected version {self._saved}"
            )
        self.fetch()
        here = self._here
        assert here is not None
        self.leave()  # the caller holds it; a second backward fetches it again
        before = self.before()
        if before is not None:
            before.fetch()
        return here


def _none() -> None:
    return None


class Offload:
    """The checkpoints of one model.

    offload = Offload()
    with offload.saving(hidden, is_first=number == 0):  # [B, S, H]
        hidden = checkpoint(layer, hidden)
    """

    def __init__(self, lane_of: Callable[[torch.device], Lane] = Lane) -> None:
        self._lane_of, self._lanes = lane_of, dict[torch.device, Lane]()
        # Autograd holds them: what is dropped with its graph is gone here, too.
        self._last: Callable[[], Checkpoint | None] = _none

    def saving(self, hidden: Tensor, *, is_first: bool) -> saved_tensors_hooks:
        """What autograd saves of `hidden` in the block is a checkpoint. is_first: of the layers of a forward."""
        own = weakref.ref(hidden)  # both hooks live as long as what they saved

        def pack(tensor: Tensor) -> Any:
            if tensor is not own():  # masks, tables: all layers share them
                return tensor
            return self.add(tensor, is_first=is_first)

        def unpack(packed: Any) -> Tensor:
            found: Tensor = packed.back() if isinstance(packed, Checkpoint) else packed
            return found

        return saved_tensors_hooks(pack, unpack)

    def add(self, tensor: Tensor, *, is_first: bool) -> Checkpoint:
        """The checkpoint of a layer that begins; that of the layer before leaves the device."""
        last = self._last()
        if last is not None:
            last.leave()
        if tensor.device not in self._lanes:
            self._lanes[tensor.device] = self._lane_of(tensor.device)
        # Of another forward the backward may come much later, as of micro-batches in stages.
        one = Checkpoint(tensor.detach(), self._lanes[tensor.device], _none if is_first else self._last)
        self._last = weakref.ref(one)
        return one


def host_bytes(num_layers: int, input_bytes: float) -> int:
    """Of the inputs of `num_layers` layers, each of `input_bytes`. Pinned buffers are powers of two in torch."""
    return num_layers * 2 ** max(0, int(input_bytes) - 1).bit_length()


def notes_of_offload(
    config: RunConfig, blueprint: Blueprint, data: TokenizedDataset, *, world: int | None = None
) -> list[str]:
    """How much of this machine's memory a run takes for inputs of layers, where it keeps them there.

    world: the number of ranks that are started; None: of a run that is only looked at, one for each GPU that is here.

    Raises:
        UserError: the machine has less.
    """
    if config.train.recompute != "offload" or not len(data):
        return []
    if config.device == "cpu" or not torch.cuda.is_available():
        return ["train.recompute: offload: on CPUs that spares nothing, and full computes the same"]
    row = int(np.diff(data.offsets).max())
    if config.data.packing is True:
        row = config.data.longest
    rows = config.train.micro_batch_size * len(data) / data.num_examples  # an example may be a pair
    topology, model = blueprint.topology, blueprint.model
    width = num_streams(model.config) * model.config.get_text_config().hidden_size * blueprint.dtype.itemsize
    tokens = rows * row / topology.size_over(topology.token_cut)
    # Of stages the first rank has so many micro-batches on the way that it has as many inputs as there are layers.
    needed = host_bytes(len(decoder_layers(model)[1]), tokens * width)
    ranks = min(topology.world, torch.cuda.device_count()) if world is None else ranks_on_host(world)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    words = f"inputs of layers take up to {needed / 1e9:,.2f} GB of the host for each of {ranks} ranks"
    if needed * ranks > there:
        way_out = "use train.recompute: full, smaller micro-batches or shorter rows"
        raise UserError("train.recompute=offload", f"{words}, which has {there / 1e9:,.1f} GB", way_out)
    return [f"{words}, of {there / 1e9:,.1f} GB"]
