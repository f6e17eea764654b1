"""The processor of a model's folder: its tokenizer, and how images become the model's inputs.

Owns: loading it. Does not own: its use (`reading.images`, `reading.chat`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PROCESSOR_MAPPING, PretrainedConfig

from meshlora_ground.errors import UnsupportedError, UserError, reason

FILES = ("preprocessor_config.json", "processor_config.json")


def load_processor(path: str | Path, config: PretrainedConfig) -> Any:
    """The processor in a model's folder, without its part for videos, which needs torchvision. Raises: UserError: there
    is none, or it cannot be loaded. UnsupportedError: the model takes no images."""
    try:
        kind = PROCESSOR_MAPPING[type(config)]
    except KeyError:
        kind = None
    if kind is None or "image_processor" not in kind.get_attributes():
        raise UnsupportedError(
            f"images for model_type {config.model_type!r}",
            "transformers has no processor of images for it",
            "use a model with a vision part, or leave the images out",
        )
    # Where it has neither, transformers would name the hub.
    if Path(path).is_dir() and not any((Path(path) / name).is_file() for name in FILES):
        given, rule = f"images for the model in {path}", f"it has no processor, as in {FILES[0]}"
        raise UserError(given, rule, "copy the files of its processor there, or leave the images out")
    try:
        processor = _without_videos(kind).from_pretrained(path, local_files_only=True)
    except ImportError as error:
        way_out = "pip install 'meshlora[images]'"
        raise UserError(f"processor in {path}", f"it needs a library ({reason(error)})", way_out) from error
    except Exception as error:  # untrusted files read by a library may raise anything
        way_out = "is preprocessor_config.json there?"
        raise UserError(f"processor in {path}", f"it cannot be loaded ({reason(error)})", way_out) from error
    if getattr(processor, "image_token", None) is None:
        raise UnsupportedError(f"{kind.__name__}", "it names no image_token", "leave the images out")
    if processor.chat_template is not None:  # it is the tokenizer that renders
        processor.tokenizer.chat_template = processor.chat_template
    return processor


def _without_videos(kind: Any) -> Any:
    names = [name for name in kind.get_attributes() if "video" not in name]
    return type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda _: names)})
