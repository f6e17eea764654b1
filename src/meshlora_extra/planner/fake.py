"""Running real code on fake tensors, and recording its cost.

Owns: `FakeRun`, the mode in which floating-point tensors have no data; it records live storages, collectives, and the
work of each operator. Does not own: the code that is run, the use of the numbers.

Floating-point tensors are on torch's meta device. Integer tensors computed from integers alone are real, because code
branches on them: is there a label? how many rows go where? Reading a fake tensor gives a fixed answer: 1 for a number,
an equal share per expert for row counts. Collectives carry no data, except integers, which every rank is taken to have
as this one does. Attention is one fused kernel, on GPUs and CPUs. Code that asks takes the tensors for a GPU's, or if
told so for a CPU's, which runs other operators in places.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from meshlora.model.regions import tensors_in
from meshlora.wings.context.context import Block, RowsOfMask
from meshlora.wings.experts import products, row_counts
from meshlora_ground.compat import replaced
from meshlora_ground.compat.torch_fused import fused_attention
from meshlora_ground.compat.torch_operators import (
    FLOAT8_PRODUCT,
    GROUPED_PRODUCT,
    ON_EACH,
    READ_NUMBER,
    TorchDispatchMode,
    map_tensors,
    schema_of,
    storage_id,
)

_KINDS = ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast", "send")
_PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "linear", FLOAT8_PRODUCT.removeprefix("aten::"))
_ATTENTION = "scaled_dot_product"
# Nothing runs: what is allocated, or taken from another tensor, is written by others.
_ALLOCATES = (
    *("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"),
    *("resize_", "set_", "_unsafe_view"),
)
# Overwritten, their first argument has another shape or storage.
_MOVES = ("aten::resize_", "aten::set_", "aten::as_strided_", "aten::squeeze_", "aten::unsqueeze_", "aten::transpose_")
# These do not read their first argument, but overwrite it, or take its shape.
_NOT_READ = ("copy_", "fill_", "zero_", "zeros_like", "ones_like", "full_like", "new_zeros")
_GATHERS = ("index_select", "embedding", "gather", "index")  # these read the chosen rows of their first one
_SCATTERS = ("scatter_add_", "index_add_", "index_copy_")  # these touch as much of it as they are given
# An attention mask of all pairs of tokens is of integers too, and too large to be real.
_MOST_REAL_ELEMENTS = 2**25


class Call(NamedTuple):
    """A collective: its phase, kind, number of ranks, and the bytes of one rank's input."""

    phase: str
    kind: str
    ranks: int
    num_bytes: int


class Work(NamedTuple):
    """The cost of an operator: floating-point operations, and bytes read and written. Flops are those of a matrix
    product, or of an attention.
    """

    flops: int
    num_bytes: int
    is_attention: bool = False
    is_float8: bool = False


@dataclass
class Section:
    """One part of the code. Bytes are those of live storages, relative to its start: the maximum, and at its end. work:
    cost -> number of operators.
    """

    start_bytes: int
    peak_bytes: int = 0
    end_bytes: int = 0
    work: Counter[Work] = field(default_factory=Counter)


@dataclass(frozen=True)
class Known:
    """What an operator makes of arguments that have been seen.

    Attributes:
        made: (shape, strides, dtype) of each of its tensors, None for one not asked for; or None: the first argument,
            overwritten. must_run: only its cost is known.
    """

    made: tuple[tuple[Any, Any, torch.dtype] | None, ...] | None
    is_single: bool
    work: Work | None
    must_run: bool = False


# Layers and traces are alike: torch says once what an operator makes of tensors of some shapes, which takes it ten
# times as long as looking it up.
_KNOWN: dict[Any, Known] = {}


class FakeRun(TorchDispatchMode):
    """A context manager in which floating-point tensors have no data. device: what code takes them for, cpu or cuda.

    Attributes:
        phase: set by the caller, recorded with each collective. calls: collective -> count. live_bytes: of all storages
            that the mode has seen and that still exist. most_on_host: of inputs of layers that waited there at once.
            sections: name -> the record of its last run.
    """

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self._is_cpu = device == "cpu"
        self.phase = "forward"
        self.calls: Counter[Call] = Counter()
        self.live_bytes = 0
        self.most_on_host = self._bytes_on_host = 0
        self.sections: dict[str, Section] = {}
        self._section: Section | None = None
        self._sizes: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._replaced = contextlib.ExitStack()
        self._is_off = False
        self._made: dict[Any, Tensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and keeping dynamo out costs as much as looking an operator up

    def __enter__(self) -> FakeRun:
        # On the meta device torch would choose the attention that materialises all pairs of tokens, which no GPU runs.
        # Not a TorchFunctionMode: that is off while a backward recomputes forwards.
        self._replaced.enter_context(replaced(F, "scaled_dot_product_attention", _attention))
        self._replaced.enter_context(replaced(RowsOfMask, "_block", lambda *given: self._block(*given)))
        self._replaced.enter_context(replaced(products, "count_each", lambda ids, n: _equal_shares(ids.numel(), n)))
        self._replaced.enter_context(replaced(row_counts, "sizes_of", lambda ends, n: _equal_shares(n, len(ends))))
        self._replaced.enter_context(replaced(row_counts, "numbers", self._numbers))
        # Freeing and reallocating the memory of a live tensor, as for gathered weights, is not an operator.
        resize = self._resized(torch.UntypedStorage.resize_)
        self._replaced.enter_context(replaced(torch.UntypedStorage, "resize_", resize))
        if self._is_cpu:
            self._replaced.enter_context(replaced(Tensor, "is_cpu", True))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._replaced.close()

    def hold(self, model: nn.Module) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            self._hold(tensor)

    def begin(self, name: str) -> None:
        """Start section `name`, ending the current one."""
        self.end()
        self.sections[name] = self._section = Section(self.live_bytes)

    def end(self) -> None:
        if self._section is not None:
            self._section.end_bytes = self.live_bytes - self._section.start_bytes
            self._section = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_off:
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        given = _flat((args, kwargs))
        name: str = schema_of(func).name
        num_fake = sum([t.is_meta for t in given])
        if num_fake:
            if name == READ_NUMBER:
                if given[0].is_floating_point():
                    return 1.0
                return 1
        elif _stays_real(given, args, kwargs):
            return func(*args, **kwargs)
        if num_fake < len(given):
            args, kwargs = map_tensors(_without_content, (args, kwargs))
        if "device" in kwargs or (not given and _takes_device(func)):
            kwargs = {**kwargs, "device": torch.device("meta")}
        found, made, work = _run(func, args, kwargs)
        for tensor in made:
            self._hold(tensor)
        if self._section is not None and work is not None:
            self._section.work[work] += 1
        return found

    def _numbers(self, stop: int, device: torch.device, step: int = 1) -> Tensor:
        """Replacement of `numbers`, which a process has once, not a step: neither an operator nor memory of one."""
        key = stop, device, step
        if key not in self._made:
            self._is_off = True
            self._made[key] = torch.arange(0, stop, step, device=device)
            self._is_off = False
        return self._made[key]

    def on_host(self, tensor: Tensor, num_bytes: int) -> Tensor:
        """What `tensor` is copied to, out of the device: no memory of it, and `num_bytes` of the host's."""
        self._is_off = True
        host = torch.empty_like(tensor)
        self._is_off = False
        self._change_host(num_bytes)
        weakref.finalize(host, self._change_host, -num_bytes)
        return host

    def _change_host(self, num_bytes: int) -> None:
        self._bytes_on_host += num_bytes
        self.most_on_host = max(self.most_on_host, self._bytes_on_host)

    def _block(self, masks: RowsOfMask, rows: slice, own: slice, positions: np.ndarray) -> Block:
        """Replacement of `RowsOfMask._block`, which reads the columns of a mask: here from the first that the first
        query sees to the last that the last one sees, in rows without padding.
        """
        self._is_off = True
        here = RowsOfMask(masks.make, masks.given | {"device": "cpu", "attention_mask": None})
        ends = here._rows(rows, positions[[0, -1]])
        if ends.dtype != torch.bool:
            ends = ends == 0  # it is added to the scores
        columns = ends.flatten(0, 2).any(0).nonzero().flatten()
        self._is_off = False
        keys = slice(int(columns[0]), int(columns[-1]) + 1)
        return Block(rows, own, keys, masks._rows(rows, positions)[..., keys].contiguous())

    def _hold(self, tensor: Tensor) -> None:
        """Count the storage of `tensor` until it is freed."""
        if isinstance(tensor, DTensor):  # a rank's part, presented as the whole
            tensor = tensor.to_local()
        self._hold_storage(tensor.untyped_storage())

    def _hold_storage(self, storage: torch.UntypedStorage) -> None:
        key, size = storage_id(storage), storage.nbytes()
        before = self._sizes.get(key)
        if before == size:
            return
        if before is None:
            self._references[key] = weakref.ref(storage, functools.partial(self._free, key))
        self._sizes[key] = size
        self.live_bytes += size - (before or 0)
        section = self._section
        if section is not None:
            section.peak_bytes = max(section.peak_bytes, self.live_bytes - section.start_bytes)

    def _resized(self, resize: Any) -> Any:
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            if storage_id(storage) in self._sizes:
                self._hold_storage(storage)
            return found

        return resize_

    def _free(self, key: int, _: Any) -> None:
        self.live_bytes -= self._sizes.pop(key)
        del self._references[key]

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record it, and run it on empty tensors in the real process group."""
        kind = _kind_of(schema_of(func).name.partition("::")[2].replace("_", ""))
        held = list(tensors_in(args))
        size = ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject))).size()
        sizes = [t.nbytes for t in held]
        number = max(sizes)
        if kind == "allgather":
            number = min(sizes)  # the result is among its arguments
            if not any(t.is_meta for t in held):
                whole, own = held
                whole.copy_(own.repeat(len(whole) // len(own), *[1] * (own.ndim - 1)))
        self.calls[Call(self.phase, kind, size, number)] += 1
        nothing = map_tensors(lambda t: torch.empty(0, dtype=t.dtype), args)
        if kind == "alltoall":
            nothing = (*nothing[:3], [], [], *nothing[5:])
        return func(*nothing, **kwargs)


def _kind_of(operator: str) -> str:
    if "recv" in operator:
        return "receive"
    for kind in _KINDS:
        if kind in operator:
            return kind
    return operator


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """One fused kernel for torch's attention, `[B, h, S, d]`; values narrower than keys are padded, as flash does."""
    width = value.shape[-1]
    missing = query.shape[-1] - width
    if missing > 0:
        value = F.pad(value, [0, missing])
    if attn_mask is not None:
        attn_mask = torch.empty(attn_mask.shape, dtype=query.dtype)
    out = fused_attention(query, key, value, dropout=dropout_p, is_causal=is_causal, mask=attn_mask, scale=scale)
    if missing > 0:
        out = out[..., :width]
    return out


def _grouped_product(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """`[N, a] x [E, a, b]` or `[a, N] x [N, b]`: the meta device supports bfloat16 only, a CPU float32."""
    if right.ndim == 3:
        return left.new_empty(left.shape[0], right.shape[2])
    return left.new_empty(len(ends), left.shape[0], right.shape[1])


def _without_content(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_like(tensor, device="meta")


def _equal_shares(number: int, places: int) -> Tensor:
    """Replacement of `count_each` and `sizes_of`: an equal split of the rows over `places` experts, a real tensor."""
    shares = torch.full((places,), number // places, dtype=torch.int64)  # real, as its dtype is said
    shares[: number % places] += 1
    return shares


def _stays_real(given: list[Tensor], args: Any, kwargs: Any) -> bool:
    """Whether a call without fake arguments is to compute real integers."""
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    if (device is not None and torch.device(device).type == "meta") or (dtype is not None and dtype.is_floating_point):
        return False
    if given:
        if any(t.is_floating_point() for t in given):
            return False
        with contextlib.suppress(RuntimeError):
            return math.prod(torch.broadcast_shapes(*(t.shape for t in given))) <= _MOST_REAL_ELEMENTS
        return True
    are_integers = bool(args) and all(isinstance(arg, int) for arg in args)  # true of `arange`, not of `empty`
    return dtype is not None or are_integers


@functools.cache
def _takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in schema_of(func).arguments)


@functools.cache
def is_view(func: Any) -> bool:
    """Whether an operator only returns views of its input."""
    returns = schema_of(func).returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _run(func: Any, args: Any, kwargs: Any) -> tuple[Any, list[Tensor], Work | None]:
    """(result, its tensors, cost) of an operator on fake tensors."""
    if is_view(func):
        found = func(*args, **kwargs)
        return found, _flat(found), None
    key = func, _key_of(args), _key_of(tuple(kwargs.items()))
    known = _KNOWN.get(key)
    if known is not None and not known.must_run:
        if known.made is None:
            return args[0], [args[0]], known.work
        found, made = _made_of(known)
        return found, made, known.work
    name = schema_of(func).name
    if name.startswith(ON_EACH) and name.endswith("_"):  # it changes numbers alone
        return None, [], work_of(func, args, kwargs, [])
    if name == GROUPED_PRODUCT and args[0].dtype != torch.bfloat16:
        found = _grouped_product(*args[:3])
    else:
        found = func(*args, **kwargs)
    made = _flat(found)
    if known is None:
        work = work_of(func, args, kwargs, made)
        _KNOWN[key] = known = _known_of(func, args, kwargs, found, work) or Known(None, True, work, must_run=True)
    return found, made, known.work


def _made_of(known: Known) -> tuple[Any, list[Tensor]]:
    """(result, its tensors) of an operator whose results are known."""
    assert known.made is not None
    result: list[Tensor | None] = []
    made: list[Tensor] = []
    for each in known.made:
        if each is None:
            result.append(None)
            continue
        shape, strides, dtype = each
        made.append(torch.empty_strided(shape, strides, dtype=dtype, device="meta"))
        result.append(made[-1])
    if known.is_single:
        return made[0], made
    return tuple(result), made


def _flat(value: Any) -> list[Tensor]:
    """`tensors_in(value)`, which is asked of every operator: without a generator for each level."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    found: list[Tensor] = []
    for each in value:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, tuple | list | dict):
            found += _flat(each)
    return found


def _key_of(value: Any) -> Any:
    """A key that is equal for arguments of which an operator makes the same."""
    if isinstance(value, Tensor):
        return type(value), value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_key_of, value))
    return type(value), value  # 1, 1.0 and True are equal


def _known_of(func: Any, args: Any, kwargs: Any, found: Any, work: Work | None) -> Known | None:
    """None where the result is anything but new tensors, or the first argument overwritten."""
    given, is_single = list(tensors_in((args, kwargs))), isinstance(found, Tensor)
    results = found
    if is_single:
        results = [found]
    if not isinstance(results, list | tuple):
        return None
    made = [tensor for tensor in results if tensor is not None]
    if not made or {*map(type, (*given, *made))} - {Tensor, nn.Parameter}:
        return None
    aliases = [argument.alias_info is not None for argument in schema_of(func).arguments]
    if any(aliases):
        is_overwritten = found is args[0] and aliases[0] and sum(aliases) == 1
        if not is_overwritten or schema_of(func).name in _MOVES:
            return None
        return Known(None, True, work)
    seen = {storage_id(tensor.untyped_storage()) for tensor in given}
    forms: list[tuple[Any, Any, torch.dtype] | None] = []
    for tensor in results:
        if tensor is None:
            forms.append(None)
            continue
        shape, strides, storage = tensor.shape, tensor.stride(), tensor.untyped_storage()
        alone = torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta").untyped_storage()
        if storage_id(storage) in seen or storage.nbytes() != alone.nbytes():  # `_unsafe_view` is of its input
            return None
        seen.add(storage_id(storage))
        forms.append((shape, strides, tensor.dtype))
    return Known(tuple(forms), is_single, work)


def work_of(func: Any, args: Any, kwargs: Any, made: Sequence[Tensor]) -> Work | None:
    """The cost of an operator whose results are `made`; None if nothing runs, as for a view or an allocation."""
    name = schema_of(func).name
    short = name.partition("::")[2]
    written, read = made, args
    if not made and short.endswith("_"):  # on lists of tensors it returns nothing
        written = list(tensors_in(args[:1]))
    if not written or short in _ALLOCATES or is_view(func):
        return None
    if short.removeprefix("_foreach_") in _NOT_READ:
        read = args[1:]
    given = [tensor for tensor in tensors_in((read, kwargs)) if tensor is not kwargs.get("out")]
    moved = sum(map(_stored_bytes, written)) + sum(_read_bytes(short, tensor, written) for tensor in given)
    if short in _SCATTERS:
        moved = 3 * _stored_bytes(given[-1])
    is_causal = any(arg is True for arg in (*args, *kwargs.values()))  # of attention, its only flag
    flops = _flops_of(name, given, written, is_causal=is_causal)
    return Work(flops, moved, _ATTENTION in name, name == FLOAT8_PRODUCT)


def _stored_bytes(tensor: Tensor) -> int:
    """Bytes in memory: an expanded dimension is stored once."""
    num_bytes = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride or size < 2:
            num_bytes *= size
    return num_bytes


def _read_bytes(short: str, tensor: Tensor, written: Sequence[Tensor]) -> int:
    size = _stored_bytes(tensor)
    if short not in _GATHERS:
        return size
    return min(size, *(t.numel() * tensor.element_size() for t in written))


def _flops_of(name: str, given: Sequence[Tensor], made: Sequence[Tensor], *, is_causal: bool) -> int:
    """Floating-point operations of a matrix product or an attention; 0 for other, memory-bound operators."""
    short = name.partition("::")[2]
    if name == GROUPED_PRODUCT:  # each row once, by the matrix of its own group or into that
        left, right = given[0], given[1]
        return 2 * left.numel() * right.shape[-1]
    if short == "gate_tail":  # gate, up, z, z, B, B, A: a product with each factor
        return 2 * given[0].numel() * (given[2].shape[1] + given[3].shape[1] + len(given[6]))
    if short == "gate_tail_back":  # a gradient first: one with A again, and two for each of the forward's
        return 2 * given[0].numel() * (3 * (given[3].shape[1] + given[4].shape[1]) + 2 * len(given[7]))
    if short == "stream_sum":  # y, z, B, ...
        return 2 * given[0].numel() * given[1].shape[1]
    if short == "stream_back":  # -> dh, dz = dh B
        return 2 * made[0].numel() * made[1].shape[1]
    if short in _PRODUCTS:
        left = given[0]
        if short.startswith(("addmm", "baddbmm")):
            left = given[1]  # after what it is added to
        return 2 * made[0].numel() * left.shape[-1]
    if _ATTENTION in short:
        # Two products, each 2 operations a number, of half the pairs if causal, else of all that the kernel is given.
        # Backward: the first product again, and two for each of the forward's.
        query, key, *_ = given
        products = 2
        if "backward" in short:
            _, query, key, *_ = given  # after the gradient of the result
            products = 5
        if not is_causal:
            products *= 2
        return products * query.numel() * key.shape[-2]
    return 0
