"""Train with LoRA under ZeRO-3 with small limits, and note which weights are whole after each call.

For test_zero_loops.py.

`zero_loops.py ranks FOLDER` is one rank of a launch, `zero_loops.py planner FOLDER` the planner's
subprocess. Both write, for each case, how many elements are gathered each time a layer's weights
have been fetched or released.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.planner.zero_stream import AUTO

NUM_STEPS = 3
LENGTH = 32
LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj"]}
ZERO = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "reduce_bucket_size": 40_000,
    "stage3_prefetch_bucket_size": 9000,
    "stage3_max_live_parameters": 60_000,
    "stage3_max_reuse_distance": 0,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "vocab_size": 499,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
    "architectures": ["LlamaForCausalLM"],
}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
MODELS = {"llama": LLAMA, "mixtral": MIXTRAL}
CHECKPOINTING = {"gradient_checkpointing": True}
PLANNED: dict[str, dict[str, Any]] = {
    "llama, sft": {"trainer": "sft"},
    "llama, dpo": {"trainer": "dpo"},
    "llama, dpo, checkpointing": {"trainer": "dpo", "flags": CHECKPOINTING},
    "mixtral, sft": {"trainer": "sft", "flags": CHECKPOINTING},
    "mixtral, dpo": {"trainer": "dpo", "flags": CHECKPOINTING},
}
BEFORE = {**CHECKPOINTING, "precompute_ref_log_probs": True}
CASES = {**PLANNED, "llama, dpo, before": {"trainer": "dpo", "flags": BEFORE}}
"""With what a plan refuses: a reference that is computed before the training."""


def arguments(case: dict[str, Any], folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": 1,
        "bf16": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "optim": "adamw_torch",
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
        "deepspeed": {**AUTO, "zero_optimization": ZERO},
        **case.get("flags", {}),
    }


class Gathered:
    """Counts the elements of whole weights after each call of the engine that changes them."""

    def __init__(self) -> None:
        from deepspeed import DeepSpeedEngine
        from deepspeed.runtime.zero.partitioned_param_coordinator import (
            PartitionedParameterCoordinator as Coordinator,
        )
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Optimizer

        self.engine: Any = None
        self.calls: list[tuple[str, int]] = []
        make = DeepSpeedEngine.__init__

        def made(engine: Any, *args: Any, **kwargs: Any) -> None:
            self.engine = None
            make(engine, *args, **kwargs)
            self.engine, self.calls = engine, []

        DeepSpeedEngine.__init__ = made
        self._note(Coordinator, "fetch_sub_module")
        self._note(Coordinator, "release_sub_module")
        self._note(Optimizer, "backward_prologue")
        self._note(Optimizer, "backward_epilogue", before=True)
        self._note(Optimizer, "step")

    def _note(self, owner: Any, name: str, *, before: bool = False) -> None:
        original = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            if before:
                self._count(f"before {name}")
            result = original(*args, **kwargs)
            self._count(name)
            return result

        setattr(owner, name, noted)

    def _count(self, name: str) -> None:
        if self.engine is not None:
            whole = sum(
                weight.ds_numel
                for weight in self.engine.module.parameters()
                if weight.ds_status.name != "NOT_AVAILABLE"
            )
            self.calls.append((name, whole))

    def take(self) -> dict[str, Any]:
        engine, self.engine = self.engine, None
        return {
            "calls": self.calls,
            "world_size": engine.world_size,
            "num_steps": engine.global_steps,
            "stage": engine.zero_optimization_stage(),
            "numel": sum(weight.ds_numel for weight in engine.module.parameters()),
        }


def with_bytes(folder: Path) -> None:
    import deepspeed
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    gathered, found = Gathered(), {}
    for name in CASES:
        AcceleratorState._reset_state(reset_partial_state=True)
        deepspeed.init_distributed("gloo")
        trainer = trainer_of(name, folder)
        trainer.train()
        found[name] = gathered.take()
        unset_hf_deepspeed_config()
        trainer.model_wrapped.destroy()
        del trainer
        gc.collect()
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


def trainer_of(name: str, folder: Path) -> Any:
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoConfig, AutoModelForCausalLM

    loop = CASES[name]["trainer"].upper()
    # before the model, which is divided as it is made
    args = getattr(trl, f"{loop}Config")(**arguments(CASES[name], str(folder)), use_cpu=True)
    config = AutoConfig.for_model(**MODELS[name.split(",")[0]])
    return getattr(trl, f"{loop}Trainer")(
        model=AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16),
        args=args,
        # ranks share what is computed before by files
        train_dataset=Dataset.from_json(str(folder / f"{loop}.json"), cache_dir=str(folder)),
        processing_class=tokenizer(),
        peft_config=LoraConfig(**{key: LORA[key] for key in LORA if key != "peft_type"}),
    )


def write_rows(folder: Path) -> None:
    """Write the rows that the planner makes of a length: half is the prompt, and the end is added."""
    half = " w" * (LENGTH // 2)
    answer = " w" * (LENGTH // 2 - 1)
    rows = {
        "SFT": {"input_ids": [3] * LENGTH},
        "DPO": {"prompt": half, "chosen": answer, "rejected": answer},
    }
    for loop, row in rows.items():
        (folder / f"{loop}.json").write_text("\n".join([json.dumps(row)] * 12))


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, "w": 3}
    fast = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def flags(given: dict[str, Any]) -> tuple[str, ...]:
    written = {
        key: json.dumps(value) if isinstance(value, dict) else str(value)
        for key, value in given.items()
    }
    return tuple(word for key in written for word in (f"--{key}", written[key]))


def without_bytes(folder: Path) -> None:
    os.environ["DS_ACCELERATOR"] = "cuda"
    from trainer_plugins.planner import worker
    from trainer_plugins.planner.request import ConfigSource, PlanRequest

    gathered, found = Gathered(), {}
    environment = dict(os.environ)
    for name, case in PLANNED.items():
        os.environ.clear()
        os.environ.update(environment)
        source = ConfigSource(
            config=MODELS[name.split(",")[0]],
            arguments=flags(arguments(case, "runs")),
            sequence_length=LENGTH,
            dtype="bfloat16",
            peft=LORA,
            trainer=case["trainer"],
        )
        worker.predict(PlanRequest(source=source, num_gpus=2))
        found[name] = gathered.take()
    (folder / "planner.json").write_text(json.dumps(found))


if __name__ == "__main__":
    {"ranks": with_bytes, "planner": without_bytes}[sys.argv[1]](Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # gloo now and then aborts a process at its end
