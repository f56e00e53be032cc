"""Write down the command line that makes a plan again."""

import shlex

import typer


def command_of(context: typer.Context) -> str:
    """Return the command of a context in one line: all that differs from the defaults."""
    words = ["trainer-plugins", context.info_name or ""]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if value is None or value == parameter.get_default(context) or value in ((), []):
            continue
        if parameter.name == "help":
            continue
        flag = parameter.opts[0]
        if isinstance(value, bool):
            words.append(flag if value else parameter.secondary_opts[0])
            continue
        for each in value if isinstance(value, (list, tuple)) else [value]:
            words += [flag, str(each)]
    return shlex.join([*words, *context.args])
