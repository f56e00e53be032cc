"""Measure a streamed base on the simulated card: the same run, its saving, and its time.

Times are ratios of processor time, alternating in one process. There is no bus here, and the card
is the processor: they show the cost of hooks and copies, not that on a GPU.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any, NamedTuple

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    PreTrainedConfig,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.card import card_here
from trainer_plugins import MemoryPlan, StreamBase
from trainer_plugins.drycuda.predict import predict_all
from trainer_plugins.planner.rehearse.gather import request_of
from trainer_plugins.streaming.stream import Stream, stream_of
from trainer_plugins.units import MIB

STEPS = 5
RESIDENT = 2
ROUNDS = 5
LENGTH = 24
_TEXT = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LAYERS = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
_LLAMA = {**_TEXT, **_LAYERS, **_HEADS}
_BERT = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}
_FFN = {"encoder_ffn_dim": 192, "decoder_ffn_dim": 192, "encoder_attention_heads": 4}
_WHISPER = {
    "decoder_attention_heads": 4,
    "max_target_positions": 64,
    "num_mel_bins": 16,
    "max_source_positions": 24,
    "decoder_start_token_id": 1,
}
_VISION = {"image_size": 16, "patch_size": 8, "num_attention_heads": 4}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", _LLAMA),
    "Qwen3": ("Qwen3ForCausalLM", {**_LLAMA, "head_dim": 16}),
    "Mistral": ("MistralForCausalLM", {**_LLAMA, "sliding_window": 16}),
    "Gemma": ("Gemma3ForCausalLM", {**_LLAMA, "head_dim": 16, "sliding_window": 16}),
    "Phi": ("PhiForCausalLM", _LLAMA),
    "GPT-2": ("GPT2LMHeadModel", {**_TEXT, "n_embd": 64, "n_layer": 4, "n_head": 4}),
    "OPT": ("OPTForCausalLM", {**_BERT, "ffn_dim": 192, "word_embed_proj_dim": 64}),
    "T5": (
        "T5ForConditionalGeneration",
        {
            **_TEXT,
            "d_model": 64,
            "d_ff": 192,
            "d_kv": 16,
            "num_layers": 2,
            "num_heads": 4,
        },
    ),
    "BERT": ("BertForMaskedLM", _BERT),
    "Whisper": (
        "WhisperForConditionalGeneration",
        {**_TEXT, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, **_FFN, **_WHISPER},
    ),
    "LLaVA": (
        "LlavaForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **_LLAMA},
            "vision_config": {"model_type": "clip_vision_model", **_LAYERS, **_VISION},
            "image_token_index": 95,
        },
    ),
    "Mixtral": ("MixtralForCausalLM", {**_LLAMA, "num_local_experts": 4}),
    "Mixtral, eager": ("MixtralForCausalLM", {**_LLAMA, "num_local_experts": 4}),
}
CHECKPOINTING = ("none", "reentrant", "not reentrant")


def model_of(name: str, dropout: float, **changed: Any) -> nn.Module:
    """Build a model with LoRA on all its linear layers: the same weights every time."""
    class_name, sizes = ARCHITECTURES[name]
    model_class: Any = getattr(transformers, class_name)
    config = model_class.config_class(**{**sizes, **changed})
    _set_dropout(config, dropout)
    if name == "T5":
        config.decoder_start_token_id = 0
    if "Mixtral" in name:
        # The data decide how many tokens an eager expert gets: a plan takes the worst, all of them.
        config._experts_implementation = "eager" if name == "Mixtral, eager" else "batched_mm"
    torch.manual_seed(0)
    base = model_class._from_config(config, attn_implementation="sdpa")
    for part in base.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = dropout
    if name == "Whisper":  # audio skips the embeddings, on whose output PEFT sets requires_grad
        base.model.encoder.conv1.register_forward_hook(lambda *seen: seen[-1].requires_grad_())
    # Mixtral's experts are not linear layers, and PEFT's adapters for them have no dropout.
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if "Mixtral" in name else "all-linear"
    lora = LoraConfig(r=4, target_modules=targets, lora_dropout=dropout)
    model: Any = get_peft_model(base, lora)
    for weight_name, weight in model.named_parameters():
        if "lora_B" in weight_name:  # zeros, which would keep the gradients of A at zero
            nn.init.normal_(weight.data, std=0.02)
    return model  # type: ignore[no-any-return]


def rows_for(name: str, num: int = 32) -> list[dict[str, torch.Tensor]]:
    """Make padded rows of unequal length, with a real mask, and a picture or sound if needed."""
    dice = torch.Generator().manual_seed(2)
    rows = []
    for number in range(num):
        ids = torch.randint(3, 90, (LENGTH,), generator=dice)
        mask = torch.arange(LENGTH) < LENGTH - number % 7
        ids = ids.where(mask, 0)
        labels = ids.where(mask, -100)
        if name == "LLaVA":
            ids[:4] = 95
            picture = torch.rand(3, 16, 16, generator=dice)
            rows.append({"input_ids": ids, "pixel_values": picture, "labels": labels})
        elif name == "Whisper":
            sound = torch.rand(16, 48, generator=dice)
            rows.append({"input_features": sound, "labels": labels})
        else:
            rows.append({"input_ids": ids, "attention_mask": mask.long(), "labels": labels})
    return rows


class Trained(NamedTuple):
    """Holds the learned weights and the cost of one run."""

    learned: list[torch.Tensor]
    peak_bytes: int
    stream: Stream | None


def trainer_of(
    name: str, folder: str, streams: bool, checkpointing: str, accumulation: int, dropout: float
) -> Trainer:
    """Make the Trainer of one run, with the base resident or streamed."""
    trainer = Trainer(
        model_of(name, dropout),
        settings(
            folder, gradient_accumulation_steps=accumulation, **checkpointing_of(checkpointing)
        ),
        train_dataset=rows_for(name),
        callbacks=[StreamBase(RESIDENT, on_refusal="error")] if streams else [],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def trained(make: Callable[[], Trainer]) -> Trained:
    """Train five steps of AdamW."""
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    before_bytes = torch.accelerator.memory_allocated()
    trainer = make()
    trainer.train()
    peak_bytes = torch.accelerator.max_memory_allocated() - before_bytes
    model: Any = trainer.model
    learned = [each.detach().cpu() for each in model.parameters() if each.requires_grad]
    return Trained(learned, peak_bytes, stream_of(model))


def foretold(makers: Sequence[Callable[[], Trainer]]) -> list[int]:
    """Predict the peaks of some runs on the card, in bytes, before any of them has trained."""
    requests = [request_of(make(), None, "", 1) for make in makers]
    plans = predict_all(requests, timeout_seconds=3600)
    peaks = []
    for plan in plans:
        if not isinstance(plan, MemoryPlan):
            raise plan
        peaks.append(plan.allocated_peak_bytes)
    return peaks


def settings(folder: str, **more: Any) -> TrainingArguments:
    """Return quiet TrainingArguments."""
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "seed": 3}
    lean = {"per_device_train_batch_size": 2, "dataloader_pin_memory": False}
    return TrainingArguments(
        folder, **{**quiet, **lean, "max_steps": STEPS, "learning_rate": 1e-3, **more}
    )


def checkpointing_of(kind: str) -> dict[str, Any]:
    """Return the TrainingArguments for a kind of checkpointing."""
    if kind == "none":
        return {}
    return {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": kind == "reentrant"},
    }


def same_run(name: str, folder: str) -> str:
    """Return the line of one architecture: all its combinations, and the worst of them."""
    combinations = list(product(CHECKPOINTING, (1, 3), (0.0, 0.1)))
    makers = [
        partial(trainer_of, name, folder, streams, *combination)
        for combination in combinations
        for streams in (False, True)
    ]
    predicted = foretold(makers)
    num_equal = num_as_foretold = 0
    worst, layers, off = (0.0, 0, 0), (0, 0.0), 0.0
    for number, (_, accumulation, _) in enumerate(combinations):
        resident, streamed = (trained(make) for make in makers[2 * number : 2 * number + 2])
        stream = streamed.stream
        assert stream is not None
        num_equal += len(resident.learned) == len(streamed.learned) and all(
            torch.equal(*pair) for pair in zip(resident.learned, streamed.learned, strict=True)
        )
        formula = 2 * (stream.num_layers - RESIDENT) * STEPS * accumulation + RESIDENT
        num_as_foretold += stream.num_fetched == formula
        peaks = resident.peak_bytes, streamed.peak_bytes
        worst = max(worst, (peaks[1] / peaks[0], *peaks))
        for peak, said in zip(peaks, predicted[2 * number : 2 * number + 2], strict=True):
            off = max(off, abs(said / peak - 1))
        layers = stream.num_layers, stream.num_bytes / MIB
        del resident, streamed, stream
    num = len(combinations)
    return (
        f"| {name} | {layers[0]} | {layers[1]:.2f} | {num_equal} of {num} | {worst[1] / MIB:.2f} |"
        f" {worst[2] / MIB:.2f} | {worst[0]:.2f} | {off:.2%} | {num_as_foretold} of {num} |"
    )


class StepClock(TrainerCallback):
    """Records the processor time of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        self._begun = process_time()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.seconds.append(process_time() - self._begun)


LARGE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 12}
"""A base of 33 MiB."""

WAYS = {
    "resident": (False, "none"),
    "streamed": (True, "none"),
    "resident, checkpointing": (False, "not reentrant"),
    "streamed, checkpointing": (True, "not reentrant"),
}


def step_of(streams: bool, checkpointing: str, folder: str, **more: Any) -> tuple[float, int]:
    """Return the seconds of a step of the large model, and the peak on the card."""
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    clock = StepClock()
    trainer = Trainer(
        model_of("Llama", 0.0, **LARGE),
        settings(folder, **checkpointing_of(checkpointing), **more),
        train_dataset=rows_for("Llama"),
        callbacks=[clock, *([StreamBase(RESIDENT, on_refusal="error")] if streams else [])],
    )
    trainer.train()
    return median(clock.seconds[1:]), torch.accelerator.max_memory_allocated()


def steps(folder: str) -> Iterator[str]:
    """Yield the time of a step in each way, in turns, relative to the resident one."""
    rounds = [{way: step_of(*how, folder) for way, how in WAYS.items()} for _ in range(ROUNDS)]
    for way in WAYS:
        ratio = median(each[way][0] / each["resident"][0] for each in rounds)
        yield f"| {way} | {ratio:.2f} | {rounds[0][way][1] / MIB:.1f} |"
    zero = deepspeed_step(folder)
    yield f"| DeepSpeed ZeRO-3, offload_param, on the CPU | {zero:.2f} | (the CPU has no card) |"


def deepspeed_step(folder: str) -> float:
    """Return the time of a ZeRO-3 step relative to a plain one, both on the CPU, in turns."""
    plain = {k: v for k, v in os.environ.items() if k != "ACCELERATE_TORCH_DEVICE"}
    environment = {
        **plain,
        "DS_ACCELERATOR": "cpu",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29617",
    }
    ratios = []
    for _ in range(2):
        seconds = {}
        for way in ("plain", "zero3"):
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.streaming_deepspeed", way, folder],
                check=False,
                capture_output=True,
                text=True,
                env=environment if way == "zero3" else plain,
            )
            if done.returncode:
                raise RuntimeError(done.stderr[-2000:])
            with open(f"{folder}/{way}.json") as file:
                seconds[way] = json.load(file)["seconds"]
        ratios.append(seconds["zero3"] / seconds["plain"])
    return float(median(ratios))


def _set_dropout(config: PreTrainedConfig, dropout: float) -> None:
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _set_dropout(value, dropout)
        elif isinstance(value, float) and ("drop" in name and "layerdrop" not in name):
            setattr(config, name, dropout)


def main() -> None:
    """Print three tables: the architectures, the time of a step, and the injected errors."""
    from benchmarks import streaming_ooms  # it imports pytest, which DeepSpeed's run does not need

    card_here()
    with TemporaryDirectory() as folder:
        print(
            "| architecture | layers | their MiB | bit-equal | peak resident, MiB |"
            " streamed | ratio | all 24 peaks predicted within | fetched as by formula |"
        )
        for name in ARCHITECTURES:
            print(same_run(name, folder), flush=True)
        print("| a step | time : resident | peak on the card, MiB |")
        for line in steps(folder):
            print(line, flush=True)
        print("| an error at each | gradients bit-equal |")
        for line in streaming_ooms.lines(folder):
            print(line, flush=True)


if __name__ == "__main__":
    main()
