"""Trains what a PlanRequest describes, on the dry card: the program of a plan that has no command.

It makes the Trainer as the plan on fake tensors does, but nothing stands in for anything: the model
is loaded by `from_pretrained`, and bitsandbytes, Triton and DeepSpeed are the installed ones.
"""

import os
import pickle
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_plugins.drycuda.inside import observe
from trainer_plugins.hf_trainer import HfArguments
from trainer_plugins.planner.kind import Kind, kind_of, planned_of
from trainer_plugins.planner.plan import NotPredicted
from trainer_plugins.planner.rehearse import from_config, from_loop, from_trainer, rollout, ship
from trainer_plugins.planner.rehearse import model_of_config as of_config
from trainer_plugins.planner.rehearse.arguments import arguments_of
from trainer_plugins.planner.rehearse.rehearsal import Batch, Build, Rehearsed, loader
from trainer_plugins.planner.request import ConfigSource, PlanRequest, TrainerSource
from trainer_plugins.planner.sharded.launched import as_launched, with_deepspeed

_NO_END = 1 << 30


def main(path: str) -> None:
    """Make the Trainer of a pickled request and train; the process ends when all is seen."""
    request: PlanRequest = pickle.loads(Path(path).read_bytes())
    request = _launched(request)
    source, args = request.source, arguments_of(request.source)
    if isinstance(source, TrainerSource) and request.deepspeed and not args.deepspeed:
        args.deepspeed = request.deepspeed
    kind = kind_of(request, args)
    folder = str(Path(os.environ["TRAINER_PLUGINS_DRYCUDA"]) / "run")  # one of all ranks and runs
    build = Build(
        *(args, kind, request.has_padding, folder),
        model_of=_loaded,
        loads=_loads,
        has_stand_ins=False,
    )
    rehearsed = _rehearsed(request, build)
    trainer = rehearsed.trainer
    observe.about = {
        "planned": {**planned_of(request, trainer, args, kind), "engine": "dry card"},
        "notes": rehearsed.assumptions,
    }
    _ask_for(rehearsed, args, kind)
    is_padded = isinstance(source, ConfigSource) and rehearsed.has_padding
    _give_batches(rehearsed, request.num_steps, is_padded=is_padded)
    trainer.train()


def _launched(request: PlanRequest) -> PlanRequest:
    """Let this process be rank 0 of those that a launcher would start."""
    request = as_launched(request)
    os.environ.update(request.environment)
    request = with_deepspeed(request)
    if request.num_gpus > 1:
        os.environ.update(
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE=str(request.num_gpus),
            LOCAL_WORLD_SIZE=str(request.gpus_per_node),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="29500",
        )
    return request


def _rehearsed(request: PlanRequest, build: Build) -> Rehearsed:
    source = request.source
    if isinstance(source, TrainerSource):
        if source.replaced:
            from trainer_plugins.planner.rehearse.liger import replace_again

            replace_again(source.replaced)
        return from_trainer.rehearsed(source, build)
    if source.trainer is not None:
        return from_loop.rehearsed(source, build)
    return from_config.rehearsed(source, build)


def _loaded(
    source: ConfigSource, _: torch.device | None, num_parts: int
) -> tuple[torch.nn.Module, list[str]]:
    """Load the model of a config by `from_pretrained`, from weights that are not there."""
    import transformers

    assumptions: list[str] = []
    config = of_config.config_of(source.config)
    dtype = of_config.dtype_of(source, config, assumptions)
    options: dict[str, Any] = {"dtype": dtype}
    if of_config.loads_onto_the_card(source):
        options["device_map"] = "auto"
    if source.config.get("quantization_config"):
        raise NotPredicted("weights that are quantised already, of a config alone")
    if source.quantisation is not None:
        options["quantization_config"] = transformers.BitsAndBytesConfig(**source.quantisation)
    if num_parts > 1:
        options |= {"tp_plan": "auto", "tp_size": num_parts}
    kind, part = of_config.class_and_config(source, config)
    with tempfile.TemporaryDirectory() as folder:
        part.save_pretrained(folder)
        model: Any = kind.from_pretrained(folder, config=part, **options)
    model.config.name_or_path = source.config.get("_name_or_path", "")
    if source.config.get("tie_word_embeddings") is False:
        of_config.untie(model)
    if source.peft is not None and source.trainer is None:
        if source.quantisation is not None and source.prepares_kbit:
            import peft

            model = peft.prepare_model_for_kbit_training(model, source.kbit_checkpoints)
        model = of_config.with_peft(model, source.peft)
    return model, assumptions


def _loads(content: bytes) -> Any:
    """Restore what a Trainer's process has sent, with bitsandbytes' own weights in its layers."""
    sent = ship.loads(content)
    if "bitsandbytes" in sys.modules:
        for part in sent["model"].modules():
            _give_its_own_weight(part)
    return sent


def _give_its_own_weight(part: torch.nn.Module) -> None:
    import bitsandbytes as bnb  # type: ignore[import-not-found]

    if isinstance(part, bnb.nn.Linear4bit):
        known: Mapping[str, Any] = vars(part.weight)
        part.weight = bnb.nn.Params4bit(
            part.weight.data,
            requires_grad=False,
            quant_state=part.quant_state,
            quant_type=known.get("quant_type", "nf4"),
            compress_statistics=known.get("compress_statistics", True),
            quant_storage=part.weight.dtype,
            bnb_quantized=part.quant_state is not None,
            module=part,
        )
    elif isinstance(part, bnb.nn.Linear8bitLt) and part.weight.dtype == torch.int8:
        scales = torch.empty(part.weight.shape[0])
        part.weight = bnb.nn.Int8Params(
            part.weight.data,
            requires_grad=False,
            has_fp16_weights=False,
            CB=part.weight.data,
            SCB=scales,
        )


def _ask_for(rehearsed: Rehearsed, args: HfArguments, kind: Kind) -> None:
    """Ask the observer for what the run does: the rehearsal's own arguments ask for nothing."""
    trainer = rehearsed.trainer
    mine: Any = trainer.args
    if kind.saves:
        mine.save_strategy = args.save_strategy
    if rehearsed.make_evaluation_batch is not None:
        mine.eval_strategy, mine.eval_steps, trainer.eval_dataset = "steps", _NO_END, [0]


def _give_batches(rehearsed: Rehearsed, num_steps: int, *, is_padded: bool) -> None:
    """Give the Trainer its batches; a Trainer's own are padded as they are."""
    trainer: Any = rehearsed.trainer  # mypy lets no method be replaced
    num_batches = (num_steps + 1) * trainer.args.gradient_accumulation_steps
    make = _padded if is_padded else lambda batch: batch
    for_training, for_evaluation = rehearsed.make_batch, rehearsed.make_evaluation_batch
    number = rehearsed.num_evaluation_batches
    trainer.get_train_dataloader = lambda: loader(
        trainer, lambda: make(for_training()), num_batches
    )
    if for_evaluation is not None:
        trainer.get_eval_dataloader = lambda *_, **__: loader(
            trainer, lambda: make(for_evaluation()), number
        )
    if rollout.generates(trainer):
        rollout.give_rewards(trainer)


def _padded(batch: Batch) -> Batch:
    """Let the first row be one token shorter than the others; prompts have their own lengths."""
    if isinstance(batch, Mapping) and isinstance(mask := batch.get("attention_mask"), torch.Tensor):
        mask[0, -1] = 0
    return batch


if __name__ == "__main__":
    main(sys.argv[1])
