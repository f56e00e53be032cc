"""Every trainer under every strategy: does survival attach, and is a divided step then that of the whole?

Launched by test_every_trainer.py on two ranks; on one card it calls `cells` itself. Steps are taken
by plain SGD, whose weights move by the gradient.
"""

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from tests.models import tiny_llama
from tests.survival import test_coupled, test_families, test_sentences, test_trl
from tests.survival.failing import know_limit, logged_by, numbers_off_by, off_by, small_trainer
from tests.survival.ranks.token_card import TokenCard
from trainer_plugins import survive_oom
from trainer_plugins.survival.memo import memo_of

LIMIT = 40
"""Tokens at once: fewer than any micro-batch here has, and more than any row."""


def preference(trainer_class, config, path, **options):
    model = tiny_llama(vocab_size=384).double()
    return test_trl.made(trainer_class, config, path, model, test_trl.PREFERENCES, **options)


def seq2seq(path, **options):
    classes = {"trainer_class": Seq2SeqTrainer, "args_class": Seq2SeqTrainingArguments}
    return small_trainer(path, **classes, **options)


def online_dpo(path, **options):
    model, prompts = tiny_llama(vocab_size=259).double(), {"prompt": lambda n: "a stone"}
    more = {"reward_funcs": test_trl.wordy, "ref_model": tiny_llama(vocab_size=259).double()}
    options = {"max_length": 64, **options}
    return test_trl.made(OnlineDPOTrainer, OnlineDPOConfig, path, model, prompts, more, **options)


TRAINERS: dict[str, Callable[..., Trainer]] = {
    "Trainer": small_trainer,
    "Seq2SeqTrainer": seq2seq,
    "SFTTrainer": test_trl.sft,
    "DPOTrainer": test_trl.dpo,
    "RewardTrainer": test_trl.reward,
    "GRPOTrainer": test_trl.grpo,
    "RLOOTrainer": test_trl.rloo,
    "KTOTrainer": test_coupled.kto,
    "CPOTrainer": partial(preference, CPOTrainer, CPOConfig),
    "ORPOTrainer": partial(preference, ORPOTrainer, ORPOConfig),
    "GKDTrainer": test_coupled.gkd,
    "OnlineDPOTrainer": online_dpo,
}


def uneven(path, **options):
    """Rank 1 has two rows where rank 0 has four: fewer than there are pieces."""
    trainer = test_trl.sft(path, **options)
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: collate(rows[:2] if trainer.args.process_index else rows)
    return trainer


def ranking(path, **options):
    trainer = test_sentences.ranking(path, **options)
    for name, weight in trainer.model.named_parameters():
        weight.requires_grad_("key.bias" not in name)  # its gradient is nothing but rounding
    return trainer


def dft(path, **options):
    """Its gradient is weighted by probabilities of one in 384: so much larger is its step."""
    larger = {"learning_rate": 384 * options.pop("learning_rate")}
    return test_trl.sft(path, loss_type="dft", **options, **larger)


VARIANTS: dict[str, Callable[..., Trainer]] = {
    "rows ranked": ranking,
    "a T5": test_families.encoder_decoder,
    "SFT with an adapter": partial(test_trl.sft, lora={}),
    "SFT without padding": test_trl.sft_packed,
    "SFT packed": partial(test_trl.sft, packing=True, max_length=64),
    "SFT by dft": dft,
    "SFT with other rows on each rank": uneven,
    "DPO with an adapter": partial(test_trl.dpo, lora={}),
    "DPO with sft": test_coupled.dpo_sft,
    "DPO, precomputed": partial(test_trl.dpo, precompute_ref_log_probs=True),
    "Reward with an adapter": partial(test_trl.reward, lora={}),
    "GRPO with an adapter": partial(test_trl.grpo, lora={}),
    "GRPO with a reference": partial(test_trl.grpo, beta=0.1, loss_type="bnpo"),
    "RLOO with an adapter": partial(test_trl.rloo, lora={}),
}
REHEARSED: dict[str, Callable[..., Trainer]] = {
    "GRPOTrainer": partial(test_trl.grpo, max_completion_length=12),
    "RLOOTrainer": partial(test_trl.rloo, max_completion_length=12),
}
SETTINGS = {"steps": 1, "optim": "sgd", "learning_rate": 100.0, "max_grad_norm": 0.0}
"""A step so large that rounding the weights, as float32 in ZeRO, is nothing beside it."""

WRAP = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
ZERO = {
    **dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    whole = {
        "stage3_gather_16bit_weights_on_model_save": True,
        "stage3_param_persistence_threshold": 0,
    }
    return {
        "deepspeed": {
            **ZERO,
            "zero_optimization": {"stage": stage, **(whole if stage == 3 else {}), **more},
        }
    }


STRATEGIES: dict[str, dict[str, Any]] = {
    "1 process": {},
    "DDP": {},
    "FSDP1": {"fsdp": True, "fsdp_config": {"version": 1, "sync_module_states": False, **WRAP}},
    "FSDP2": {"fsdp": True, "fsdp_config": {"version": 2, **WRAP}},
    "ZeRO-2": zero(2),
    "ZeRO-3": zero(3),
    "ZeRO-3 offloaded": zero(
        3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}
    ),
    "ZeRO-3 rehearsed": zero(3),
}
OF_TABLE = ("1 process", "DDP", "FSDP1", "FSDP2", "ZeRO-2", "ZeRO-3")
FAILS = {
    ("FSDP1", "GKDTrainer"): "without survival too: TRL generates from divided weights",
    ("FSDP2", "a T5"): "without survival too: torch takes no weights that two units share",
}
REFUSED = {("FSDP2", "rows ranked")}
OF_VARIANTS = ("FSDP2", "ZeRO-2", "ZeRO-3 offloaded")
initialise = PartialState.__init__


def initialise_for_fsdp(self, *args, **kwargs):
    """accelerate takes FSDP to accelerators only, and calls two gloo ranks MULTI_CPU (accelerate/state.py)."""
    initialise(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        self._shared_state["device"] = torch.device("cpu")  # FSDP1 takes no cpu:0


def trained(trainer) -> list[torch.Tensor]:
    """By how much a step has moved each weight; empty on a rank that has no whole weights."""
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    trainer.train()
    if isinstance(trainer.model, FullyShardedDataParallel):
        # accelerate's `get_state_dict` reads weights on the CPU that FSDP1 has released
        with FullyShardedDataParallel.summon_full_params(trainer.model, writeback=False):
            after = {
                name.replace("_fsdp_wrapped_module.", ""): weight.detach().clone()
                for name, weight in trainer.model.named_parameters()
            }
    else:
        after = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return [after[name].double() - before[name] for name in sorted(before)] if after else []


@contextmanager
def small_card(trainer) -> Iterator[None]:
    """It is found before step 1 how much of a micro-batch fits."""
    card = TokenCard(trainer.args.process_index)
    trainer.model.register_forward_pre_hook(
        lambda _, args, named: card.holds(named["input_ids"].numel()), with_kwargs=True
    )
    modules = ("trainer_plugins.survival.memo", "trainer_plugins.survival.ranks.zero")
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch(f"{module}.card_of", lambda _: card))
        yield


def cell(make, *, is_rehearsed: bool = False) -> dict[str, Any]:
    """What becomes of one trainer under one strategy."""
    try:
        trainer = make()
    except ValueError as error:  # TRL's own
        return {"not tried": str(error)}
    try:
        survive_oom(trainer, plan_first=is_rehearsed)
    except ValueError as error:
        return {"refused": str(error)}
    if not is_rehearsed:
        know_limit(trainer, LIMIT)
    with small_card(trainer) if is_rehearsed else nullcontext():
        divided = trained(trainer)
    alike = make()
    whole = trained(alike)
    return {
        "logged_off_by": numbers_off_by(logged_by(trainer), logged_by(alike)),
        "limit": memo_of(trainer).limit,
        "num_logged": max(map(len, logged_by(trainer))),
        "wrapped": type(trainer.model_wrapped).__name__,
        "world_size": trainer.args.world_size,
        "zero": getattr(trainer.model_wrapped, "zero_optimization_stage", int)(),
        "divided": sum(e.get("memory/divided_micro_batches", 0) for e in trainer.state.log_history),
        "off_by": off_by(divided, whole) if whole else None,
    }


def made(make: Callable[..., Trainer], folder: Path, strategy: str) -> Trainer:
    unset_hf_deepspeed_config()  # of the trainer before, by which a model would be made in parts
    if strategy.startswith("ZeRO-3"):
        from deepspeed.accelerator import get_accelerator

        # DeepSpeed 0.19 refuses float64 on a CPU that has float16, and on no other.
        get_accelerator().is_fp16_supported = lambda: False
    trainer = make(folder, **SETTINGS, **STRATEGIES[strategy])
    if strategy == "FSDP1":  # its norm of gradients is float32, and refuses float64
        trainer._get_grad_norm = lambda model, grad_norm=None: None
    return trainer


def cells(
    folder: Path, strategy: str, trainers: Mapping[str, Callable[..., Trainer]] = TRAINERS
) -> dict[str, dict[str, Any]]:
    """What becomes of every trainer under one strategy."""
    facts = {}
    for name, make in trainers.items():
        AcceleratorState._reset_state(reset_partial_state=True)
        gc.collect()
        why = FAILS.get((strategy, name))
        run = partial(made, make, folder / name, strategy)
        facts[name] = {"fails": why} if why else cell(run, is_rehearsed="rehearsed" in strategy)
    return facts


def main(folder: Path, rank: str) -> None:
    facts = {}
    for strategy in [*STRATEGIES][1:]:
        PartialState.__init__ = initialise_for_fsdp if "FSDP" in strategy else initialise
        facts[strategy] = {} if strategy not in OF_TABLE else cells(folder / strategy, strategy)
        if strategy in OF_VARIANTS:
            facts[strategy] |= cells(folder / strategy, strategy, VARIANTS)
        if "rehearsed" in strategy:
            facts[strategy] = cells(folder / strategy, strategy, REHEARSED)
    (folder / f"rank-{rank}.json").write_text(json.dumps(facts))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo now and then aborts a process at its end


if __name__ == "__main__":
    main(Path(sys.argv[1]), os.environ["RANK"])
