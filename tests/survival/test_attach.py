"""survive_oom in the life of a run: attached and let go, told, remembered; and what happens when nothing helps."""

import copy
import json
import math

import pytest
import torch

from tests.models import tiny_llama
from tests.survival.failing import (
    Run,
    gradients_off_by,
    off_by_steps,
    refuse,
    small_trainer,
    survive,
)
from tests.written import read_entries
from trainer_plugins import checkpointing, survive_oom
from trainer_plugins.record.timeline import Remark
from trainer_plugins.survival.exact.finality import is_reentrant
from trainer_plugins.survival.memo import memo_of
from trainer_plugins.units import MIB


def first_micro_batch(trainer) -> int:
    return Run(trainer).num_allocations[0]


def remarks(tmp_path, *codes: str) -> list:
    return [each for each in read_entries(tmp_path, Remark) if each.finding.code in codes]


def test_detach_restores_everything(tmp_path) -> None:
    trainer = small_trainer(tmp_path)
    before = (
        dict(vars(trainer)),
        dict(vars(trainer.accelerator)),
        list(trainer.callback_handler.callbacks),
    )

    survival = survive_oom(trainer)
    assert (vars(trainer), vars(trainer.accelerator), trainer.callback_handler.callbacks) != before
    survival.detach()
    survival.detach()

    assert (vars(trainer), vars(trainer.accelerator), trainer.callback_handler.callbacks) == before


def test_a_copied_trainer_survives_as_well(tmp_path) -> None:
    """Both share accelerate's Accelerator, which does not let itself be copied."""
    whole = Run(small_trainer(tmp_path))
    trainer = small_trainer(tmp_path)
    survival = survive_oom(trainer)
    copied = copy.deepcopy(trainer)
    for one in (copied, trainer):
        run = Run(one, {0: [60], 1: [300]})
        assert run.allocations.num_failed == 2
        assert gradients_off_by(run, whole) <= 1e-6
    survival.detach()
    assert Run(copied, {0: [60]}).allocations.num_failed == 1


def test_as_a_context_manager(tmp_path) -> None:
    trainer = small_trainer(tmp_path)
    with survive_oom(trainer):
        with pytest.raises(ValueError, match=r"something has replaced trainer\.compute_loss"):
            survive_oom(trainer)
        trainer.train()

    assert "compute_loss" not in vars(trainer)
    assert trainer.state.global_step == 2


def test_what_was_put_on_top_stays(tmp_path, caplog) -> None:
    trainer = small_trainer(tmp_path)
    survival = survive_oom(trainer)
    ours = trainer.accelerator.backward
    trainer.accelerator.backward = theirs = lambda loss, **kwargs: ours(loss, **kwargs)

    survival.detach()

    assert trainer.accelerator.backward is theirs
    assert "backward was replaced again later" in caplog.text
    with pytest.raises(torch.OutOfMemoryError):
        Run(trainer, {0: [20]})


def test_where_everything_fits_nothing_changes(tmp_path, caplog) -> None:
    whole, watched = survive(lambda: small_trainer(tmp_path), {})

    assert gradients_off_by(watched, whole) == 0
    assert watched.logged == whole.logged
    assert watched.num_allocations == whole.num_allocations
    assert "divided" not in caplog.text
    assert not [
        logs for logs in watched.trainer.state.log_history if "memory/divided_micro_batches" in logs
    ]


def test_it_is_told_in_words_in_the_timeline_and_in_the_history(tmp_path, caplog) -> None:
    trainer = survive(lambda: small_trainer(tmp_path), {0: 0.8, 3: 0.3})[1].trainer

    told = [
        record.message
        for record in caplog.records
        if record.name.startswith("trainer_plugins.survival")
    ]
    assert len(told) == 2
    assert told[0].startswith(
        "step 1: [out-of-memory-survived] 4 rows (52 tokens, including padding) ran out of memory in the backward pass; "
        "the micro-batch was computed in 2 pieces of at most 2 rows (1 failed attempt, "
    )
    assert (
        "the limit is now 2 rows of this length at once; CUDA out of memory. Tried to allocate 2.00 MiB"
        in told[0]
    )
    assert "step 2" in told[1]
    assert "ran out of memory in the forward pass" in told[1]
    assert [entry.step for entry in remarks(tmp_path, "out-of-memory-survived")] == [1, 2]
    assert [
        logs["out_of_memory_survived"] for logs in trainer.state.log_history if "loss" in logs
    ] == [1, 2]


@pytest.mark.parametrize(
    "restores", [False, True], ids=["by ourselves", "callbacks restored by transformers"]
)
def test_the_limit_goes_with_the_checkpoint(tmp_path, restores: bool) -> None:
    def make(steps=4):
        settings = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
        return small_trainer(
            tmp_path, steps=steps, restore_callback_states_from_checkpoint=restores, **settings
        )

    whole = Run(make())
    trainer = make(steps=2)
    survive_oom(trainer)
    first = Run(trainer, {0: [whole.num_allocations[0] // 2]})
    trainer = make()
    survive_oom(trainer)
    second = Run(trainer, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))

    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["SurvivalMemo"]["attributes"]["limit"] == 26
    assert off_by_steps(first.gradients + second.gradients, whole.gradients) <= 1e-12
    assert min(second.num_allocations) >= 1.8 * max(whole.num_allocations), (
        "each is divided beforehand"
    )
    assert len(remarks(tmp_path, "out-of-memory-survived")) == 1
    assert [
        logs["step"]
        for logs in second.trainer.state.log_history
        if "out_of_memory_survived" in logs
    ] == [1]


def test_the_limit_of_another_way_to_train_is_not_taken_up(tmp_path) -> None:
    def make(**kwargs):
        trainer = small_trainer(tmp_path, save_strategy="steps", save_steps=1, **kwargs)
        survive_oom(trainer)
        return trainer

    Run(make(steps=1), {0: [100]})
    resumed = Run(
        make(gradient_checkpointing=True), resume_from_checkpoint=str(tmp_path / "checkpoint-1")
    )

    assert max(resumed.num_allocations) < 1.5 * first_micro_batch(
        small_trainer(tmp_path, gradient_checkpointing=True)
    )


def test_the_limit_of_a_card_of_another_size_is_not_taken_up(tmp_path, simgpu) -> None:
    def limit_on(capacity_mib: int, resume: bool) -> float:
        simgpu.set_capacity(capacity_mib * MIB)
        trainer = small_trainer(
            tmp_path, tiny_llama(), use_cpu=False, steps=2, save_strategy="steps", save_steps=1,
            restore_callback_states_from_checkpoint=True,
        )  # fmt: skip
        survive_oom(trainer, plan_first=False)
        if resume:
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        else:
            simgpu.fail_at(200)
            trainer.train()
        return memo_of(trainer).limit

    learned = limit_on(64, resume=False)
    assert learned < math.inf
    assert limit_on(64, resume=True) == learned
    assert limit_on(128, resume=True) == math.inf


def test_a_limit_that_was_learned_without_checkpointing_is_open_again_with_it(tmp_path) -> None:
    trainer = small_trainer(tmp_path, per_device_train_batch_size=2)
    survive_oom(trainer)
    Run(
        trainer, {0: [60, 2600]}
    )  # two rows; between them it is measured whether they add up; and one of them

    memo = memo_of(trainer)
    assert memo.rungs == ["checkpointing"]
    assert memo.limit == math.inf


def test_a_checkpoint_of_a_run_without_it_can_be_taken_up(tmp_path) -> None:
    Run(small_trainer(tmp_path, steps=1, save_strategy="steps", save_steps=1))
    trainer = small_trainer(tmp_path, steps=2, save_strategy="steps", save_steps=1)
    survive_oom(trainer)

    trainer.train(resume_from_checkpoint=True)

    assert (tmp_path / "checkpoint-2").exists()


def test_one_row_that_does_not_fit_switches_checkpointing_on(tmp_path) -> None:
    def make():
        return small_trainer(tmp_path, per_device_train_batch_size=1)

    whole = Run(make())
    trainer = make()
    survival = survive_oom(trainer)
    survived = Run(trainer, {0: [whole.num_allocations[0] * 3 // 4]})

    assert trainer.model.is_gradient_checkpointing
    assert not is_reentrant(trainer.model), "which would finish gradients in parts"
    assert gradients_off_by(survived, whole) <= 1e-12
    told = remarks(tmp_path, "out-of-memory-survived")[0].finding
    assert "in one piece, with checkpointing switched on" in told.summary
    assert "per_device_train_batch_size" not in told.remedy
    survival.detach()
    assert not trainer.model.is_gradient_checkpointing


def test_a_second_training_goes_on_with_what_the_first_has_switched_on(tmp_path) -> None:
    trainer = small_trainer(tmp_path, per_device_train_batch_size=1)
    survival = survive_oom(trainer)
    Run(trainer, {0: [200]})
    trainer.train()

    assert memo_of(trainer).rungs == ["checkpointing"]
    survival.detach()
    assert not trainer.model.is_gradient_checkpointing


@pytest.mark.parametrize(
    ("options", "num_rows", "why"),
    [
        (
            {"ladder": ()},
            1,
            "nothing smaller to try than 1 row (13 tokens, including padding), and nothing left to",
        ),
        (
            {"ladder": (), "min_micro_batch": 3},
            4,
            "nothing smaller to try than 4 rows (52 tokens, including padding)",
        ),
    ],
)
def test_when_nothing_helps_the_error_keeps_its_words(
    tmp_path, options, num_rows: int, why: str
) -> None:
    trainer = small_trainer(tmp_path, per_device_train_batch_size=num_rows)
    survive_oom(trainer, **options)

    with pytest.raises(torch.OutOfMemoryError) as raised:
        Run(trainer, {0: [100]})

    assert str(raised.value).startswith(
        "CUDA out of memory. Tried to allocate 2.00 MiB for number 100."
    )
    assert why in str(raised.value)
    (told,) = remarks(tmp_path, "out-of-memory-refused")
    assert why in told.finding.evidence
    if num_rows > 1:
        assert "halve per_device_train_batch_size" in told.finding.remedy
        assert f"{checkpointing.NAME}=True" in told.finding.remedy


NOT_INITIALIZED = RuntimeError(
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
)


@pytest.mark.parametrize(
    "error",
    [
        NOT_INITIALIZED,
        RuntimeError(
            "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"
        ),
        RuntimeError(
            'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":838'
        ),
        MemoryError(),
    ],
    ids=["cuBLAS", "driver", "NVML", "host"],
)
def test_a_full_card_has_other_words_too(tmp_path, error: Exception) -> None:
    whole, survived = survive(lambda: small_trainer(tmp_path), {1: 0.5}, error)

    assert gradients_off_by(survived, whole) <= 1e-12


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA driver error: out of memory"),  # expandable segments, half mapped
    ],
)
def test_what_the_process_does_not_survive_goes_through(tmp_path, error: Exception) -> None:
    trainer = small_trainer(tmp_path)
    survive_oom(trainer)

    with pytest.raises(RuntimeError) as raised:
        Run(trainer, {0: [100]}, error)
    assert raised.value is error


def test_what_may_be_something_else_stays_what_it_was_when_nothing_helps(tmp_path) -> None:
    trainer = small_trainer(tmp_path, per_device_train_batch_size=1)
    survive_oom(trainer, ladder=())

    with pytest.raises(RuntimeError, match=r"^CUDA error: CUBLAS_STATUS_NOT_INITIALIZED") as raised:
        Run(trainer, {0: [100]}, NOT_INITIALIZED)
    assert type(raised.value) is RuntimeError


def test_other_errors_go_through_as_they_are(tmp_path) -> None:
    def wrong(module, inputs):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x32 and 64x32)")

    model = tiny_llama().double()
    model.lm_head.register_forward_pre_hook(wrong)
    why = r"^mat1 and mat2 shapes cannot be multiplied \(4x32 and 64x32\)$"
    refuse(small_trainer(tmp_path, model), why, error=RuntimeError)
