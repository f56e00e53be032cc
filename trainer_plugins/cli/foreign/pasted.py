"""Reads a whole command as it is pasted: a launcher, a program, its flags and its files."""

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainer_plugins.cli.foreign.front_ends import of_axolotl, of_flags, of_llama_factory
from trainer_plugins.cli.foreign.reading import Reading, is_true
from trainer_plugins.cli.foreign.spellings import OTHER_TRAINERS, SCRIPTS, Script, names
from trainer_plugins.planner.plan import NotPredicted, PlanError
from trainer_plugins.planner.request import TRL_TRAINERS
from trainer_plugins.plug_in.flags import ASSIGNMENT, without_assignments

_PROGRAMS = ("trl", "axolotl", "llamafactory-cli")
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_FILES = (".yaml", ".yml", ".json")
_NUM_CARDS = ("nproc_per_node", "num_processes", "num_gpus", "nproc")
_OF_A_LAUNCHER = names(
    """
    dynamo_backend hostfile launcher log_dir m machine_rank main_process_ip main_process_port
    master_addr master_port max_restarts module multi_gpu nnodes node_rank
    num_cpu_threads_per_process num_machines num_nodes rdzv_backend rdzv_endpoint rdzv_id
    same_network standalone tee
    """
)  # besides the number of cards, the files, and what is refused
_TRAINER = re.compile(r"\b(SFT|DPO|KTO|Reward|GRPO|RLOO|GMPO|ORPO|CPO|TPO)Trainer\(")


def read_command(words: Sequence[str]) -> Reading | None:
    """Understand a command as far as it is known; None if it names no model.

    Raises:
        PlanError: a file of it cannot be read.
        NotPredicted: it asks for what is not planned.
    """
    variables, words = without_assignments(words)
    at = _program_at(words)
    if at is None:
        return None
    launched = pairs(words[:at])
    reading = _of_program(words[at], words[at + 1 :], launched)
    if "model" not in reading.options:
        return None
    _launch(reading, launched, variables, words[at])
    return reading


def read_file(name: object) -> dict[str, Any]:
    """Read a YAML or JSON file of settings."""
    import yaml

    path = Path(str(name))
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise PlanError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise PlanError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise PlanError(f"{path} holds no mapping")
    return {str(key): value for key, value in content.items()}


def of_file(name: object, changed: Mapping[str, Any], trainer: str | None) -> Reading:
    """Understand a file of axolotl, LLaMA-Factory or TRL, or of a launcher; flags go before it."""
    values = read_file(name)
    if "compute_environment" in values or "distributed_type" in values:
        return of_flags({**changed, "accelerate_config": str(name)}, Script(trainer))
    if "zero_optimization" in values:
        return of_flags({**changed, "deepspeed": str(name)}, Script(trainer))
    values |= changed
    if "base_model" in values:
        return of_axolotl(values)
    if "model_name_or_path" in values and {"stage", "finetuning_type", "cutoff_len"} & {*values}:
        return of_llama_factory(values)
    if "model_name_or_path" in values:
        return of_flags(values, Script(trainer))
    raise PlanError(
        f"{name} is no file of axolotl (base_model), LLaMA-Factory or TRL (model_name_or_path),"
        " accelerate (distributed_type) or DeepSpeed (zero_optimization)"
    )


def pairs(words: Sequence[str]) -> dict[str, Any]:
    """Return flags and their values, and words of the form name=value.

    >>> pairs(["--bf16", "--lr=1", "--lora_target", "q", "v", "cutoff_len=5"])
    {'bf16': True, 'lr': '1', 'lora_target': ['q', 'v'], 'cutoff_len': '5'}
    """
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        is_flag = word.startswith("--") or re.match(r"-[a-zA-Z]", word)
        if is_flag or ASSIGNMENT.match(word):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            found[name] = value if equals else True
            name = "" if equals else name
        elif name:
            before = found[name]
            found[name] = word if before is True else [*_list(before), word]
    return found


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _program_at(words: Sequence[str]) -> int | None:
    """Return where the program is that a launcher starts."""
    for index, word in enumerate(words):
        is_module = words[index - 1] in ("-m", "--module") if index else False
        if word in _LAUNCHERS:
            continue
        if is_module or word.endswith(".py") or Path(word).name in _PROGRAMS:
            return index
    return None


def _of_program(program: str, rest: Sequence[str], launched: dict[str, Any]) -> Reading:
    name = Path(program).name
    if name == "trl":
        trainer, values = (rest[0] if rest else ""), pairs(rest[1:])
        if trainer not in TRL_TRAINERS:
            raise NotPredicted(f"trl {trainer}: its Trainer is none of {', '.join(TRL_TRAINERS)}")
        values = {**(read_file(values.pop("config")) if "config" in values else {}), **values}
        _take_launch(values, launched)
        return of_flags(values, Script(trainer))
    if name in _PROGRAMS:
        rest = rest[1:]  # as in `axolotl train`
    if rest and rest[0].endswith(_FILES):
        return of_file(rest[0], pairs(rest[1:]), None)
    values, script = pairs(rest), _script(program)
    if isinstance(values.get("config"), str):
        values = {**read_file(values.pop("config")), **values}
    if name == "llamafactory-cli":
        return of_llama_factory(values)
    return of_flags(values, script)


def _script(program: str) -> Script:
    """Return what is known of a program by its name, or by the Trainer that it makes."""
    path = Path(program)
    if path.stem in OTHER_TRAINERS:
        raise NotPredicted(f"{path.name}: its Trainer or its pictures, from a config alone")
    if path.stem.endswith("no_trainer"):
        raise NotPredicted(f"{path.name}: it trains in a loop of its own, without a Trainer")
    if path.is_file() and (made := _TRAINER.search(path.read_text(errors="replace"))):
        known = SCRIPTS.get(path.stem, Script())
        return known._replace(trainer=made[1].lower())
    found = SCRIPTS.get(path.stem, Script())
    if found.not_planned:
        raise NotPredicted(f"{path.name}: {found.not_planned}; give plan_run the Trainer")
    return found


def _take_launch(values: dict[str, Any], launched: dict[str, Any]) -> None:
    """Move the flags of a launcher to the others; TRL's program takes both."""
    for name in (*_NUM_CARDS, "accelerate_config", "config_file"):
        if name in values:
            launched[name] = values.pop(name)


def _launch(
    reading: Reading, launched: dict[str, Any], variables: Mapping[str, str], program: str
) -> None:
    """Say how many cards train, and with which file of a launcher."""
    file = launched.pop("accelerate_config", launched.pop("config_file", None))
    if file is not None:
        reading.options["accelerate_config"] = _shipped(str(file))
    if (engine := launched.pop("deepspeed_config_file", None)) is not None:
        reading.flags.setdefault("deepspeed", engine)
    if (precision := launched.pop("mixed_precision", None)) in ("bf16", "fp16"):
        reading.flags.setdefault(precision, True)
    elif precision not in (None, "no"):
        raise NotPredicted(f"--mixed_precision {precision}")
    nodes = _number(launched.get("nnodes", launched.get("num_nodes")))
    number = next((launched.pop(name) for name in _NUM_CARDS if name in launched), None)
    if (included := launched.pop("include", None)) is not None:  # of deepspeed, as host:0,1
        number = len(str(included).partition(":")[2].split(","))
    visible = [each for each in variables.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    starts_all = Path(program).name in _PROGRAMS or launched.get("multi_gpu")
    if number is None and len(visible) > 1 and (starts_all or file is not None):
        number = len(visible)
    if number is not None:
        each_node = "nnodes" in launched or "num_nodes" in launched
        reading.options["num_gpus"] = _number(number) * (nodes if each_node else 1)
    elif file is None and {"deepspeed", "fsdp"} & {*reading.flags}:
        reading.said.append("one card is planned: the command does not say how many (--num-gpus)")
    for name, value in launched.items():
        if name in _OF_A_LAUNCHER or name in ("u", "i") or not is_true(value):
            continue
        if name.startswith(
            ("fsdp_", "zero_", "offload_", "use_fsdp", "use_deepspeed", "use_megatron")
        ):
            raise PlanError(f"--{name}: write it to a file, for --config_file of accelerate launch")
        reading.unknown.append(name)


def _number(value: object) -> int:
    return int(str(value)) if str(value).isdecimal() else 1


def _shipped(name: str) -> str:
    """Return the file of accelerate that a name means which TRL ships, as in `zero2`."""
    found = find_spec("trl")
    if not Path(name).exists() and found is not None and found.origin is not None:
        shipped = Path(found.origin).parent / "accelerate_configs" / f"{name}.yaml"
        if shipped.is_file():
            return str(shipped)
    return name
