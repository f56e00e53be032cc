"""A batch for any class of transformers: four rows of unequal length, with a real attention mask, and labels."""

import inspect
from typing import Any

import torch
from torch import nn

LENGTHS = (7, 16, 12, 5)
WIDTH = max(LENGTHS)


def batch_for(model: nn.Module, *, labels_at_padding: bool) -> dict[str, Any]:
    """What a collator would give this model: its inputs by the names of its `forward`, and labels by its loss."""
    dice = torch.Generator().manual_seed(2)
    names = inspect.signature(model.forward).parameters
    config: Any = model.config
    batch: dict[str, Any] = {}
    kind = type(model).__name__
    main: str = model.main_input_name  # type: ignore[assignment]
    is_text = "input_ids" in names
    if is_text:
        mask = (torch.arange(WIDTH)[None] < torch.tensor(LENGTHS)[:, None]).long()
        num_ids = getattr(config.get_text_config(), "vocab_size", 80) or 80
        ids = torch.randint(10, min(80, num_ids), mask.shape, generator=dice)
        if isinstance(end := getattr(config.get_text_config(), "eos_token_id", None), int):
            ids[torch.arange(4), torch.tensor(LENGTHS) - 1] = end
        pad = getattr(config.get_text_config(), "pad_token_id", None)
        batch = {"input_ids": torch.where(mask > 0, ids, 0 if pad is None else pad)}
        if "attention_mask" in names or any(p.kind is p.VAR_KEYWORD for p in names.values()):
            batch["attention_mask"] = mask
        if (
            main == "pixel_values"
            and names.get(main)
            and names[main].default is inspect.Parameter.empty
        ):
            batch[main] = _signal(main, config, dice)
        if "bbox" in names:
            batch["bbox"] = torch.randint(0, 30, (4, WIDTH, 4), generator=dice).sort(-1).values
    else:
        mask = torch.ones(4, WIDTH).long()
        ids = torch.randint(10, 80, mask.shape, generator=dice)
        batch = {main: _signal(main, config, dice)}
        if ("CTC" in kind or "XVector" in kind) and batch[main].dim() == 2:
            batch[main] = batch[main].repeat(1, 6)  # they take more frames than labels
    ignored = torch.where(mask > 0, ids, ids if labels_at_padding else -100)
    num = getattr(config, "num_labels", 3)
    if "MultipleChoice" in kind:  # three answers to each, which begin as differently as rows
        for name, value in batch.items():
            batch[name] = torch.stack([value, value.roll(1, 0), value.roll(2, 0)], 1)
        batch["labels"] = ids[:, 0] % 3
    elif "NextSentencePrediction" in kind:
        batch["labels"] = ids[:, 0] % 2
    elif "XVector" in kind:
        batch["labels"] = ids[:, 0] % num
    elif "AudioFrame" in kind:
        with torch.no_grad():
            shape = model(**batch).logits.shape
        classes = torch.randint(0, shape[-1], shape[:-1], generator=dice)
        batch["labels"] = nn.functional.one_hot(classes, shape[-1])
    elif "start_positions" in names:  # at padding is beyond the end, where no loss counts it
        starts, width = torch.tensor((1, 3, 12, 2)), torch.tensor(WIDTH)
        starts = torch.where(torch.tensor([labels_at_padding, True, True, True]), starts, width)
        batch |= {"start_positions": starts, "end_positions": (starts + 2).minimum(width)}
    elif "TokenClassification" in kind:
        batch["labels"] = torch.where(ignored >= 0, ignored % num, ignored)
    elif "Classification" in kind:
        batch["labels"] = ids[:, 0] % num
    elif getattr(config, "is_encoder_decoder", False) or not is_text:
        lengths = torch.tensor((4, 6, 2, 5))
        some = torch.randint(10, 80, (4, 6), generator=dice)
        is_there = torch.arange(6)[None] < lengths[:, None]
        if "CTC" in kind:
            some = some % (config.vocab_size - 1) + 1
        batch["labels"] = some if labels_at_padding else some.masked_fill(~is_there, -100)
    elif "MaskedLM" in kind:
        batch["labels"] = ignored.masked_fill(ids % 3 == 1, -100)
    else:
        batch["labels"] = ignored
    return batch


def _signal(name: str, config: Any, dice: torch.Generator) -> torch.Tensor:
    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=dice).double()

    def inner(key: str, default: Any) -> Any:
        for place in (
            config,
            *(
                getattr(config, n, None)
                for n in (
                    "vision_config",
                    "audio_config",
                    "encoder_config",
                    "backbone_config",
                    "encoder",
                )
            ),
        ):
            if (value := getattr(place, key, None)) is not None:
                return value
        return default

    if name in ("pixel_values", "pixel_values_videos", "flattened_patches"):
        size = inner("image_size", 32)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = inner("num_channels", 3)
        frames = inner("num_frames", None) or inner("frames_per_clip", None)
        if frames is not None:
            return rand(4, frames, channels, height, width)
        return rand(4, channels, height, width)
    if name == "input_values" and hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        return rand(4, config.max_length, config.num_mel_bins)
    if name == "input_values":
        return rand(4, 2000) - 0.5
    if name == "input_features":
        return rand(4, inner("num_mel_bins", 16), 2 * inner("max_source_positions", 64))
    return rand(4, WIDTH)
