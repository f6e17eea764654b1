"""The tokenizer of a model's folder.

Owns: loading it, and what padding is made of. Does not own: what is tokenised (`data`).
"""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from meshlora.data.files import is_folder
from meshlora.errors import UserError, reason


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer that lies beside the model.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    if Path(path).is_dir():
        is_folder(Path(path))  # a named pipe among the files would be waited for
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise UserError(
            f"tokenizer in {path}", f"it cannot be loaded ({reason(error)})", "is tokenizer.json there and whole?"
        ) from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def padding_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """What padding is made of; masked out, so any id will do."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0
