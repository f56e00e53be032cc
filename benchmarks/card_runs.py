"""Compare plans with the same trainings on a real card.

Here: `python -m benchmarks.card_runs foretell FOLDER` plans each run. Beside a card: `... run
FOLDER` trains them there, in FOLDER, several at once. Then here: `... report FOLDER` prints the
differences. FOLDER travels between the machines. Both need the same versions of torch,
transformers, TRL, PEFT and bitsandbytes.
"""

import hashlib
import json
import lzma
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Condition
from typing import IO, Any

from trainer_plugins.drycuda.dry_plan import dry_plan
from trainer_plugins.drycuda.dry_run import dry_run_of
from trainer_plugins.planner.inputs import request_of
from trainer_plugins.planner.options import RunOptions
from trainer_plugins.planner.plan import MemoryPlan, PlanError
from trainer_plugins.planner.request import ConfigSource, PlanRequest
from trainer_plugins.units import GIB, MIB

GPU = "h100-80gb"
_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 500000.0}
_1B: dict[str, Any] = {
    **_LLAMA,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
_8B: dict[str, Any] = {
    **_LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
_QWEN: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
_GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
    "sliding_window": 512,
}
_MOE: dict[str, Any] = {
    "model_type": "olmoe",
    "architectures": ["OlmoeForCausalLM"],
    "num_hidden_layers": 4,
}
_T5: dict[str, Any] = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_model": 1024,
    "d_ff": 4096,
    "num_layers": 24,
    "num_heads": 16,
    "decoder_start_token_id": 0,
    "vocab_size": 32128,
}
_LORA = {"peft_type": "LORA", "r": 16, "target_modules": "all-linear"}
_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
_CHECKPOINTING = ("--gradient_checkpointing=true",)


def _run(
    config: Mapping[str, Any],
    rows: int,
    tokens: int,
    *flags: str,
    dtype: str = "bfloat16",
    mixed: str = "--bf16=true",
    **more: Any,
) -> PlanRequest:
    arguments = ("--output_dir=out", f"--per_device_train_batch_size={rows}", mixed, *flags)
    if not any(flag.startswith("--save_strategy") for flag in flags):
        arguments += ("--save_strategy=no",)
    asked = RunOptions(
        training_args=arguments,
        seq_length=tokens,
        dtype=dtype,
        eval_batches=4,
        gpu=GPU,
        calibration=False,
        **more,
    )
    return request_of(dict(config), asked)


def named() -> dict[str, PlanRequest]:
    """Return common runs, by name."""
    evaluates = ("--eval_strategy=epoch", "--per_device_eval_batch_size=4")
    ends = ("--optim=adamw_torch_fused", "--save_strategy=epoch", *evaluates)
    return {
        "1B full": _run(_1B, 4, 1024, *ends),
        "1B full, fp32 weights": _run(_1B, 2, 1024, *ends, dtype="float32"),
        "1B full, fp16 autocast": _run(_1B, 2, 1024, dtype="float32", mixed="--fp16=true"),
        "1B full, checkpointing": _run(_1B, 8, 2048, *_CHECKPOINTING),
        "1B full, Liger": _run(_1B, 8, 2048, "--use_liger_kernel=true"),
        "1B full, compile": _run(_1B | {"num_hidden_layers": 2}, 4, 1024, "--torch_compile=true"),
        "1B full, eager": _run(_1B | {"attn_implementation": "eager"}, 2, 1024),
        "1B full, adafactor": _run(_1B, 4, 1000, "--optim=adafactor"),
        "1B full, 8-bit AdamW": _run(_1B, 4, 1024, "--optim=adamw_bnb_8bit"),
        "1B full, accumulation": _run(_1B, 2, 777, "--gradient_accumulation_steps=4"),
        "1B LoRA, SFT": _run(_1B, 4, 1024, peft_config=_LORA, trainer="sft"),
        "1B DoRA": _run(_1B, 4, 1024, peft_config=_LORA | {"use_dora": True}),
        "1B full, DPO": _run(_1B, 2, 1024, trainer="dpo"),
        "1B LoRA, DPO": _run(_1B, 2, 1024, peft_config=_LORA, trainer="dpo"),
        "1B GRPO": _run(_1B, 8, 512, "--max_completion_length=128", trainer="grpo"),
        "Qwen3 0.6B full": _run(_QWEN, 4, 2048, *ends),
        "Gemma 3 1B full": _run(_GEMMA, 4, 1024, *ends),
        "OLMoE, 4 layers": _run(_MOE, 2, 1024, *evaluates),
        "T5 0.7B, generation": _run(
            _T5, 4, 512, *evaluates, "--predict_with_generate=true", target_length=128
        ),
        "8B LoRA, checkpointing": _run(_8B, 2, 2048, *_CHECKPOINTING, peft_config=_LORA),
        "8B QLoRA, paged AdamW": _run(
            *(_8B, 2, 2048, *_CHECKPOINTING, "--optim=paged_adamw_8bit"),
            peft_config=_LORA,
            quantization_config=_NF4,
        ),
        "8B QLoRA, quantised twice, SFT": _run(
            *(_8B, 4, 1024, *_CHECKPOINTING),
            peft_config=_LORA,
            quantization_config=_NF4 | {"bnb_4bit_use_double_quant": True},
            trainer="sft",
        ),
        "8B int8 LoRA": _run(
            *(_8B, 1, 1024, *_CHECKPOINTING),
            peft_config=_LORA,
            quantization_config={"load_in_8bit": True},
        ),
        "8B full, checkpointing": _run(_8B, 1, 2048, *_CHECKPOINTING),
    }


_TRY_THE_SMALLEST = (
    *("1B full", "1B full, checkpointing", "1B LoRA, SFT", "1B full, DPO"),
    *("Qwen3 0.6B full", "8B QLoRA, paged AdamW"),
)
"""Runs that are also trained with exactly the planned memory, and with 2 MiB less."""

_LARGEST = 1_000_000_000
"""The most parameters of a random model that we run: its weights are made on the card, written."""


def foretell(folder: Path) -> None:
    """Plan each run, and write the predictions of those that can run."""
    folder.mkdir(parents=True, exist_ok=True)
    known = folder / "foretold.json"
    lines: list[dict[str, Any]] = json.loads(known.read_text()) if known.exists() else []
    done = {line["name"] for line in lines}
    left = [(name, one) for name, one in named().items() if name not in done]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(2) as pool:
        for line in pool.map(lambda pair: _foretold(pair[0], pair[1], Path(scratch), folder), left):
            lines.append(line)
            known.write_text(json.dumps(lines, indent=1))
            print(line["name"], line.get("failed", ""), file=sys.stderr, flush=True)


def _foretold(name: str, request: PlanRequest, scratch: Path, folder: Path) -> dict[str, Any]:
    file = re.sub(r"\W+", "-", name)[:40].strip("-")
    line: dict[str, Any] = {"name": name, "file": file}
    (folder / f"{file}.request").write_bytes(pickle.dumps(request))
    try:
        run = replace(dry_run_of(request, 600), snapshot=scratch / f"{file}.snapshot")
        plan = dry_plan(run, lambda text: None).plan
        line |= {"dry": _peaks(plan), "num_parameters": plan.num_parameters}
        line["room_bytes"] = (plan.smallest_card_bytes or 0) - plan.context_bytes
        line["fails_on_less"] = plan.fails_on_less
        _keep_events(scratch / f"{file}.snapshot", folder / f"{file}.dry.xz")
    except PlanError as error:
        line["failed"] = str(error)
    return line


def _peaks(plan: MemoryPlan) -> dict[str, list[int]]:
    return shared_moments(
        {name: (each.allocated_bytes, each.reserved_bytes) for name, each in plan.moments.items()}
    )


def shared_moments(peaks: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the peaks of moments; the first step starts elsewhere after a load."""
    found: dict[str, list[int]] = {}
    for moment, peak in peaks.items():
        name = {"load": "forward"}.get(moment, moment)
        if name != "resume":
            found[name] = [*map(max, found.get(name, [0, 0]), peak)]
    return found


def _keep_events(snapshot: Path, kept: Path) -> None:
    """Write the allocator's actions, each stack once, and remove the snapshot."""
    from trainer_plugins.snapshot.cards import read
    from trainer_plugins.snapshot.stacks import meaning_of

    found = read(snapshot)
    card = found.main_card()
    places = [meaning_of(stack).place for stack in found.stacks]
    events = [(event.action, event.num_bytes, event.address, event.stack) for event in card.events]
    with lzma.open(kept, "wb", preset=1) as file:
        pickle.dump({"events": events, "places": places}, file)
    snapshot.unlink()


def run(folder: Path, most_seconds: float) -> None:
    """Train the planned runs on the card, as many at once as it holds, until time is up."""
    lines = [line for line in json.loads((folder / "foretold.json").read_text()) if "dry" in line]
    lines = [line for line in lines if _is_run(line)]
    card, end = _Share(_SHARED_BYTES), time.monotonic() + most_seconds
    answers = folder / "answers"
    answers.mkdir(exist_ok=True)
    lines = [line for line in lines if not (answers / f"{line['file']}.json").exists()]
    requests = {line["file"]: (folder / f"{line['file']}.request").resolve() for line in lines}
    _WEIGHTS.mkdir(exist_ok=True)

    def answer(line: dict[str, Any]) -> None:
        file = line["file"]
        needed = max(reserved for _, reserved in line["dry"].values()) + GIB
        rooms = [0]
        if line["name"] in _TRY_THE_SMALLEST:
            rooms += [line["room_bytes"], line["room_bytes"] - 2 * MIB]
        with card.of(needed):
            begun = time.monotonic()
            for room in rooms:
                if time.monotonic() < end:
                    _child(requests[file], answers, f"{file}-{room}" if room else file, end, room)
        print(f"{time.monotonic() - begun:.0f} s {line['name']}", flush=True)

    with open(answers / "weights.log", "w") as log, ThreadPoolExecutor(15) as pool:
        pool.submit(_python, "weights", _WEIGHTS, *requests.values(), log=log, end=end)
        list(pool.map(answer, lines))


def _is_run(line: Mapping[str, Any]) -> bool:
    return line["num_parameters"] <= _LARGEST or not line["name"].startswith("drawn")


_SHARED_BYTES = 58 * GIB
"""Of the card; the rest is for the process that makes weights."""

_WEIGHTS = Path("/dev/shm/weights")


class _Share:
    """Gives each process its part of the card, and makes others wait."""

    def __init__(self, num_bytes: int) -> None:
        self._left, self._all, self._changed = num_bytes, num_bytes, Condition()

    @contextmanager
    def of(self, num_bytes: int) -> Iterator[None]:
        num_bytes = min(num_bytes, self._all)
        with self._changed:
            self._changed.wait_for(lambda: self._left >= num_bytes)
            self._left -= num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._left += num_bytes
                self._changed.notify_all()


def _child(request: Path, answers: Path, name: str, end: float, room_bytes: int) -> None:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as scratch,
        open(answers / f"{name}.log", "w") as log,
    ):
        _python("train", request, scratch, room_bytes, log=log, end=end, TMPDIR=scratch)
        for each in Path(scratch).glob("seen-0.json"):
            seen = json.loads(each.read_text())
            seen["more"] = json.loads(Path(scratch, "more.json").read_text())
            seen.pop("named")
            (answers / f"{name}.json").write_text(json.dumps(seen))
        if not room_bytes and Path(scratch, "snapshot-0.pickle").exists():
            _keep_events(Path(scratch, "snapshot-0.pickle"), answers / f"{name}.xz")


def _python(*words: object, log: IO[str], end: float, **variables: str) -> None:
    command = [sys.executable, "-m", "benchmarks.card_runs", *map(str, words)]
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            stdout=log,
            stderr=log,
            check=False,
            timeout=max(1, end - time.monotonic()),
        )


def _weights_of(request: PlanRequest) -> Path:
    source: Any = request.source
    config = repr(sorted(source.config.items()))
    return _WEIGHTS / hashlib.md5(config.encode()).hexdigest()


def weights(requests: list[PlanRequest]) -> None:
    """Write checkpoints of the requests' models: random bfloat16 weights, made on the card."""
    import torch

    from trainer_plugins.planner.rehearse import model_of_config as of_config

    for request in requests:
        source, folder = request.source, _weights_of(request)
        if folder.exists():
            continue
        assert isinstance(source, ConfigSource)
        kind, part = of_config.class_and_config(source, of_config.config_of(source.config))
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = kind._from_config(part, dtype=torch.bfloat16)
        model.save_pretrained(draft := folder.with_suffix(".draft"))
        draft.rename(folder)
        del model
        torch.cuda.empty_cache()


def train(asked: Path, folder: Path, room_bytes: int) -> None:
    """Train a request on the card, as the dry run does, watched by the same observer."""
    import torch
    import transformers

    from trainer_plugins.inside import observe, of_request, seen

    torch.cuda.mem_get_info()  # the dry card reads its variables once, and here too
    assert transformers.Trainer
    request = pickle.loads(asked.read_bytes())
    written = _weights_of(request)
    while not written.exists():
        time.sleep(0.1)
    os.environ |= {
        "TRAINER_PLUGINS_DRYCUDA": str(folder),
        "TRAINER_PLUGINS_DRY_STEPS": str(request.num_steps),
    }
    if room_bytes:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((room_bytes + 1) / total)
    save = transformers.PreTrainedConfig.save_pretrained

    def with_weights(self: Any, path: str, *args: Any, **kwargs: Any) -> None:
        save(self, path, *args, **kwargs)
        for each in written.glob("model*"):
            link = Path(path, each.name)
            if not link.exists():
                link.symlink_to(each)

    transformers.PreTrainedConfig.save_pretrained = with_weights
    module: Any = observe  # mypy lets no function of a module be replaced
    of_card: Any = seen
    write = module.write

    def with_facts(*args: Any) -> None:
        (folder / "more.json").write_text(json.dumps(_facts()))
        write(*args)

    module.write, of_card.counters = with_facts, dict
    observe.record()
    observe.watch_trainers()
    of_request.train_request(str(asked))


def _facts() -> dict[str, Any]:
    """Return the driver's figures for this process."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    own = [
        each.usedGpuMemory
        for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        if each.pid == os.getpid()
    ]
    return {
        "own_bytes": own[0] if own else None,
        "reserved_bytes": torch.cuda.memory_reserved(),
        "device": torch.cuda.get_device_name(),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "total_bytes": torch.cuda.get_device_properties(0).total_memory,
    }


def report(folder: Path) -> str:
    """Report the differences between plans, dry runs and the card."""
    text, differences = [], []
    for line in json.loads((folder / "foretold.json").read_text()):
        file = folder / "answers" / f"{line['file']}.json"
        if not file.exists() or "dry" not in line:
            continue
        seen = json.loads(file.read_text())
        card = _moments(seen)
        shared = [name for name in card if name in line["dry"]]
        alone = max(card[name][0] for name in shared), max(card[name][1] for name in shared)
        columns = []
        for engine in ("dry",):
            if engine not in line:
                columns.append("refused".rjust(22))
                continue
            of = line[engine]
            pair = [max(of[name][at] for name in shared if name in of) for at in (0, 1)]
            columns.append(f"{(pair[0] - alone[0]) / MIB:+9.1f} MiB {pair[1] / alone[1] - 1:+7.2%}")
        died = " died" if seen["died"] else ""
        text.append(
            f"{line['name'][:60]:60} {alone[0] / GIB:7.3f} {alone[1] / GIB:7.3f}"
            f" {' '.join(columns)}{died}"
        )
        differences += [f"{line['name'][:60]}", *_first_difference(folder, line["file"])]
    return "\n".join([*text, "", *differences])


def _moments(seen: Mapping[str, Any]) -> dict[str, list[int]]:
    return shared_moments({name: peaks[0] for name, peaks in seen["moments"].items()})


def _first_difference(folder: Path, file: str, show: int = 3) -> Iterator[str]:
    """Show where the allocations on the card first differ from those of the dry run."""
    dry, card = _asked(folder / f"{file}.dry.xz"), _asked(folder / "answers" / f"{file}.xz")
    at = next((at for at, (a, b) in enumerate(zip(dry, card, strict=False)) if a[0] != b[0]), None)
    if at is None and len(dry) == len(card):
        yield f"    all {len(dry):,} allocations have their size"
        return
    at = min(len(dry), len(card)) if at is None else at
    yield f"    allocation {at:,} of {len(dry):,} and {len(card):,}:"
    for index in range(max(0, at - 1), at + show):
        for name, those in (("dry", dry), ("card", card)):
            if index < len(those):
                yield f"      {name:4} {those[index][0]:>14,} {those[index][1]}"


def _asked(path: Path) -> list[tuple[int, str]]:
    with lzma.open(path) as file:
        found = pickle.load(file)
    return [
        (num_bytes, str(found["places"][stack]).partition(", of ")[0])
        for action, num_bytes, _, stack in found["events"]
        if action == "alloc"
    ]


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    if what == "foretell":
        foretell(where)
    elif what == "run":
        run(where, float(sys.argv[3]) if sys.argv[3:] else 300)
    elif what == "weights":
        weights([pickle.loads(Path(each).read_bytes()) for each in sys.argv[3:]])
    elif what == "train":
        train(where, Path(sys.argv[3]), int(sys.argv[4]))
    else:
        print(report(where))
