"""Rows of a vocabulary that an adapter trains in place of those of the base: `trainable_token_indices`.

Owns: what they are, once they are chosen. A row itself is trained, not its difference from the base. Does not own: the
choice (`wings.vocabulary`), their computation (`layers.token_rows`), their initial values (`adapter.attach`).
"""

from __future__ import annotations

from dataclasses import dataclass

DELTA = "trainable_tokens_delta"  # PEFT's name of a parameter that holds rows, not differences


@dataclass(frozen=True)
class TokenRows:
    """The rows `[n, H]` of tokens `ids` in the vocabulary of `module`.

    tied: other modules that have the same rows. num_tokens: of the vocabulary.
    """

    module: str
    ids: tuple[int, ...]
    num_tokens: int
    tied: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the trained parameter."""
        return f"{self.module}.{DELTA}"

    @property
    def modules(self) -> tuple[str, ...]:
        """All modules that have them."""
        return (self.module, *self.tied)
