"""The page of a run: what happened is on it, a peak is never lost, and it is small."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from tests.report.drawn import (
    MOMENTS,
    Keeps,
    Read,
    draw_oom,
    highest,
    loads_nothing,
    plan_of,
)
from tests.test_report import HOSTILE, report, write
from tests.test_timeline import READING
from tests.written import read_entries, read_findings
from trainer_plugins import CudaCacheCallback, MemoryWatchdog, OOMReporter, StrategyInForce, draw
from trainer_plugins.cli import app
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.record.history import read_history
from trainer_plugins.record.timeline import (
    Entry,
    Failure,
    Flush,
    Remark,
    Sample,
    read_timeline,
    thin,
)
from trainer_plugins.report.html.chart import draw_limit
from trainer_plugins.report.html.memory_chart import stretches_of
from trainer_plugins.report.pace import paces_of
from trainer_plugins.units import GIB, MIB


def page_of(folder: Path, *more: str) -> str:
    """What the command writes."""
    path = folder / "page.html"
    done = CliRunner().invoke(app, ["report", str(folder), "--html", str(path), *more])
    assert done.exit_code == 0, done.output
    text = path.read_text(encoding="utf-8")
    assert loads_nothing(text)
    return text


def test_a_run_that_died_says_why_and_what_to_do_before_the_picture(
    make_trainer, simgpu, tmp_path
) -> None:
    trainer = make_trainer(
        Keeps(6), StrategyInForce(), MemoryWatchdog(), CudaCacheCallback(interval=5), OOMReporter(),
        max_steps=60, eval_strategy="steps", eval_steps=10,
    )  # fmt: skip
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    text = page_of(tmp_path / "run")
    page = Read(text)

    failed = trainer.state.global_step
    assert page.titles[0].startswith(f"Out of memory after step {failed}: ")
    assert text.index("Try this first") < text.index("data-chart") < text.index("<h2>Why</h2>")
    said = CliRunner().invoke(app, ["explain", str(tmp_path / "run")]).stdout
    (first,) = [line[7:] for line in said.splitlines() if line.startswith("Try    ")]
    assert first in page.words
    assert f"out of memory after step {failed}" in page.words
    assert "1 rank of LlamaForCausalLM on simgpu" in page.words
    for category in ("parameter", "optimizer", "other"):
        assert category in page.words.partition("What was alive")[2]
    memory = page.data["charts"]["memory-0"]
    assert {span["colour"] for span in memory["spans"]} == {"eval", "flush"}
    assert memory["uprights"] == [mark["at"] for mark in memory["marks"] if mark["text"] == "✕"]
    codes = {finding.code for finding in read_findings(tmp_path / "run")}
    assert codes
    for code in codes:
        assert page.words.count(code) >= 2, "on the axis, and in words"
    samples = read_entries(tmp_path / "run", Sample)
    evaluated = [each.reading for each in samples if each.moment == "eval"]
    assert max(each.peak_allocated_bytes for each in evaluated) in page.figures


def test_the_snapshot_of_an_oom_is_on_the_page_of_its_run(make_trainer, simgpu, tmp_path) -> None:
    trainer = make_trainer(Keeps(5), MemoryWatchdog(), OOMReporter(), max_steps=60)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    (file,) = (tmp_path / "run").rglob("oom-rank0.json")
    assert "<section data-snapshot" not in page_of(tmp_path / "run")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"snapshot": "snapshot.pickle"}))
    draw_oom(tmp_path / "run")  # which leaves the file there
    text = page_of(tmp_path / "run")
    (shown,) = Read(text).data["snapshots"]
    assert shown["asked_bytes"] == 20 * MIB
    assert (
        text.index("data-chart")
        < text.index('data-snapshot="0"')
        < text.index("The peak of each moment")
    )


def test_the_highest_points_of_a_picture_are_the_peaks_of_the_run(make_trainer, simgpu, tmp_path):
    make_trainer(MemoryWatchdog(), eval_strategy="steps", eval_steps=4).train()
    page = Read(page_of(tmp_path / "run"))
    readings = [each.reading for each in read_entries(tmp_path / "run", Sample)]
    used = max(r.non_torch_bytes + max(r.reserved_bytes, r.peak_allocated_bytes) for r in readings)
    peak = max(r.non_torch_bytes + r.peak_allocated_bytes for r in readings)
    assert (highest(page, "cached"), highest(page, "within")) == (used, peak)
    assert page.data["charts"]["memory-0"]["top"] == draw_limit(used, 256 * MIB)[0]


def long_run(num_steps: int, peak_at: int, rank: int = 0) -> list[Entry]:
    """A run on an 80 GiB card: one step in the middle took twice what the others did."""
    chance, now = random.Random(rank), 1e9 + rank
    found: list[Entry] = []
    for step in range(num_steps):
        now += chance.uniform(0.9, 1.3)
        peak = 60 * GIB if step == peak_at else int(chance.uniform(30, 34) * GIB)
        reading = replace(
            READING, device=f"cuda:{rank}", total_bytes=80 * GIB, free_bytes=10 * GIB, reserved_bytes=69 * GIB,
            allocated_bytes=20 * GIB, peak_allocated_bytes=peak,
        )  # fmt: skip
        found.append(Sample(step=step, moment="train", reading=reading, time_seconds=now))
        if step % 10 == 0:
            now += 3
            found.append(Sample(step=step, moment="eval", reading=reading, time_seconds=now))
            found.append(Flush(step=step, reason="interval", released_bytes=MIB, stuck_bytes=0, seconds=0.1, time_seconds=now))  # fmt: skip
    return found


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_ten_thousand_steps_are_a_small_page_that_has_lost_no_peak(
    tmp_path: Path, num_ranks: int
) -> None:
    num_steps = 10_000 if num_ranks == 1 else 2_500
    for rank in range(num_ranks):
        write(tmp_path, rank, long_run(num_steps, peak_at=num_steps // 3, rank=rank))
    text = page_of(tmp_path)
    page = Read(text)
    assert len(text) < 500_000
    assert 60 * GIB in page.figures
    assert f"in step {num_steps // 3}" in page.words
    if num_ranks == 1:
        assert highest(page, "within") == 61 * GIB
    else:
        assert [f"rank {rank}: 60.00 GiB" in page.words for rank in range(num_ranks)] == [True] * 4


@pytest.mark.parametrize("most", [3, 50, 10_000])
def test_what_is_joined_has_the_highest_of_every_figure_and_all_of_the_time(most: int) -> None:
    entries = long_run(300, peak_at=77)
    alone, joined = stretches_of(entries, 1e9, most=10**9), stretches_of(entries, 1e9, most=most)
    assert len(joined) <= most + 1
    for name in ("outside_bytes", "kept_bytes", "peak_bytes", "used_bytes"):
        assert max(getattr(each, name) for each in joined) == max(
            getattr(each, name) for each in alone
        )
    ends = [each.ended_seconds for each in joined]
    assert [each.began_seconds for each in joined] == [0.0, *ends[:-1]]
    assert ends[-1] == alone[-1].ended_seconds


def test_an_evaluation_is_no_part_of_a_step() -> None:
    paces = [*paces_of(long_run(300, peak_at=77))]
    assert sum(each.num_steps for each in paces) == 299
    assert max(each.busy_seconds for each in paces) < 1.4


def seen(folder: Path) -> list[int]:
    return [each.num_tokens_seen for each in read_entries(folder, Sample)]


def test_tokens_a_second_are_under_the_time_of_a_step_if_the_trainer_counts_them(
    make_trainer, tmp_path
) -> None:
    settings = {"include_num_input_tokens_seen": True, "gradient_accumulation_steps": 2}
    saved = {"save_strategy": "steps", "save_steps": 4}
    make_trainer(MemoryWatchdog(), OOMReporter(), max_steps=4, **settings, **saved).train()
    tokens = 2 * 2 * 32
    assert seen(tmp_path / "run") == [0, *(n * tokens for n in (1, 2, 3, 4, 4, 4))]
    again = make_trainer(MemoryWatchdog(), OOMReporter(), max_steps=8, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert seen(tmp_path / "run")[7:] == [n * tokens for n in (4, 5, 6, 7, 8, 8)]

    entries = read_history(tmp_path / "run").runs[-1].timelines[0]
    paces = [*paces_of(entries)]
    assert [each.num_tokens for each in paces] == [tokens] * 4
    mean = 4 * tokens / sum(each.busy_seconds for each in paces)
    for words in (Read(page_of(tmp_path / "run")).words, report(tmp_path / "run")):
        assert re.search(rf"A step took .*; {mean:,.0f} tokens a second on all ranks", words)


def test_rows_a_second_stand_in_for_tokens_that_nobody_counts(make_trainer, tmp_path) -> None:
    trainer = make_trainer(MemoryWatchdog(), OOMReporter(), gradient_accumulation_steps=3)
    trainer.train()
    page = Read(page_of(tmp_path / "run"))
    assert "rows a second on all ranks" in page.words
    (tmp_path / "run" / "_trainer_plugins" / "run.json").unlink()
    assert "a second on all ranks" not in Read(page_of(tmp_path / "run")).words


def test_a_long_timeline_that_counts_tokens_is_thinned_and_keeps_the_count(tmp_path) -> None:
    taken: list[Entry] = [
        Sample(
            step=n, moment="train", reading=READING, time_seconds=1e9 + n, num_tokens_seen=64 * n
        )
        for n in range(1, 1001)
    ]
    write(tmp_path, 0, taken)
    file = tmp_path / "_trainer_plugins" / "memory" / "rank-0.jsonl"
    before = file.stat().st_size
    assert thin(file) == file.stat().st_size < 0.7 * before
    found = read_timeline(file)
    assert sum(each.num_readings for each in found if isinstance(each, Sample)) == 1000
    assert sum(each.num_tokens for each in paces_of(found)) == 64 * (1000 - found[0].step)


def test_a_clock_that_is_set_back_and_readings_at_once_are_drawn(tmp_path: Path) -> None:
    entries = long_run(20, peak_at=7)
    entries = [replace(each, time_seconds=1e9 - n) for n, each in enumerate(entries)]
    write(tmp_path, 0, entries)
    assert 60 * GIB in Read(page_of(tmp_path)).figures


def test_foreign_text_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    wild = f"<i>short</i> </title></svg><script>alert(1)</script><img src=x onerror=alert(1)>\"'{HOSTILE}"
    reading = replace(READING, device=wild)
    finding = Finding(code=wild, severity=Severity.ERROR, summary=wild, evidence=wild, remedy=wild)
    write(
        tmp_path,
        0,
        [
            Sample(step=1, moment=wild, reading=reading, time_seconds=1e9),
            Remark(step=1, finding=finding, time_seconds=1e9 + 1),
            Failure(step=1, words=wild, record=wild, time_seconds=1e9 + 2),
        ],
    )
    text = page_of(tmp_path)
    page = Read(text)
    assert {tag for tag, _ in page.tags}.isdisjoint({"i", "img"})
    assert len(page.scripts) == 2, "the data and ours"
    assert "<script>alert(1)</script>" in page.words
    assert r"\x1b]0;mine\x07" in page.words
    assert [each for each in text.replace("\n", "") if not each.isprintable()] == []


def test_a_plan_is_drawn_beside_the_run_and_its_error_is_said(tmp_path: Path) -> None:
    write(tmp_path, 0, long_run(60, peak_at=7))
    plan = plan_of(MOMENTS, gpu_gib=80)
    (tmp_path / "plan.json").write_text(plan.to_json())
    page = Read(page_of(tmp_path, "--plan", str(tmp_path / "plan.json")))
    assert highest(page, "planned") == 6.5 * GIB, "with the context"
    assert "-90.0%" in page.words, "6 GiB were planned, and 60 measured"
    assert 6 * GIB in page.figures


def test_a_notebook_shows_a_plan_and_a_run_in_a_frame_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, 0, long_run(30, peak_at=7))
    for page in (draw(tmp_path), draw(plan_of(MOMENTS))):
        shown = page._repr_html_()
        assert shown.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
        assert shown.count("<") == 2
        assert "sandbox" in shown
    assert draw(tmp_path) == page_of(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--html", "{folder}/nowhere/page.html"], "No such file or directory"),
        (["--html", "{folder}"], "Is a directory"),
        (["--plan", "{folder}/plan.json"], "add --html"),
        (["--html", "{folder}/page.html", "--plan", "{folder}/plan.json"], "is not a plan"),
        (["--html", "{folder}/page.html", "--plan", "{folder}/no.json"], "No such file"),
    ],
)
def test_bad_input_is_said_in_a_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    write(tmp_path, 0, long_run(3, peak_at=1))
    (tmp_path / "plan.json").write_text("[" * 100_000)
    given = [each.format(folder=tmp_path) for each in arguments]
    done = CliRunner().invoke(app, ["report", str(tmp_path), *given], env={"COLUMNS": "1000"})
    assert done.exit_code == 2
    assert words in done.stderr


def test_a_folder_without_an_entry_is_nothing_to_draw(tmp_path: Path) -> None:
    write(tmp_path, 0, [])
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(tmp_path)
    assert read_history(tmp_path).runs == []
