"""What no machine here shows: the facts of a healthy run, changed in one place, give one finding."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from trainer_plugins.allocator.machine import Machine
from trainer_plugins.check import judge
from trainer_plugins.check.data import measure_waste
from trainer_plugins.check.facts import (
    CardFacts,
    DataFacts,
    Facts,
    MainMemory,
    ModelFacts,
    ModelShape,
    Owner,
    RunSettings,
)
from trainer_plugins.devices import GpuProcess, HostFacts
from trainer_plugins.finding import Severity
from trainer_plugins.launch.extensions import ExtensionLock
from trainer_plugins.launch.lint.document import read_document
from trainer_plugins.planner.plan import Category, MemoryPlan, MomentPeak, Streamed
from trainer_plugins.reading import MemoryReading
from trainer_plugins.strategy import Strategy
from trainer_plugins.units import GIB, MIB


def reading(device: str, total: int, free: int, ours: int = 0) -> MemoryReading:
    return MemoryReading(
        device=device, total_bytes=total, free_bytes=free, reserved_bytes=ours, allocated_bytes=ours,
        peak_allocated_bytes=ours,
    )  # fmt: skip


STRATEGY = Strategy(
    distributed_type="NO", wrapped_class="LlamaForCausalLM", family="nothing", world_size=1,
    device="cuda", num_params=8 * 10**9,
)  # fmt: skip
CARD = CardFacts(uuid="GPU-1", name="H100", reading=reading("cuda:0", 80 * GIB, 60 * GIB, 19 * GIB))
MAIN = MainMemory(
    reading=reading("cpu", 256 * GIB, 200 * GIB, 4 * GIB),
    machine_bytes=256 * GIB,
    shared=HostFacts(num_oom_kills=0, shm_total_bytes=64 * GIB, shm_free_bytes=64 * GIB),
)
RUN = RunSettings(values={"output_dir": "runs"}, strategy=STRATEGY, num_cards=1)
MODEL = ModelFacts(trainable_bytes={"bfloat16": 15 * GIB}, homes={"cuda": 15 * GIB})
HEALTHY = Facts(
    cards=(CARD,), own_pids=frozenset({7, 8}), device_bytes=80 * GIB, device_free_bytes=60 * GIB,
    main=MAIN, versions={"torch": "2.13.0"}, run=RUN, model=MODEL, data=DataFacts(lengths=(64,) * 200),
)  # fmt: skip


def run(**values: object) -> RunSettings:
    return replace(RUN, values={**RUN.values, **values})


def main(**more: object) -> MainMemory:
    return replace(MAIN, **more)  # type: ignore[arg-type]


def strategy(**more: object) -> Strategy:
    return replace(STRATEGY, **more)  # type: ignore[arg-type]


def plan(
    allocated: int, breakdown: Mapping[Category, int] | None = None, **more: object
) -> MemoryPlan:
    return MemoryPlan(
        allocated_peak_bytes=allocated, reserved_peak_bytes=allocated, nvidia_smi_peak_bytes=allocated,
        host_ram_bytes_per_node=GIB, capacity_bytes=80 * GIB, moment="backward",
        breakdown=breakdown or {}, moments={"backward": MomentPeak(allocated_bytes=1, reserved_bytes=1)},
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


def peer(used_bytes: int) -> CardFacts:
    me = Owner(process=GpuProcess(7, 20 * GIB, "python"))
    other = Owner(process=GpuProcess(8, used_bytes, "python"), is_peer=True)
    return replace(CARD, owners=(me, other))


BATCH = DataFacts(lengths=(64,) * 200, batch_bytes=100 * MIB)
OFFLOADS = replace(RUN, strategy=strategy(offload={"optimizer": "cpu"}))
SMALL_SHM = HostFacts(num_oom_kills=0, shm_total_bytes=64 * MIB, shm_free_bytes=64 * MIB)
FULL = reading("cpu", 256 * GIB, 4 * GIB, 4 * GIB)
OLD_CARD = replace(CARD, name="T4", capability=(7, 5))
ADAPTERS = replace(MODEL, trainable_bytes={"float32": GIB}, frozen_bytes={"bfloat16": 15 * GIB})
BEST = {"load_best_model_at_end": True}
VLLM = {"use_vllm": True, "vllm_mode": "colocate"}
DEEPSPEED = strategy(family="DeepSpeed", num_params=200 * 10**9)
LARGE_SAVE = replace(RUN, strategy=DEEPSPEED, gathers_on_save="ZeRO-3")
FSDP_SAVE = replace(
    RUN,
    strategy=strategy(family="FSDP", world_size=2),
    gathers_on_save="FSDP with FULL_STATE_DICT",
)
LLAMA = ModelShape(vocab_size=32, num_layers=32, num_heads=32, num_key_value_heads=8, head_size=128)
WORDS = replace(MODEL, shape=LLAMA, attention="sdpa")
LONG = DataFacts(lengths=(8192,) * 200)
REENTRANT = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
FSDP2 = strategy(family="FSDP", wrapped_class="FSDPLlamaForCausalLM")
ACCUMULATES = replace(
    run(gradient_accumulation_steps=4), strategy=strategy(family="FSDP", world_size=8)
)
EACH_TIME = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
LOCK = ExtensionLock(path=Path("/cache/cpu_adam/lock"), age_seconds=9e4, holder=None, unseen="")

CHANGES: list[tuple[dict, str, Severity]] = [
    ({"main": main(reading=FULL)}, "host-memory-pressure", Severity.ERROR),
    (
        {"main": main(shared=SMALL_SHM), "data": BATCH, "run": run(dataloader_num_workers=4)},
        "shared-memory-small",
        Severity.ERROR,
    ),
    ({"main": main(swap_bytes=64 * GIB, swap_used_bytes=40 * GIB), "run": OFFLOADS}, "swap-in-use", Severity.WARNING),
    (
        {
            "main": main(memlock_bytes=64 * 1024),
            "run": replace(RUN, strategy=strategy(num_machines=2)),
        },
        "memlock-small",
        Severity.WARNING,
    ),
    ({"machine": Machine(is_wsl=True)}, "windows-limits", Severity.WARNING),
    ({"cards": (OLD_CARD,), "run": run(bf16=True)}, "bf16-emulated", Severity.WARNING),
    ({"cards": (peer(700 * MIB),)}, "stray-context", Severity.WARNING),
    ({"run": replace(RUN, disk_free_bytes=GIB)}, "disk-too-small", Severity.ERROR),
    ({"run": LARGE_SAVE}, "save-gathers", Severity.ERROR),
    ({"run": FSDP_SAVE}, "save-gathers", Severity.WARNING),
    ({"run": ACCUMULATES}, "fsdp-whole-gradients", Severity.ERROR),
    ({"model": WORDS, "data": LONG, "capability": (7, 5)}, "attention-stores-scores", Severity.WARNING),
    ({"run": replace(run(**BEST), strategy=strategy(family="DeepSpeed"))}, "best-model-at-end", Severity.WARNING),
    ({"model": ADAPTERS, "run": run(**BEST)}, "best-model-at-end", Severity.WARNING),
    ({"run": run(**VLLM, vllm_gpu_memory_utilization=0.9)}, "vllm-share", Severity.WARNING),
    ({"environ": {"CUDA_LAUNCH_BLOCKING": "1"}}, "debug-switch", Severity.WARNING),
    ({"run": replace(run(**REENTRANT), strategy=FSDP2)}, "known-version", Severity.WARNING),
    ({"run": run(torch_compile=True), "versions": {"torch": "2.9.1+cu128"}}, "known-version", Severity.WARNING),
    ({"plan": plan(79 * GIB, fits=True)}, "card-too-full", Severity.ERROR),
    ({"device_free_bytes": 80 * GIB, "plan": plan(78 * GIB, fits=True)}, "plan-is-tight", Severity.WARNING),
    ({"plan": plan(90 * GIB, fits=False, failed_request_bytes=GIB)}, "plan-does-not-fit", Severity.ERROR),
    ({"plan": plan(9 * GIB, host_shortage="each machine needs 248 GiB")}, "plan-host-memory", Severity.ERROR),
    ({"no_plan": "a plan cannot predict torch_compile"}, "plan-not-made", Severity.INFO),
    ({"failed": ("the data: OSError: gone",)}, "check-not-made", Severity.INFO),
]  # fmt: skip


CHANGED = [
    (Facts(locks=(LOCK,)), "extension-lock", Severity.WARNING),
    *((replace(HEALTHY, **change), code, severity) for change, code, severity in CHANGES),
]


def test_a_healthy_run_has_no_findings() -> None:
    assert judge(HEALTHY).findings == ()
    values = {**ACCUMULATES.values, "accelerator_config": EACH_TIME}
    assert judge(replace(HEALTHY, run=replace(ACCUMULATES, values=values))).findings == ()
    assert judge(Facts()).findings == ()


@pytest.mark.parametrize(
    ("facts", "code", "severity"), CHANGED, ids=[f"{n}-{code}" for n, (_, code, _) in enumerate(CHANGED)]
)  # fmt: skip
def test_one_change_gives_one_finding(facts: Facts, code: str, severity: Severity) -> None:
    (found,) = judge(facts).findings
    assert (found.code, found.severity) == (code, severity)
    assert judge(facts).worst == severity


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (Machine(is_wsl=True), "Headroom(leave_fraction=0.05)"),  # WSL#11050: it has no such policy
        (Machine(is_windows=True), "Prefer No Sysmem Fallback"),
    ],
)
def test_a_card_that_spills_under_wsl_gets_a_limit_of_torchs(machine: Machine, said: str) -> None:
    (found,) = judge(replace(HEALTHY, machine=machine)).findings
    assert "very slow" in found.summary
    assert said in found.remedy


def test_a_streamed_base_that_would_fit_is_told_beside_the_plan() -> None:
    base = Streamed(
        num_layers=32,
        resident_layers=2,
        num_bytes=13 * GIB,
        copied_bytes_per_micro_batch=25 * 10**9,
        copied_bytes_per_step=100 * 10**9,
        copy_seconds_per_step=4.0,
    )
    does_not_fit = plan(90 * GIB, fits=False, failed_request_bytes=GIB, num_gpus=2)
    facts = replace(HEALTHY, plan=does_not_fit)
    fits = replace(plan(70 * GIB, fits=True, num_gpus=2), streamed=base)

    found = judge(replace(facts, streamed_plan=fits)).findings
    assert [each.code for each in found] == ["plan-does-not-fit", "streaming-would-fit"]
    assert "70.00 GiB" in found[1].summary
    assert "at least 4.0 s per step at 25 GB/s" in found[1].evidence
    assert "one copy of the base for all 2 ranks" in found[1].remedy

    too_large = replace(fits, fits=False, failed_request_bytes=GIB)
    found = judge(replace(facts, streamed_plan=too_large)).findings
    assert [each.code for each in found] == ["plan-does-not-fit"]


@pytest.mark.parametrize(
    ("change", "capability", "lengths", "said"),
    [
        ({}, (8, 0), (8192,), "sdpa: flash"),
        ({}, (8, 0), (8192, 4096), "sdpa: memory-efficient"),
        ({"trainable_bytes": {"float32": GIB}}, (9, 0), (8192,), "sdpa: memory-efficient"),
        ({"trainable_bytes": {"float16": GIB}}, (7, 5), (8192,), "sdpa: memory-efficient"),
        ({}, None, (8192,), "sdpa"),
        ({"attention": "flash_attention_2"}, (8, 0), (8192,), "flash_attention_2"),
    ],
)
def test_the_attention_kernel_of_these_shapes_is_named(change, capability, lengths, said) -> None:
    model = replace(WORDS, **change)
    facts = replace(HEALTHY, model=model, data=DataFacts(lengths=lengths), capability=capability)
    shown = dict(judge(facts).groups)["model"]
    assert [line.seen for line in shown if line.name == "attention"] == [said]
    assert judge(facts).findings == ()


def test_logits_must_fit_in_what_a_vllm_leaves_of_the_card() -> None:
    words = replace(WORDS, predicts_tokens=True, shape=replace(LLAMA, vocab_size=128_000))
    data = DataFacts(lengths=(512,), longest_target=512)
    alone = replace(HEALTHY, model=words, data=data)
    half = {**VLLM, "vllm_gpu_memory_utilization": 0.5}
    shared = replace(alone, run=run(**half))
    asleep = replace(alone, run=run(**half, vllm_enable_sleep_mode=True))
    assert judge(alone).findings == judge(asleep).findings == ()
    assert [found.code for found in judge(shared).findings] == ["logits-fp32"]


def test_rows_grouped_by_length_begin_with_the_worst_batch() -> None:
    facts = replace(HEALTHY, run=run(train_sampling_strategy="group_by_length"))
    shown = [line.seen for line in dict(judge(facts).groups)["model"] if line.name == "rows"]
    assert shown == ["64 tokens, the longest 64, which the first batch has"]


def test_adapters_that_help_not_are_told_beside_the_plan() -> None:
    breakdown: Mapping[Category, int] = {"activations": 60 * GIB, "frozen weights": 15 * GIB}
    numbers = {"num_parameters": 8 * 10**9, "num_trainable_parameters": 10**7}
    does_not_fit = plan(90 * GIB, breakdown, fits=False, failed_request_bytes=GIB, **numbers)
    found = judge(replace(HEALTHY, plan=does_not_fit)).findings
    assert [each.code for each in found] == ["plan-does-not-fit", "adapters-save-little"]


def test_fsdp2_checkpointing_of_accelerate_before_1_15_is_known(tmp_path: Path) -> None:
    file = tmp_path / "fsdp2.yaml"
    file.write_text(
        "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"
        "  fsdp_activation_checkpointing: true\n"
    )
    for version, expected in (("1.14.0", ["known-version"]), ("1.15.0", [])):
        versions = {"accelerate": version}
        facts = replace(HEALTHY, versions=versions, document=read_document(file))
        found = judge(facts).findings
        assert [each.code for each in found if each.severity > Severity.INFO] == expected


@pytest.mark.parametrize(("version", "frozen", "expected"), [
    ("1.12.0", {"bfloat16": GIB}, ["known-version"]),
    ("1.12.0", {"float32": GIB}, []),
    ("1.13.0", {"bfloat16": GIB}, []),
])  # fmt: skip
def test_a_frozen_base_that_fsdp2_made_float32_is_known(version, frozen, expected) -> None:
    facts = replace(
        HEALTHY,
        versions={"accelerate": version},
        model=replace(ADAPTERS, frozen_bytes=frozen),
        run=replace(run(bf16=True), strategy=FSDP2),
    )
    found = [each for each in judge(facts).findings if each.code == "known-version"]
    assert [each.code for each in found] == expected
    assert all("accelerate#3844" in each.evidence for each in found)


@pytest.mark.parametrize(("version", "frozen", "issue"), [
    ("5.23.0", {"uint8": GIB, "bfloat16": 8 * GIB}, "bitsandbytes#1849"),
    ("4.57.6", {"uint8": GIB, "bfloat16": 8 * GIB}, ""),
    ("5.23.0", {"bfloat16": 8 * GIB}, "transformers#43749"),
    ("4.57.6", {"bfloat16": 8 * GIB}, ""),
])  # fmt: skip
def test_what_transformers_5_does_to_experts_is_known(version, frozen, issue, tmp_path) -> None:
    file = tmp_path / "fsdp2.yaml"
    loads = "fsdp_cpu_ram_efficient_loading: true" if "uint8" not in frozen else "fsdp_version: 2"
    file.write_text(f"distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  {loads}\n")
    versions = {"transformers": version}
    facts = replace(HEALTHY, versions=versions, document=read_document(file))
    mixture = replace(ADAPTERS, frozen_bytes=frozen, expert_bytes=8 * GIB)

    def found(model):
        judged = judge(replace(facts, model=model)).findings
        return [each for each in judged if each.code == "known-version"]

    assert [issue in each.evidence for each in found(mixture)] == [True] * bool(issue)
    assert not found(replace(mixture, expert_bytes=0))


@pytest.mark.parametrize(("versions", "arguments", "issue"), [
    ({"trl": "1.4.0"}, {"activation_offloading": True}, "trl#5700"),
    ({"trl": "1.5.0"}, {"activation_offloading": True}, ""),
    ({"trl": "1.4.0"}, {"activation_offloading": False}, ""),
    ({"vllm": "0.16.1"}, {"vllm_enable_sleep_mode": True}, "vllm#32714"),
    ({"vllm": "0.16.1+cu128"}, {"vllm_enable_sleep_mode": True}, "vllm#32714"),
    ({"vllm": "a branch"}, {"vllm_enable_sleep_mode": True}, ""),
])  # fmt: skip
def test_a_fault_that_explain_knows_is_found_before_the_run(versions, arguments, issue) -> None:
    facts = replace(HEALTHY, versions=versions, run=run(**arguments))
    found = [each for each in judge(facts).findings if each.code == "known-version"]
    assert [issue in each.evidence for each in found] == [True] * bool(issue)
    assert all("pip install -U" in each.remedy for each in found)


def test_a_check_that_fails_is_a_note_and_costs_no_other() -> None:
    broken = replace(HEALTHY, run=run(auto_find_batch_size=True), main=main(shared=None))
    found = judge(broken).findings
    assert [each.code for each in found] == ["auto-find-batch-size", "check-not-made"]
    assert "AttributeError" in found[1].evidence


def test_the_padding_of_random_batches_is_what_they_have_on_average() -> None:
    assert measure_waste([10] * 50, 8) == pytest.approx(0.0)
    assert measure_waste([1, 3], 1) == pytest.approx(0.0)
    # Two rows of 1 or 3 are padded to 3 in three cases of four: 2.5 on average, of which 2 are used.
    assert measure_waste([1, 3], 2) == pytest.approx(1 - 2 / 2.5)
