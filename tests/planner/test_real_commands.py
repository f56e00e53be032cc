"""Commands as TRL, transformers, axolotl, LLaMA-Factory and PEFT print them: flags become a request."""

import json
import shlex
import sys
from collections import Counter
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from trainer_plugins.cli import app
from trainer_plugins.cli.foreign.pasted import read_command
from trainer_plugins.cli.plan_inputs import inputs_of
from trainer_plugins.cli.plan_options import RunOptions
from trainer_plugins.cli.typed_options import value_of
from trainer_plugins.launch.lint.training import argument_names
from trainer_plugins.planner.inputs import request_of
from trainer_plugins.planner.plan import MemoryPlan, PlanError
from trainer_plugins.planner.request import ConfigSource, PlanRequest

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it
    import tomli as tomllib

pytest.importorskip("trl")
CONFIGS = Path(__file__).parent / "configs"
CONTENT = tomllib.loads(Path(__file__).with_name("real_commands.toml").read_text())
COMMANDS = CONTENT["commands"]
NOT_KNOWN = {"freeze_feature_encoder"}


def words_of(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "))


def found(project: str, part: str) -> list[str]:
    """Return the first command of a project that has this part, or whose source has."""
    return next(
        words_of(each["command"])
        for each in COMMANDS
        if each["project"] == project and part in each["command"] + each["source"]
    )


@pytest.fixture
def there(tmp_path: Path, monkeypatch) -> Path:
    """Go where the files are that commands name."""
    for name, text in CONTENT["files"].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("TRAINER_PLUGINS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def requested(words: list[str], config: str = "llama-3.2-1b") -> PlanRequest:
    """Return what `plan` asks with these words, of the config of another model."""
    command = typer.main.get_command(app).commands["plan"]  # type: ignore[attr-defined]
    context = command.make_context("plan", ["--gpu", "80GiB", *words])
    details, inputs = inputs_of(value_of(RunOptions, context.params), context.args)
    return request_of(CONFIGS / f"{config}.json", details, inputs)


def read(words: list[str]) -> PlanRequest:
    reading = read_command(words)
    assert reading is not None
    return requested(reading.words())


def test_there_are_ten_of_each() -> None:
    counts = Counter(each["project"] for each in COMMANDS)
    assert set(counts.values()) == {10}
    assert len(counts) == 5


@pytest.mark.parametrize("each", COMMANDS, ids=lambda each: each["source"])
def test_it_is_understood_or_refused_by_name(there: Path, each: dict[str, str]) -> None:
    words = words_of(each["command"])
    if "refused" in each:
        with pytest.raises(PlanError, match=each["refused"]):
            read(words)
        return
    reading = read_command(words)
    assert reading is not None
    assert {*reading.unknown} <= NOT_KNOWN
    request = requested(reading.words())
    assert isinstance(request.source, ConfigSource)
    assert isinstance(request.source.arguments, tuple)
    flags = {word[2:] for word in request.source.arguments if word.startswith("--")}
    assert flags <= argument_names(request.source.trainer)


def test_what_trl_says_of_its_adapter_and_its_base(there: Path) -> None:
    source = read(found("trl", "kto.py")).source
    assert isinstance(source, ConfigSource)
    assert (source.trainer, source.dtype) == ("kto", None)
    assert source.peft == {
        "peft_type": "LORA",
        "r": 16,
        "lora_dropout": 0.05,
        "target_modules": "all-linear",
    }
    assert source.quantisation == {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def test_launchers_say_how_many_train_and_how(there: Path) -> None:
    assert read(found("peft", "torchrun")).num_gpus == 8
    launched = read(found("llama-factory", "fsdp_qlora"))
    assert launched.num_gpus == 2
    assert launched.launch_file == "examples/accelerate/fsdp_config.yaml"
    named = read(found("trl", "accelerate_config zero2")).launch_file
    assert named is not None
    assert Path(named).is_file(), "a file that TRL ships"


def test_what_axolotl_makes_of_its_file(there: Path) -> None:
    request = read(found("axolotl", "lora-1b"))
    source = request.source
    assert isinstance(source, ConfigSource)
    assert (source.dtype, source.sequence_length, request.has_padding) == ("bfloat16", 2048, False)
    assert source.config["_attn_implementation"] == "flash_attention_2"
    words = list(source.arguments)
    assert words[words.index("--optim") + 1] == "adamw_8bit"
    assert words[words.index("--per_device_eval_batch_size") + 1] == "2"


def test_what_llama_factory_makes_of_its_file(there: Path) -> None:
    source = read(found("llama-factory", "otfq")).source
    assert isinstance(source, ConfigSource)
    assert source.quantisation is not None
    assert source.quantisation["bnb_4bit_quant_storage"] == "bfloat16"
    assert not source.prepares_kbit
    full = read(["llamafactory-cli", "train", *FULL]).source
    assert isinstance(full, ConfigSource)
    assert (full.dtype, full.peft) == ("float32", None), "what is trained is float32"


FULL = ("--model_name_or_path", "m", "--finetuning_type", "full", "--bf16", "true")


@pytest.mark.parametrize(
    ("flags", "means"),
    [
        ("--lora_r 16 --load_in_4bit", "--lora-r 16 --load-in-4bit"),
        ("--lora_r 8 --load_in_4bit False", "--lora-r 8"),
        (
            "--lora_r 8 --lora_target_modules q_proj v_proj",
            "--lora-r 8 --lora-target q_proj,v_proj",
        ),
        (
            "--micro_batch_size 4 --cutoff_len 512",
            "--seq-length 512 --per_device_train_batch_size 4",
        ),
        ("--max_length 512", "--seq-length 512"),
        ("--trainer sft --max_length 512", "--trainer sft --seq-length 512 --max_length 512"),
        ("--torch_dtype bfloat16", "--dtype bfloat16"),
        ("--attn_implementation eager", "--attn-implementation eager"),
        ("--num-epochs 3 --dataset_name x", "--num_train_epochs 3"),
        ("--seed 1 --output_dir x", "--seed 1 --output_dir x"),
    ],
)
def test_a_flag_of_others_means_one_of_ours(flags: str, means: str) -> None:
    assert requested(flags.split()) == requested(means.split())


def test_use_peft_has_the_defaults_of_trl_and_of_peft() -> None:
    flags = "--trainer sft --use_peft --lora_alpha 8 --use_rslora --load_in_4bit --dtype bfloat16"
    source = requested(flags.split()).source
    assert isinstance(source, ConfigSource)
    assert source.peft == {"peft_type": "LORA", "r": 16, "lora_dropout": 0.05}
    assert source.quantisation is not None
    assert source.quantisation["bnb_4bit_compute_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--fp8 True", "--fp8: training in FP8"),
        ("--optim muon", "has no optimizer 'muon'"),
        ("--use_unsloth", "--use_unsloth: unsloth"),
        ("--lora_dropout 0.1", "--lora_dropout belongs to an adapter: give its rank, --lora-r"),
        ("--config nothing.yaml", "nothing.yaml cannot be read"),
        ("--peft-config {", "is not JSON"),
    ],
)
def test_what_is_not_there_is_said_by_name(flags: str, line: str) -> None:
    model = ("--model", str(CONFIGS / "llama-3.2-1b.json"))
    done = CliRunner().invoke(app, ["plan", *model, *flags.split()])
    assert done.exit_code == 2
    assert line in done.stderr
    assert done.stderr.count("\n") == 1


def place_one_layer(folder: Path) -> None:
    config = json.loads((CONFIGS / "llama-3.2-1b.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))


@pytest.mark.all
def test_a_pasted_command_is_read_where_it_cannot_run(there: Path) -> None:
    place_one_layer(there)
    command = (
        "accelerate launch --num_processes 4 mine.py --model_name_or_path . --lora_r 8 --what 3"
    )
    words = ("--gpu", "24GiB", "--engine", "fake", "--json", "--", *command.split())
    done = CliRunner().invoke(app, ["plan", *words])
    assert "read from the command's flags, it is not run" in done.stderr
    assert "not understood, and left out: what" in done.stderr
    plan = MemoryPlan.from_json(done.stdout)
    assert (plan.num_gpus, plan.planned["adapter"]) == (4, "LORA, r=8")
    again = "trainer-plugins plan --model . --lora-r 8 --gpu 24GiB --num-gpus 4 --engine fake"
    assert plan.planned["command"].replace(" --json", "") == again


def test_a_trainer_that_a_script_makes_is_found(there: Path) -> None:
    (there / "mine.py").write_text("trainer = DPOTrainer(model, args)")
    source = read(["python", "mine.py", "--model_name_or_path", "m", "--beta", "0.2"]).source
    assert isinstance(source, ConfigSource)
    assert source.trainer == "dpo"


@pytest.mark.slow
@pytest.mark.all
@pytest.mark.parametrize(
    ("project", "part", "model"),
    [
        ("axolotl", "lora-1b", "NousResearch/Llama-3.2-1B"),
        ("llama-factory", "otfq", "Qwen/Qwen3-4B-Instruct-2507"),
    ],
)
def test_it_is_planned(there: Path, project: str, part: str, model: str) -> None:
    (there / model).mkdir(parents=True)
    place_one_layer(there / model)
    words = ["--gpu", "80GiB", "--engine", "fake", "--json", "--", *found(project, part)]
    done = CliRunner().invoke(app, ["plan", *words])
    assert done.exit_code == 0, done.output
    plan = MemoryPlan.from_json(done.stdout)
    assert plan.planned["adapter"].startswith("LORA, r=")
    assert ("quantised" in plan.planned) is (part == "otfq")
    assert ("evaluation" in plan.moments) is (part != "otfq")


@pytest.mark.slow
@pytest.mark.parametrize("file", ["examples/llama-3/lora-1b.yml", "their.json"])
def test_a_file_is_a_plan_and_flags_change_it(there: Path, file: str) -> None:
    place_one_layer(there)
    (there / "their.json").write_text(json.dumps({"base_model": "m", "sequence_len": 2048}))
    words = ["--config", file, "--model", ".", "--lora-r", "4", "--json"]
    done = CliRunner().invoke(app, ["plan", *words])
    plan = MemoryPlan.from_json(done.stdout)
    assert plan.planned["length"] == "2048 tokens"
