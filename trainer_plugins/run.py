"""Run any training script, unedited, with callbacks on every Trainer that it builds.

    python -m trainer_plugins.run --preset memory_safe --memory-warn-fraction 0.8 train.py --lr 1e-5
    python -m trainer_plugins.run -m package.module --lr 1e-5
    accelerate launch --num_processes 2 -m trainer_plugins.run train.py
    torchrun --nproc-per-node 2 -m trainer_plugins.run train.py

The script sees the same `sys.argv`, `sys.path` and `__main__` as under plain python, and its exit
code is passed on.
"""

import sys

from trainer_plugins.plug_in.as_main import NoSuchProgramError, program
from trainer_plugins.plug_in.attachment import attach, say_at_exit
from trainer_plugins.plug_in.flags import Flags


def main(arguments: list[str]) -> None:
    """Attach the callbacks, then run the program that the command line names."""
    flags = Flags(
        "python -m trainer_plugins.run",
        "(SCRIPT | -m MODULE) [ARGUMENT ...]",
        "Run a training script, unedited, with callbacks on every transformers.Trainer it builds.",
        takes_module=True,
    )
    given, command = flags.split(arguments)
    if is_module := command[:1] == ["-m"]:
        del command[0]
    if not command:
        flags.refuse("name a script, or a module after -m")
    try:
        run = program(command, is_module)
    except NoSuchProgramError as error:
        flags.refuse(str(error))
    try:
        attach(**given)
    except ValueError as error:
        flags.refuse(str(error))
    say_at_exit()
    run()


if __name__ == "__main__":
    main(sys.argv[1:])
