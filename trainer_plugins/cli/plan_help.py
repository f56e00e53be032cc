"""The panels of `trainer-plugins plan --help`: which option stands in which, in order."""

from typing import Any

from typer.core import TyperCommand

PANELS = {
    "The model and its Trainer": (
        "model",
        "from_hub",
        "dtype",
        "trainer",
        "num_labels",
        "seq_length",
        "target_length",
        "images_per_row",
        "image_size",
        "sound_seconds",
    ),
    "Adapters and quantised weights": (
        "lora_r",
        "lora_target",
        "peft_config",
        "load_in_4bit",
        "load_in_8bit",
        "bnb_4bit_quant_type",
        "bnb_4bit_use_double_quant",
        "bnb_4bit_compute_dtype",
        "bnb_4bit_quant_storage",
        "prepare_kbit",
        "stream_base",
        "stream_embeddings",
    ),
    "The machine": (
        "gpu",
        "vllm_utilization",
        "num_gpus",
        "accelerate_config",
        "host_memory",
        "pinned_memory",
    ),
    "Batches and evaluation": ("padding", "eval_batches", "metrics"),
    "Many predictions in one table": ("search", "search_lengths", "explain_change", "compare"),
    "Beside the real run": ("run_dir", "calibration"),
    "Output": ("as_json", "html", "timeout", "help"),
}
_PLACES = {
    name: (place, panel)
    for place, (panel, name) in enumerate(
        (panel, name) for panel, names in PANELS.items() for name in names
    )
}


class PlanCommand(TyperCommand):
    """Puts the options into panels; one that is in no panel stands first, under Options."""

    def get_params(self, ctx: Any) -> Any:
        params: list[Any] = [*super().get_params(ctx)]
        for param in params:
            _, param.rich_help_panel = _PLACES.get(param.name or "", (0, None))
        return sorted(params, key=lambda param: _PLACES.get(param.name or "", (-1, None))[0])
