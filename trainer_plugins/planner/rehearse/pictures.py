"""Build the images of a vision-language model from its config, in its processor's sizes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from trainer_plugins.planner.plan import PlanError
from trainer_plugins.planner.rehearse.rehearsal import Batch
from trainer_plugins.planner.request import ConfigSource

_USUAL_SIDE = 448  # pixels, if neither the config nor the user says


class Pictures(NamedTuple):
    """Describes the images of a row, and the inputs they add."""

    num_tokens: int  # of a row, that stand for images
    add_to: Callable[[Batch, int], None]  # adds a processor's inputs to a batch of this many rows
    said: str


def pictures_of(model: Any, source: ConfigSource) -> Pictures:
    """Return the images of a run."""
    kind = model.config.model_type
    if kind not in KINDS:
        raise PlanError(
            f"--images-per-row and --image-size do not apply to {kind}, only to {', '.join(KINDS)}"
        )
    number = 1 if source.images_per_row is None else source.images_per_row
    found = KINDS[kind](model.config, source, number)
    if found.num_tokens >= source.sequence_length:
        raise PlanError(
            f"rows of {source.sequence_length:,} tokens (--seq-length) leave no room for text"
            f" beside {found.num_tokens:,} tokens of images (--images-per-row {number})"
        )
    return found


def _describe(number: int, picture: tuple[int, int], num_tokens: int, why: str) -> str:
    if number == 0:
        return "rows have no pictures (--images-per-row)"
    size = f"{picture[0]} x {picture[1]} pixels ({why})"
    if number == 1:
        return (
            f"each row has a picture of {size}, {num_tokens:,} of its tokens; see --images-per-row"
        )
    return f"each row has {number} pictures of {size}, each {num_tokens:,} of its tokens"


def _measure_tower(config: Any, source: ConfigSource) -> tuple[int, int]:
    """Return the side of an image for the vision tower, and the number of patches along it."""
    side = config.vision_config.image_size
    if source.image_size not in (None, (side, side)):
        raise PlanError(
            f"--image-size must be {side}x{side} for this model (image_size of its vision_config):"
            " count the tiles of a larger image with --images-per-row"
        )
    return side, side // config.vision_config.patch_size


def _describe_one_size(
    num_tokens: Callable[[Any, int], int],
    why: str = "image_size of the config",
    *,
    has_types: bool = False,
    by_row: bool = False,
) -> Any:
    """Describe models that take all images in one list, or by row with a mask of pixels."""

    def pictures(config: Any, source: ConfigSource, number: int) -> Pictures:
        side, patches = _measure_tower(config, source)
        each = num_tokens(config, patches)

        def add_to(batch: Batch, rows: int) -> None:
            if number:
                shape = (rows, number) if by_row else (rows * number,)
                channels = config.vision_config.num_channels
                batch["pixel_values"] = torch.zeros(*shape, channels, side, side)
                if by_row:
                    mask = torch.ones(*shape, side, side, dtype=torch.long)
                    batch["pixel_attention_mask"] = mask
            if has_types:
                types = torch.zeros(rows, source.sequence_length, dtype=torch.long)
                batch["token_type_ids"] = types

        return Pictures(number * each, add_to, _describe(number, (side, side), each, why))

    return pictures


_pieces = _describe_one_size(
    lambda config, patches: patches**2 // config.scale_factor**2,
    "the piece of a larger one: image_size of the config",
    by_row=True,
)


def _describe_any_size(config: Any, source: ConfigSource, number: int) -> Pictures:
    """Describe models that take patches in one list, with the height and width of each image."""
    vision = config.vision_config
    unit = vision.patch_size * vision.spatial_merge_size
    asked = source.image_size or (_USUAL_SIDE, _USUAL_SIDE)
    height, width = (max(1, round(side / unit)) * unit for side in asked)
    grid = [1, height // vision.patch_size, width // vision.patch_size]
    patches = grid[1] * grid[2]
    each = patches // vision.spatial_merge_size**2
    length = source.sequence_length

    def add_to(batch: Batch, rows: int) -> None:
        if not number:
            return
        numbers = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        batch["pixel_values"] = torch.zeros(rows * number * patches, numbers)
        # The model slices by these, so it needs their values, not only their shapes.
        batch["image_grid_thw"] = torch.tensor([grid] * (rows * number))
        between = (length - number * each) // (number + 1)  # text precedes each image
        row = ([0] * between + [1] * each) * number
        types = torch.tensor([row + [0] * (length - len(row))] * rows)
        batch["mm_token_type_ids"] = types
        batch["input_ids"] = types * config.image_token_id
        batch["attention_mask"] = torch.tensor([[1] * length] * rows)

    why = "--image-size, in whole patches" if source.image_size else "a guess; see --image-size"
    said = _describe(number, (height, width), each, why)
    return Pictures(number * each, add_to, said)


def _count_llava_tokens(config: Any, patches: int) -> int:
    has_class = config.vision_feature_select_strategy == "full"
    return patches**2 + int(has_class and config.vision_config.model_type.startswith("clip"))


KINDS: dict[str, Callable[[Any, ConfigSource, int], Pictures]] = {
    "llava": _describe_one_size(_count_llava_tokens),
    "paligemma": _describe_one_size(lambda _, patches: patches**2, has_types=True),
    "gemma3": _describe_one_size(lambda config, _: int(config.mm_tokens_per_image), has_types=True),
    "idefics3": _pieces,
    "smolvlm": _pieces,
    "qwen2_vl": _describe_any_size,
    "qwen2_5_vl": _describe_any_size,
    "qwen3_vl": _describe_any_size,
}  # by model_type
