"""All kinds of runs that a config and flags describe, each on the dry card: what really ran there is in the plan."""

import json
from dataclasses import replace

import pytest
import transformers

from tests.models import IS_OLD
from tests.planner.test_plans import LORA, request, tiny
from trainer_plugins.drycuda.predict import plan_run, predict_one
from trainer_plugins.launch import configs
from trainer_plugins.launch.main_memory import PROCESS_BYTES, HostLimits
from trainer_plugins.planner.cards import card_of
from trainer_plugins.planner.plan import MemoryPlan, NotPredicted, PlanError
from trainer_plugins.units import GIB, MIB

HAS_HEADS = not transformers.__version__.startswith("4.")
WIDE = tiny(hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
LENGTH = 32


def planned(*flags: str, config=None, **how) -> MemoryPlan:
    length = how.pop("sequence_length", LENGTH)
    return predict_one(request(config or tiny(), *flags, sequence_length=length, **how))


def test_without_a_card_a_plan_says_what_is_needed_and_the_smallest_card() -> None:
    asked = request(tiny(), sequence_length=LENGTH)
    plan = predict_one(replace(asked, card=None))
    assert (plan.fits, plan.fits_card, plan.capacity_bytes, plan.gpu) == (None, None, None, None)
    assert plan.nvidia_smi_peak_bytes == plan.reserved_peak_bytes
    assert plan.smallest_card_bytes is not None
    assert plan.allocated_peak_bytes < plan.smallest_card_bytes < 600 * MIB
    on_it = replace(asked, card=card_of(f"{plan.smallest_card_bytes // MIB + 1}MiB,sm_90"))
    assert predict_one(on_it).fits is True


def offloaded(*devices: str, num_gpus: int = 2) -> MemoryPlan:
    zero = {f"offload_{name}": {"device": "cpu", "pin_memory": True} for name in devices}
    settings = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **zero}}
    batch = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    flags = ("--deepspeed", json.dumps({**settings, **batch}), "--bf16", "True")
    return planned(*flags, config=WIDE, num_gpus=num_gpus, gpu="h100-80gb")


def test_what_deepspeed_offloads_is_in_main_memory() -> None:
    plan = offloaded("optimizer")
    states = 12 * plan.num_parameters // 2  # the weights in float32 and two averages, a rank
    assert plan.host_pinned_bytes_per_node > states
    assert plan.host_ram_bytes_per_node >= 2 * states
    assert plan.host_process_bytes_per_node >= 2 * PROCESS_BYTES
    assert plan.planned["strategy"] == "DeepSpeed ZeRO-3"


def test_what_fsdp2_offloads_is_in_main_memory() -> None:
    """transformers' own AdamW, fused, then steps on the CPU."""
    asked = request(
        {**WIDE, "vocab_size": 8192}, "--bf16", "True", sequence_length=LENGTH, num_gpus=2
    )
    plan = predict_one(replace(asked, launch_file=str(configs.path("fsdp2_offload"))))
    assert plan.planned["strategy"].startswith("FSDP2")
    both = 16 * plan.num_parameters  # weights, gradients and two averages
    assert plan.host_moments["optimizer step"] > both
    assert "optimizer states" not in plan.breakdown


@pytest.mark.all
def test_what_deepspeed_offloads_is_not_on_the_card() -> None:
    on_card, in_main = offloaded(), offloaded("optimizer")
    states = 12 * on_card.num_parameters // 2
    gone = on_card.allocated_peak_bytes - in_main.allocated_peak_bytes
    assert gone == pytest.approx(states, rel=0.2)
    assert on_card.host_pinned_bytes_per_node < states


@pytest.mark.parametrize(("kind", "casts"), [("FULL", True), ("SHARDED", False)])
@pytest.mark.all
def test_what_the_first_rank_does_alone_counts_once(tmp_path, kind: str, casts: bool) -> None:
    """Under FSDP rank 0 reads the weights, and gathers a whole state; of a sharded one each has its part."""
    text = configs.path("fsdp2").read_text()
    assert "FULL_STATE_DICT" in text
    file = tmp_path / "fsdp2.yaml"
    file.write_text(text.replace("FULL_STATE_DICT", f"{kind}_STATE_DICT"))
    asked = request(WIDE, "--bf16", str(casts), sequence_length=LENGTH, num_gpus=8)
    plan = predict_one(replace(asked, launch_file=str(file)))
    assert plan.planned["strategy"].startswith("FSDP2")
    weights = 4 * plan.num_parameters  # in float32, and so are each of two averages
    times = plan.host_moments.get("load", 0) / weights
    assert 7.9 < times < 9 if casts else times < 1.5, "each rank casts all of them, if any does"
    assert weights / 2 < plan.host_moments["save"] < 4 * weights, "once, and not eight times"


@pytest.mark.all
def test_deepspeed_trains_on_one_card_as_its_launcher_would_start_it() -> None:
    """Without a launcher it looks for other ranks by MPI, which few have installed."""
    plan = offloaded("optimizer", num_gpus=1)
    assert (plan.num_gpus, plan.planned["strategy"]) == (1, "DeepSpeed ZeRO-3")
    assert plan.host_pinned_bytes_per_node > 11 * plan.num_parameters
    settings = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
    plan = plan_run(tiny(), {"deepspeed": settings, "bf16": True}, seq_length=LENGTH)
    assert plan.planned["strategy"] == "DeepSpeed ZeRO-2"


@pytest.mark.all
def test_ranks_by_the_thousand_are_rank_0_alone() -> None:
    plan = offloaded(num_gpus=1024)
    assert plan.num_gpus == 1024
    assert "only rank 0 of 1024 ran; " in " ".join(plan.assumptions)


@pytest.mark.parametrize(
    ("exported", "words"),
    [
        ({}, "DDP"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "FSDP2"),
        (
            {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"},
            "tensor parallelism",
        ),
    ],
)
@pytest.mark.all
def test_the_launch_decides_what_divides_the_work(exported, words) -> None:
    # transformers saves no optimizer of a model that is divided as it is loaded, and says so.
    flags = ("--save_only_model", "True") if words == "tensor parallelism" else ()
    asked = request(tiny(), *flags, sequence_length=LENGTH, num_gpus=2)
    plan = predict_one(replace(asked, environment=exported))
    assert plan.planned["strategy"] == words
    assert (" (2 share a row)" in plan.planned["batch"]) is (words == "tensor parallelism")


def test_main_memory_that_is_short_is_said_and_the_card_judged_by_itself() -> None:
    asked = request(WIDE, sequence_length=LENGTH)
    plan = predict_one(replace(asked, host=HostLimits(total_bytes=300 * MIB)))
    assert (plan.fits, plan.fits_card) == (False, True)
    assert plan.host_shortage is not None
    assert "of main memory, but has 300.0 MiB" in plan.host_shortage


@pytest.mark.all
def test_one_memory_for_both_holds_python_and_its_libraries_too() -> None:
    asked = request(WIDE, sequence_length=LENGTH)
    apart = predict_one(replace(asked, card=card_of("h100-80gb")))
    one = predict_one(replace(asked, card=card_of("gb10")))
    assert one.context_bytes > PROCESS_BYTES
    assert one.allocated_peak_bytes == apart.allocated_peak_bytes
    assert one.fits is True
    short = predict_one(replace(asked, card=replace(card_of("gb10"), capacity_bytes=GIB)))
    assert short.fits is False


@pytest.mark.all
def test_settings_of_a_request_replace_those_of_the_environment(monkeypatch) -> None:
    """The older name of the variable, which is read first, may be set for another run."""
    asked = request(WIDE, sequence_length=LENGTH, allocator="expandable_segments:True")
    expected = predict_one(asked)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    found = predict_one(asked)
    assert found.reserved_peak_bytes == expected.reserved_peak_bytes
    usual = predict_one(replace(asked, allocator=""))
    assert usual.reserved_peak_bytes != expected.reserved_peak_bytes


@pytest.mark.parametrize("quantisation", [None, {"load_in_4bit": True}])
@pytest.mark.all(but=1)
def test_a_base_that_is_streamed_waits_in_main_memory(quantisation) -> None:
    asked = request(WIDE, sequence_length=LENGTH, peft={**LORA, "r": 4}, quantisation=quantisation)
    whole = predict_one(asked)
    plan = predict_one(replace(asked, resident_layers=1))
    assert plan.streamed is not None
    assert (plan.streamed.num_layers, plan.streamed.resident_layers) == (4, 1)
    assert plan.streamed.copied_bytes_per_step > plan.streamed.num_bytes
    assert plan.host_pinned_bytes_per_node >= plan.streamed.num_bytes
    spared = whole.breakdown["frozen weights"] - plan.breakdown["frozen weights"]
    assert spared > 0.5 * plan.streamed.num_bytes
    if quantisation:
        assert plan.planned["quantised"] == "4 bits, by bitsandbytes"


def test_a_streamed_base_that_is_trained_is_refused() -> None:
    with pytest.raises(PlanError, match="none of its 2 layers has frozen weights"):
        predict_one(
            replace(request(tiny(num_hidden_layers=2), sequence_length=LENGTH), resident_layers=1)
        )


def test_an_evaluation_a_save_and_a_resumption_have_peaks_of_their_own() -> None:
    plan = planned("--eval_strategy", "epoch", "--per_device_eval_batch_size", "16")
    assert plan.moments.keys() == {
        *("load", "forward", "backward", "optimizer step", "evaluation", "save", "resume")
    }
    few = planned("--eval_strategy", "epoch", "--per_device_eval_batch_size", "2")
    at_once = (each.moments["evaluation"].allocated_bytes for each in (plan, few))
    assert next(at_once) > next(at_once)


@pytest.mark.all
def test_text_that_is_generated_to_be_judged_is_a_moment() -> None:
    t5 = {"model_type": "t5", "vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 128}
    more = {"num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0}
    generates = ("--eval_strategy", "epoch", "--predict_with_generate", "True")
    plan = planned(
        *generates, "--generation_max_length", "12", config={**t5, **more}, dtype="float32"
    )
    assert plan.moments["generation"].allocated_bytes > 0
    assert plan.moments["evaluation"].allocated_bytes > 0


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("sft", ("--packing", "True", "--max_length", "32")),
        ("dpo", ()),
        ("kto", ("--per_device_train_batch_size", "2")),
        ("reward", ()),
        ("orpo", ()),
        ("cpo", ()),
        ("grpo", ("--per_device_train_batch_size", "4", "--num_generations", "4")),
        ("rloo", ("--per_device_train_batch_size", "4", "--num_generations", "4")),
    ],
)
@pytest.mark.skipif(not HAS_HEADS, reason="TRL 1.16 needs transformers 5")
@pytest.mark.all(but=2)
def test_a_trainer_of_trl_trains_by_its_own_code(name: str, flags: tuple[str, ...]) -> None:
    online = name in ("grpo", "rloo")
    more = ("--max_completion_length", "8") if online else ()
    plan = planned(*flags, *more, trainer=name, dtype=None)
    assert plan.planned["trainer"].casefold() == f"trl's {name}trainer"
    assert ("generation" in plan.moments) is online
    assert plan.moments["backward"].allocated_bytes > 4 * plan.num_parameters


@pytest.mark.skipif(not HAS_HEADS, reason="TRL 1.16 needs transformers 5")
def test_vllm_has_its_share_of_the_card() -> None:
    flags = ("--num_generations", "4", "--max_completion_length", "8")
    vllm = ("--use_vllm", "True", "--vllm_gpu_memory_utilization", "0.5")
    how = {"trainer": "grpo", "dtype": None, "rows": 4, "gpu": "6GiB,sm_90"}
    plan = planned(*flags, *vllm, **how)
    assert plan.breakdown["vLLM"] == 3 * GIB


@pytest.mark.all
def test_a_sound_and_a_picture_are_as_large_as_they_are_said_to_be() -> None:
    small = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    hears = {"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"], "vocab_size": 32}
    sizes = {**small, "intermediate_size": 128, "pad_token_id": 0}
    short, long = (
        planned(config={**hears, **sizes}, dtype="float32", sound_seconds=seconds)
        for seconds in (1.0, 8.0)
    )
    assert long.breakdown["activations"] > 4 * short.breakdown["activations"]
    sees = {"model_type": "vit", "architectures": ["ViTForImageClassification"]}
    plan = planned(config={**sees, **sizes, "image_size": 224}, dtype="float32")
    assert "a picture has 3 x 224 x 224 numbers (image_size of the config)" in plan.assumptions


@pytest.mark.parametrize(
    ("config", "line"),
    [
        *(() if IS_OLD else [(tiny(attn_implementation="flash_attention_2"), "FlashAttention2")]),
        (
            tiny(quantization_config={"quant_method": "gptq", "bits": 4}),
            "a gptq checkpoint from its config alone",
        ),
    ],
)
def test_what_needs_a_package_that_is_not_there_is_said(config, line: str) -> None:
    with pytest.raises(PlanError, match=line) as refused:
        planned(config=config)
    if "gptq" in line:
        assert isinstance(refused.value, NotPredicted)


def test_states_on_a_disk_have_no_plan() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}
    asked = replace(request(tiny()), launch_file=str(configs.path("zero3_offload_nvme")))
    with pytest.raises(NotPredicted, match="offload_optimizer to NVMe: plan it with device cpu"):
        planned("--deepspeed", json.dumps({"zero_optimization": zero}), num_gpus=2)
    with pytest.raises(NotPredicted, match="offload_optimizer to NVMe: plan it with device cpu"):
        predict_one(asked)
