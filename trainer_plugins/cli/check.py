"""`trainer-plugins check`: find, before a launch, the usual causes of a failure hours later."""

import os
from dataclasses import fields

import click

from trainer_plugins.check import judge
from trainer_plugins.check.gather_launch import gather_command, gather_launch
from trainer_plugins.cli.as_json import print_json
from trainer_plugins.cli.plan import DryOptions, command_in, take_as_json, variations_of
from trainer_plugins.cli.spelled import WITH_OTHER_FLAGS, CommandOfARun
from trainer_plugins.cli.typed_options import refuse_bad_input
from trainer_plugins.finding import Severity
from trainer_plugins.interrupted import interrupt_by_any_signal
from trainer_plugins.launch.lint.document import ConfigError
from trainer_plugins.planner.options import MOST_USED, RunOptions, complete
from trainer_plugins.planner.plan import PlanError
from trainer_plugins.plug_in.flags import PanelOption, take_options
from trainer_plugins.report.check import check_report
from trainer_plugins.report.page import show

_EXIT_CODES = {Severity.INFO: 0, Severity.WARNING: 1, Severity.ERROR: 3}
_MOST_USED = [each.name for each in fields(RunOptions) if each.metadata.get("panel") == MOST_USED]


@click.command(cls=CommandOfARun, context_settings=WITH_OTHER_FLAGS)
@click.pass_context
@take_options("run", RunOptions, [*_MOST_USED, "host_memory"])
@click.option(
    "--verbose",
    cls=PanelOption,
    panel=MOST_USED,
    is_flag=True,
    help="List the passed checks.",
)
@take_as_json
def check(context: click.Context, run: RunOptions, verbose: bool, as_json: bool) -> None:
    """Check this machine, and with --model a run, before you launch it.

    You can add all options of `trainer-plugins plan` that describe a run, and all flags of
    TrainingArguments. Without --model it takes a second, and imports no torch.

    Example: trainer-plugins check --model config.json --gpu 24GiB --bf16

    Or give the command itself: it runs on CUDA cards that compute nothing.

    Example: trainer-plugins check --gpu 24GiB -- accelerate launch train.py --bf16

    Exit codes: 0 no findings, 1 warnings, 3 errors that will end the run, 2 bad input.
    """
    with refuse_bad_input(ConfigError, PlanError):
        command = command_in(context.args)
        if command and run.model is None:
            with interrupt_by_any_signal():
                ran = variations_of(command, run, DryOptions(), foretells=True)
                facts = gather_command(os.environ, ran, run.gpu)
        else:
            facts = gather_launch(os.environ, complete(run, context.args))
        checklist = judge(facts)
    if as_json:
        print_json("check", checklist)
    else:
        show(check_report(checklist, verbose))
    raise SystemExit(_EXIT_CODES[checklist.worst])
