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
    at_once = words[0] == "-u"
    if at_once:
        del words[0]
    open_streams(at_once)
    match words:
        case ["-c", code, *rest]:
            run_text(code, "<string>", ["-c", *rest])
        case ["-", *_]:
            run_text(sys.stdin.read(), "<stdin>", words)
        case ["-m", *rest]:
            program(rest, is_module=True)()
        case _:
            program(words, is_module=False)()


def open_streams(at_once: bool) -> None:
    """Open the standard streams again: those of the server do not know whether they can seek."""
    for name, mode in (("stdin", "rb"), ("stdout", "wb"), ("stderr", "wb")):
        before = getattr(sys, name)
        is_raw = name != "stdin" and (at_once or before.write_through)
        file = open(before.fileno(), mode, 0 if is_raw else -1, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            file,
            before.encoding,
            before.errors,
            line_buffering=before.line_buffering or file.isatty(),
            write_through=is_raw,
        )
        setattr(sys, name, stream)


def run_text(code: str, name: str, words: list[str]) -> None:
    sys.argv, sys.path[0] = words, ""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(code, name, "exec"), module.__dict__)


if __name__ == "__main__":
    main(sys.argv[1:])
