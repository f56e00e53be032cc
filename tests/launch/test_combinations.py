"""Every shipped file under every TrainingArguments that people combine, through the real accelerate and transformers.

The way of a real launch without its processes: `accelerate launch` reads the YAML and makes the
environment, in it the Trainer's side builds the plugin, fills in what is "auto", and DeepSpeed
reads the result.
"""

import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed")

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from deepspeed.runtime.config import DeepSpeedConfig
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, unset_hf_deepspeed_config

from trainer_plugins.launch import configs
from trainer_plugins.launch.lint.document import read_document

COMBINATIONS = list(
    itertools.product(("bf16", "fp16", "fp32"), (1, 8), (0.3, 1.0), (True, False), (True, False))
)
MODEL = SimpleNamespace(config=SimpleNamespace(hidden_size=4096))


@pytest.fixture(scope="module")
def arguments(tmp_path_factory) -> list[tuple[str, TrainingArguments]]:
    folder = str(tmp_path_factory.mktemp("run"))
    made = []
    for dtype, accumulation, clipping, only_model, evaluates in COMBINATIONS:
        args = TrainingArguments(
            folder,
            use_cpu=True,
            report_to=[],
            bf16=dtype == "bf16",
            fp16=dtype == "fp16",
            gradient_accumulation_steps=accumulation,
            max_grad_norm=clipping,
            save_only_model=only_model,
            eval_strategy="steps" if evaluates else "no",
            eval_steps=10,
        )
        made.append((dtype, args))
    return made


def environment_of(name: str, monkeypatch: pytest.MonkeyPatch, elsewhere: Path) -> dict[str, str]:
    """What `accelerate launch` gives to the ranks."""
    monkeypatch.chdir(elsewhere)
    words = ["--config_file", str(configs.path(name)), "--main_process_port", "0", "train.py"]
    monkeypatch.setattr(sys, "argv", ["accelerate-launch", *words])
    args, defaults, from_config = _validate_launch_command(
        launch_command_parser().parse_args(words)
    )
    if not args.use_deepspeed:
        return dict(prepare_multi_gpu_env(args))
    fields = [*defaults.deepspeed_config, *(["mixed_precision"] if from_config else [])]
    args.deepspeed_fields_from_accelerate_config = ",".join(fields)
    return dict(prepare_deepspeed_cmd_env(args)[1])


@pytest.mark.parametrize(
    "name", [name for name in configs.names() if read_document(configs.path(name)).deepspeed]
)
def test_deepspeed_files_agree_with_every_training(name, arguments, monkeypatch, tmp_path) -> None:
    for key, value in environment_of(name, monkeypatch, tmp_path).items():
        if key.startswith("ACCELERATE_"):
            monkeypatch.setenv(key, value)
    assert len(arguments) == 48
    for dtype, args in arguments:
        plugin = DeepSpeedPlugin()
        plugin.set_mixed_precision({"fp32": "no"}.get(dtype, dtype))
        filled = HfTrainerDeepSpeedConfig(plugin.hf_ds_config.config)
        filled.trainer_config_process(args)
        filled.trainer_config_finalize(args, MODEL, num_training_steps=100)
        assert not filled.mismatches
        plugin.hf_ds_config, plugin.deepspeed_config = filled, filled.config
        plugin.deepspeed_config_process(
            must_match=False
        )  # raises for an "auto" that nobody filled in

        read = DeepSpeedConfig(filled.config)

        assert (read.bfloat16_config.enabled, read.float16_config.enabled) == (
            dtype == "bf16",
            dtype == "fp16",
        )
        assert read.gradient_accumulation_steps == args.gradient_accumulation_steps
        assert read.gradient_clipping == args.max_grad_norm
        assert read.train_micro_batch_size_per_gpu == args.per_device_train_batch_size
        zero, asked = (
            read.zero_config,
            (read_document(configs.path(name)).deepspeed or {})["zero_optimization"],
        )
        assert zero.stage == asked["stage"]
        assert zero.reduce_bucket_size == 50_000_000
        for what in ("offload_optimizer", "offload_param"):
            block = getattr(zero, what)
            assert (block.device if block else "none") == asked.get(what, {}).get("device", "none")
        if zero.stage == 3:
            assert zero.gather_16bit_weights_on_model_save
            assert plugin.zero3_init_flag
    unset_hf_deepspeed_config()


@pytest.mark.parametrize("name", [name for name in configs.names() if name.startswith("fsdp2")])
def test_fsdp_files_make_the_plugin_they_name(name, arguments, monkeypatch, tmp_path) -> None:
    for key, value in environment_of(name, monkeypatch, tmp_path).items():
        if key.startswith(("ACCELERATE_", "FSDP_")):
            monkeypatch.setenv(key, value)
    for dtype, args in arguments:
        plugin = FullyShardedDataParallelPlugin()
        plugin.set_mixed_precision(dtype)

        assert plugin.fsdp_version == 2
        assert bool(
            plugin.cpu_offload and type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
        ) is ("offload" in name)
        assert plugin.reshard_after_forward is True
        # The Trainer refuses save_only_model with the other.
        assert not args.save_only_model or "SHARDED_STATE_DICT" not in str(plugin.state_dict_type)


@pytest.mark.parametrize("name", ["single_device", "ddp", "ddp_multinode"])
def test_the_plain_files_leave_the_precision_to_the_training(
    name, arguments, monkeypatch, tmp_path
) -> None:
    if name == "single_device":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    else:
        monkeypatch.setenv(
            "ACCELERATE_MIXED_PRECISION",
            environment_of(name, monkeypatch, tmp_path)["ACCELERATE_MIXED_PRECISION"],
        )
    for dtype, args in arguments:
        made = TrainingArguments(
            str(tmp_path), use_cpu=True, report_to=[], bf16=args.bf16, fp16=args.fp16
        )
        # transformers 4 hands it on in the environment, 5 keeps it to itself
        precision = (
            getattr(made, "mixed_precision", None) or os.environ["ACCELERATE_MIXED_PRECISION"]
        )
        assert precision == {"fp32": "no"}.get(dtype, dtype)
        if not hasattr(made, "mixed_precision"):
            monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
