"""The watchdog sees each moment's own peak, says what is wrong once, and stops in good order when asked."""

import json
from itertools import pairwise

import pytest
import torch
from click.testing import CliRunner
from transformers import Trainer

from tests.events import at, takes
from tests.report.drawn import Keeps, Read
from tests.written import read_entries, read_findings, read_steps
from trainer_plugins import CudaCacheCallback, MemoryWatchdog, OOMReporter, draw
from trainer_plugins.cli import app
from trainer_plugins.finding import Severity
from trainer_plugins.record.timeline import Remark, Sample, Timeline
from trainer_plugins.units import MIB


def run(make_trainer, *callbacks, steps: int = 8, args=None, **settings) -> Timeline:
    timeline = Timeline()
    make_trainer(
        *callbacks, MemoryWatchdog(timeline=timeline, **settings), max_steps=steps, **(args or {})
    ).train()
    return timeline


class EvaluatesItself(Trainer):
    """Has evaluators of its own, as open-unlearning has: nobody hears on_evaluate or on_prediction_step."""

    def evaluate(self, *args, **kwargs):
        torch.zeros(40 * MIB, dtype=torch.uint8, device=self.args.device)
        return {"own_score": 1.0}


class EvaluatesItselfAndLogs(EvaluatesItself):
    def evaluate(self, *args, **kwargs):
        metrics = super().evaluate(*args, **kwargs)
        self.log(metrics)
        return metrics


@pytest.mark.parametrize(
    ("kind", "peak_mib"), [(EvaluatesItself, 40), (EvaluatesItselfAndLogs, 40), (Trainer, 30)]
)
def test_the_final_evaluation_is_seen_once(make_trainer, simgpu, kind, peak_mib) -> None:
    timeline = Timeline()
    trainer = make_trainer(
        MemoryWatchdog(timeline=timeline),
        at("prediction_step", takes(30)),
        trainer_class=kind,
        max_steps=2,
    )
    trainer.train()
    assert samples(timeline, "eval") == []

    trainer.evaluate()
    trainer.log({"a number of the user's": 1.0})

    (seen,) = samples(timeline, "eval")
    assert seen.step == 2
    assert seen.reading.peak_allocated_bytes > peak_mib * MIB


thrash = takes(130, 150, 170)  # each more than the cache has in one piece


def samples(timeline: Timeline, moment: str) -> list[Sample]:
    return [entry for entry in timeline if isinstance(entry, Sample) and entry.moment == moment]


def findings(timeline: Timeline) -> dict[str, list[int]]:
    """Code -> the steps at which it was said."""
    said: dict[str, list[int]] = {}
    for entry in timeline:
        if isinstance(entry, Remark):
            said.setdefault(entry.finding.code, []).append(entry.step)
    return said


def the_finding(timeline: Timeline, code: str):
    return next(
        entry.finding
        for entry in timeline
        if isinstance(entry, Remark) and entry.finding.code == code
    )


def test_each_moment_has_its_own_peak(make_trainer, simgpu) -> None:
    args = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}

    mibs = {"step_begin": 20, "prediction_step": 60, "save": 100}
    timeline = run(make_trainer, *(at(it, takes(mib)) for it, mib in mibs.items()), args=args)

    peaks = {m: {round(s.reading.peak_allocated_bytes / MIB / 20) for s in samples(timeline, m)} for m in
             ("train", "eval", "save")}  # fmt: skip
    assert peaks == {"train": {1}, "eval": {3}, "save": {5}}
    assert [sample.step for sample in samples(timeline, "train")] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [sample.step for sample in samples(timeline, "eval")] == [4, 8]
    assert {sample.reading.device for sample in timeline if isinstance(sample, Sample)} == {
        "simgpu:0"
    }


def test_looking_seldom_still_parts_training_from_evaluation(make_trainer, simgpu) -> None:
    timeline = run(
        make_trainer,
        at("step_begin", takes(60)),
        at("prediction_step", takes(20)),
        every_steps=5,
        args={"eval_strategy": "steps", "eval_steps": 4},
    )

    assert [sample.step for sample in samples(timeline, "train")] == [4, 5, 8]
    assert all(s.reading.peak_allocated_bytes < 40 * MIB for s in samples(timeline, "eval"))


def test_a_healthy_run_is_silent(make_trainer, anywhere, caplog) -> None:
    timeline = run(make_trainer, steps=60)

    assert findings(timeline) == {}
    assert not [record for record in caplog.records if record.name.startswith("trainer_plugins")]


def test_pressure_is_the_peak_and_is_said_once(make_trainer, simgpu, caplog) -> None:
    timeline = run(make_trainer, at("step_begin", takes(236)))

    assert findings(timeline) == {"memory-pressure": [1]}
    finding = the_finding(timeline, "memory-pressure")
    assert finding.severity is Severity.WARNING
    assert "peak allocated 236" in finding.evidence
    assert "gradient_accumulation_steps" in finding.remedy
    (record,) = [record for record in caplog.records if record.name.startswith("trainer_plugins")]
    assert record.levelname == "WARNING"
    assert record.message == f"step 1: {finding}"


def test_a_full_cache_is_no_pressure(make_trainer, simgpu) -> None:
    timeline = run(make_trainer, at("step_begin", takes(120, 110)))

    assert torch.accelerator.memory_reserved() > 110 * MIB
    assert findings(timeline) == {}


def test_stops_in_good_order_past_the_act_mark(make_trainer, simgpu, tmp_path) -> None:
    growing = at("step_begin", takes(250), *range(3, 8)), at("step_begin", takes(10))
    trainer = make_trainer(*growing, MemoryWatchdog(stop=True))
    trainer.train()

    assert trainer.state.global_step == 4
    state = json.loads((tmp_path / "run" / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["global_step"] == 4

    resumed = make_trainer(MemoryWatchdog(stop=True))
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 8


def test_without_stop_it_only_speaks(make_trainer, simgpu) -> None:
    timeline = run(make_trainer, at("step_begin", takes(250)))

    assert the_finding(timeline, "memory-pressure").severity is Severity.ERROR
    assert len(samples(timeline, "train")) == 8


def test_foreign_memory_is_told_by_bytes(make_trainer, simgpu) -> None:
    def intrude(_) -> None:
        simgpu.card().hold(4242, 80 * MIB, "python infer.py")

    timeline = run(make_trainer, at("step_end", intrude, 4))

    assert findings(timeline) == {"foreign-memory": [4]}
    finding = the_finding(timeline, "foreign-memory")
    assert finding.summary == "other processes hold 80.0 MiB of simgpu:0"
    assert "Do not empty the cache" in finding.remedy


def test_foreign_memory_that_was_there_first_is_told_too(make_trainer, simgpu) -> None:
    simgpu.card().hold(4242, 80 * MIB, "python infer.py")

    assert findings(run(make_trainer)) == {"foreign-memory": [0]}


@pytest.mark.parametrize("mib", [1, 0.7])  # two of 0.7 MiB lie in a segment of 2 MiB, with a gap
@pytest.mark.all(but=1)
def test_a_leak_is_said_until_the_end(make_trainer, simgpu, tmp_path, mib: float) -> None:
    simgpu.set_capacity(160 * MIB)
    trainer = make_trainer(Keeps(mib), MemoryWatchdog(), OOMReporter(), max_steps=400)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    died = trainer.state.global_step
    remarks = read_entries(tmp_path / "run", Remark)
    told = [each for each in remarks if each.finding.code == "leak-tensors"]

    # A simulated card lies in main memory, where the leak is seen too.
    expected = {"leak-tensors", "memory-pressure", "leak-host"}
    assert {each.finding.code for each in remarks} <= expected
    assert told[0].step == 42  # 8 of warm-up, 32 of evidence, 2 that show what is new
    assert told[0].finding.evidence.startswith(f"{float(mib)} MiB per step")
    assert told[0].finding.severity is Severity.WARNING
    assert len(told) >= 3
    for remark in told:  # the count is that of the step, and the end is foreseen
        assert f"; {remark.step} x Tensor" in remark.finding.evidence
        assert "held by Keeps.kept, 1 more per step since about step 0" in remark.finding.evidence
        assert "`Keeps.kept.clear()`" in remark.finding.remedy
        assert remark.finding.data["steps_left"] == pytest.approx(died - remark.step, abs=24)
    for before, after in pairwise(each.finding for each in told):
        assert after.amount >= 2 * before.amount or after.severity > before.severity
    assert told[-1].finding.severity is Severity.ERROR

    pressed = [each.finding for each in remarks if each.finding.code == "memory-pressure"]
    assert bool(pressed) is (mib == 1)  # else the gaps fill the card
    said = CliRunner().invoke(app, ["explain", str(tmp_path / "run"), "--verbose"]).output
    assert f"{mib} MiB more after each step" in said.replace("1.0 MiB", "1 MiB")
    assert "leak]" in said.splitlines()[0]
    assert "`Keeps.kept.clear()`" in said
    assert told[-1].finding.evidence.partition(" held by ")[0] in " ".join(said.split())
    table = Read(draw(tmp_path / "run")).words.partition("Most by module and holder")[2]
    assert "Keeps.kept" in table.partition("Findings")[0]


def test_batches_of_changing_length_are_no_leak(make_trainer, simgpu) -> None:
    def keep(now) -> None:
        mib = (3, 9, 5, 14, 7)[now.state.global_step % 5]
        now.model.kept = torch.zeros(mib * MIB, dtype=torch.uint8, device=now.args.device)

    assert findings(run(make_trainer, at("step_end", keep), steps=64)) == {}


def test_a_growing_neighbour_and_a_leak_outside_torch_are_told_apart(make_trainer, simgpu) -> None:
    def take_slowly(now) -> None:  # this very process outside torch, as NCCL does
        simgpu.card().hold(4242, MIB * now.state.global_step // 4, "self")

    timeline = run(make_trainer, at("step_end", take_slowly), steps=48)
    assert set(findings(timeline)) == {"leak-non-torch"}


def test_retries_of_the_allocator_are_told_after_warm_up(make_trainer, simgpu) -> None:
    timeline = run(make_trainer, at("step_begin", thrash, 10, 11, 12, 13), steps=14)

    assert findings(timeline)["allocator-retries"][0] == 11
    assert samples(timeline, "train")[-1].reading.num_alloc_retries > 0


def test_readings_are_in_the_file_when_the_next_step_begins(make_trainer, tmp_path) -> None:
    """A kill leaves them there."""
    found: list[list[int]] = []
    looks = at("step_begin", lambda _: found.append(read_steps(tmp_path / "run")))
    make_trainer(MemoryWatchdog(), looks).train()

    assert found == [[*range(1, step)] for step in range(1, 9)]


def test_training_before_an_evaluation_at_the_end_of_an_epoch_keeps_its_own_peak(
    make_trainer, simgpu
) -> None:
    args = {"eval_strategy": "epoch", "num_train_epochs": 1}

    taking = at("step_begin", takes(60))
    timeline = run(make_trainer, taking, steps=-1, every_steps=1000, args=args)

    assert (
        [s.step for s in samples(timeline, "train")]
        == [s.step for s in samples(timeline, "eval")]
        == [32]
    )
    assert samples(timeline, "train")[0].reading.peak_allocated_bytes >= 60 * MIB
    assert samples(timeline, "eval")[0].reading.peak_allocated_bytes < 20 * MIB


def test_a_timeline_of_ones_own_still_hears_of_releases(make_trainer, simgpu) -> None:
    def leave_islands(now) -> None:
        """Of three tensors in a segment one stays, so that a release can give none of them back."""
        device = now.args.device
        three_each = [torch.zeros(6 * MIB, dtype=torch.uint8, device=device) for _ in range(12)]
        now.model.kept = three_each[::3]

    releases = CudaCacheCallback(interval=1, min_reclaimable_fraction=0)
    timeline = run(make_trainer, at("step_begin", leave_islands, 2), releases)

    assert findings(timeline)["memory-fragmentation"] == [3]


def test_one_watchdog_serves_two_runs(make_trainer, tmp_path, simgpu) -> None:
    watchdog = MemoryWatchdog()
    for fold in ("a", "b"):
        taking = at("step_begin", takes(236))
        make_trainer(taking, watchdog, output_dir=str(tmp_path / fold)).train()

    for fold in ("a", "b"):
        assert len(read_entries(tmp_path / fold, Sample)) == 10
        assert [each.code for each in read_findings(tmp_path / fold)] == ["memory-pressure"]


def test_a_second_training_is_not_stopped_for_the_first(make_trainer, simgpu) -> None:
    taking = at("step_begin", takes(250))
    trainer = make_trainer(taking, MemoryWatchdog(stop=True, timeline=Timeline()))
    trainer.train()
    assert trainer.state.global_step == 1
    trainer.remove_callback(taking)
    torch.accelerator.empty_cache()
    trainer.train()

    assert trainer.state.global_step == 8
