"""Does what `python` does with its arguments, in a process that was forked from the server."""

import io
import os
import sys
import types

from tests.forked import MARK, ROOT, SHIM
from trainer_plugins.as_main import program


def main(words: list[str]) -> None:
    with open("/proc/self/comm", "w") as name:
        name.write(os.environ.get(MARK, "python")[:15])  # as Linux cuts it
    sys.executable = os.environ.pop(SHIM)  # so that what it starts in turn is forked too
    sys.path.remove(ROOT)
    sys.path.append(ROOT)  # an editable install is found last
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if words[:2] == ["-X", "faulthandler"]:  # the server has it
        del words[:2]
    if words[0] == "-u":
        del words[0]
        write_at_once()
    match words:
        case ["-c", code, *rest]:
            run_text(code, "<string>", ["-c", *rest])
        case ["-", *_]:
            run_text(sys.stdin.read(), "<stdin>", words)
        case ["-m", *rest]:
            program(rest, is_module=True)()
        case _:
            program(words, is_module=False)()


def write_at_once() -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = io.FileIO(number, "w", closefd=False)
        errors = getattr(sys, name).errors
        setattr(sys, name, io.TextIOWrapper(raw, "utf-8", errors, write_through=True))


def run_text(code: str, name: str, words: list[str]) -> None:
    sys.argv, sys.path[0] = words, ""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(code, name, "exec"), module.__dict__)


if __name__ == "__main__":
    main(sys.argv[1:])
