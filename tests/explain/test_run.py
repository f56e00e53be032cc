"""What a run has written down explains it: the planted cause comes first, and what is printed first helps."""

import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from contextlib import redirect_stderr
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from transformers import TrainerCallback

from tests.explain.planted import run, watched, with_rows
from tests.schemas import read_answer
from tests.test_report import HOSTILE, obeyed, report
from trainer_plugins import MemoryWatchdog, OOMReporter, checkpointing
from trainer_plugins.cli import app
from trainer_plugins.explain.answer import Explanation
from trainer_plugins.explain.run import explain_run
from trainer_plugins.launch.place import place
from trainer_plugins.oom import classify
from trainer_plugins.record.folder import folder_of_run, write_new
from trainer_plugins.record.oom_record import LiveModel, OomRecord, Planned, read_oom_records
from trainer_plugins.record.run_facts import Launch, read_run_facts
from trainer_plugins.record.shown import Frame, Process
from trainer_plugins.record.timeline import Failure, Remark, Timeline, timeline_of_run
from trainer_plugins.survival.words import report_not_attached
from trainer_plugins.units import GIB, MIB, size


def first(explanation: Explanation | None) -> str:
    assert explanation is not None
    assert explanation.remedies[0].cause == explanation.causes[0].code
    return explanation.causes[0].code


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    """Where the folder of one run that died is kept for all tests of this file."""
    return tmp_path_factory.mktemp("kept") / "run"


@pytest.fixture
def died(request, kept, tmp_path) -> OomRecord:
    if not kept.exists():
        request.getfixturevalue("simgpu").set_capacity(200 * MIB)
        make_trainer = request.getfixturevalue("make_trainer")
        settings = {"per_device_train_batch_size": 256}
        request.getfixturevalue("monkeypatch").chdir(tmp_path)  # not where the package lies
        with redirect_stderr(io.StringIO()) as said:
            run(with_rows(make_trainer(*watched(), **settings), 256, 128))
        shutil.copytree(tmp_path / "run", kept)
        (kept / "stderr").write_text(said.getvalue().replace(str(tmp_path / "run"), "run"))
    shutil.copytree(kept, tmp_path / "run", dirs_exist_ok=True)
    (record,) = read_oom_records(tmp_path / "run")
    return record


def explained(folder: Path, *records: OomRecord) -> Explanation:
    for record in records:
        write_new(folder, f"oom-rank{record.rank}", asdict(record))
    return explain_run(folder)


PIECES: dict[str, Any] = {
    "requested_bytes": 4 * GIB, "total_bytes": 24 * GIB, "free_bytes": GIB,
    "allocated_bytes": 12 * GIB, "unused_bytes": 10 * GIB,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"moment": "save"}, "save-gather"),
        ({"moment": "resume"}, "resume-load"),
        ({"moment": "generate"}, "generate-cache"),
        ({"requested_bytes": 2 << 40}, "impossible-size"),
        ({"requested_bytes": GIB, "free_bytes": 20 * GIB, "total_bytes": 24 * GIB}, "contradictory"),
        (PIECES, "fragmentation"),
        ({"source": "shared"}, "shm"),
        ({"source": "pinned"}, "pinned"),
        ({"source": "nccl"}, "nccl"),
        ({"source": "host"}, "host-alloc"),
    ],
)  # fmt: skip
def test_what_a_small_card_cannot_show(died, tmp_path, change: dict, code: str) -> None:
    of_error = {name: value for name, value in change.items() if hasattr(died.error, name)}
    of_record = {name: value for name, value in change.items() if name not in of_error}
    record = replace(died, error=replace(died.error, **of_error), **of_record)
    said = explained(tmp_path / code, record)
    assert said.causes[0].code == code


def test_a_limit_of_its_own_explains_a_refusal_with_memory_free(died, tmp_path) -> None:
    """As `set_per_process_memory_fraction` sets one, and `Headroom` with it."""
    free = {"requested_bytes": GIB, "free_bytes": 20 * GIB, "total_bytes": 24 * GIB}
    error = replace(died.error, **free, limit_bytes=2 * GIB)
    said = explained(tmp_path / "limited", replace(died, error=error))
    assert "contradictory" not in {each.code for each in said.causes}

    plain = replace(died, error=error, batch={}, frames=())
    (cause, *_) = explained(tmp_path / "plain", plain).causes
    assert cause.code == "capacity"
    assert cause.evidence[0] == "this process may use only 2.00 GiB of 24.00 GiB"


def test_a_size_is_compared_as_torch_prints_it(died, tmp_path) -> None:
    """3.91 GiB are 3.914 GiB with two digits; what a table of scores has is not theirs."""
    config = {**died.run.model_config, "vocab_size": 128_256, "num_attention_heads": 32}
    run = replace(died.run, model_config=config)
    for asked, code in ((int(3.91 * GIB), "logits-loss"), (4 * GIB, "quadratic-attention")):
        error = replace(died.error, requested_bytes=asked, total_bytes=24 * GIB, free_bytes=GIB)
        error = replace(error, allocated_bytes=22 * GIB, unused_bytes=0)
        batch = {"input_ids": replace(died.batch["input_ids"], shape=(1, 8192))}
        said = explained(tmp_path / code, replace(died, run=run, error=error, batch=batch))
        assert said.causes[0].code == code


def test_a_setting_that_is_followed_is_not_advised(died, tmp_path) -> None:
    pieces = replace(died.error, **PIECES)
    for number, allocator in enumerate(
        ({}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"})
    ):
        record = replace(died, error=pieces, run=replace(died.run, allocator=allocator))
        said = explained(tmp_path / str(number), record)
        assert said.causes[0].code == "fragmentation"
        advised = [each.do for each in said.remedies if "expandable_segments" in each.do]
        assert len(advised) == (0 if allocator else 1)
        assert said.remedies


@pytest.mark.parametrize(("asked", "is_enough"), [(10 * MIB, True), (60 * MIB, False)])
def test_a_remedy_with_which_it_would_die_again_is_not_first(
    died, tmp_path, asked: int, is_enough: bool
) -> None:
    """A teacher of 40 MiB beside a run that has 190 of 200 MiB in tensors."""
    assert died.alive is not None
    held = f"a local of train() -> {died.run.trainer}.teacher"
    teacher = LiveModel(name="LlamaForCausalLM", num_bytes=40 * MIB, holder=held)
    alive = replace(died.alive, models=(*died.alive.models, teacher))
    error = replace(died.error, requested_bytes=asked, allocated_bytes=190 * MIB)
    said = explained(tmp_path / "taught", replace(died, alive=alive, error=error))
    assert first(said) == "second-copy"
    (halved,) = [each for each in said.remedies if "bfloat16" in each.do]
    assert halved.fits is is_enough
    assert said.numbers.others_bytes is not None
    assert halved.predicted_peak_bytes == 170 * MIB + asked + said.numbers.others_bytes
    assert (said.remedies[0] is halved) is is_enough


def test_an_engine_beside_it(died, tmp_path) -> None:
    own = Process(pid=1, used_bytes=8 * GIB, name="python", is_own=True)
    engine = Process(pid=2, used_bytes=70 * GIB, name="VLLM::EngineCore vllm", is_own=False)
    error = replace(died.error, requested_bytes=GIB, total_bytes=80 * GIB, free_bytes=GIB)
    said = explained(tmp_path, replace(died, error=error, processes=(own, engine)))
    assert first(said) == "engine-share"


def test_the_rank_that_died_first_leads_and_those_that_waited_are_named(died, tmp_path) -> None:
    folder = tmp_path / "ranks"
    run = replace(died.run, world_size=3)
    second = replace(
        died, run=run, rank=0, moment="save", part="", time_seconds=died.time_seconds + 2
    )
    for rank, words in (
        (0, "OutOfMemoryError"),
        (1, "OutOfMemoryError"),
        (2, "RuntimeError: peer"),
    ):
        timeline_of_run(str(folder), rank).add(Failure(step=7, words=words))
    said = explained(folder, second, replace(died, run=run, rank=1))

    assert said.causes[0].code == "capacity"
    assert said.facts[0].startswith("rank 1 of 3 ran out of memory in step 0")
    assert "rank 0 ran out of memory 2.0 s later, in step 0 (save)" in said.facts
    assert "rank 2 was only waiting, after step 7: RuntimeError: peer" in said.facts


def test_a_later_run_that_went_well_is_told(died, make_trainer, tmp_path) -> None:
    make_trainer(*watched(), max_steps=1).train()
    said = explain_run(tmp_path / "run")
    assert said.causes[0].code == "capacity"
    assert "1 later run(s) in this folder left no such record" in said.facts


def killed(make_trainer, tmp_path, *callbacks, **place_of_run) -> Path:
    """A run whose timeline stops, and whose process is gone."""
    folder = tmp_path / "run"
    callbacks = (MemoryWatchdog(), OOMReporter(), *callbacks)
    make_trainer(*callbacks, max_steps=3, dataloader_num_workers=0).train()
    path = folder / "_trainer_plugins" / "memory" / "rank-0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"end"' not in line))
    facts = json.loads((folder / "_trainer_plugins" / "run.json").read_text())
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    facts["place"] |= {"pid": gone.pid, **place_of_run}
    (folder / "_trainer_plugins" / "run.json").write_text(json.dumps(facts))
    return folder


def test_a_run_that_was_killed_is_found_out(make_trainer, tmp_path) -> None:
    folder = killed(make_trainer, tmp_path)
    said = explain_run(folder)
    assert [cause.code for cause in said.causes] == ["host-kill"]
    assert said.causes[0].grade == "possible"
    assert "143 is SIGTERM" in said.causes[0].doubt
    assert [each.do.split()[0] for each in said.remedies] == [
        "sudo",
        "trainer.train(resume_from_checkpoint=True)",
    ]
    assert said.causes[0].evidence[0].startswith("the last entry is of step 3 (train), ")
    assert report(folder).startswith("[run-cut-off] the run ended without a word")

    # The other rank, which waits for a rank that was killed, is told of by its backend.
    timelines = folder_of_run(folder) / "memory"
    shutil.copy(timelines / "rank-0.jsonl", timelines / "rank-1.jsonl")
    lost = Failure(step=3, words="RuntimeError: Connection reset by peer")
    timeline_of_run(str(folder), 1).add(lost)
    said = explain_run(folder)
    assert said.causes[0].summary.startswith("rank 0 of 2 ended without a word")
    assert "rank 1 raised in step 3: RuntimeError: Connection reset by peer" in (
        said.causes[0].evidence
    )


class FillsTheDisk(TrainerCallback):
    """Leaves room for half a line of the timeline, until training has ended."""

    def __init__(self, room: int) -> None:
        self.room = room

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            path = folder_of_run(Path(args.output_dir)) / "memory" / "rank-0.jsonl"
            self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (path.stat().st_size + self.room, self.before[1])
            )

    def on_train_end(self, args, state, control, **kwargs):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


@pytest.mark.parametrize("room", [0, 50])
def test_a_run_that_a_full_disk_has_cut_off_was_not_killed(make_trainer, tmp_path, room) -> None:
    full = FillsTheDisk(room)
    folder = killed(make_trainer, tmp_path, full, num_oom_kills=place().num_oom_kills - 2)
    assert report(folder).startswith(
        "[timeline-cut-off] how the run ended is unknown: the disk was too full"
    )
    assert "was killed" not in report(folder)
    said = explain_run(folder)
    assert (said.causes, said.remedies) == ((), ())
    assert said.facts[0].startswith("[timeline-cut-off]")

    make_trainer(MemoryWatchdog(), OOMReporter(), max_steps=1).train()
    assert "cut-off" not in report(folder)
    (folder / "_trainer_plugins" / "memory" / "rank-0.jsonl").unlink()
    shutil.rmtree(folder)
    assert report(killed(make_trainer, tmp_path)).startswith("[run-cut-off]")


def test_kills_that_the_container_counted_are_told(make_trainer, tmp_path) -> None:
    folder = killed(make_trainer, tmp_path, num_oom_kills=place().num_oom_kills - 2)
    said = explain_run(folder)
    assert said.causes[0].grade == "likely"
    assert any("oom_kill of the control group rose" in line for line in said.causes[0].evidence)
    assert report(folder).startswith("[host-oom-kill] the run was killed")


def test_a_run_that_still_runs_was_not_killed(make_trainer, tmp_path) -> None:
    folder = killed(make_trainer, tmp_path, pid=os.getpid())
    assert explain_run(folder).causes == ()
    assert report(folder).startswith("rank 0: the timeline does not end: it is still running\n")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is", "shm"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", "host-kill"),
        ("RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly", "host-kill"),
    ],
)
def test_a_dead_dataloader_worker(tmp_path, words: str, code: str) -> None:
    Timeline(tmp_path / "_trainer_plugins" / "memory" / "rank-0.jsonl").add(
        Failure(step=3, words=words)
    )
    assert first(explain_run(tmp_path)) == code


@pytest.mark.parametrize(
    ("words", "command", "typed"),
    [
        (("accelerate", "launch", "x.py", "--lr", "1 2"), ("x.py",), "accelerate launch x.py --lr '1 2'"),
        (("torchrun", "--nproc-per-node", "1", "-m", "mine"), ("x.py",), "torchrun --nproc-per-node 1 -m mine"),
        ((), ("x.py", "--a"), "python x.py --a"),
        ((), ("-m", "mine.train", "--a"), "python -m mine.train --a"),
    ],
)  # fmt: skip
def test_the_launcher_of_a_recorded_run_is_kept(
    died, tmp_path, words: tuple[str, ...], command: tuple[str, ...], typed: str
) -> None:
    facts = replace(died.run, command=command, launch=Launch(words=words))
    said = explained(tmp_path / "launched", replace(died, run=facts))
    assert f"trainer-plugins exec --preset survive -- {typed}" in [one.do for one in said.remedies]


SAVES = ("transformers/trainer.py", "_save_checkpoint", "self.save_model(output_dir)")


@pytest.mark.parametrize(
    ("frames", "first"),
    [
        ([("mine.py", "save_model", "w = {k: v.float() for k, v in w.items()}")], ".cpu() before the copy at mine.py:3"),
        ([("mine.py", "save_model", "twin = copy.deepcopy(self.model)"), ("copy.py", "deepcopy", "y = copier(memo)"), ("torch/nn/parameter.py", "__deepcopy__", "self.data.clone()")], ".cpu() before the copy at mine.py:3"),
        ([("mine.py", "save_model", "[p.clone() for p in self.model.parameters()]")], ".cpu() instead of .clone() at mine.py:3"),
        ([("transformers/trainer.py", "_save_optimizer_and_scheduler", "save_fsdp_optimizer(")], "--save_only_model True"),
        ([("transformers/trainer.py", "_save", "state_dict = self.model.state_dict()")], "--optim adafactor"),
    ],
)  # fmt: skip
def test_what_helps_a_save_is_what_it_copied(
    died, tmp_path, frames: list[tuple[str, str, str]], first: str
) -> None:
    came = (
        Frame(file=file, line=number, function=function, code=code)
        for number, (file, function, code) in enumerate((SAVES, *frames), 2)
    )
    said = explained(tmp_path / "save", replace(died, moment="save", frames=tuple(came)))
    assert said.causes[0].code == "save-gather"
    assert said.remedies[0].do == first
    assert ("--save_only_model True" in str(said.remedies)) is (first == "--save_only_model True")


def test_our_own_frames_are_not_in_a_record(died) -> None:
    files = [frame.file for frame in died.frames]
    assert files[0] == "transformers/trainer.py"
    assert not any(file.endswith(("oom_reporter.py", "_around.py")) for file in files)


def test_a_report_begins_with_the_error(died, tmp_path) -> None:
    lines = report(tmp_path / "run").splitlines()
    assert lines[0].startswith("rank 0, step 0: OutOfMemoryError: CUDA out of memory.")
    assert lines[1] == f"To see why: trainer-plugins explain {tmp_path / 'run'}"


def test_the_reading_at_the_oom_is_in_the_peak(died, tmp_path) -> None:
    assert died.reading is not None
    peak = size(died.reading.peak_allocated_bytes)
    (row,) = (line.split() for line in report(tmp_path / "run").splitlines() if " train " in line)
    assert " ".join(row[4:6]) == peak
    (moment,) = (
        each
        for each in read_answer(report(tmp_path / "run", "--json"), "report")["runs"][0]["peaks"]
        if each["moment"] == "train"
    )
    assert moment["peak_bytes"] == died.reading.peak_allocated_bytes
    done = CliRunner().invoke(app, ["top", str(tmp_path / "run"), "--once", "--json"])
    (rank,) = read_answer(done.stdout, "top")["ranks"]
    assert rank["reading"]["peak_allocated_bytes"] == died.reading.peak_allocated_bytes
    assert rank["state"] == "failed"
    assert max(rank["trend"]) == died.reading.pressure


@pytest.mark.slow
@pytest.mark.all
def test_the_page_of_a_run_says_what_explain_says(died, tmp_path) -> None:
    said = CliRunner().invoke(app, ["explain", str(tmp_path / "run"), "--json"])
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--html", str(page)])
    assert done.exit_code == 0, done.output
    first = read_answer(said.stdout, "explain")["remedies"][0]
    assert first["grade"] == "predicted"
    assert first["predicted_peak_bytes"] > 0
    assert (first["fits"], first["spare_bytes"] > 0) == (True, True)
    assert int(first["flags"]["per_device_train_batch_size"]) > 0
    assert first["do"] in page.read_text()


def test_the_command_explains_a_folder(died, tmp_path) -> None:
    done = CliRunner().invoke(app, ["explain", str(tmp_path / "run"), "--no-predict"])
    assert done.exit_code == 0
    assert done.stdout.startswith(
        "Cause  the run needs more memory than the card has  [likely: capacity]"
    )
    assert "Try    --per_device_train_batch_size " in done.stdout
    assert CliRunner().invoke(app, ["explain", str(tmp_path)]).exit_code == 2


GUESSED = """Traceback (most recent call last):
  File "/v/lib/python3.12/site-packages/torch/nn/functional.py", line 3462, in cross_entropy
    return torch._C._nn.cross_entropy_loss(
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB of which 0.10 GiB is free.
"""


def answered(*arguments: object, stdin: str | None = None) -> dict[str, Any]:
    done = CliRunner().invoke(
        app, ["explain", "--no-predict", "--json", *map(str, arguments)], input=stdin
    )
    assert done.exit_code == 0, done.output
    return read_answer(done.stdout, "explain")


@pytest.mark.parametrize("cwd", ["elsewhere", "beside", "inside", "piped"])
def test_a_log_that_names_the_record_of_its_run_is_answered_by_it(
    died, tmp_path, monkeypatch, cwd: str
) -> None:
    """A later run into the folder, which died of something else, is not what the log is of."""
    later = replace(died.run, time_seconds=died.run.time_seconds + 60)
    saved = replace(died, moment="save", run=later, time_seconds=died.time_seconds + 60)
    write_new(tmp_path / "run", "oom-rank0", asdict(saved))
    log = tmp_path / ("run/train.log" if cwd == "inside" else "train.log")
    log.write_text((tmp_path / "run" / "stderr").read_text() + GUESSED)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere" if cwd in ("elsewhere", "inside") else tmp_path)
    said = answered("-", stdin=log.read_text()) if cwd == "piped" else answered(log)
    assert said["causes"][0]["code"] == "capacity"
    assert "the log names the record of its run, used here: " in said["facts"][0]
    assert said["facts"][0].endswith("run/_trainer_plugins/oom-rank0.json")
    assert said["facts"][1].startswith("rank 0 of 1 ran out of memory in step 0 (train, ")
    record = folder_of_run(tmp_path / "run") / "oom-rank0.json"
    assert answered(record)["causes"] == said["causes"]
    assert answered(tmp_path / "run")["causes"][0]["code"] == "save-gather"


@pytest.mark.parametrize("what", ["missing", "damaged", "fifo", "of another run", "unbalanced"])
def test_a_record_that_is_not_there_leaves_the_words(died, tmp_path, what: str) -> None:
    path, log = folder_of_run(tmp_path / "run") / "oom-rank0.json", tmp_path / "train.log"
    said = (tmp_path / "run" / "stderr").read_text()
    if what == "of another run":
        path.write_text(json.dumps(asdict(replace(died, step=7))))
    elif what == "unbalanced":
        said = said.replace("explain run", "explain 'run")
    else:
        path.unlink()
    if what == "damaged":
        path.write_text("{")
    elif what == "fifo":
        os.mkfifo(path)
    log.write_text(said + GUESSED)
    found = answered(log)
    assert found["causes"][0]["code"] == "logits-loss"
    assert ("_trainer_plugins/oom-rank0.json" in str(found["unknown"])) is (what != "unbalanced")


def test_what_only_words_show_is_taken_from_them(died, tmp_path) -> None:
    tower = Frame(file="model.py", line=9, function="forward", code="self.vision_tower(pixels)")
    before = died.frames[:1]  # the call of train()
    error = classify(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total"
        " capacity of 23.68 GiB of which 4.00 GiB is free. Including non-PyTorch memory, this process"
        " has 19.60 GiB memory in use. Of the allocated memory 19.00 GiB is allocated by PyTorch, and"
        " 100.00 MiB is reserved by PyTorch but unallocated."
    )
    assert error is not None
    record = replace(died, error=error, frames=(*before, tower))
    said = explained(tmp_path / "words", record)
    assert first(said) == "image-size"
    assert said.causes[-1].code == "capacity"


def test_a_run_that_went_well_has_no_cause(make_trainer, tmp_path) -> None:
    make_trainer(MemoryWatchdog(), OOMReporter(), max_steps=1).train()
    said = explain_run(tmp_path / "run")
    assert said.causes == ()
    assert said.remedies == ()
    assert said.facts == ("no run in this folder has recorded an OOM",)


def test_a_folder_of_nobody_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="give the output_dir of a run that had OOMReporter"):
        explain_run(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, '{"version": 1}', "\0" * 99, '{"rank": NaN}', "fifo"]
)
def test_damaged_records_are_left_out(died, tmp_path, text: str) -> None:
    for name in ("oom-rank0-7.json", "run-7.json"):
        path = folder_of_run(tmp_path / "run") / name
        os.mkfifo(path) if text == "fifo" else path.write_text(text)
    assert first(explain_run(tmp_path / "run")) == "capacity"
    assert len(read_run_facts(tmp_path / "run")) == 1


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("rank", "zero", "rank: zero is not a int"),
        ("error", {"source": "allocator"}, "missing 3 required"),
        ("frames", [{"file": 3}], "frames: file: 3 is not a str"),
        ("moment", "lunch", "moment: 'lunch' is none of"),
    ],
)
def test_a_record_with_a_wrong_value_is_no_explanation(
    died, tmp_path, name: str, value: object, words: str
) -> None:
    path = folder_of_run(tmp_path / "run") / "oom-rank0.json"
    wrong = json.loads(path.read_text()) | {name: value}
    path.write_text(json.dumps(wrong))
    (tmp_path / "other.json").write_text(json.dumps(wrong))
    for given in (path, tmp_path / "other.json", tmp_path / "run"):
        done = CliRunner().invoke(app, ["explain", str(given)])
        assert done.exit_code == 2
        assert words in " ".join(done.output.replace("│", " ").split())


def test_only_a_damaged_record_is_no_folder_of_nobody(tmp_path) -> None:
    (tmp_path / "_trainer_plugins").mkdir()
    (tmp_path / "_trainer_plugins" / "oom-rank0.json").write_text('{"version": 1, "time_sec')
    with pytest.raises(ValueError, match=r"has no readable run\.json"):
        explain_run(tmp_path)


def test_numbers_that_nobody_can_have_meant_cost_no_time_and_no_traceback(died, tmp_path) -> None:
    rows = dict.fromkeys(("per_device_train_batch_size", "dataloader_num_workers"), 10**15)
    for number, arguments in enumerate((rows, dict.fromkeys(rows, 0), dict.fromkeys(rows, -4)), 1):
        run = replace(died.run, arguments=arguments)
        said = explained(
            tmp_path / "run", replace(died, run=run, time_seconds=died.time_seconds + number)
        )
        assert first(said) == "capacity"
        assert not any("10000000" in each.do or "-4" in each.do for each in said.remedies)
    wordless = replace(died, error=replace(died.error, source="nccl", text=""))
    said = explained(tmp_path / "run", replace(wordless, time_seconds=died.time_seconds + 9))
    assert first(said) == "nccl"


def test_foreign_text_in_a_record_is_shown_and_not_obeyed(died, tmp_path) -> None:
    path = tmp_path / "run" / "_trainer_plugins" / "oom-rank0.json"
    value = json.loads(path.read_text())
    value["error_class"] = value["run"]["card"] = value["run"]["model"] = HOSTILE
    value["alive"]["models"] = [{"name": HOSTILE, "num_bytes": 30 * MIB}] * 2
    path.write_text(json.dumps(value))
    said = explain_run(tmp_path / "run")
    assert not any(obeyed(line) for line in said.facts)
    shown = [*(each.summary for each in said.causes), *(each.do for each in said.remedies)]
    shown += [line for each in said.causes for line in each.evidence]
    assert not any(obeyed(line) for line in shown)


def test_it_is_explained_without_torch(died, tmp_path) -> None:
    code = (
        "import sys; from pathlib import Path; from trainer_plugins.explain.run import explain_run"
    )
    code += "; print(explain_run(Path(sys.argv[1])).causes[0].code, 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["capacity", "False"]


@pytest.mark.parametrize("place", ["record", "timeline"])
def test_survival_that_was_refused_is_not_offered_again(died, tmp_path, place: str) -> None:
    assert any("--preset survive" in each.do for each in explained(tmp_path / "run", died).remedies)
    folder = tmp_path / "run"
    if place == "record":
        folder = tmp_path / "refused"
        text = f"{died.error.text}\nsurvive_oom could not help: its gradient is not the sum"
        died = replace(died, error=replace(died.error, text=text))
    else:
        timeline = timeline_of_run(str(folder), 0)
        timeline.add(Remark(step=1, finding=report_not_attached(["a loss of your own"])))
    said = explained(folder, died)
    assert said.causes[0].code == "capacity"
    assert said.remedies
    assert not any("--preset survive" in each.do for each in said.remedies)


def test_a_run_that_hydra_made_is_told_overrides(died, tmp_path) -> None:
    under_hydra = replace(died, run=replace(died.run, override="++trainer.args."))
    as_flags = explained(tmp_path / "plain", died).remedies
    as_overrides = explained(tmp_path / "hydra", under_hydra).remedies
    rows, steps = re.findall(r"--(\w+ \d+)", as_flags[0].do)
    assert as_overrides[0].do == " ".join(
        f"++trainer.args.{each.replace(' ', '=')}" for each in (rows, steps)
    )
    assert "+trainer_plugins=survive" in [each.do for each in as_overrides]
    assert f"++trainer.args.{checkpointing.NAME}=True" in [each.do for each in as_overrides]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"built_class": "__main__.Mine"}, "transformers has no class __main__.Mine"),
        ({"model": "PeftModelForCausalLM"}, "its adapter is not recorded"),
        ({"family": "FSDP"}, "its launch file is not recorded, and it ran as FSDP"),
        ({"family": "DataParallel"}, "it ran as DataParallel"),
        ({"device": "xpu:0"}, "it ran on xpu:0"),
        ({"call": "evaluate"}, "it failed in evaluate(), and plans cover only train()"),
        ({"batch": {}}, "the batch is unknown, or has no input_ids"),
        (
            {"model_config": {"num_hidden_layers": 1_000_000}},
            "the config's num_hidden_layers is 1,000,000: a number from 1 to 4,096 is expected",
        ),
    ],
)
def test_what_no_plan_can_be_made_of_is_not_checked(
    died, tmp_path, change: dict[str, Any], why: str
) -> None:
    facts = died.run
    if "family" in change:
        assert facts.strategy is not None
        facts = replace(facts, strategy=replace(facts.strategy, **change))
    else:
        facts = replace(
            facts, **{name: its for name, its in change.items() if hasattr(facts, name)}
        )
    of_record = {name: its for name, its in change.items() if name in ("call", "batch")}
    folder = tmp_path / "other"
    known = explained(folder, replace(died, run=facts, **of_record))
    said = explain_run(folder, predicts=True)
    assert said.remedies == known.remedies
    assert said.unknown[-1] == (f"the effect of the remedies: {why}")


def test_whole_gradients_are_advised_against_where_fsdp_accumulates_them(died, tmp_path) -> None:
    assert died.run.strategy is not None
    fsdp = replace(died.run, strategy=replace(died.run.strategy, family="FSDP"))
    for steps, is_advised in ((4, True), (1, False)):
        arguments = {**died.run.arguments, "gradient_accumulation_steps": steps}
        record = replace(died, run=replace(fsdp, arguments=arguments))
        remedies = explained(tmp_path / str(steps), record).remedies
        assert any("sync_each_batch" in each.do for each in remedies) is is_advised


@pytest.mark.slow
def test_a_plan_that_fits_says_nothing_of_remedies(died, tmp_path) -> None:
    facts = replace(died.run, arguments={**died.run.arguments, "per_device_train_batch_size": 1})
    folder = tmp_path / "small"
    known = explained(folder, replace(died, run=facts))
    said = explain_run(folder, predicts=True)
    assert said.remedies == known.remedies
    assert re.match(
        r"the effect of the remedies: the plan of its config and"
        r" arguments fits \([\d.]+ MiB of 200\.0 MiB\), so something else took the rest$",
        said.unknown[-1],
    )


def test_what_a_plan_had_said_is_told(died, tmp_path) -> None:
    plan = Planned(
        source="plan.json",
        nvidia_smi_peak_bytes=3 * GIB,
        capacity_bytes=8 * GIB,
        fits=True,
        moment="backward",
    )
    said = explained(tmp_path / "planned", replace(died, plan=plan))
    assert (
        "plan.json had predicted a peak of 3.00 GiB of 8.00 GiB, in backward: it fits" in said.facts
    )
