"""Divide the tensors of a model among ranks: on simulated cards, or in the planner.

For test_tensor_ranks.py.

`tensor_ranks.py ranks FOLDER` is one rank of a launch. It writes what each case took of its card,
and what it learned. `tensor_ranks.py planner FOLDER` plans the cases by the launch file there.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.planner import shared_rows
from tests.planner.shared_rows import LENGTH, flash_on_simulated_cards, sizes
from tests.wanted import read_wanted

LORA = {**shared_rows.LORA, "target_modules": ["q_proj", "v_proj"]}
"""Not all layers: of those that divide their input (o_proj, down_proj), PEFT 0.21 makes none."""

EVERYWHERE = "LoRA on all layers"
CASES = shared_rows.CASES
PLANNED = {
    **CASES,
    "saved": {"save_strategy": "steps", "save_steps": 3, **CASES["evaluation"]},
    "tied": {},
    EVERYWHERE: {},
}
"""Also what real ranks are not asked to do."""

ALWAYS = ("evaluation", "saved", "tied", EVERYWHERE)


def arguments(name: str, folder: str) -> dict[str, Any]:
    return {**shared_rows.arguments("bf16", folder), **PLANNED[name]}


def with_bytes(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainingArguments,
    )
    from transformers.distributed import DistributedConfig

    from trainer_plugins.testing import simgpu

    rank = os.environ["RANK"]
    saved = str(folder / f"model-{rank}")
    given = {k: v for k, v in sizes().items() if k not in ("model_type", "architectures")}
    torch.manual_seed(0)
    LlamaForCausalLM._from_config(LlamaConfig(**given), dtype=torch.float32).save_pretrained(saved)
    simgpu.enable(capacity_bytes=1 << 30)
    flash_on_simulated_cards()
    tokens = torch.randint(1, 4099, (24, LENGTH), generator=torch.Generator().manual_seed(0))
    ones = torch.ones(LENGTH, dtype=torch.long)
    rows = [{"input_ids": row, "attention_mask": ones, "labels": row} for row in tokens]

    def trained(name: str) -> dict[str, Any]:
        gc.collect()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_stats()["requested_bytes.all.current"]
        torch.manual_seed(0)
        args = TrainingArguments(**arguments(name, str(folder / name)))
        model = AutoModelForCausalLM.from_pretrained(
            saved,
            dtype=torch.float32,
            distributed_config=DistributedConfig(tp_size=2, tp_plan="auto"),
        )
        if name == "LoRA":
            model = get_peft_model(model, LoraConfig(**LORA))
        trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        peak = torch.accelerator.memory_stats()["requested_bytes.all.peak"]
        return {
            "card": peak - before,
            "device": str(args.device),
            "losses": [each["loss"] for each in trainer.state.log_history if "loss" in each],
        }

    wanted = read_wanted(folder)
    (folder / f"{rank}.json").write_text(json.dumps({name: trained(name) for name in wanted}))


def without_bytes(folder: Path) -> None:
    os.environ["DS_ACCELERATOR"] = "cuda"
    from dataclasses import asdict

    from trainer_plugins.planner import worker
    from trainer_plugins.planner.inputs import arguments_to_send
    from trainer_plugins.planner.request import ConfigSource, PlanRequest
    from trainer_plugins.planner.tracing.events import Trace
    from trainer_plugins.planner.tracing.trace import Tracker

    watched: Callable[[Tracker], Trace] = Tracker.trace
    traces: list[Trace] = []
    found: dict[str, Any] = {}

    def noted(tracker: Tracker) -> Trace:
        traces.append(watched(tracker))
        return traces[-1]

    Tracker.trace = noted  # type: ignore[method-assign,assignment]
    environment = dict(os.environ)
    wanted = read_wanted(folder)
    for name in {**dict.fromkeys(wanted), **dict.fromkeys(ALWAYS)}:
        os.environ.clear()
        os.environ.update(environment)
        source = ConfigSource(
            config={**sizes(), "tie_word_embeddings": name == "tied"},
            arguments=arguments_to_send(arguments(name, "runs")),
            sequence_length=LENGTH,
            dtype="float32",
            peft={"LoRA": LORA, EVERYWHERE: shared_rows.LORA}.get(name),
        )
        file = str(folder / "tensor.yaml")
        request = PlanRequest(source=source, num_gpus=0, launch_file=file)
        if name == EVERYWHERE:
            found[name] = worker.answer(request)
            continue
        plan = asdict(worker.predict(request))
        found[name] = {"plan": plan, "card": shared_rows.requested(traces[-1])}
    (folder / "planner.json").write_text(json.dumps(found))


if __name__ == "__main__":
    mode, home = sys.argv[1:]
    if mode == "ranks":
        with_bytes(Path(home))
    else:
        without_bytes(Path(home))
    sys.stdout.flush()
    os._exit(0)  # gloo now and then aborts a process at its end
