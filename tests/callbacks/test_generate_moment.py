"""What `generate` takes inside training is a moment of its own: in an evaluation, and within a step."""

import pytest
import torch
from transformers import LlamaForCausalLM, Seq2SeqTrainingArguments, TrainerCallback

from tests.explain.test_planted import Generates
from tests.models import tiny_llama, token_rows
from tests.report.drawn import Read
from tests.report.test_run_page import page_of
from tests.test_report import report
from tests.written import read_entries
from trainer_plugins import MemoryWatchdog
from trainer_plugins.record.timeline import Remark, Sample, Timeline
from trainer_plugins.report.pace import paces_of
from trainer_plugins.units import MIB


class Takes(LlamaForCausalLM):
    """A model whose `generate` needs 60 MiB; the outer one of two calls in one another 20 more."""

    def generate(self, *args, nested: bool = False, **kwargs):
        held = torch.zeros((20 if nested else 60) * MIB, dtype=torch.uint8, device=self.device)
        made = super().generate(*args, **kwargs) if not nested else self.generate(*args, **kwargs)
        del held
        return made


def model() -> Takes:
    return Takes(tiny_llama().config)


class Previews(TrainerCallback):
    """Takes some MiB, gives them back, and then looks what the model says, before each step."""

    def __init__(self, mib: int, **options: bool) -> None:
        self.mib, self.options = mib, options

    def on_step_begin(self, args, state, control, *, model, **kwargs):
        torch.zeros(self.mib * MIB, dtype=torch.uint8, device=model.device)
        prompt = torch.tensor([[5, 17, 99]], device=model.device)
        model.generate(prompt, max_new_tokens=4, **self.options)


def of(entries, moment: str) -> list[Sample]:
    return [each for each in entries if isinstance(each, Sample) and each.moment == moment]


def peaks(entries, moment: str) -> set[int]:
    """The peaks of a moment in steps of 20 MiB."""
    return {round(each.reading.peak_allocated_bytes / MIB / 20) for each in of(entries, moment)}


def evaluating(make_trainer, *callbacks, **settings):
    options = {"predict_with_generate": True, "generation_max_length": 40, "eval_strategy": "steps"}
    trainer = make_trainer(
        *callbacks,
        model=model(),
        trainer_class=Generates,
        args_class=Seq2SeqTrainingArguments,
        max_steps=4,
        eval_steps=2,
        per_device_eval_batch_size=4,
        **options,
        **settings,
    )
    trainer.eval_dataset = token_rows(12)
    return trainer


def test_the_generations_of_an_evaluation_are_one_reading_before_it(make_trainer, simgpu) -> None:
    timeline = Timeline()
    trainer = evaluating(make_trainer, MemoryWatchdog(timeline=timeline), eval_on_start=True)
    trainer.train()
    generated = of(timeline, "generate")
    assert [each.step for each in generated] == [0, 2, 4]
    assert [each.num_readings for each in generated] == [3, 3, 3]  # batches
    assert peaks(timeline, "generate") == {3}
    assert peaks(timeline, "train") == peaks(timeline, "eval") == {0}
    moments = [each.moment for each in timeline if isinstance(each, Sample)]
    assert moments == [
        "begin",
        *("generate", "eval"),
        *("train", "train", "generate", "eval"),
        *("train", "train", "generate", "eval"),
        "end",
    ]
    assert "generate" not in vars(trainer.model)
    trainer.evaluate()  # after training too
    assert [each.num_readings for each in of(timeline, "generate")] == [3, 3, 3, 3]
    assert peaks(timeline, "generate") == {3}
    assert peaks(timeline, "eval") == {0}
    assert "generate" not in vars(trainer.model)


@pytest.mark.parametrize(
    ("before_mib", "options", "taken"), [(100, {}, 3), (0, {"nested": True}, 4)]
)
def test_a_step_keeps_the_peak_of_what_was_around_its_generation(
    make_trainer, simgpu, before_mib: int, options: dict[str, bool], taken: int
) -> None:
    timeline = Timeline()
    before = Previews(before_mib, **options)
    make_trainer(before, MemoryWatchdog(timeline=timeline), model=model(), max_steps=3).train()
    assert peaks(timeline, "train") == {before_mib // 20}
    assert peaks(timeline, "generate") == {taken}
    assert [each.num_readings for each in of(timeline, "generate")] == [1, 1, 1]


def test_looking_seldom_counts_the_generations_since(make_trainer, simgpu) -> None:
    timeline = Timeline()
    watchdog = MemoryWatchdog(every_steps=2, timeline=timeline)
    make_trainer(Previews(0), watchdog, model=model(), max_steps=6).train()
    assert [each.num_readings for each in of(timeline, "generate")] == [2, 2, 2]
    assert peaks(timeline, "train") == {0}


def test_a_generation_that_fills_the_card_is_said_to_be_one(make_trainer, simgpu) -> None:
    simgpu.set_capacity(64 * MIB)
    timeline = Timeline()
    make_trainer(Previews(0), MemoryWatchdog(timeline=timeline), model=model(), max_steps=2).train()
    (finding,) = [each.finding for each in timeline if isinstance(each, Remark)]
    assert finding.code == "memory-pressure"
    assert finding.summary.endswith("full at its peak in generate")
    assert "number of generated tokens" in finding.remedy


def test_a_generation_that_raises_does_not_hide_the_next(make_trainer, simgpu) -> None:
    class Forgives(Previews):
        def on_step_begin(self, args, state, control, *, model, **kwargs):
            prompt = torch.tensor([[5]]).to(model.device)
            simgpu.fail_at(1)
            with pytest.raises(torch.OutOfMemoryError):
                model.generate(prompt, max_new_tokens=2)
            super().on_step_begin(args, state, control, model=model, **kwargs)

    timeline = Timeline()
    watchdog = MemoryWatchdog(timeline=timeline)
    make_trainer(Forgives(0), watchdog, model=model(), max_steps=2).train()
    assert [each.num_readings for each in of(timeline, "generate")] == [2, 2]
    assert peaks(timeline, "generate") == {3}


def test_reports_and_pages_tell_it_and_a_step_is_not_shorter_for_it(
    make_trainer, simgpu, tmp_path
) -> None:
    make_trainer(Previews(0), MemoryWatchdog(), model=model(), max_steps=6).train()
    folder = tmp_path / "run"
    assert "generate" in report(folder)
    page = Read(page_of(folder))
    key = page.data["charts"]["memory-0"]["others"]
    assert "generate (6)" in [each["name"] for each in key]
    entries = read_entries(folder)
    assert (
        max(each.reading.peak_allocated_bytes for each in of(entries, "generate")) in page.figures
    )

    steps = [of(entries, "begin")[0], *of(entries, "train")]
    spent = sum(each.busy_seconds for each in paces_of(entries))
    assert spent == pytest.approx(steps[-1].time_seconds - steps[0].time_seconds)
