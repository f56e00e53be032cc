"""The ways that `exec --fit` tries: no dry run is made, each answer is given."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import TrainingArguments

from trainer_plugins import checkpointing
from trainer_plugins.accumulation import Accumulation, Effect
from trainer_plugins.cli.exec_fit import MAY
from trainer_plugins.drycuda import dry_search
from trainer_plugins.drycuda.dry_plan import DryAnswer
from trainer_plugins.drycuda.dry_run import DryRun
from trainer_plugins.planner.cards import card_of
from trainer_plugins.planner.compare import switches
from trainer_plugins.planner.compare.switches import LORA
from trainer_plugins.planner.plan import MemoryPlan, Moment, MomentPeak
from trainer_plugins.planner.request import ConfigSource, PlanRequest
from trainer_plugins.units import GIB

_EACH_TIME = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
_PLAN = MemoryPlan(
    allocated_peak_bytes=20 * GIB, reserved_peak_bytes=20 * GIB, nvidia_smi_peak_bytes=21 * GIB,
    host_ram_bytes_per_node=0, capacity_bytes=24 * GIB, moment="backward", breakdown={"activations": 15 * GIB, "logits and loss": 5 * GIB, "gradients": 8 * GIB, "optimizer states": 8 * GIB},
    moments={"load": MomentPeak(allocated_bytes=GIB, reserved_bytes=GIB)},
    num_parameters=8, num_trainable_parameters=8,
)  # fmt: skip


_SHORT = 30 * GIB


def variations(
    monkeypatch: pytest.MonkeyPatch,
    is_fsdp: bool,
    fitting: dict[str, Any],
    trainer: str = "SFTTrainer",
    why_whole: dict[str, list[str]] = {},  # noqa: B006
    short: tuple[Moment, ...] = ("backward",),
    has_triton: bool = True,
    frees: int = 4 * GIB,
    **given: Any,
) -> tuple[dry_search.Variations, list[dict[str, object]]]:
    """Return a run of which only one argument fits, gradients reduced each time, and what is tried."""
    arguments = {
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "per_device_eval_batch_size": 8,
        "gradient_checkpointing": True, "bf16": False, "fp16": False, "accelerator_config": TrainingArguments(use_cpu=True).to_dict()["accelerator_config"], **given,
    }  # fmt: skip
    tried: list[dict[str, object]] = []

    def dry_plan(run: DryRun, tell: object) -> DryAnswer:
        tried.append({**run.changed})
        fits = fitting.items() <= run.changed.items()
        peak = MomentPeak(allocated_bytes=_SHORT, reserved_bytes=_SHORT)
        moments = {**_PLAN.moments, **dict.fromkeys(short, peak)}
        plan = replace(_PLAN, planned={"model": f"LlamaForCausalLM, trained by {trainer}"})
        if not fits:
            plan = replace(plan, fits=False, nvidia_smi_peak_bytes=_SHORT, moments=moments)
            halved = {8: 0, 4: frees}[int(str(run.changed.get("per_device_eval_batch_size", 8)))]
            least = _SHORT - halved
            plan = replace(plan, allocated_peak_bytes=least - GIB, smallest_card_bytes=least)
        return DryAnswer(plan, arguments, 2048, is_fsdp, why_whole)

    monkeypatch.setattr(dry_search, "dry_plan", dry_plan)
    monkeypatch.setattr(dry_search, "find_spec", {"triton": has_triton}.get)
    run = DryRun(command=["python", "train.py"], card=card_of("24GiB"))
    return dry_search.Variations(run, print), tried


def first_that_fits(
    monkeypatch: pytest.MonkeyPatch,
    is_fsdp: bool = False,
    may: tuple[str, ...] = (),
    fitting: dict[str, Any] = {"accelerator_config": _EACH_TIME},  # noqa: B006
    **given: Any,
):
    """Return what is chosen of the ways, what does not fit, and what was tried."""
    several, tried = variations(monkeypatch, is_fsdp, fitting, **given)
    found, failed = several.first_that_fits(may)
    return found, failed, tried


def test_time_limits_the_second_proposal_and_not_the_first(monkeypatch) -> None:
    """The run as it is took no time, so there is none left when the first way is tried."""
    given: dict[str, Any] = {"per_device_train_batch_size": 8, checkpointing.NAME: False}
    monkeypatch.setattr(dry_search, "_MOST_OF_THE_PLANS_TIME", 0.0)
    several, tried = variations(monkeypatch, False, {checkpointing.NAME: True}, **given)
    (only,) = several.proposals().proposals
    assert "checkpointing" in only.changes
    assert len(tried) > 2, "what comes before it does not fit"


def test_a_search_that_finds_nothing_ends(monkeypatch) -> None:
    monkeypatch.setattr(dry_search, "_MORE_SECONDS", -1)
    several, tried = variations(monkeypatch, False, {"none": 1}, gradient_checkpointing=False)
    plan = several.proposals()
    assert plan.proposals == ()
    assert plan.tried_without_success[-1] == "the rest was not tried, for lack of time"
    assert len(tried) == 1


def test_what_survival_does_not_divide_stays_as_it_is(monkeypatch) -> None:
    """Fewer rows and more accumulation might be another training."""
    fewer = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    rows: dict[str, Any] = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    found, _, _ = first_that_fits(monkeypatch, fitting=fewer, **rows)
    assert found is not None
    assert (found.rows_at_once, found.changed) == (1, {})

    read = {"unless vouched": ["compute_loss returns a mean over its micro-batch"]}
    found, _, _ = first_that_fits(monkeypatch, fitting=fewer, why_whole=read, **rows)
    assert found is not None
    assert found.vouches
    assert found.proposal.price.startswith("compute_loss returns a mean")

    whole = {"training": ["it has batch normalization"]}
    found, failed, _ = first_that_fits(monkeypatch, fitting=fewer, why_whole=whole, **rows)
    assert found is None
    assert failed[0] == "micro-batches cannot be split: it has batch normalization"

    same = replace(_PLAN, accumulation=Accumulation(Effect.SAME, "a sum"))
    monkeypatch.setattr("tests.drycuda.test_fit_ways._PLAN", same)
    found, _, _ = first_that_fits(monkeypatch, fitting=fewer, why_whole=whole, **rows)
    assert found is not None
    assert (found.rows_at_once, found.changed) == (0, fewer)
    rows["dataloader_drop_last"] = True  # it would drop other rows
    found, _, _ = first_that_fits(monkeypatch, fitting=fewer, why_whole=whole, **rows)
    assert found is None

    checkpointed = {checkpointing.NAME: True}
    rows[checkpointing.NAME] = False
    found, _, _ = first_that_fits(monkeypatch, fitting=checkpointed, why_whole=whole, **rows)
    assert found is not None
    assert (found.rows_at_once, found.changed) == (0, checkpointed)


@pytest.mark.parametrize("short", [("evaluation",), ("generation",), ("evaluation", "generation")])
@pytest.mark.parametrize("stays", [False, True])
def test_an_evaluation_that_is_short_gets_fewer_rows(monkeypatch, short, stays: bool) -> None:
    fewer = {"per_device_eval_batch_size": 2}
    whole = {"evaluation": ["its ranks compute each forward pass together"]} if stays else {}
    given = {"per_device_train_batch_size": 4, "short": short, "why_whole": whole}
    found, _, tried = first_that_fits(monkeypatch, fitting=fewer, **given)
    assert found is not None
    assert (found.rows_at_once, found.changed) == (0, fewer if stays else {})
    assert found.proposal.changes[0] == "2 rows at once during evaluation"
    assert [each.get("per_device_train_batch_size") for each in tried] == [None] * 3


def test_an_evaluation_that_keeps_all_outputs_is_not_halved_on_and_on(monkeypatch) -> None:
    """What the first halving has freed is more than all further ones can free."""
    fewer = {"per_device_eval_batch_size": 2}
    found, _, tried = first_that_fits(
        monkeypatch, fitting=fewer, short=("evaluation",), frees=2 * GIB
    )
    assert found is None
    assert [each.get("per_device_eval_batch_size") for each in tried][:3] == [None, 4, None]


def test_fewer_rows_at_once_evaluate_as_many_in_all() -> None:
    flags = ("--per_device_eval_batch_size", "4")
    source = ConfigSource(config={}, arguments=flags, num_evaluation_batches=25)
    smaller = switches.eval_rows(2).turn(PlanRequest(source=source)).source
    assert isinstance(smaller, ConfigSource)
    assert (smaller.num_evaluation_batches, smaller.find_flag("per_device_eval_batch_size")) == (
        50,
        "2",
    )


def test_what_cannot_free_enough_is_not_run(monkeypatch) -> None:
    """All activations and logits are 20 GiB: enough where 6 are missing, and not where 36 are."""
    monkeypatch.setattr("tests.drycuda.test_fit_ways._SHORT", 60 * GIB)
    found, failed, tried = first_that_fits(monkeypatch, fitting={"none": 1})
    assert found is None
    assert len(tried) == 1
    assert failed[0] == "1 row x 4 accumulation steps: 36.00 GiB short"
    assert all(": at least " in each for each in failed[1:])


def test_rows_that_cannot_fit_are_not_run_either(monkeypatch) -> None:
    """Of 60 GiB rows take 20: those of one row of eight are a lower bound without a run."""
    monkeypatch.setattr("tests.drycuda.test_fit_ways._SHORT", 60 * GIB)
    found, failed, tried = first_that_fits(
        monkeypatch, fitting={"none": 1}, per_device_train_batch_size=8
    )
    assert found is None
    assert len(tried) == 1
    assert failed[0].startswith("fewer rows at once: at least 19.")


def test_what_is_not_enough_alone_is_tried_with_others(monkeypatch) -> None:
    """Fewer rows alone are no run, so there is none to hold the first change against."""
    monkeypatch.setattr("tests.drycuda.test_fit_ways._SHORT", 83 * GIB // 2)
    both = {"use_liger_kernel": True, checkpointing.NAME: True}
    off = {checkpointing.NAME: False, "gradient_checkpointing": False}
    found, failed, tried = first_that_fits(
        monkeypatch,
        fitting=both,
        per_device_train_batch_size=8,
        **off,  # type: ignore[arg-type]
    )
    assert failed[0].startswith("fewer rows at once: at least ")
    assert tried[1]["use_liger_kernel"]
    assert found is not None
    assert found.changed == both


@pytest.mark.parametrize("has_triton", [True, False])
def test_a_fused_loss_is_chosen_only_where_its_kernels_can_run(monkeypatch, has_triton) -> None:
    """What is chosen is run here, where torch may be built for CPUs."""
    fused = {"use_liger_kernel": True}
    found, _, tried = first_that_fits(monkeypatch, fitting=fused, has_triton=has_triton)
    assert (found is not None) == has_triton
    assert any("use_liger_kernel" in each for each in tried) == has_triton


def test_under_fsdp_gradients_that_are_reduced_each_time_keep_the_result(monkeypatch) -> None:
    found, _, _ = first_that_fits(monkeypatch, is_fsdp=True)
    assert found is not None
    assert found.changed == {"accelerator_config": _EACH_TIME}
    assert found.proposal.changes == ("gradients reduced each time",)
    assert first_that_fits(monkeypatch, is_fsdp=False)[0] is None


def test_settings_of_accelerate_that_a_user_has_made_are_left_alone(monkeypatch) -> None:
    mine = {"split_batches": True}
    assert first_that_fits(monkeypatch, is_fsdp=True, accelerator_config=mine)[0] is None


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
    found, _, _ = first_that_fits(monkeypatch, False, (may,), fitting, **given)
    assert found is not None
    assert fitting.items() <= found.changed.items()
    others = tuple({*MAY} - {may})
    assert first_that_fits(monkeypatch, False, others, fitting, **given)[0] is None


@pytest.mark.parametrize("given", [{"bf16": True}, {"fp16": True}])
def test_a_run_in_16_bits_keeps_its_precision(monkeypatch, given: dict[str, Any]) -> None:
    wanted: dict[str, Any] = {"bf16": True, "max_length": 1}
    assert first_that_fits(monkeypatch, False, ("precision",), wanted, **given)[0] is None


def test_activations_stay_where_trl_loses_them(monkeypatch) -> None:
    wanted: dict[str, Any] = {checkpointing.OPTIONS: {"offload": True}}
    found, *_ = first_that_fits(monkeypatch, False, (), wanted)
    assert (found is not None) is checkpointing.CAN_OFFLOAD
    assert first_that_fits(monkeypatch, False, (), wanted, trainer="DPOTrainer")[0] is None
