"""This compares plans on fake tensors with dry runs of the same: CUDA's own code is the judge.

Configurations are drawn from a seed. Each is planned twice, with the same torch: on fake tensors,
and on the dry card. Compared are the allocated and the reserved bytes of each moment, and the
blocks that are alive at the peak. Ctrl-C ends it, and prints what is known. What it needs is
fetched into a cache.

Use: scripts/bench judge, which then runs the published rows (`benchmarks.prediction`, `several`),
or `python -m benchmarks.judge NUMBERS`, as in `0-299` or `7`.
"""

import json
import os
import pickle
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import prediction
from trainer_plugins import forks
from trainer_plugins.planner.inputs import ConfigInputs, RunInputs, request_of
from trainer_plugins.planner.plan import MemoryPlan, NotPredicted, PlanError
from trainer_plugins.planner.predict import _IMPORTS, _environment
from trainer_plugins.planner.request import PlanRequest
from trainer_plugins.planner.tracing.replay import Replay

SEED = "2026-11"

# text models of 2024 to 2026 by their `model_type`, whose default config is of a real size
ARCHITECTURES = (
    *("llama", "llama", "llama", "qwen2", "qwen2", "qwen3", "qwen3", "mistral", "gemma2"),
    *("gemma3_text", "gemma4_text", "phi3", "olmo2", "olmo3", "granite", "smollm3"),
    *("cohere2", "glm4", "ernie4_5", "exaone4", "starcoder2", "stablelm"),
    *("seed_oss", "arcee", "helium", "ministral3", "apertus", "qwen3_5_text"),
    *("vaultgemma", "diffllama", "doge", "nanochat", "youtu", "jais2", "hyperclovax", "lfm2"),
    *("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "granitemoe", "ernie4_5_moe"),
    *("deepseek_v3", "glm4_moe", "qwen2_moe", "phimoe", "falcon_h1", "bamba", "minimax", "mamba2"),
)
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
_QUANTISED: dict[str, dict[str, object]] = {
    "nf4": _NF4,
    "nf4 twice": {**_NF4, "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
_OPTIMIZERS = (
    *("adamw_torch", "adamw_torch_fused", "adamw_torch_fused", "adafactor", "sgd", "rmsprop"),
    *("adamw_bnb_8bit", "paged_adamw_8bit", "lion_8bit", "schedule_free_adamw"),
)
_FSDP = {
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_use_orig_params": True,
    },
}
_ZERO = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero3_init_flag": True}}
_LAUNCHES = (
    "",
    "",
    "",
    "",
    "ddp",
    "fsdp1",
    "fsdp2",
    "fsdp2",
    "zero1",
    "zero2",
    "zero3",
    "zero3 offload",
)


@dataclass(frozen=True)
class Drawn:
    """Holds one configuration, in words and as what is asked."""

    number: int
    said: str
    config: dict[str, Any]
    details: ConfigInputs
    run: RunInputs

    def request(self) -> PlanRequest:
        """Return the request of both engines."""
        return request_of(self.config, self.details, self.run)


def drawn(number: int, folder: Path) -> Drawn:
    """Draw the configuration of a number; a launch file is written to the folder."""
    chance = random.Random(f"{SEED} {number}")
    architecture = chance.choice(ARCHITECTURES)
    config = _config(architecture, chance.choice((2, 3, 4)))
    method = chance.choice(("full", "full", "lora", "lora", "dora", "nf4", "nf4 twice", "int8"))
    launch = chance.choice(_LAUNCHES if method not in _QUANTISED else ("", "", "ddp"))
    precision = chance.choice(("bf16", "bf16", "bf16", "fp16", "fp32"))
    arguments: dict[str, object] = {
        "output_dir": "judged",
        "per_device_train_batch_size": chance.choice((1, 2, 3, 4)),
        "gradient_accumulation_steps": chance.choice((1, 1, 2, 4)),
        "optim": chance.choice(_OPTIMIZERS if not launch else _OPTIMIZERS[:3]),
        "use_liger_kernel": chance.random() < 0.2,
        "save_strategy": chance.choice(("no", "no", "epoch")),
    }
    if precision != "fp32":
        arguments[precision] = True
    checkpointing = chance.choice(("off", "reentrant", "not reentrant"))
    if checkpointing != "off":
        arguments["gradient_checkpointing"] = True
        arguments["gradient_checkpointing_kwargs"] = {"use_reentrant": checkpointing == "reentrant"}
    trainer = chance.choice((None, None, None, "sft", "dpo")) if method not in ("dora",) else None
    if trainer is None and chance.random() < 0.25:
        arguments["eval_strategy"] = "epoch"
        arguments["per_device_eval_batch_size"] = chance.choice((1, 2, 8))
    length = chance.choice((128, 257, 512, 1000, 1024, 2048))
    peft = None
    if method != "full":
        peft = {
            "peft_type": "LORA",
            "r": chance.choice((8, 16, 64)),
            "target_modules": "all-linear",
        }
        peft["use_dora"] = method == "dora"
    dtype = chance.choice(("bfloat16", "bfloat16", "float32"))
    words = [architecture, method, launch or "one card", precision, dtype, checkpointing]
    words += [
        f"{name}={value}"
        for name, value in arguments.items()
        if name not in ("output_dir", "bf16", "fp16")
    ]
    file = (
        _launch_file(launch, precision, folder / f"launch-{number}.yaml")
        if launch not in ("", "ddp")
        else None
    )
    if trainer is not None:
        arguments["report_to"] = "none"
    details = ConfigInputs(
        training_args=tuple(_flags(arguments)),
        seq_length=length,
        dtype=dtype,
        peft_config=peft,
        accelerate_config=file,
        num_evaluation_batches=4,
        quantization_config=_QUANTISED.get(method),
        trainer=trainer,
    )
    run = RunInputs(gpu="h100-80gb", calibration=False, num_gpus=4 if launch else None)
    return Drawn(
        number, ", ".join((*words, f"{length} tokens", trainer or "Trainer")), config, details, run
    )


def _flags(arguments: dict[str, object]) -> list[str]:
    return [
        f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"
        for name, value in arguments.items()
    ]


def _config(architecture: str, layers: int) -> dict[str, Any]:
    """Return the default config of an architecture, with few layers."""
    from transformers import CONFIG_MAPPING

    default = CONFIG_MAPPING[architecture]()
    given: dict[str, Any] = default.to_diff_dict() | {"model_type": architecture}
    known = default.to_dict()
    for name in _LAYERS:
        if name in known:
            given[name] = layers
    for name, value in known.items():  # one entry for each layer
        if isinstance(value, list) and name.endswith(("layer_types", "layers_block_type")):
            given[name] = value[:layers]
    return given


def _launch_file(launch: str, precision: str, path: Path) -> str:
    name, _, offloads = launch.partition(" ")
    if name.startswith("fsdp"):
        content: dict[str, Any] = json.loads(json.dumps(_FSDP))
        content["fsdp_config"]["fsdp_version"] = int(name[-1])
    else:
        content = json.loads(json.dumps(_ZERO))
        where = "cpu" if offloads else "none"
        content["deepspeed_config"] |= {
            "zero_stage": int(name[-1]),
            "offload_optimizer_device": where,
            "offload_param_device": where,
        }
        if name != "zero3":
            content["deepspeed_config"]["zero3_init_flag"] = False
    mixed = precision if precision != "fp32" else "no"
    content |= {"num_processes": 4, "mixed_precision": mixed, "machine_rank": 0, "num_machines": 1}
    path.write_text(json.dumps(content))
    return str(path)


def judged(case: Drawn, folder: Path) -> dict[str, Any]:
    """Plan one configuration twice, and compare."""
    line: dict[str, Any] = {"number": case.number, "said": case.said}
    for engine, answer in (("refused", _fake), ("failed", _dry)):
        begun = time.monotonic()
        try:
            line |= answer(case.request(), folder)
        except PlanError as error:
            line[engine] = str(error)
        line[f"{answer.__name__[1:]}_s"] = round(time.monotonic() - begun, 1)
    return line


def watched(asked: str, answered: str) -> None:
    """Rehearse a pickled request on fake tensors, and write what was alive at the peak."""
    from trainer_plugins.planner.judge import rules_of
    from trainer_plugins.planner.rehearse.watch import watch
    from trainer_plugins.planner.tracing.replay import live_at_peak, replay

    request = pickle.loads(Path(asked).read_bytes())
    try:
        trace = watch(request).trace
    except PlanError as error:
        Path(answered).write_text(json.dumps({"refused": str(error)}))
        return
    replayed = replay(trace, None, rules_of(request))  # the dry card has no limit either
    live = live_at_peak(trace, replayed)
    names = [[size, f"{each.operation} {each.module}"] for each, size in live]
    Path(answered).write_text(json.dumps({"fake": _peaks(replayed), "fake_live": names}))


def _fake(request: PlanRequest, folder: Path) -> dict[str, Any]:
    number = os.urandom(4).hex()
    asked, answered = folder / f"asked-{number}", folder / f"answered-{number}"
    asked.write_bytes(pickle.dumps(request))
    environment = _environment(request)
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    words = ("benchmarks.judge", "--watched", str(asked), str(answered))
    call = forks.Call(words=words, folder=str(folder), environ=environment, scratch=str(folder))
    with open(folder / f"log-{number}", "w+") as log, open(os.devnull) as nothing:
        files = {0: nothing.fileno(), 1: log.fileno(), 2: log.fileno()}
        process = forks.server_for(_IMPORTS, environment).start(call, files)
        try:
            process.wait(600)
        finally:
            process.end()
        if not answered.exists():
            log.seek(0)
            raise PlanError(f"crashed: {log.read().strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(answered.read_text())
    if "refused" in found:
        raise NotPredicted(found["refused"].removeprefix("not predicted: "))
    return found


def dry_plan_of(
    request: PlanRequest, file: Path, snapshot: Path | None = None
) -> tuple[MemoryPlan, Any]:
    """Run a request on a dry card without a limit; return its plan, and all that was seen."""
    from trainer_plugins.drycuda.dry_plan import plan_of
    from trainer_plugins.drycuda.dry_request import dry_run_of
    from trainer_plugins.drycuda.dry_run import ran

    run = dry_run_of(request, file, 600)
    run = replace(run, card=replace(run.card, capacity_bytes=4096 << 30), snapshot=snapshot)
    result = ran(run, lambda text: None)
    return plan_of(result, run), result


def _dry(request: PlanRequest, folder: Path) -> dict[str, Any]:
    plan, result = dry_plan_of(request, folder / f"dry-{os.urandom(4).hex()}")
    live = [[life.num_bytes, result.case.sorter.place(life)] for life in result.at_peak()]
    return {"dry": _peaks(plan), "dry_live": live, "notes": list(plan.not_reliable)}


def _peaks(plan: MemoryPlan | Replay) -> dict[str, list[int]]:
    return shared_moments(
        {name: (each.allocated_bytes, each.reserved_bytes) for name, each in plan.moments.items()}
    )


def shared_moments(peaks: Mapping[str, tuple[int, int]]) -> dict[str, list[int]]:
    """Return the allocated and the reserved peak of each moment that both engines have.

    Where the first step begins is another place in each, and a resumed run goes on in one of them.
    """
    found: dict[str, list[int]] = {}
    for moment, peak in peaks.items():
        name = {"load": "forward"}.get(moment, moment)
        if name != "resume":
            found[name] = [*map(max, found.get(name, [0, 0]), peak)]
    return found


def compared(line: dict[str, Any]) -> dict[str, Any]:
    """Return how far two plans are apart."""
    moments = [name for name in line["dry"] if name in line["fake"]]
    differs = {name: line["fake"][name][0] - line["dry"][name][0] for name in moments}
    peak = max(line["dry"][name][0] for name in moments)
    reserved = max(line["dry"][name][1] for name in moments)
    return {
        "allocated": max(line["fake"][name][0] for name in moments) - peak,
        "of": peak,
        "moments": {name: value for name, value in differs.items() if value},
        "reserved": (max(line["fake"][name][1] for name in moments) - reserved) / reserved,
        "live": _different(line["fake_live"], line["dry_live"]),
    }


def _different(fake: list[list[Any]], dry: list[list[Any]]) -> list[str]:
    """Say which blocks that are alive at the peak only one of the two has, the largest first."""
    ours, theirs = (
        Counter(_rounded(each) for each, _ in fake),
        Counter(_rounded(each) for each, _ in dry),
    )
    found = []
    for size in sorted({*ours, *theirs}, reverse=True):
        if ours[size] != theirs[size]:
            more = fake if ours[size] > theirs[size] else dry
            names = sorted({name for each, name in more if _rounded(each) == size})
            found.append(f"{size:,}: {ours[size]} and {theirs[size]} ({'; '.join(names[:3])})")
    return found[:6]


def _rounded(size: int) -> int:
    """Round to 2 MiB what is large: how a block is cut depends on what lies beside it."""
    return size if size < 1 << 20 else -(-size // (2 << 20)) * (2 << 20)


def report(lines: list[dict[str, Any]]) -> str:
    """Count what is equal, and name what is not."""
    both = [(line, compared(line)) for line in lines if "dry" in line and "fake" in line]
    neither = [line for line in lines if "refused" in line and "failed" in line]
    refused = [line for line in lines if "refused" in line and "failed" not in line]
    failed = [line for line in lines if "failed" in line and "refused" not in line]
    equal = sum(each["allocated"] == 0 for _, each in both)
    always = sum(not each["moments"] for _, each in both)
    near = sum(abs(each["allocated"]) <= each["of"] / 1000 for _, each in both)
    reserved = sum(abs(each["reserved"]) <= 0.01 for _, each in both)
    total = len(both) or 1
    text = [
        f"{len(lines)} configurations: {len(both)} compared; {len(neither)} that neither can run,"
        f" {len(refused)} that only the plan refuses, {len(failed)} that only fail on the dry card",
        f"allocated peak: equal to the byte in {equal} ({equal / total:.1%}),"
        f" within 0.1 % in {near} ({near / total:.1%});"
        f" equal in every moment in {always} ({always / total:.1%})",
        f"reserved within 1 % in {reserved} ({reserved / total:.1%})",
    ]
    for line, each in sorted(both, key=lambda pair: -abs(pair[1]["allocated"]) / pair[1]["of"]):
        if each["allocated"] or abs(each["reserved"]) > 0.01:
            text += [f"  {told(line)}", *[f"      {words}" for words in each["live"][:3]]]
    text += [f"  {told(line)}" for line in (*failed, *refused)]
    return "\n".join(text)


def told(line: dict[str, Any]) -> str:
    """Say in a line how one comparison ended."""
    if "dry" in line and "fake" in line:
        each = compared(line)
        share = each["allocated"] / each["of"]
        ended = f"{each['allocated']:+,} ({share:+.3%}), reserved {each['reserved']:+.2%}"
    else:
        names = [name for name in ("failed", "refused") if name in line]
        ended = "; ".join(f"{name}: {line[name][:200]}" for name in names)
    return f"{line['number']}: {ended}: {line['said']}"


def main(numbers: list[int]) -> None:
    """Judge configurations, two at once, and print how far they are apart."""
    lines: list[dict[str, Any]] = []
    prediction.equip_dry_cards()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        folder = Path(name)
        cases = [drawn(number, folder) for number in numbers]
        try:
            for line in pool.map(lambda case: judged(case, folder), cases):
                lines.append(line)
                print(told(line), file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
    print(report(lines), flush=True)


if sys.argv[1:2] == ["--watched"]:
    watched(*sys.argv[2:])
    os._exit(0)  # torch's own C++ objects must not be destroyed: some were replaced
elif __name__ == "__main__":
    _first, _, _last = (sys.argv[1] if sys.argv[1:] else "0-299").partition("-")
    main([*range(int(_first), int(_last or _first) + 1)])
    if not sys.argv[1:]:
        from benchmarks import several  # which imports this module

        prediction.main([])
        several.main([])
