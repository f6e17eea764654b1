"""Context parallelism: each cp rank has its own tokens of every sequence, and attends with them to all others.

Owns: attention of a rank's own queries to all keys and values, and the masks of these rows. Does not own: which tokens
a rank has (`layers.held_tokens`), what else layers are called with (`wings.context.borders`), the softmax: that is the
model's, or that of `wings.context.attention_parts`.

transformers calls attention and makes masks through two registries of functions by name. Ours stand there under names
of their own, `meshlora-sdpa` and `meshlora-eager`: a mask is made when a layer asks for it, for its own queries and the
keys that they see, and attention runs block by block of queries on gathered keys and values. So windows, sinks,
soft caps and packing are those of the model, in its own code. sdpa on CPUs, where torch would keep a mask in numbers of
each block, plain causal rows on GPUs, where a mask would keep keys for each head, and the ring take attention in parts
in place of that code.

Keys and values are gathered once, together, and their gradients reduce-scattered once. In the ring they pass by one
rank's at a time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from meshlora.comm.groups import SharedByCopies
from meshlora.layers.held_tokens import ContextCut, HeldTokens
from meshlora.plan.rules import CONTEXT_ATTENTIONS
from meshlora.wings.context.attention_parts import How, Part, Seen, attend, columns_of, groups_of, has_kernel
from meshlora_ground.compat import transformers_attention, transformers_models
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.transfer import to_device

_OURS = "meshlora-"

# Queries of a block: the sixteenth of a row, within these. Blocks skip the keys that none of their queries sees.
_FEWEST, _MOST, _PER_ROW = 8, 1024, 16
# Fewer queries of a row than this are computed together with those of other rows, with a mask.
_ALONE = 128

# Arguments of attention functions that change nothing in attention in parts: masks have the window and the direction.
_WITHOUT_EFFECT = {"is_causal", "sliding_window", "position_ids"}


class ContextAttention(SharedByCopies):
    """How the layers of a model attend over cp. One object per model.

    Attributes:
        cut: of its running forward.
        is_ring: whether keys and values pass by, in place of being gathered.
    """

    def __init__(self, cut: ContextCut, *, is_ring: bool) -> None:
        self.cut, self.is_ring = cut, is_ring
        self.compared: set[type] = set()  # attentions whose own code computes what the ring does

    def check_ring(self, module: nn.Module, unknown: Sequence[str]) -> None:
        """
        Raises:
            UnsupportedError: there is something `unknown` in the attention `module`.
        """
        if unknown:
            rule = f"the ring computes attention itself, and does not know {', '.join(unknown)}"
            instead = f"cp={self.cut.axis.size} gathers keys and values, and runs the model's own attention"
            raise UnsupportedError(f"the ring with {type(module).__name__}", rule, f"leave out ring ({instead})")


def _blocks_of(held: HeldTokens) -> Iterator[tuple[slice, slice, np.ndarray]]:
    """(rows, own tokens, their positions) of each block of queries. Rows are together where all are dealt alike."""
    for row, rows in _rows_dealt_alike(held):
        for own in _cut_up(held, slice(0, held.per_rank), row):
            yield rows, own, held.own_on_host[row, own]


def _rows_dealt_alike(held: HeldTokens) -> Iterator[tuple[int, slice]]:
    """(The first of them, rows whose tokens are dealt alike): all, or each by itself."""
    if held.is_uniform:
        yield 0, slice(None)
        return
    for row in range(held.rows):
        yield row, slice(row, row + 1)


def _cut_up(held: HeldTokens, tokens: slice, row: int) -> Iterator[slice]:
    """Blocks of own `tokens` of a row."""
    most = min(_MOST, max(_FEWEST, held.length // _PER_ROW))
    begin = tokens.start
    # A block ends where the next token is not the neighbour in the row; short ones are joined.
    breaks = np.flatnonzero(np.diff(held.own_on_host[row, tokens]) != 1) + 1 + tokens.start
    for end in [*breaks.tolist(), tokens.stop]:
        if 2 * (end - begin) < most and end < tokens.stop:
            continue
        for start in range(begin, end, most):
            yield slice(start, min(end, start + most))
        begin = end


class RowsOfMask:
    """The mask of a forward, made of transformers' own function when a layer asks for some of its rows.

    make: that function, with `given` the arguments by name that it was called with.
    """

    ndim = 4  # transformers asks whether it is a mask of tokens

    def __init__(self, make: Callable[..., Any], given: dict[str, Any]) -> None:
        self.make, self.given = make, given
        self.held: HeldTokens | None = None
        self._made: dict[str, Any] = {}

    @property
    def shape(self) -> torch.Size:
        """`[B, 1, S, S]`, without making it."""
        return torch.Size((self.given["batch_size"], 1, self.given["q_length"], self.given["kv_length"]))

    @functools.cached_property
    def whole(self) -> Any:
        """The mask as without context parallelism."""
        return self.make(**self.given)

    def own(self, held: HeldTokens) -> Tensor:
        """The rows of a rank's queries `[B, 1, S/cp, S]`, in the order of its tokens."""
        parts = ((rows, held.own_on_host[row]) for row, rows in _rows_dealt_alike(held))
        return self._once("own", held, lambda: torch.cat([self._rows(*part) for part in parts]))

    def to(self, dtype: torch.dtype) -> RowsOfMask:
        """The same mask in another dtype, when its rows are made."""
        make = self.make
        return RowsOfMask(lambda **given: make(**given).to(dtype), self.given)

    def blocks(self, held: HeldTokens) -> list[Block]:
        """The blocks of a rank's queries, each with its part of the mask; the same for all layers."""
        return self._once("blocks", held, lambda: [self._block(*b) for b in _blocks_of(held)])

    def parts(self, held: HeldTokens, *, in_ring: bool) -> list[list[Part]]:
        """The parts of keys that a rank's queries see, the same for all layers: of all keys, in the order of the row;
        in the ring of its own keys, then of those of the ranks before it, in the order of each.
        """
        size, rank = held.axis.size, held.axis.rank
        of_steps = [np.tile(np.arange(held.length), (held.rows, 1))]
        if in_ring:
            of_steps = [held.of_rank((rank - step) % size) for step in range(size)]
        found: list[list[Part]] = self._once(
            "parts", held, lambda: [list(self._parts(held, keys)) for keys in of_steps]
        )
        return found

    def _once(self, what: str, held: HeldTokens, make: Callable[[], Any]) -> Any:
        self.held = self.held or held
        # A layer that runs again in a backward is that of its own forward.
        if self.held is not held:
            given = "a backward that computes layers again, of an earlier forward than the last"
            rule = "under cp the tokens of the last forward are held"
            raise UnsupportedError(given, rule, "run the backward of each forward before the next")
        if what not in self._made:
            self._made[what] = make()
        return self._made[what]

    def _parts(self, held: HeldTokens, keys: np.ndarray) -> Iterator[Part]:
        """The parts of the keys at positions `keys` `[B, m]`, ascending in each row."""
        of_rows: list[Seen] = []
        for row, rows in _rows_dealt_alike(held):
            of_rows += self._seen(held, keys, row, rows)
        if held.is_uniform:
            are_alike = all(one.is_equal(of_rows[0]) for one in of_rows)
            if are_alike or held.per_rank < _ALONE:
                # One mask for all rows, unless what they see needs none.
                groups: Iterable[Any] = [(slice(0, held.per_rank), None)]
                if are_alike:
                    groups = groups_of(of_rows[0])
                yield from self._parts_of(held, keys, slice(None), of_rows, groups)
                return
        for row, one in enumerate(of_rows):
            yield from self._parts_of(held, keys, slice(row, row + 1), [one], groups_of(one))

    def _parts_of(
        self, held: HeldTokens, keys: np.ndarray, rows: slice, seen: Sequence[Seen], groups: Iterable[Any]
    ) -> Iterator[Part]:
        """seen: by each of the rows, or by all of them alike."""
        row = rows.start or 0
        for queries, slices in groups:
            if slices is not None:
                for where, is_causal in slices:
                    yield Part(rows, queries, where, None, is_causal)
                continue
            for own in _cut_up(held, queries, row):
                columns = columns_of(seen, own)
                if columns.stop:
                    mask = self._rows(rows, held.own_on_host[row, own], keys[row])
                    yield Part(rows, own, columns, mask[..., columns].contiguous())

    def _seen(self, held: HeldTokens, keys: np.ndarray, row: int, rows: slice) -> Iterator[Seen]:
        """What own queries see of the keys at positions `keys`, of each of `rows`, which are dealt as `row` is."""
        positions = held.own_on_host[row]
        number = np.searchsorted(keys[row], positions, side="right")
        own = np.where(keys[row][number - 1] == positions, number - 1, -1)
        if self.is_causal:
            yield Seen(np.zeros_like(number), number - 1, number, own)  # the same of all rows
            return
        pieces = []  # some queries at a time: a mask of all is as large as what is spared here
        for piece in np.array_split(np.arange(len(positions)), -(-len(positions) // _MOST)):
            mask = self._rows(rows, positions[piece], keys[row])
            pieces.append([Seen.of_mask(one[0], own[piece]) for one in mask])
        for of_row in zip(*pieces, strict=True):
            yield Seen.joined(of_row)

    @functools.cached_property
    def is_causal(self) -> bool:
        """Whether each token sees all before it and itself, without looking at any."""
        padding = self.given["attention_mask"]
        return self.given["mask_function"] is causal_mask_function and (padding is None or bool(padding.all()))

    def _block(self, rows: slice, own: slice, positions: np.ndarray) -> Block:
        mask = self._rows(rows, positions)
        columns = _seen_columns(_as_bool(mask))
        keys = slice(columns.start, max(1, columns.stop))  # kernels take no empty part
        return Block(rows, own, keys, mask[..., keys].contiguous())

    def _rows(self, rows: slice, positions: np.ndarray, keys: np.ndarray | None = None) -> Tensor:
        """The rows `positions` of the mask, `[b, 1, n, S]`, or with `keys` its columns at these positions, bool."""
        given, function = self.given, self.given["mask_function"]
        first, number = 0, given["batch_size"]
        if rows.stop is not None:
            first, number = rows.start, rows.stop - rows.start
        of_keys = keys
        if of_keys is None:
            of_keys = np.arange(given["kv_length"])
        where = torch.from_numpy(positions).to(given["device"])
        which = torch.from_numpy(of_keys).to(given["device"])
        padding = given["attention_mask"]
        if padding is not None:
            padding = padding[rows][:, which]
        mask: Tensor = self.make(
            **given
            | {
                "batch_size": number,
                "q_length": len(where),
                "kv_length": len(which),
                "mask_function": lambda batch, head, q, k: function(batch + first, head, where[q], which[k]),
                "attention_mask": padding,
                # Either skip would return no mask, and these rows are not a whole square.
                "allow_is_causal_skip": False,
                "allow_is_bidirectional_skip": False,
            }
        )
        if keys is None:
            return mask
        return _as_bool(mask)

    # Everything else that the code of a model may do with a mask is refused by name.

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _refused(f"reads {name} of")

    def __getitem__(self, index: object) -> Any:
        # gemma4 slices it to the tokens whose logits are wanted: in training, all.
        if isinstance(index, tuple) and all(part in (slice(None), slice(0, None)) for part in index):
            return self
        raise _refused("slices")

    def __invert__(self) -> Any:
        raise _refused("inverts")

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        """torch calls it for every function and operator that has such a mask beside a tensor."""
        raise _refused(f"calls {function.__name__} with")


def _refused(what: str) -> UnsupportedError:
    rule = f"its code {what} its attention mask, which is made in parts"
    return UnsupportedError("cp with this model", rule, "use cp=1")


@dataclass(frozen=True, eq=False)
class Block:
    """Queries of a rank with the keys that they see: own tokens `own` of `rows`, `keys`, and their mask."""

    rows: slice
    own: slice
    keys: slice
    mask: Tensor


def _as_bool(mask: Tensor) -> Tensor:
    """Where a key is seen, of a mask in either form."""
    if mask.dtype == torch.bool:
        return mask
    return mask == 0  # what is added to scores


def _seen_columns(seen: Tensor) -> slice:
    """The columns of a mask `[b, 1, n, m]` from the first to the last that is seen; none at all: 0 to 0."""
    columns = seen.flatten(0, 2).any(0).nonzero().flatten()
    if not len(columns):
        return slice(0, 0)
    return slice(int(columns[0]), int(columns[-1]) + 1)


def _attention(
    base: str, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of own queries `[B, h, S/cp, d]` to all keys, as transformers' function `base` computes it.

    key, value: of own tokens, `[B, h, S/cp, d]`. Returns `[B, S/cp, h, d]`.
    """
    call = functools.partial(transformers_attention.attention_function(base, module), module)
    context: ContextAttention = module.meshlora_context
    held = context.cut.held
    if held is None:
        if isinstance(attention_mask, RowsOfMask):
            attention_mask = attention_mask.whole
        return call(query, key, value, attention_mask, *args, **kwargs)
    if not isinstance(attention_mask, RowsOfMask):
        rule = "its mask does not come from transformers' mask functions"
        raise UnsupportedError(f"cp with {type(module).__name__}", rule, "use cp=1")
    # Side by side, so that one collective moves both.
    pair = torch.cat([key.transpose(1, 2), value.transpose(1, 2)], -1)
    unknown = _unknown(base, args, kwargs)
    scale, cap = kwargs.get("scaling"), kwargs.get("softcap")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    how = How(scale, cap, query.shape[-1])
    if context.is_ring:
        context.check_ring(module, unknown)
        if base == "eager" and type(module) not in context.compared:
            _compare(module, call, query, pair, how, kwargs)
            context.compared.add(type(module))
    else:
        pair = held.gathered(pair)
    # Of other rows than plain causal ones a GPU's own kernel takes the mask, block by block.
    is_plain = query.is_cpu or (attention_mask.is_causal and key.shape == value.shape and has_kernel(query))
    if context.is_ring or (base == "sdpa" and not unknown and is_plain):
        parts = attention_mask.parts(held, in_ring=context.is_ring)
        return attend(query, pair, kwargs.get("s_aux"), parts, how, held.axis), None
    keys, values = pair.transpose(1, 2).split([key.shape[-1], value.shape[-1]], -1)
    blocks, found = attention_mask.blocks(held), []
    for block in blocks:
        own, seen = (block.rows, slice(None), block.own), (block.rows, slice(None), block.keys)
        found.append(call(query[own], keys[seen], values[seen], block.mask, *args, **kwargs)[0])
    return _joined(blocks, found, held), None


def _joined(blocks: Sequence[Block], found: Sequence[Tensor], held: HeldTokens) -> Tensor:
    """What is `found` of each of the `blocks`, as `[B, S/cp, h, d]`."""
    if held.is_uniform:
        return torch.cat(list(found), 1)
    rows = []
    for row in range(held.rows):
        of_row = [out for block, out in zip(blocks, found, strict=True) if block.rows.start == row]
        rows.append(torch.cat(of_row, 1))
    return torch.cat(rows)


def _unknown(base: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """The arguments of an attention function, by name, that attention in parts does not take."""
    known = {"scaling", *_WITHOUT_EFFECT}
    if base == "eager":  # transformers' sdpa passes over them
        known |= {"softcap", "s_aux"}
    found = [f"argument {number + 5}" for number in range(len(args))]
    for name, value in kwargs.items():
        has_effect = isinstance(value, Tensor) or name in ("dropout", "softcap", "s_aux", "position_bias", "cache")
        if name not in known and has_effect and value is not None and (isinstance(value, Tensor) or value):
            found.append(name)
    return found


def _compare(module: Any, call: Any, query: Tensor, pair: Tensor, how: How, kwargs: dict[str, Any]) -> None:
    """Compare eager attention, which each family has of its own, with attention in parts, on a few numbers. Raises:
    UnsupportedError: they are not the same."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return to_device(3 * torch.randn(*shape, generator=generator, dtype=torch.float64), query.device)

    few, pairs = draw(1, query.shape[1], 3, query.shape[-1]), draw(1, 4, *pair.shape[-2:])
    seen = torch.ones(1, 1, 3, 4, dtype=torch.bool, device=query.device).tril()
    key, value = pairs.transpose(1, 2).split([how.key_width, pair.shape[-1] - how.key_width], -1)
    mask = torch.zeros_like(seen, dtype=few.dtype).masked_fill_(~seen, torch.finfo(few.dtype).min)
    with torch.no_grad():
        expected = call(few, key, value, mask, **kwargs)[0]
        part = Part(slice(None), slice(0, 3), slice(0, 4), seen)
        found = attend(few, pairs, kwargs.get("s_aux"), [[part]], how, module.meshlora_context.cut.axis)
    # Softmaxes in float32, and sinks in bfloat16, which eager attention may add before it widens them.
    if found.shape != expected.shape or not torch.allclose(found, expected.to(found.dtype), rtol=1e-2, atol=1e-3):
        module.meshlora_context.check_ring(module, ["what its eager attention computes"])


def _rows_of_mask(make: Callable[..., Any], **given: Any) -> RowsOfMask:
    """The mask that `make` would make, or what is given in its place: the decoder of a composite gets it whole."""
    ready = given.get("attention_mask")
    return ready if isinstance(ready, RowsOfMask) else RowsOfMask(make, given)


def _register() -> None:
    for name in CONTEXT_ATTENTIONS:
        make = AttentionMaskInterface()[name]
        AttentionInterface.register(_OURS + name, functools.partial(_attention, name))
        AttentionMaskInterface.register(_OURS + name, functools.partial(_rows_of_mask, make))


_register()


def _begin(context: ContextCut) -> None:
    """A forward of a user's own is whole, which gradients must not be: each rank would have them of all tokens."""
    context.begin()
    if context.held is None and torch.is_grad_enabled():
        given = f"a forward with gradients of whole sequences on cp={context.axis.size}"
        way_out = "give the model labels, use meshlora.language_model_loss, or torch.no_grad() for logits alone"
        raise UserError(given, "each cp rank would have the gradients of all tokens, and they are summed", way_out)


def hold_context(model: Any, layers: nn.ModuleList, context: ContextAttention, parents: Sequence[nn.Module]) -> None:
    """Let the decoder `layers` of `model` attend over all cp ranks. parents: the modules around them."""
    base = transformers_models.attention_of(model.config.get_text_config())
    assert base in CONTEXT_ATTENTIONS, base
    model.register_forward_pre_hook(lambda *_: _begin(context.cut), prepend=True)
    for module in (*parents, *layers.modules()):
        module.meshlora_context = context  # type: ignore[assignment]
        if (config := getattr(module, "config", None)) is not None:
            transformers_attention.set_attention(config, _OURS + base)


@contextlib.contextmanager
def as_transformers_attends(model: nn.Module) -> Iterator[None]:
    """Inside the block attention of `model` is what it is without this file, and without
    `wings.packed_rows.by_sequence`: for whole forwards, whose masks the code of a model may look into.
    """
    ours: dict[int, tuple[Any, str]] = {}  # many modules have one configuration
    for module in model.modules():
        config = getattr(module, "config", None)
        name = ""
        if config is not None:
            name = transformers_models.attention_of(config) or ""
        if name.startswith(_OURS):
            ours[id(config)] = (config, name)
    for config, name in ours.values():
        transformers_attention.set_attention(config, name.rpartition("-")[2])
    try:
        yield
    finally:
        for config, name in ours.values():
            transformers_attention.set_attention(config, name)
