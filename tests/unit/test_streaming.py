"""Text that comes token by token: each character once and whole."""

from __future__ import annotations

from typing import Any

import pytest

from meshlora.run.streaming import GrowingText


class _Bytes:
    """A tokenizer whose tokens are bytes of UTF-8, but for 300, which is special."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")


class _Spaces:
    """One that writes a space after the last word only once another follows, and takes one before a comma away."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join("abc,"[token] for token in tokens).replace(" ,", ",")


@pytest.mark.parametrize("text", ["", "a", "naïve", "日本語", "👩‍👩‍👧 and 🇺🇾"])
def test_characters_of_several_tokens_come_whole(text: str) -> None:
    growing: Any = GrowingText(_Bytes())  # type: ignore[arg-type]
    pieces = [growing.add([token]) for token in [*text.encode(), 300]]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + growing.rest() == growing.whole == text
    assert len([piece for piece in pieces if piece]) == len(text), "it came at once"


def test_half_a_character_at_the_end_is_not_lost() -> None:
    growing: Any = GrowingText(_Bytes())  # type: ignore[arg-type]
    assert growing.add(list("é".encode())[:1]) == ""
    assert growing.rest() == growing.whole == "\ufffd"


def test_text_that_changes_before_its_end_is_not_said_twice() -> None:
    growing: Any = GrowingText(_Spaces())  # type: ignore[arg-type]
    assert [growing.add([token]) for token in (0, 3, 1)] == ["a", ",", " b"]
