"""Divide rows among ranks: on simulated cards, or in the planner.

For test_shared_rows.py.

`shared_rows.py ranks FOLDER LAUNCH` is one rank of a launch, or a card that trains alone. It writes
what each case of the launch took of its card, and what it learned. `shared_rows.py planner FOLDER`
plans the cases of all launches by their files in the folder.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.planner.zero_resumed import CONFIG, simulated_cards
from tests.wanted import read_wanted

LENGTH = 512
"""Long enough that what a layer keeps of a sequence is most of the peak."""

LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "target_modules": "all-linear"}
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "checkpointing": {"gradient_checkpointing": True, "per_device_train_batch_size": 4},
    "accumulation": {"gradient_accumulation_steps": 2},
    "LoRA": {},
    "evaluation": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 4,
    },
}
IN_PARTS = ("bf16", "checkpointing", "accumulation", "LoRA", "evaluation")
LAUNCHES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "context": ("fsdp2", {"cp_size": 2}, IN_PARTS),
    "context, two by two": ("fsdp2", {"cp_size": 2, "dp_shard_size": 2}, ("bf16",)),
    "context, in turn": (
        "fsdp2",
        {"cp_size": 4, "cp_comm_strategy": "alltoall"},
        ("checkpointing",),
    ),
    "sequence": ("zero3", {"sp_size": 2, "sp_backend": "deepspeed"}, IN_PARTS),
    "sequence, ZeRO-2": ("zero2", {"sp_size": 2, "sp_backend": "deepspeed"}, ("bf16",)),
}
"""For each launch the file that it is like, the groups of its cards, and its cases."""

ALONE = "alone"
aten = torch.ops.aten
KERNELS = torch.library.Library("aten", "IMPL")
"""Holds kernels, which torch takes back when it goes."""


def all_cases() -> list[tuple[str, str]]:
    """Return each case, after the name of its launch."""
    return [(launch, name) for launch, (_, _, names) in LAUNCHES.items() for name in names]


def wanted_cases(folder: Path) -> list[tuple[str, str]]:
    """Return those of them that the selected tests ask for."""
    return [(launch, name) for launch, name in read_wanted(folder)]


def arguments(name: str, folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": 3,
        "per_device_train_batch_size": 1,
        "bf16": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "optim": "adamw_torch",
        "dataloader_pin_memory": False,
        **CASES[name],
    }


def sizes() -> dict[str, Any]:
    return {**CONFIG, "max_position_embeddings": LENGTH}


def flash_on_simulated_cards() -> None:
    """Give simulated cards the flash kernel of CUDA, of which torch makes a ring.

    They have the CPU's kernel, by another name. What it needs while it runs is not on the card.
    """

    def of_all_heads(query: torch.Tensor, *pair: torch.Tensor) -> list[torch.Tensor]:
        groups = query.shape[1] // pair[0].shape[1]
        return [query.cpu(), *(each.cpu().repeat_interleave(groups, 1) for each in pair)]

    def on_card(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like).copy_(values)

    def forward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout: float = 0.0,
        is_causal: bool = False,
        return_mask: bool = False,
        scale: float | None = None,
    ) -> tuple[object, ...]:
        heads = of_all_heads(query, key, value)
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            *heads, dropout, is_causal, scale=scale
        )
        made = on_card(query, out), sums.to(query.device)
        seed = torch.empty(2, dtype=torch.uint64, device=query.device)
        return *made, None, None, query.shape[2], key.shape[2], seed, seed[0], query.new_empty(0)

    def backward(
        gradient: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        sums: torch.Tensor,
        *more: Any,
        scale: float | None = None,
    ) -> tuple[torch.Tensor, ...]:
        dropout, is_causal = more[4:6]
        heads, held = of_all_heads(query, key, value), (out.cpu(), sums.cpu())
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient.cpu(), *heads, *held, dropout, is_causal, scale=scale
        )
        groups = query.shape[1] // key.shape[1]
        pair = (each.unflatten(1, (-1, groups)).sum(2) for each in found[1:])
        return on_card(query, found[0]), *map(on_card, (key, value), pair)

    KERNELS.impl("_scaled_dot_product_flash_attention", forward, "PrivateUse1")
    KERNELS.impl("_scaled_dot_product_flash_attention_backward", backward, "PrivateUse1")
    torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Take flash, as on CUDA: transformers/attention.cpp."""
    found: torch.Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale or query.shape[-1] ** -0.5
    )[0]
    return found


def with_bytes(folder: Path, launch: str) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from trainer_plugins.testing import simgpu

    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        simulated_cards()
    simgpu.enable(capacity_bytes=1 << 30)
    flash_on_simulated_cards()
    tokens = torch.randint(1, 4099, (24, LENGTH), generator=torch.Generator().manual_seed(0))
    ones = torch.ones(LENGTH, dtype=torch.long)
    rows = [{"input_ids": row, "attention_mask": ones, "labels": row} for row in tokens]
    if launch.startswith("sequence"):  # else DeepSpeed refuses them
        rows = [{**row, "position_ids": torch.arange(LENGTH)} for row in rows]
    given = {k: v for k, v in sizes().items() if k not in ("model_type", "architectures")}

    def trained(name: str) -> dict[str, Any]:
        gc.collect()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_stats()["requested_bytes.all.current"]
        torch.manual_seed(0)
        args = TrainingArguments(**arguments(name, str(folder / name)))
        model = LlamaForCausalLM._from_config(LlamaConfig(**given), dtype=torch.float32)
        if name == "LoRA":
            model = get_peft_model(model, LoraConfig(**LORA))
        trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        peak = torch.accelerator.memory_stats()["requested_bytes.all.peak"]
        told = {
            "card": peak - before,
            "device": str(args.device),
            "wrapped": type(trainer.model_wrapped).__name__,
            "losses": [each["loss"] for each in trainer.state.log_history if "loss" in each],
            "norms": [each["grad_norm"] for each in trainer.state.log_history if "loss" in each],
        }
        if launch.startswith("sequence"):
            forget_deepspeed(trainer.model_wrapped)
        return told

    cases = wanted_cases(folder) if launch != ALONE else [(ALONE, "bf16")]
    found = {name: trained(name) for of, name in cases if of == launch}
    rank = os.environ.get("RANK", "0")
    (folder / f"{launch}-{rank}.json").write_text(json.dumps(found))


def forget_deepspeed(engine: Any) -> None:
    """End an engine, and what it keeps for the process."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    unset_hf_deepspeed_config()
    engine.destroy()
    FWD_MODULE_STACK.clear()  # it would keep the weights
    parallel_state_sp._release_sequence_parallel_groups()
    del ALL_ATTENTION_FUNCTIONS["sdpa"]  # the exchange around it; the function itself stays


def requested(trace: Any) -> int:
    """The highest sum of what was asked for, without workspaces: simulated cards have none."""
    from trainer_plugins.planner.tracing.events import ALLOC, FREE

    now = peak = 0
    for kind, number, _ in trace.events:
        if kind in (ALLOC, FREE) and trace.storages[number].category != "workspaces":
            now += kind * trace.storages[number].num_bytes
        peak = max(peak, now)
    return peak


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
    found: dict[str, dict[str, Any]] = {launch: {} for launch in LAUNCHES}

    def noted(tracker: Tracker) -> Trace:
        traces.append(watched(tracker))
        return traces[-1]

    Tracker.trace = noted  # type: ignore[method-assign,assignment]
    environment = dict(os.environ)
    for launch, name in wanted_cases(folder):
        os.environ.clear()
        os.environ.update(environment)
        source = ConfigSource(
            config=sizes(),
            arguments=arguments_to_send(arguments(name, "runs")),
            sequence_length=LENGTH,
            peft=LORA if name == "LoRA" else None,
        )
        file = str(folder / f"{launch}.yaml")
        plan = asdict(worker.predict(PlanRequest(source=source, num_gpus=0, launch_file=file)))
        found[launch][name] = {"plan": plan, "card": requested(traces[-1])}
    (folder / "planner.json").write_text(json.dumps(found))


if __name__ == "__main__":
    mode, home, *named = sys.argv[1:]
    if mode == "ranks":
        with_bytes(Path(home), *named)
    else:
        without_bytes(Path(home))
    sys.stdout.flush()
    os._exit(0)  # gloo now and then aborts a process at its end
