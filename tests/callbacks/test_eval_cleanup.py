"""What evaluation leaves is dropped or named, on every path a Trainer takes."""

import pytest
import torch
from transformers import DynamicCache, Trainer
from transformers.generation import CompileConfig

from tests.conftest import CAPACITY_BYTES
from tests.events import at
from tests.models import tiny_llama
from tests.written import read_findings
from trainer_plugins import EvalGenerateCleanup, MemoryWatchdog, protect
from trainer_plugins.record.timeline import Flush, Remark, Sample, Timeline
from trainer_plugins.units import MIB


class LeavesACompiledCall(Trainer):
    """An evaluation that generates with a static cache, which leaves a compiled forward on the model."""

    def evaluate(self, *args, **kwargs):
        self.model.get_compiled_call(CompileConfig())
        return super().evaluate(*args, **kwargs)


class SilentEvaluation(Trainer):
    """Overrides evaluate and returns without on_evaluate, as open-unlearning's trainer does."""

    def evaluate(self, *args, **kwargs):
        self.model.get_compiled_call(CompileConfig())
        return {}


def steps_with_a_leftover(make_trainer, *callbacks, **kwargs) -> int:
    """Look, behind ours, what is left on the model when training goes on."""
    left: list[bool] = []
    look = at("step_begin", lambda now: left.append("_compiled_call" in vars(now.model)))
    trainer = make_trainer(*callbacks, look, **kwargs)
    trainer.train()
    assert len(left) == 8
    return sum(left) + ("_compiled_call" in vars(trainer.model))


@pytest.mark.all
def test_leftovers_are_dropped_before_training_goes_on(make_trainer, anywhere) -> None:
    for trainer_class in (LeavesACompiledCall, SilentEvaluation):
        for when in (
            {"eval_strategy": "steps", "eval_steps": 4},
            {"eval_strategy": "epoch"},
            {"eval_on_start": True},
        ):
            settings = {
                "trainer_class": trainer_class,
                "eval_strategy": "epoch",
                "num_train_epochs": 1,
                **when,
            }
            assert steps_with_a_leftover(make_trainer, **settings) > 0, when
            assert steps_with_a_leftover(make_trainer, EvalGenerateCleanup(), **settings) == 0, (
                trainer_class,
                when,
            )


def test_a_generation_outside_an_evaluation_is_cleaned_up_too(make_trainer) -> None:
    def preview(now) -> None:
        now.model.generate(torch.tensor([[1, 2]]), max_new_tokens=2)
        now.model.get_compiled_call(CompileConfig())

    previews = at("step_end", preview)
    assert steps_with_a_leftover(make_trainer, previews, EvalGenerateCleanup()) == 0


class KeepsItsCache(Trainer):
    def evaluate(self, *args, **kwargs):
        self.kept = DynamicCache()
        keys, values = (torch.zeros(1, 4, 1024, 1024, device=self.args.device) for _ in range(2))
        self.kept.update(keys, values, 0)
        del keys, values
        return super().evaluate(*args, **kwargs)


def test_who_holds_a_cache_is_named(make_trainer, simgpu) -> None:
    timeline = Timeline()

    trainer = make_trainer(
        EvalGenerateCleanup(timeline=timeline),
        trainer_class=KeepsItsCache,
        eval_strategy="steps",
        eval_steps=8,
    )
    trainer.train()

    (remark,) = [entry for entry in timeline if isinstance(entry, Remark)]
    assert remark.finding.code == "evaluation-leftover"
    assert "32.0 MiB more allocated on simgpu:0" in remark.finding.summary
    assert "16.0 MiB [1, 4, 1024, 1024] held by" in remark.finding.evidence
    assert "KeepsItsCache.kept" in remark.finding.evidence
    assert len(trainer.kept.layers) == 1  # named, not destroyed


class TakesAndFrees(Trainer):
    take_bytes = 100 * MIB

    def evaluate(self, *args, **kwargs):
        torch.zeros(self.take_bytes, dtype=torch.uint8, device=self.args.device)
        return super().evaluate(*args, **kwargs)


class TakesLittle(TakesAndFrees):
    take_bytes = 2 * MIB


def test_cached_blocks_are_released_only_if_that_pays(make_trainer, simgpu) -> None:
    for trainer_class, num_flushes in ((TakesAndFrees, 2), (TakesLittle, 0)):
        simgpu_cache_is_empty = torch.accelerator.memory_reserved()
        timeline = Timeline()
        make_trainer(
            EvalGenerateCleanup(timeline=timeline),
            trainer_class=trainer_class,
            eval_strategy="steps",
            eval_steps=4,
        ).train()

        flushes = [entry for entry in timeline if isinstance(entry, Flush)]
        assert [flush.step for flush in flushes] == [4, 8][:num_flushes]
        assert all(
            flush.released_bytes >= 100 * MIB and flush.reason == "after eval" for flush in flushes
        )
        assert torch.accelerator.memory_reserved() < simgpu_cache_is_empty + 60 * MIB


def test_mode_and_checkpointing_are_left_as_found(make_trainer) -> None:
    trainer = make_trainer(
        EvalGenerateCleanup(), eval_strategy="steps", eval_steps=8, gradient_checkpointing=True
    )
    trainer.train()

    assert trainer.model.is_gradient_checkpointing
    assert not trainer.model.training  # as the Trainer's own evaluation leaves it


class Unreadable(torch.Tensor):
    """A wrapper without memory of its own, as DTensor and torchao's quantised tensors are."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2, 2), device=torch.device("simgpu"))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        raise NotImplementedError


def test_the_holder_is_found_beside_a_teacher_and_tensors_without_memory(
    make_trainer, simgpu
) -> None:
    teacher = tiny_llama(vocab_size=40_000, hidden_size=256).to("simgpu")
    wrapper = Unreadable()
    timeline = Timeline()

    class Keeps(Trainer):
        def evaluate(self, *args, **kwargs):
            self.kept = torch.zeros(8 * MIB, dtype=torch.uint8, device=self.args.device)
            return super().evaluate(*args, **kwargs)

    make_trainer(
        EvalGenerateCleanup(timeline=timeline),
        trainer_class=Keeps,
        eval_strategy="steps",
        eval_steps=8,
    ).train()

    (remark,) = [entry for entry in timeline if isinstance(entry, Remark)]
    assert "8.0 MiB [8388608] held by" in remark.finding.evidence
    assert "Keeps.kept" in remark.finding.evidence
    del teacher, wrapper


def test_generation_in_every_step_is_no_leftover(make_trainer, simgpu) -> None:
    """As in GRPO: `generate` runs before the optimizer has made its states."""

    class Online(Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            model.generate(inputs["input_ids"][:, :4], max_new_tokens=2)
            return super().training_step(model, inputs, *args, **kwargs)

    timeline = Timeline()
    model = tiny_llama(vocab_size=20_000)
    make_trainer(EvalGenerateCleanup(timeline=timeline), trainer_class=Online, model=model).train()

    assert list(timeline) == []


def test_what_a_rehearsal_makes_is_no_leftover_of_the_evaluation_at_the_start(
    tmp_path, make_trainer, simgpu
) -> None:
    """`survive` tries the longest rows when training begins, and makes the optimizer's states for it."""
    model = tiny_llama(hidden_size=256, intermediate_size=1024)
    trainer = make_trainer(
        model=model, eval_on_start=True, eval_strategy="steps", eval_steps=4, max_steps=4
    )
    protect(trainer, "survive")
    trainer.train()

    states = sum(
        value.nbytes
        for each in trainer.optimizer.state.values()
        for value in each.values()
        if value.device.type == "simgpu"
    )
    assert states > 0.01 * CAPACITY_BYTES
    told = [each.code for each in read_findings(tmp_path / "run")]
    assert "evaluation-leftover" not in told


class GeneratesAndKeepsSilent(Trainer):
    """As open-unlearning's: its own evaluators generate, and no event is fired."""

    def evaluate(self, *args, **kwargs):
        prompt = torch.tensor([[5, 17, 99]], device=self.args.device)
        self.model.generate(prompt, max_new_tokens=4)
        self.model.get_compiled_call(CompileConfig())
        torch.zeros(100 * MIB, dtype=torch.uint8, device=self.args.device)
        return {}


def test_the_final_evaluation_is_cleaned_up_and_its_generations_are_seen(
    make_trainer, simgpu
) -> None:
    for trainer_class in (GeneratesAndKeepsSilent, type("Heir", (GeneratesAndKeepsSilent,), {})):
        timeline = Timeline()
        guards = EvalGenerateCleanup(timeline=timeline), MemoryWatchdog(timeline=timeline)
        trainer = make_trainer(*guards, trainer_class=trainer_class, max_steps=2)
        trainer.train()
        before = timeline.num_added
        trainer.evaluate()

        moments = [each.moment for each in list(timeline)[before:] if isinstance(each, Sample)]
        assert sorted(moments) == ["eval", "generate"]
        (flush,) = [each for each in list(timeline)[before:] if isinstance(each, Flush)]
        assert flush.released_bytes >= 100 * MIB
        assert "_compiled_call" not in vars(trainer.model)
        assert "generate" not in vars(trainer.model)
