"""Inputs of layers in host memory: their order beside a computation that does not wait, and what they take."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshlora.plan.derive import num_streams
from meshlora.run import offload as module
from meshlora.run.offload import Checkpoint, Lane, Offload, host_bytes, notes_of_offload
from meshlora.run.recompute import _checkpointed_on_host
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config

LAYERS = 5


class _Late(Lane):
    """A GPU's stream on a CPU, at its slowest: a copy is made where the computation waits for it, from what then is in
    its source. A source that nobody holds any more was given away, and the copy is no number.

    deaf_to: out or back: such copies are not waited for.
    """

    def __init__(self, device: torch.device, deaf_to: str = "") -> None:
        super().__init__(device)
        self.log, self._deaf_to = list[str](), deaf_to

    def _copy(self, to: Tensor, source: Tensor) -> Any:
        to.fill_(torch.nan)
        target, given, kind, is_done = weakref.ref(to), weakref.ref(source), self.log[-1], list[bool]()

        def copy() -> None:
            into, found = target(), given()
            if not is_done and into is not None and found is not None and kind != self._deaf_to:
                into.copy_(found)
            is_done.append(True)

        return copy

    def out(self, tensor: Tensor) -> tuple[Tensor, Any]:
        self.log.append("out")
        return super().out(tensor)

    def back(self, host: Tensor) -> tuple[Tensor, Any]:
        self.log.append("back")
        return super().back(host)

    def wait(self, event: Any) -> None:
        self.log.append("wait")
        event()


class _Layers:
    """Some layers that run twice. alive: of their inputs, where each begins."""

    def __init__(self, lane_of: Callable[[torch.device], Lane]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(8, 8, generator=generator).div(3).requires_grad_() for _ in range(LAYERS)]
        self.x = torch.randn(4, 8, generator=generator)
        self.offload, self.alive = Offload(lane_of), list[int]()
        self._seen = list[Any]()

    def forward(self, *, saves: bool = True) -> Tensor:
        def layer(hidden: Tensor, weight: Tensor) -> Tensor:
            self._seen.append(weakref.ref(hidden))
            self.alive.append(sum(each() is not None for each in self._seen))
            return (hidden @ weight).tanh()

        hidden = self.x * 1
        for number, weight in enumerate(self.weights):
            if not saves:
                hidden = layer(hidden, weight)
                continue
            with self.offload.saving(hidden, is_first=number == 0):
                hidden = checkpoint(layer, hidden, weight, use_reentrant=False, early_stop=False)  # type: ignore[assignment]
        return hidden

    def gradients(self, out: Tensor, **options: Any) -> list[Tensor]:
        return list(torch.autograd.grad(out.square().sum(), self.weights, **options))


def _plain() -> list[Tensor]:
    layers = _Layers(Lane)
    return layers.gradients(layers.forward(saves=False))


def _equal(found: list[Tensor], right: list[Tensor]) -> bool:
    return all(map(torch.equal, found, right))


def test_copies_that_are_late_are_waited_for() -> None:
    layers = _Layers(_Late)
    assert _equal(layers.gradients(layers.forward()), _plain())


def test_forwards_may_all_come_before_their_backwards_and_a_backward_twice() -> None:
    """As of micro-batches in stages, the first one first; and of a graph that is kept."""
    layers = _Layers(_Late)
    first, second = layers.forward(), layers.forward()
    layers.forward()  # dropped without a backward
    for out in (first, second):
        assert _equal(layers.gradients(out, retain_graph=True), _plain())
        assert _equal(layers.gradients(out), _plain())


def test_the_layer_before_is_of_the_same_forward() -> None:
    """Else a backward would fetch what it does not need, and hold it."""
    lane = _Late(torch.device("cpu"))
    layers = _Layers(lambda _: lane)
    out = [layers.forward(), layers.forward()]
    lane.log.clear()
    layers.gradients(out[1])
    assert lane.log.count("back") == LAYERS - 1


def test_the_device_holds_inputs_of_two_layers() -> None:
    layers = _Layers(Lane)
    out = layers.forward()
    assert max(layers.alive) <= 3, "what a layer makes is the input of the next"
    layers.alive.clear()
    layers.gradients(out)
    assert len(layers.alive) == LAYERS
    assert max(layers.alive) <= 2
    assert layers.offload._last() is None, "the host's copies are freed with the graph"


def test_the_layer_before_is_fetched_before_a_layer_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lane, events = _Late(torch.device("cpu")), []
    layers = _Layers(lambda _: lane)
    out = layers.forward()
    assert lane.log == ["out", *["wait", "out"] * (LAYERS - 1)]
    lane.log.clear()
    plain = Checkpoint.back

    def back(one: Checkpoint) -> Tensor:
        found = plain(one)
        events.append([*lane.log])
        lane.log.clear()
        return found

    monkeypatch.setattr(Checkpoint, "back", back)
    layers.gradients(out)
    # The last layer's is still there; of the first there is none before it.
    assert events == [["wait", "back"]] * (LAYERS - 1) + [["wait"]]


@pytest.mark.parametrize("kind", ["out", "back"])
def test_a_copy_that_is_not_waited_for_is_seen(kind: str) -> None:
    """A buffer that is let go at once; an input that is used before it is there."""
    layers = _Layers(lambda device: _Late(device, deaf_to=kind))
    assert not _equal(layers.gradients(layers.forward()), _plain())


@pytest.mark.parametrize("is_left", [False, True], ids=["it is on the device", "it has left"])
@pytest.mark.parametrize("offloads", [True, False], ids=["ours", "torch's own"])
def test_an_input_that_is_written_to_is_an_error_of_the_backward(is_left: bool, offloads: bool) -> None:
    """Whether or not its copy was already made, and who has written: here by a view of what it is a view of."""
    offload, weight = Offload(), torch.ones(8, 8, requires_grad=True)
    whole = torch.ones(4, 8) * 1
    hidden = whole[:2]

    def layer(hidden: Tensor) -> Tensor:
        return (hidden @ weight).tanh()

    def run(hidden: Tensor, *, is_first: bool) -> Any:
        with offload.saving(hidden, is_first=is_first) if offloads else contextlib.nullcontext():
            return checkpoint(layer, hidden, use_reentrant=False, early_stop=False)

    out = run(hidden, is_first=True)
    if is_left:
        out = run(out, is_first=False)
    del hidden
    whole[1:].mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"):
        out.sum().backward()


def test_what_all_layers_share_stays() -> None:
    offload, hidden, mask = Offload(), torch.ones(2, requires_grad=True) * 1, torch.ones(2, requires_grad=True) * 2
    with offload.saving(hidden, is_first=True):
        out = (hidden * mask).sum()
    node: Any = out.grad_fn
    product = node.next_functions[0][0]
    assert isinstance(product._raw_saved_self.data, Checkpoint)
    assert product._raw_saved_other.data is mask


def test_pinned_buffers_are_powers_of_two() -> None:
    assert [host_bytes(3, n) for n in (1, 4, 5, 2**28, 2**28 + 1)] == [3, 12, 24, 3 * 2**28, 3 * 2**29]


class _Model(nn.Module):
    def __init__(self, **more: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(32))

        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=4096, **more))

    def get_input_embeddings(self) -> Any:
        return SimpleNamespace(embedding_dim=512)  # as of opt-350m, which projects them


def _notes(
    topology: str = "", recompute: str = "offload", device: str = "auto", world: int | None = None, **of_model: int
) -> list[str]:
    config = SimpleNamespace(
        train=SimpleNamespace(recompute=recompute, micro_batch_size=2),
        data=SimpleNamespace(packing=False, longest=0),
        device=device,
    )
    blueprint = SimpleNamespace(model=_Model(**of_model), topology=Topology.parse(topology), dtype=torch.bfloat16)
    return notes_of_offload(config, blueprint, _Rows(np.array([0, 100, 32_868])), world=world)  # type: ignore[arg-type]


class _Rows:
    def __init__(self, offsets: Any) -> None:
        self.offsets, self.num_examples = offsets, len(offsets) - 1

    def __len__(self) -> int:
        return self.num_examples


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """On a machine with some memory, in GB."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(module, "decoder_layers", lambda model: ("layers", model.layers))

    def with_memory(memory_gb: float) -> None:
        monkeypatch.setattr(module.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096}.get(name, memory_gb * 1e9 / 4096))

    return with_memory


def test_a_run_says_what_it_takes_of_the_host(two_gpus: Callable[[float], None]) -> None:
    two_gpus(100)
    # 2 rows x 32,768 tokens x 4,096 x 2 bytes in each of 32 layers.
    assert _notes() == ["inputs of layers take up to 17.18 GB of the host for each of 1 ranks, of 100.0 GB"]
    assert "8.59 GB of the host for each of 2 ranks" in _notes("tp=2,sp")[0]
    assert "17.18 GB of the host for each of 2 ranks" in _notes("tp=2")[0]
    assert _notes(recompute="full") == []
    assert _notes("tp=2", device="cpu") == [
        "train.recompute: offload: on CPUs that spares nothing, and full computes the same"
    ]


def test_each_of_several_residual_streams_takes_room(two_gpus: Callable[[float], None]) -> None:
    two_gpus(100)
    assert "take up to 68.72 GB" in _notes(hc_mult=4)[0]
    families = "llama", "deepseek_v4", "hy_v4", "gemma3n_text"
    assert [num_streams(twin_config(family)) for family in families] == [1, 4, 4, 4]


def test_a_host_without_room_is_refused(two_gpus: Callable[[float], None]) -> None:
    two_gpus(20)
    _notes()
    with pytest.raises(UserError, match=r"17\.18 GB of the host for each of 2 ranks, which has 20\.0 GB.*: full"):
        _notes("tp=2")


def test_a_host_has_room_for_all_its_ranks(two_gpus: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Four that share two GPUs; of eight on two hosts those that are here."""
    two_gpus(40)
    _notes("tp=4")
    with pytest.raises(UserError, match=r"17\.18 GB of the host for each of 4 ranks, which has 40\.0 GB"):
        _notes("tp=4", world=4)
    monkeypatch.setattr(module, "ranks_on_host", lambda world: world // 4)
    assert "for each of 2 ranks" in _notes("tp=8", world=8)[0]


def test_layers_that_take_their_input_by_name_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"train\.recompute=offload: layers of this family take their input by"):
        _checkpointed_on_host(Offload(), True, lambda: None)
