"""Logits that are never computed: a record of the model's operations on them, replayed by each rank on its slice.

Owns: `LogitsRecipe`, and the list of calls on logits that are elementwise. Does not own: the loss that replays them
(`layers.head_loss`), the head that returns one (`layers.linear`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from meshlora_ground.compat.torch_tensors import tensor_without_storage
from meshlora_ground.errors import UnsupportedError

_FIELDS = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_cuda", "is_meta")
_QUESTIONS = ("size", "dim", "numel", "is_floating_point", "element_size", "__len__")
# What a model may ask of logits that are not there.
_METADATA = {torch.is_floating_point, torch.numel}
_METADATA |= {getattr(Tensor, name).__get__ for name in _FIELDS} | {getattr(Tensor, name) for name in _QUESTIONS}

# Elementwise functions, by name: a rank can apply them to its slice of the vocabulary alone.
_ELEMENTWISE = (
    *("mul", "multiply", "div", "divide", "true_divide", "add", "sub", "subtract", "neg", "negative"),
    *("tanh", "clamp", "clip", "clamp_min", "clamp_max", "pow", "exp", "sigmoid"),
)
_OPERATORS = ("mul", "rmul", "truediv", "rtruediv", "add", "radd", "sub", "rsub", "neg", "pow")
_IN_PLACE_OPERATORS = {"imul": "mul", "itruediv": "div", "idiv": "div", "iadd": "add", "isub": "sub", "ipow": "pow"}
_CASTS = ("to", "float", "double", "half", "bfloat16", "contiguous")

# The function that a model calls -> the one that replays it, out of place.
_OUT_OF_PLACE: dict[Callable[..., Any], Callable[..., Tensor]] = {
    **{getattr(torch, name): getattr(torch, name) for name in _ELEMENTWISE},
    **{getattr(Tensor, name): getattr(Tensor, name) for name in (*_ELEMENTWISE, *_CASTS)},
    **{getattr(Tensor, f"__{name}__"): getattr(Tensor, f"__{name}__") for name in _OPERATORS},
}
_IN_PLACE: dict[Callable[..., Any], Callable[..., Tensor]] = {
    **{getattr(o, f"{n}_"): getattr(o, n) for o in (torch, Tensor) for n in _ELEMENTWISE if hasattr(o, f"{n}_")},
    **{getattr(Tensor, f"__{op}__"): getattr(Tensor, name) for op, name in _IN_PLACE_OPERATORS.items()},
}


@dataclass(frozen=True)
class _Operation:
    """One recorded call: `function(*before, logits, *after, **kwargs)`, cast back to the input's dtype if in place."""

    function: Callable[..., Tensor]
    after: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_in_place: bool
    before: tuple[Any, ...] = ()

    def __call__(self, logits: Tensor) -> Tensor:
        result = self.function(*self.before, logits, *self.after, **self.kwargs)
        return result.to(logits.dtype) if self.is_in_place else result


class LogitsRecipe(Tensor):
    """Logits that are not computed: the hidden states they come from, and the model's operations on them since.

    A head returns one instead of logits, `[..., H]` -> `[..., V]` without storage. The model's own forward then scales
    it, caps it, casts it; each such call is recorded and returns a recipe. `replay` applies the calls to real logits.
    Only elementwise calls are recorded, since each rank replays them on its own slice of the vocabulary.

    Attributes:
        hidden: the input of the head, `[..., H]`. operations: the recorded calls, in order.
    """

    hidden: Tensor
    operations: tuple[_Operation, ...]

    @staticmethod
    def __new__(
        cls, hidden: Tensor, *, vocab: int, dtype: torch.dtype | None = None, operations: tuple[_Operation, ...] = ()
    ) -> LogitsRecipe:
        shape = (*hidden.shape[:-1], vocab)
        # Not the meta device: a model may ask for its logits' device.
        recipe = tensor_without_storage(cls, shape, dtype=dtype or hidden.dtype, device=hidden.device)
        recipe.hidden, recipe.operations = hidden, operations
        return recipe

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def replay(self, logits: Tensor) -> Tensor:
        """Apply the recorded operations to logits `[..., V/tp]`, out of place."""
        for operation in self.operations:
            logits = operation(logits)
        return logits

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        names = [operation.function.__name__ for operation in self.operations]
        return f"LogitsRecipe(shape={tuple(self.shape)}, dtype={self.dtype}, operations={names})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is Tensor.__getitem__ and (vocab := _without_end(args[0], args[1])):
            return LogitsRecipe(args[0].hidden, vocab=vocab, dtype=args[0].dtype, operations=args[0].operations)
        return _record(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        _refuse(func)  # reached only by bypassing __torch_function__


def _record(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> LogitsRecipe:
    """The recipe after this call. An in-place call changes the recipe itself."""
    is_in_place = func in _IN_PLACE
    if not is_in_place and func not in _OUT_OF_PLACE:
        _refuse(func)
    recipe: LogitsRecipe | None = None
    before, after = [], []
    for arg in args:
        if recipe is not None:
            after.append(_scalar(arg, func))  # a second recipe is no scalar, and refused there
        elif isinstance(arg, LogitsRecipe):
            recipe = arg
        else:
            before.append(_scalar(arg, func))
    if recipe is None:
        _refuse(func)
    by_name = {name: _scalar(value, func) for name, value in kwargs.items()}
    replayed = _IN_PLACE[func] if is_in_place else _OUT_OF_PLACE[func]
    operation = _Operation(replayed, tuple(after), by_name, is_in_place, before=tuple(before))
    with torch.DisableTorchFunctionSubclass():
        # One logit shows the dtype of the result, and whether the call returns its input (a cast without effect).
        probe = torch.zeros((1,) * recipe.ndim, dtype=recipe.dtype, device=recipe.device)
        vocab = recipe.shape[-1]  # of all ranks
    result = operation(probe)
    if result is probe:
        return recipe
    if is_in_place:
        recipe.operations += (operation,)  # whoever holds the logits sees the change
        return recipe
    operations = (*recipe.operations, operation)
    return LogitsRecipe(recipe.hidden, vocab=vocab, dtype=result.dtype, operations=operations)


def _without_end(recipe: LogitsRecipe, index: Any) -> int:
    """The vocabulary of `logits[..., :n]`, which drops rows that pad the head (inkling); 0: it is something else."""
    if not isinstance(index, tuple) or len(index) != 2 or index[0] is not Ellipsis or not isinstance(index[1], slice):
        return 0
    one = index[1]
    return one.stop if (one.start, one.step) == (None, None) and 0 < (one.stop or 0) <= recipe.shape[-1] else 0


def _scalar(value: Any, func: Callable[..., Any]) -> Any:
    """An argument that is the same for every logit: a number, a dtype, or an untrained tensor of one element."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad:
        # [1]: replayed logits have fewer dims; 0-dim stays, as it takes no part in type promotion.
        return value.detach().reshape(1) if value.ndim else value.detach()
    if value is None or isinstance(value, bool | int | float | torch.dtype | torch.memory_format):
        return value
    return _refuse(func)


def _refuse(func: Any) -> NoReturn:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = f"reading .{getattr(getattr(func, '__self__', None), '__name__', '?')}"  # of an attribute
    rule = "with the head split over tp, only what acts on each logit by itself is known to be exact"
    raise UnsupportedError(f"this model's forward calls {name} on its logits", rule, "use tp=1")
