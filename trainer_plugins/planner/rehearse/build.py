"""Make the Trainer that is rehearsed: from a config and flags, or from what was sent of somebody's own."""

import contextlib
import dataclasses
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.pretend import fused_head
from trainer_plugins.planner.rehearse import refusals, ship
from trainer_plugins.planner.rehearse.rehearsal import Batch, other_models
from trainer_plugins.planner.request import MOST_ROWS, OPTIMIZER_STEPS, ConfigSource, TrainerSource
from trainer_plugins.planner.sharded.zero_config import read_config, refuse_config

# The rehearsal decides about these itself: it is short, silent, and writes nothing.
_REHEARSED = {
    "max_steps": OPTIMIZER_STEPS,
    "report_to": "none",
    "disable_tqdm": True,
    "logging_strategy": "no",
    "eval_strategy": "no",
    "eval_on_start": False,
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "auto_find_batch_size": False,
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": None,
    "dataloader_persistent_workers": False,
    "dataloader_pin_memory": False,
    "resume_from_checkpoint": None,
    "skip_memory_metrics": True,
    "tf32": None,  # asks the card, and changes no size
    "full_determinism": False,
    "lr_scheduler_type": "constant",  # some ask for evaluations
    "do_train": True,
}


@dataclass(slots=True)
class Rehearsed:
    """What is rehearsed."""

    trainer: Any
    make_batch: Callable[[], Batch]
    make_evaluation_batch: Callable[[], Batch] | None
    num_evaluation_batches: int
    saves: bool
    resumes: bool
    has_padding: bool
    assumptions: list[str]


def arguments_of(source: ConfigSource | TrainerSource) -> Any:
    """The user's TrainingArguments, as they were given.

    Raises:
        PlanError: transformers refuses them.
    """
    if isinstance(source, TrainerSource):
        return ship.loads(source.trainer)["args"]
    from transformers import HfArgumentParser, Seq2SeqTrainingArguments

    try:
        if isinstance(source.arguments, bytes):
            kind, fields = pickle.loads(source.arguments)
            _check_deepspeed(fields.get("deepspeed"))
            return kind(**fields)
        _check_deepspeed(_value_of("--deepspeed", source.arguments))
        parser = HfArgumentParser(
            Seq2SeqTrainingArguments, prog="trainer-plugins plan", allow_abbrev=False
        )
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            args, unknown = parser.parse_args_into_dataclasses(
                [*source.arguments], return_remaining_strings=True
            )
    except SystemExit as exit_:
        lines = errors.getvalue().strip().splitlines()
        raise PlanError(
            lines[-1].partition("error: ")[2] if lines else "the flags cannot be read"
        ) from exit_
    except PlanError:
        raise
    except (ValueError, TypeError, ImportError) as error:
        raise PlanError(first_line(error)) from error
    if unknown:
        near = get_close_matches(unknown[0].split("=")[0], parser._option_string_actions, n=1)
        raise PlanError(
            f"neither plan nor TrainingArguments knows {unknown[0]}"
            + (f": is it {near[0]}?" if near else "")
        )
    return args


def _value_of(flag: str, arguments: Sequence[str]) -> str | None:
    for text, following in zip(arguments, (*arguments[1:], None), strict=True):
        if text == flag:
            return following
        if text.startswith(f"{flag}="):
            return text.partition("=")[2]
    return None


def _check_deepspeed(given: Any) -> None:
    """Before transformers reads it, which takes its form for granted."""
    if given:
        refuse_config(read_config(given))


def rehearsed_arguments(args: Any, output_dir: str) -> Any:
    """The same arguments for a run of three steps that writes nothing."""
    given = {
        field.name: getattr(args, field.name) for field in dataclasses.fields(args) if field.init
    }
    changed = {name: value for name, value in _REHEARSED.items() if name in given}
    return type(args)(**{**given, **changed, "output_dir": output_dir})


def first_line(error: BaseException) -> str:
    """An error in one line; two where the first one only announces the second."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])


def model_of(source: ConfigSource) -> tuple[Any, list[str]]:
    """Build a model from its config on the host, as `from_pretrained` leaves it, and say what was assumed.

    Raises:
        PlanError: the config is none, or PEFT refuses its own.
    """
    import transformers

    assumptions: list[str] = []
    kind = source.config.get("model_type")
    if not isinstance(kind, str):
        raise PlanError("the config has no model_type: it is not the config.json of a model")
    if kind not in transformers.CONFIG_MAPPING:
        raise PlanError(f"transformers {transformers.__version__} knows no model_type {kind!r}")
    if source.config.get("quantization_config"):
        raise NotPredicted("a quantized model (quantization_config)")
    refusals.refuse_attention(
        source.config.get("attn_implementation") or source.config.get("_attn_implementation")
    )
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(dict(source.config))
        dtype = _dtype(source, config, assumptions)
        model_class = _class_of(config)
        model = model_class._from_config(config, dtype=dtype)
        if source.config.get("tie_word_embeddings") is False:
            _untie(model)
    except PlanError:
        raise
    except (
        Exception
    ) as error:  # a config may be wrong in any way, and transformers has errors of its own for some
        raise PlanError(f"no model can be built from the config: {first_line(error)}") from error
    if source.peft is not None:
        model = _with_peft(model, source.peft)
    return model, assumptions


def _untie(model: Any) -> None:
    """Give the head weights of its own where the config's class has overruled the config, as T5's does.

    `from_pretrained` does so too where a checkpoint has both (modeling_utils.py, tie_weights), as
    that of T5 1.1 has.
    """
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embeddings is None or head.weight is not embeddings.weight:
        return
    head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
    for name, module in model.named_modules():
        if module is head:
            getattr(model, "all_tied_weights_keys", {}).pop(
                f"{name}.weight", None
            )  # transformers 5


def _dtype(source: ConfigSource, config: Any, assumptions: list[str]) -> torch.dtype:
    import transformers

    given = source.dtype
    if given is None:
        newer = int(transformers.__version__.partition(".")[0]) >= 5
        of_config = (
            getattr(config, "dtype", None) if newer else None
        )  # 4.x loads in float32 unless asked otherwise
        given = str(of_config or "float32")
        assumptions.append(
            f"weights are loaded in {given.removeprefix('torch.')}, as from_pretrained does; see --dtype"
        )
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16"}
    name = given.removeprefix("torch.")
    dtype = getattr(torch, short.get(name, name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise PlanError(f"--dtype needs float32, bfloat16 or float16, got {given!r}")
    return dtype


def _class_of(config: Any) -> Any:
    """The class that `architectures` names if it can be trained, else the usual one for this config."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    named = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    if named is not None and "For" in named.__name__:
        return named
    autos = (
        (AutoModelForSeq2SeqLM,)
        if config.is_encoder_decoder
        else (AutoModelForCausalLM, AutoModelForMaskedLM)
    )
    if (
        not config.is_encoder_decoder
        and not getattr(config, "is_decoder", False)
        and config.model_type in _ENCODERS
    ):
        autos = (AutoModelForMaskedLM,)
    for auto in autos:
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise NotPredicted(f"{config.model_type} without `architectures` in its config")


_ENCODERS = (
    "bert",
    "roberta",
    "distilbert",
    "electra",
    "albert",
    "deberta",
    "deberta-v2",
    "xlm-roberta",
    "modernbert",
)


def _with_peft(model: Any, fields: dict[str, Any]) -> Any:
    try:
        import peft
    except ImportError as error:
        raise PlanError("LoRA and other adapters need the package peft") from error
    kind = str(fields.get("peft_type", "LORA")).upper()
    mapping = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING
    if kind not in mapping:
        raise PlanError(f"peft {peft.__version__} knows no peft_type {kind!r}")
    known = {field.name for field in dataclasses.fields(mapping[kind])}
    unknown = sorted(set(fields) - known - {"peft_version", "auto_mapping"})
    if unknown:
        raise PlanError(
            f"the adapter's config has keys that peft {peft.__version__} does not know: {', '.join(unknown)}"
        )
    given = {
        name: value for name, value in fields.items() if name in known and name != "inference_mode"
    }
    try:
        return peft.get_peft_model(model, mapping[kind](**given))
    except (ValueError, TypeError, KeyError) as error:
        raise PlanError(f"peft refuses the adapter: {first_line(error)}") from error


def batch_of(model: Any, rows: int, length: int, target_length: int | None) -> Callable[[], Batch]:
    """What a collator would make for this model.

    Raises:
        NotPredicted: its inputs are more than tokens.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    name, config = type(inner).__name__, inner.config
    refusals.refuse_other_inputs(inner)

    def tokens(columns: int = length) -> torch.Tensor:
        return torch.ones((rows, columns), dtype=torch.long)

    def one_each() -> torch.Tensor:
        return torch.zeros(rows, dtype=torch.long)

    if config.is_encoder_decoder:
        labels: dict[str, Callable[[], torch.Tensor]] = {
            "labels": lambda: tokens(target_length or length)
        }
    elif name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForTokenClassification")):
        labels = {"labels": tokens}
    elif name.endswith("ForSequenceClassification"):
        labels = {"labels": one_each}
    elif name.endswith("ForQuestionAnswering"):
        labels = {"start_positions": one_each, "end_positions": one_each}
    else:
        raise NotPredicted(f"{name} from a config alone: {refusals.GIVE_A_TRAINER}")

    def make() -> Batch:
        made: Batch = {"input_ids": tokens(), "attention_mask": tokens()}
        return {**made, **{key: label() for key, label in labels.items()}}

    return make


def rehearsal_of(
    source: ConfigSource | TrainerSource, has_padding: bool | None, output_dir: str
) -> Rehearsed:
    """Make what is rehearsed, its model on the card.

    Raises:
        PlanError: the input is wrong, or nothing here can say what it will need.
    """
    args = arguments_of(source)
    if isinstance(source, TrainerSource):
        return _of_trainer(source, args, has_padding, output_dir)
    return _of_config(source, args, has_padding, output_dir)


def _of_config(
    source: ConfigSource, args: Any, has_padding: bool | None, output_dir: str
) -> Rehearsed:
    import transformers

    rows = args.per_device_train_batch_size
    for name, number in (("train", rows), ("eval", args.per_device_eval_batch_size)):
        if not 1 <= number <= MOST_ROWS:
            raise PlanError(
                f"per_device_{name}_batch_size is a number of rows from 1 to {MOST_ROWS:,}, got {number:,}"
            )
    model, assumptions = model_of(source)
    if has_padding is None:
        has_padding = rows > 1
        if has_padding:
            assumptions.append("batches have padding, which is the worse case; see --no-padding")
    generates = getattr(args, "predict_with_generate", False)
    trainer_class = transformers.Seq2SeqTrainer if generates else transformers.Trainer
    make = batch_of(model, rows, source.sequence_length, source.target_length)
    trainer = _constructed(
        trainer_class,
        model=model,
        args=rehearsed_arguments(args, output_dir),
        train_dataset=[0] * rows,
        compute_metrics=(lambda predictions: {}) if generates else None,
    )
    evaluates = _says(args.eval_strategy) != "no" or args.do_eval
    rows = args.per_device_eval_batch_size
    return Rehearsed(
        trainer=trainer,
        make_batch=make,
        make_evaluation_batch=batch_of(model, rows, source.sequence_length, source.target_length)
        if evaluates
        else None,
        num_evaluation_batches=source.num_evaluation_batches,
        saves=_says(args.save_strategy) != "no",
        resumes=not args.save_only_model,
        has_padding=has_padding,
        assumptions=assumptions,
    )


def _constructed(trainer_class: Any, **kwargs: Any) -> Any:
    try:
        return trainer_class(**kwargs)
    except ValueError as error:
        raise PlanError(first_line(error)) from error


def _of_trainer(
    source: TrainerSource, args: Any, has_padding: bool | None, output_dir: str
) -> Rehearsed:
    sent = ship.loads(source.trainer)
    trainer = _revived(sent, rehearsed_arguments(args, output_dir))
    if trainer.args.device.type == "cuda":
        fused_head.kernels_take_nothing()
    batch = ship.loads(source.batch)
    evaluation = ship.loads(source.evaluation_batch) if source.evaluation_batch else None
    return Rehearsed(
        trainer=trainer,
        make_batch=lambda: _copied(batch),
        make_evaluation_batch=(lambda: _copied(evaluation)) if evaluation is not None else None,
        num_evaluation_batches=source.num_evaluation_batches,
        saves=_says(args.save_strategy) != "no",
        resumes=not args.save_only_model,
        has_padding=bool(has_padding),
        assumptions=[],
    )


def _revived(sent: dict[str, Any], args: Any) -> Any:
    """The user's Trainer with all that its constructor made, but for what belongs to a process or a device."""
    import transformers
    from transformers.trainer_callback import (
        CallbackHandler,
        DefaultFlowCallback,
        TrainerControl,
        TrainerState,
    )
    from transformers.trainer_utils import TrainerMemoryTracker

    for module in (sent["model"], *sent["others"].values()):
        _made_known(module)
    trainer = sent["class"].__new__(sent["class"])
    vars(trainer).update(sent["others"])
    trainer.args, trainer.model, trainer.deepspeed = args, sent["model"], None
    trainer.compute_metrics = (lambda *_, **__: {}) if sent["has_metrics"] else None
    trainer.train_dataset, trainer.eval_dataset = [0], None
    trainer.data_collator = transformers.default_data_collator
    trainer.model_init = trainer.hp_search_backend = None
    trainer._memory_tracker = TrainerMemoryTracker(skip_memory_metrics=True)
    trainer.create_accelerator_and_postprocess()
    args._setup_devices  # noqa: B018 - it has the side effect that its name tells
    trainer.optimizer, trainer.lr_scheduler, trainer._created_lr_scheduler = (
        sent["optimizer"],
        None,
        False,
    )
    if trainer.place_model_on_device:
        trainer._move_model_to_device(trainer.model, args.device)
    for module in other_models(trainer):
        _placed(module, trainer)
    trainer.model_wrapped = trainer.model
    trainer.callback_handler = CallbackHandler(
        [DefaultFlowCallback], trainer.model, None, None, None
    )
    trainer.control, trainer.state = TrainerControl(), TrainerState()
    trainer._train_batch_size = args.train_batch_size
    return trainer


def _made_known(model: Any) -> None:
    """Whose outputs are recorded transformers notes when a model is constructed, which here it is not."""
    from transformers import modeling_utils

    recorded = getattr(modeling_utils, "_CAN_RECORD_REGISTRY", {})
    for part in model.modules() if isinstance(model, torch.nn.Module) else ():
        if isinstance(part, modeling_utils.PreTrainedModel):
            dict.__setitem__(recorded, str(part.__class__), part._can_record_outputs)


def _placed(module: Any, trainer: Any) -> None:
    """Where its constructor had it: on the card, and prepared by accelerate if it was."""
    if vars(module).pop("_is_accelerate_prepared", False):
        trainer.accelerator.prepare_model(module, evaluation_mode=True)
    module.to(trainer.args.device)


def _copied(value: Any) -> Any:
    """A batch of its own each time, as a collator makes it."""
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value)
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(each) for each in value)
    return value


def _says(strategy: Any) -> str:
    return str(getattr(strategy, "value", strategy)).lower()
