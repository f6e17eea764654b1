"""Images of conversations: which files are read, and the model's inputs that a processor makes of them.

Owns: the safe reading of image files, and the tensors of a sequence's images. Does not own: loading the processor
(`reading.processor`), placeholders in the text (`chat.py`), putting sequences together (`collate.py`).

A dataset keeps paths and hashes. Files are read, checked against their hash and processed when a batch is made: the
pixels of a whole dataset would not fit into memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import os
import stat
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshlora.reading.records import MalformedError, Record, is_image, quoted
from meshlora_ground.errors import UserError, reason
from meshlora_ground.file_hash import FileHashes
from meshlora_ground.further_inputs import TOKEN_TYPES

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_FILE_BYTES = 64 * 2**20
MAX_PIXELS = 2**26  # 8192 x 8192: 200 MB decoded; a small file can claim far more
_OF_TEXT = ("input_ids", "attention_mask", *TOKEN_TYPES)


@dataclass(frozen=True)
class ImageFile:
    """An image of a record. origin: of the record, for messages. sha256: of the file's bytes."""

    path: Path
    origin: str
    sha256: str


@dataclass(frozen=True, eq=False)
class Images:
    """Images in files. files: of each sequence, in the order of their placeholders. processor: of transformers."""

    files: Sequence[tuple[ImageFile, ...]]
    processor: Any
    token_types: tuple[str, ...]
    has_images: bool = True

    @property
    def token(self) -> int:
        """The id of an image's placeholder."""
        return int(self.processor.image_token_id)

    def number(self, index: int) -> int:
        """How many images sequence `index` has."""
        return len(self.files[index])

    def inputs(self, index: int, input_ids: np.ndarray) -> dict[str, Tensor]:
        """As in `FurtherInputs`. Raises: UserError: a file is missing, damaged, or not the one that was tokenised."""
        found: dict[str, Tensor] = {}
        if self.token_types:
            (types,) = self.processor.create_mm_token_type_ids([input_ids.tolist()])
            found = {name: torch.tensor(types) for name in self.token_types}
        if files := self.files[index]:
            # Only images are processed, but some processors refuse to without text.
            text = [self.processor.image_token * len(files)]
            images = [read_image(file.path, file.origin, sha256=file.sha256) for file in files]
            made = self.processor(text=text, images=[images], return_tensors="pt")
            # The text was none of the sequence's.
            found |= {name: tensor for name, tensor in made.items() if name not in _OF_TEXT}
        return found

    def digest(self) -> np.ndarray:
        """uint8 `[32]`: a hash of all images, in order."""
        words = "\n".join(" ".join(file.sha256 for file in files) for files in self.files)
        return np.frombuffer(hashlib.sha256(words.encode()).digest(), dtype=np.uint8)

    def chosen(self, indices: Sequence[int]) -> Images:
        """Those of the sequences `indices`, in this order."""
        return dataclasses.replace(self, files=[self.files[index] for index in indices])


def images_of(records: Sequence[Record], processor: Any, *, skips: bool = False) -> Images:
    """The images of `records`, hashed. skips: a record whose files cannot be read has none here, and is no error yet.
    Raises: UserError: a file is missing, or no regular file."""
    readable = [_readable(record, skips=skips) for record in records]
    with FileHashes(itertools.chain.from_iterable(readable)) as hashes:
        files = []
        for record, paths in zip(records, readable, strict=True):
            files.append(tuple(ImageFile(path, record.origin, hashes[path]) for path in paths))
    made: Any = ()
    if processor.return_mm_token_type_ids:  # a trial says under which of the names
        made = processor(text=["x"])
    return Images(files, processor, tuple(name for name in TOKEN_TYPES if name in made))


def locate_images(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """`row` with the paths of images in its messages, relative to `folder`, made absolute. Malformed parts are kept.
    Raises: MalformedError: a path that leads out of `folder`, links followed: data are untrusted."""

    def part_of(part: Any) -> Any:
        if not is_image(part) or not isinstance(part.get("image"), str):
            return part
        root = folder.resolve()
        given = part["image"]
        path = Path(os.path.realpath(root / given.replace("\0", "")))  # Path.resolve raises on a circle of links
        if "\0" in given or not path.is_relative_to(root):
            raise MalformedError(f"image {quoted(given, 200)} is not below the folder of the data file")
        if "://" in given:
            raise MalformedError(f"image {quoted(given, 200)} is an address; only files are read")
        return {**part, "image": str(path)}

    def message_of(message: Any) -> Any:
        if isinstance(message, Mapping) and isinstance(content := message.get("content"), list):
            return {**message, "content": [*map(part_of, content)]}
        return message

    found = dict(row)
    for name, value in row.items():  # whatever the messages are called
        if isinstance(value, list):
            found[name] = [*map(message_of, value)]
    return found


def _readable(record: Record, *, skips: bool) -> list[Path]:
    """The image files of a record; none if one of them is not there and `skips`, else Raises: UserError."""
    paths = [*map(Path, record.images)]
    try:
        for path in paths:
            _check_file(path, record.origin)
    except UserError:
        if not skips:
            raise
        return []
    return paths


def _check_file(path: Path, origin: str) -> None:
    given = f"{origin}: image {quoted(str(path), 200)}"
    if not path.is_absolute():
        raise UserError(given, "a dataset in memory has no folder", "give the whole path")
    try:
        found = path.stat()
    except OSError as error:
        raise UserError(given, f"it cannot be read ({error.strerror})", "is this the path?") from None
    if not stat.S_ISREG(found.st_mode):
        raise UserError(given, "it is not a regular file")
    if found.st_size > MAX_FILE_BYTES:
        raise UserError(given, f"it is larger than {MAX_FILE_BYTES >> 20} MB", "make it smaller")


def read_image(path: Path, origin: str, *, sha256: str | None = None) -> Any:
    """The image in a file as `PIL.Image`, RGB, turned as its EXIF data say.

    sha256: of the bytes that are expected.

    Raises:
        UserError: it is missing, too large, of another format, damaged, or another file than expected.
    """
    given = f"{origin}: image {quoted(str(path), 200)}"
    _check_file(path, origin)
    try:
        # Not blocking: opening a named pipe without a writer would never return.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UserError(given, f"it cannot be read ({error.strerror})", "is this the path?") from None
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(given, "it was changed since the run began", "start the run again")
    return decoded(content, given)


def decoded(content: bytes, given: str) -> Any:
    """The RGB image of a file's bytes. given: names the file in messages. Raises: UserError, as `read_image`."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of many pixels: counted below
            image = Image.open(io.BytesIO(content), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            words = f"it has {image.width} x {image.height} pixels, more than {MAX_PIXELS:,}"
            raise UserError(given, words, "make it smaller")
        if getattr(image, "n_frames", 1) > 1:
            raise UserError(given, "it is animated", "give one frame of it")
        return ImageOps.exif_transpose(image).convert("RGB")  # reads all pixels: a truncated file raises
    except UserError:
        raise
    except Exception as error:  # untrusted bytes read by a library may raise anything
        words = f"it cannot be read as {', '.join(FORMATS)}"
        if not isinstance(error, UnidentifiedImageError):  # whose text names an object of ours
            words += f" ({reason(error)})"
        raise UserError(given, words, "is the file whole?") from error
