"""Programs that train several times: the fullest training counts, or the plan says what it misses."""

import sys
from pathlib import Path

import pytest

from tests import processes
from tests.distributed.launched import environment
from tests.drycuda.scripts import ROOT, TRAINS, place, plan_of
from trainer_plugins.report.plan_text import verdict

pytestmark = [pytest.mark.slow, pytest.mark.all, pytest.mark.usefixtures("cuda_build")]

_TRAINING = TRAINS.partition("Trainer(model=model")[0].replace(
    "def padded", 'args_of = dict(eval_strategy="no", save_strategy="no")\n\ndef padded'
).replace('eval_strategy="epoch"', '**args_of')  # fmt: skip
_FOLD = """
def fold(rows):
    Trainer(model=model, args=args, train_dataset=rows, data_collator=padded).train()
"""
_PROGRAMS = {
    "a loop": f"{_FOLD}\nfor part in (rows[:8], rows):\n    fold(part)\n",
    "a function called twice": f"{_FOLD}\nfold(rows)\nfold(rows[:8])\n",
    "processes": """
import subprocess
if len(sys.argv) == 3:
    for num in ("64", "8"):
        subprocess.run([sys.executable, *sys.argv, "1", num], check=True)
else:
    Trainer(
        model=model, args=args, train_dataset=rows[: int(sys.argv[4])], data_collator=padded
    ).train()
""",
    "a method": f"""{_FOLD}
class Stages:
    def first(self): fold(rows[:8])
    def second(self): fold(rows)
    def run(self):
        self.first()
        self.second()

Stages().run()
""",
}
_EVALUATES = """
trainer = Trainer(
    model=model, args=args, train_dataset=rows[:4], eval_dataset=rows * 8, data_collator=padded
)
trainer.train()
"""
_SEARCH = """
from transformers import AutoConfig

args.max_steps = 2
config = AutoConfig.from_pretrained(sys.argv[1])
trainer = Trainer(
    model_init=lambda trial: AutoModelForCausalLM.from_config(config), args=args,
    train_dataset=rows, eval_dataset=rows[:2], data_collator=padded,
)
trainer.hyperparameter_search(n_trials=2, backend="optuna", hp_space=lambda trial: {
    "per_device_train_batch_size": trial.suggest_int("rows", 6 + trial.number, 6 + trial.number)
})
"""


_HALVES = """
while True:
    try:
        Trainer(model=model, args=args, train_dataset=rows, data_collator=padded).train()
        break
    except torch.OutOfMemoryError:
        args.per_device_train_batch_size //= 2
"""


@pytest.mark.parametrize(
    ("then", "is_counted"),
    [
        ("metrics = trainer.evaluate()", True),
        ("if args.do_predict:\n    trainer.predict(rows)", False),
        ("if args.do_eval:\n    trainer.predict(rows)", True),
    ],
)
def test_an_evaluation_after_the_training_counts(
    tmp_path: Path, then: str, is_counted: bool
) -> None:
    """Two batches of evaluation are larger than the four rows of 32 tokens that train."""
    program = _TRAINING.replace("per_device_eval_batch_size=2", "per_device_eval_batch_size=16")
    plan = plan_of(place(tmp_path, program + _EVALUATES + then), "--gpu", "24GiB")
    where = "during evaluation" if is_counted else "in the backward pass"
    assert verdict(plan).endswith(where)
    assert ("evaluation" in plan.moments) is is_counted
    line = 1 + (tmp_path / "train.py").read_text().splitlines().index(then.splitlines()[-1])
    said = f"the evaluation in train.py:{line} counts as one while training"
    assert (said in plan.assumptions) is is_counted


@pytest.mark.parametrize("program", _PROGRAMS)
def test_every_training_of_a_program_counts(tmp_path: Path, program: str) -> None:
    plan = plan_of(place(tmp_path, _TRAINING + _PROGRAMS[program]), "--gpu", "24GiB")
    assert plan.planned["batch"].startswith("4 rows at once of 512 tokens"), "the fullest one"
    assert verdict(plan).endswith("to spare, in the backward pass")
    assert not any("not come to" in line for line in plan.assumptions)


def test_a_program_that_halves_its_batch_itself_is_planned_with_that_batch(tmp_path: Path) -> None:
    plan = plan_of(place(tmp_path, _TRAINING + _HALVES), "--gpu", "2100MiB")
    assert plan.fits
    assert plan.planned["batch"].startswith("2 rows at once of 512 tokens")
    assert any("ran out of memory 1 times and continued" in line for line in plan.not_reliable)


def test_every_trial_of_a_search_counts_with_its_arguments(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    plan = plan_of(place(tmp_path, _TRAINING + _SEARCH), "--gpu", "24GiB")
    assert plan.planned["batch"].startswith("7 rows at once"), plan.planned
    assert plan.planned["model"].endswith("trained by Trainer, then by Trainer")
    assert "missed" not in plan.planned
    assert not any("perhaps not the longest" in line for line in plan.assumptions)


def test_a_training_that_does_not_come_is_named_in_the_first_line(tmp_path: Path) -> None:
    """An error that only the dry run raises ends the loop."""
    program = f"{_FOLD}\nimport os\nfor part in (rows[:8], rows):\n    fold(part)\n"
    fails = '    assert "TRAINER_PLUGINS_DRYCUDA" not in os.environ\n'
    place(tmp_path, _TRAINING.replace("90", "1") + program + fails)
    at = 1 + (tmp_path / "train.py").read_text().splitlines().index("    fold(part)")
    missed = f"the training in train.py:{at} is not counted"
    assert verdict(plan_of(tmp_path, "--gpu", "24GiB")).endswith(f"backward pass; {missed}")
    fit = ("exec", "--fit=ask", "--gpu", "24GiB", "--", sys.executable, "train.py", "model", "out")
    done = processes.run(
        [sys.executable, "-m", "trainer_plugins", *fit],
        cwd=tmp_path,
        environ={**environment(), "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        fresh="the dry card is loaded by a start of Python",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"exec --fit: {missed}" in done.stdout
