"""Images of a proof: random pixels of the shapes that a twin's tower takes, and their placeholders in its sequences.

No processor and no file is needed. Both sides of a proof take the same pixels, as they take the same tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UnsupportedError, reason
from meshlora_ground.further_inputs import TOKEN_TYPES, KnownInputs
from meshlora_ground.model_class import model_class

# Images of sequences 0, 1, 2, ..., over and over: dp ranks and micro-batches without any are among them.
_NUMBERS = (1, 0, 2, 0, 0, 1, 3)
_FIRST_PLACE, _BETWEEN = 3, 2  # tokens before the first image of a sequence, and between two


@dataclass(frozen=True)
class _RandomImages:
    """Attributes:
    shapes: of each image of each sequence: `(t, h, w)` patches, `(h, w)` pixels, or none if all have one size.
    arguments: of the model's forward, for token types and shapes. row: shape of a row of `pixel_values`.
    """

    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    arguments: tuple[str, ...]
    row: tuple[int, ...]
    token: int
    seed: int

    def inputs(self, index: int, input_ids: np.ndarray) -> dict[str, Tensor]:
        """As in `meshlora_ground.further_inputs.FurtherInputs`."""
        types = torch.from_numpy(input_ids.astype(np.int64) == self.token).long()
        found = {name: types for name in self.arguments if name in TOKEN_TYPES}
        if not (shapes := self.shapes[index]):
            return found
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        sizes = torch.tensor(shapes)
        if "image_grid_thw" in self.arguments:
            pixels = torch.randn(int(sizes.prod(1).sum()), *self.row, generator=generator)
            return found | {"pixel_values": pixels, "image_grid_thw": sizes}
        pixels = torch.randn(len(shapes), *self.row, generator=generator)
        if "image_position_ids" in self.arguments:  # of patches, in images padded to as many
            positions = torch.full((*pixels.shape[:2], 2), -1)
            for image, own, (height, width) in zip(pixels, positions, shapes, strict=True):
                patches = torch.arange(height * width)
                own[: len(patches)] = torch.stack([patches % width, patches // width], -1)
                image[len(patches) :] = 0
            return found | {"pixel_values": pixels, "image_position_ids": positions}
        if "image_sizes" not in self.arguments:
            return found | {"pixel_values": pixels}
        for image, (height, width) in zip(pixels, shapes, strict=True):  # as processors pad them
            image[:, height:], image[:, :, width:] = 0, 0
        height, width = sizes.max(0).values.tolist()
        return found | {"pixel_values": pixels[:, :, :height, :width], "image_sizes": sizes}


def with_images(data: TokenizedDataset, config: PretrainedConfig, *, seed: int) -> TokenizedDataset:
    """`data` with random images in some of the sequences. Raises: UnsupportedError: the model takes none like them."""
    numbers = [_NUMBERS[index % len(_NUMBERS)] for index in range(len(data))]
    images, lengths = _images(config, numbers, seed=seed)
    ids, trained = [], []
    for sequence, of_images in zip(data, lengths, strict=True):
        own_ids, own_trained = sequence.input_ids.copy(), sequence.is_trained.copy()
        own_ids[own_ids == images.token] = abs(images.token - 1)  # of drawn tokens none is a placeholder
        place = _FIRST_PLACE
        for length in of_images:
            own_ids = np.insert(own_ids, place, [images.token] * length)
            own_trained = np.insert(own_trained, place, [False] * length)
            place += length + _BETWEEN
        ids.append(own_ids)
        trained.append(own_trained)
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    further = []
    for index, own_ids in enumerate(ids):
        further.append({name: value.numpy() for name, value in images.inputs(index, own_ids).items()})
    return replace(
        data,
        input_ids=np.concatenate(ids),
        is_trained=np.concatenate(trained),
        offsets=offsets,
        further=KnownInputs(further, numbers, images.token),
    )


def _images(config: PretrainedConfig, numbers: Sequence[int], *, seed: int) -> tuple[_RandomImages, list[list[int]]]:
    """(random images, how many tokens each of a sequence takes) for sequences with these numbers of images."""
    what = f"--images with model_type {config.model_type!r}"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = model_class(config).from_config(config).eval()
    given = inspect.signature(model.forward).parameters
    vision, token = getattr(config, "vision_config", None), getattr(config, "image_token_id", None)
    if "pixel_values" not in given or vision is None or token is None:
        raise UnsupportedError(what, "its model takes no images", "leave out --images")
    arguments = tuple(
        name for name in (*TOKEN_TYPES, "image_grid_thw", "image_sizes", "image_position_ids") if name in given
    )
    patch, merge, frames = vision.patch_size, 1, 1
    for part, name in ((config, "spatial_merge_size"), (vision, "merge_size"), (vision, "spatial_merge_size")):
        merge = getattr(part, name, merge)
    for name in ("patch_temporal", "temporal_patch_size"):  # the first: of muse_glimmer, as merge_size is
        frames = getattr(vision, name, frames)
    channels = getattr(vision, "in_channels", getattr(vision, "num_channels", 3))
    fixed: tuple[int, ...] = ()
    if hasattr(vision, "image_size"):
        sides = vision.image_size if isinstance(vision.image_size, list | tuple) else [vision.image_size] * 2
        fixed = (channels, *sides)
    kinds: list[tuple[int, ...]] = [()]
    row = fixed
    if "image_grid_thw" in arguments:
        kinds = [(1, 2 * merge, 2 * merge), (1, merge, 3 * merge), (1, 2 * merge, merge)]
        row = (channels * frames * patch**2,)
    elif "image_sizes" in arguments:
        kinds = [(2 * patch * merge,) * 2, (patch * merge, 2 * patch * merge), (2 * patch * merge, patch * merge)]
        row = (channels, *kinds[0])
    elif "image_position_ids" in arguments:
        pool = vision.pooling_kernel_size
        kinds = [(2 * pool, 2 * pool), (pool, 2 * pool), (2 * pool, pool)]
        row = ((2 * pool) ** 2, channels * patch**2)
    images = _RandomImages((), arguments, row, token, seed)
    try:
        of_kind = _tokens_of(model, images, kinds)
    except UnsupportedError:
        if "image_sizes" not in arguments or not fixed:
            raise
        # Some classes have towers of images of any size, and others of one size, which are told none.
        without = tuple(name for name in arguments if name != "image_sizes")
        kinds, images = [()], replace(images, arguments=without, row=fixed)
        of_kind = _tokens_of(model, images, kinds)
    shapes, lengths = [], []
    for index, number in enumerate(numbers):
        own = tuple(kinds[(index + place) % len(kinds)] for place in range(number))
        shapes.append(own)
        lengths.append([of_kind[kind] for kind in own])
    return replace(images, shapes=tuple(shapes)), lengths


def _tokens_of(model: Any, images: _RandomImages, kinds: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """How many tokens an image of each shape takes. Raises: UnsupportedError: the tower does not take one."""
    found = {}
    for kind in kinds:
        try:
            found[kind] = _tokens(model, replace(images, shapes=((kind,),)))
        except Exception as error:  # towers raise anything
            what = f"--images with model_type {model.config.model_type!r}"
            rule = f"its tower does not take them ({reason(error)})"
            raise UnsupportedError(what, rule, "leave out --images") from error
    return found


@torch.no_grad()
def _tokens(model: Any, image: _RandomImages) -> int:
    """How many tokens the only image takes."""
    inputs = image.inputs(0, np.zeros(1))
    for name in TOKEN_TYPES:
        inputs.pop(name, None)
    found = model.get_image_features(**inputs, return_dict=True)
    features = found.pooler_output
    if features is None:
        features = found.last_hidden_state
    if not isinstance(features, Tensor):  # one of each image, as they are of unequal size
        features = torch.cat(list(features))
    return int(features.flatten(0, -2).shape[0])
