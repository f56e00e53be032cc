"""The ways that `exec --fit` tries: no dry run is made, each answer is given."""

from dataclasses import replace
from typing import Any

import pytest
from transformers.trainer_pt_utils import AcceleratorConfig

from trainer_plugins import checkpointing
from trainer_plugins.cli.exec_fit import MAY
from trainer_plugins.planner.cards import card_of
from trainer_plugins.planner.compare.switches import LORA
from trainer_plugins.planner.plan import MemoryPlan, MomentPeak
from trainer_plugins.testing.drycuda import dry_search
from trainer_plugins.testing.drycuda.dry_plan import DryAnswer
from trainer_plugins.testing.drycuda.dry_run import DryRun
from trainer_plugins.units import GIB

_EACH_TIME = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
_PLAN = MemoryPlan(
    allocated_peak_bytes=20 * GIB, reserved_peak_bytes=20 * GIB, nvidia_smi_peak_bytes=21 * GIB,
    host_ram_bytes_per_node=0, capacity_bytes=24 * GIB, moment="backward", breakdown={},
    top_tensors=(), moments={"load": MomentPeak(allocated_bytes=GIB, reserved_bytes=GIB)},
    num_parameters=8, num_trainable_parameters=8,
)  # fmt: skip


def first_that_fits(
    monkeypatch: pytest.MonkeyPatch,
    is_fsdp: bool,
    may: tuple[str, ...] = (),
    fitting: dict[str, Any] = {"accelerator_config": _EACH_TIME},  # noqa: B006
    trainer: str = "SFTTrainer",
    **given: Any,
):
    """Return what is chosen of ways of which only one argument fits: gradients reduced each time."""
    arguments = {
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4,
        "gradient_checkpointing": True, "bf16": False, "fp16": False, "accelerator_config": AcceleratorConfig().to_dict(), **given,
    }  # fmt: skip

    def dry_plan(run: DryRun, tell: object) -> DryAnswer:
        fits = fitting.items() <= run.changed.items()
        plan = _PLAN if fits else replace(_PLAN, nvidia_smi_peak_bytes=30 * GIB, fits=False)
        plan = replace(plan, planned={"model": f"LlamaForCausalLM, trained by {trainer}"})
        return DryAnswer(plan, arguments, 2048, is_fsdp)

    monkeypatch.setattr(dry_search, "dry_plan", dry_plan)
    run = DryRun(command=["python", "train.py"], card=card_of("24GiB"))
    found, _ = dry_search.Variations(run, print).first_that_fits(may)
    return found


def test_under_fsdp_gradients_that_are_reduced_each_time_keep_the_result(monkeypatch) -> None:
    found = first_that_fits(monkeypatch, is_fsdp=True)
    assert found is not None
    assert found.changed == {"accelerator_config": _EACH_TIME}
    assert found.proposal.changes == ("gradients reduced each time",)
    assert first_that_fits(monkeypatch, is_fsdp=False) is None


def test_settings_of_accelerate_that_a_user_has_made_are_left_alone(monkeypatch) -> None:
    mine = {**AcceleratorConfig().to_dict(), "split_batches": True}
    assert first_that_fits(monkeypatch, is_fsdp=True, accelerator_config=mine) is None


@pytest.mark.parametrize(
    ("may", "fitting", "given"),
    [
        ("precision", {"bf16": True}, {}),
        ("length", {"max_length": 512}, {"max_length": 1024}),
        ("optim", {"optim": "adamw_bnb_8bit"}, {}),
        ("peft", {"peft_config": LORA}, {}),
    ],
)
def test_what_changes_the_result_is_tried_only_if_it_was_named(
    monkeypatch, may: str, fitting: dict[str, Any], given: dict[str, Any]
) -> None:
    found = first_that_fits(monkeypatch, False, (may,), fitting, **given)
    assert found is not None
    assert fitting.items() <= found.changed.items()
    others = tuple({*MAY} - {may})
    assert first_that_fits(monkeypatch, False, others, fitting, **given) is None


@pytest.mark.parametrize("given", [{"bf16": True}, {"fp16": True}])
def test_a_run_in_16_bits_keeps_its_precision(monkeypatch, given: dict[str, Any]) -> None:
    wanted: dict[str, Any] = {"bf16": True, "max_length": 1}
    assert first_that_fits(monkeypatch, False, ("precision",), wanted, **given) is None


def test_activations_stay_where_trl_loses_them(monkeypatch) -> None:
    wanted: dict[str, Any] = {checkpointing.OPTIONS: {"offload": True}}
    assert first_that_fits(monkeypatch, False, (), wanted) is not None
    assert first_that_fits(monkeypatch, False, (), wanted, trainer="DPOTrainer") is None
