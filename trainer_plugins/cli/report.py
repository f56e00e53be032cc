"""`trainer-plugins report`: print the memory history of a run."""

from pathlib import Path

import click

from trainer_plugins.cli.as_json import print_json
from trainer_plugins.cli.typed_options import refuse_bad_input, take_as_json, take_run_dir
from trainer_plugins.explain.run.ending import judge_ending
from trainer_plugins.planner.plan import MemoryPlan
from trainer_plugins.plug_in.flags import PATH, Command
from trainer_plugins.record.history import read_history
from trainer_plugins.report.page import show
from trainer_plugins.report.summary import add_records, records_of, summary
from trainer_plugins.report.text import history_report


@click.command(cls=Command)
@take_run_dir
@click.option("--html", type=PATH, help="Write an HTML page of the last run to this file.")
@click.option("--plan", type=PATH, help="With --html: the plan of this run, from plan --json.")
@click.option("--rank", type=int, metavar="N", help="Print only this rank (default: all).")
@take_as_json
@click.option(
    "--predict/--no-predict",
    "predicts",
    default=True,
    help="With --html: predict the effect of each remedy for an OOM (takes up to a minute).",
)
def report(
    run_dir: Path,
    html: Path | None,
    plan: Path | None,
    rank: int | None,
    as_json: bool,
    predicts: bool,
) -> None:
    """Print how a run ended, the peak of each moment, releases and findings.

    If several runs wrote into the folder, each gets a block, the last one first. If there are
    several ranks, it shows the fullest, and how full the least full one was.

    Example: trainer-plugins report runs/my-run

    Exit codes: 0 printed; 2 nothing to read.
    """
    with refuse_bad_input(ValueError):
        history = read_history(run_dir)
        if rank is not None:
            history = history.select_rank(rank)
        ending = judge_ending(history, run_dir)
        if html is not None:
            from trainer_plugins.report.html.run_page import run_page

            planned = None if plan is None else _read_plan(plan)
            page = run_page(history, run_dir, ending, planned, predicts)
            html.write_text(page, encoding="utf-8")
        elif plan is not None:
            raise ValueError("--plan is drawn on a page: add --html")
    runs = [add_records(run, records_of(run, run_dir)) for run in history.runs]
    history = history._replace(runs=runs)
    if as_json:
        print_json("report", summary(history, ending))
    else:
        show(history_report(history, ending))


def _read_plan(plan: Path) -> MemoryPlan:
    try:
        return MemoryPlan.from_json(plan.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        what = "not a plan printed with --json"
        raise ValueError(f"--plan: {plan} is {what}: {error}") from error
