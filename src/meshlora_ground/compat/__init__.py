"""Private names of torch, transformers and PEFT: every one that the product uses, and only here.

Owns: those names, each behind a public one of ours, with its purpose and why no public API does, in a file for each
library and purpose. Does not own: their uses.

Any release may drop one. `tests/unit/test_compat_names.py` then says which, and who needs it; once a library has a
public API, the name leaves its file. Every layer and both sides of a proof import them: so nothing here computes
what a proof compares, and PEFT, transformers and rare parts of torch are imported on first use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set attribute `name` of `owner` to `value` for the block, then restore the original, own or inherited.

        with replaced(F, "scaled_dot_product_attention", attention):

    Raises:
        AttributeError: `owner` has no such attribute.
    """
    getattr(owner, name)
    is_own = name in vars(owner)
    original = vars(owner).get(name)  # as stored: getattr would unwrap a staticmethod
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
