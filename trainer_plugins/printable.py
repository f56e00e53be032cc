"""Make text from files, processes and drivers safe to print, on one line."""

import re

LONGEST_CHARACTERS = 4000
_LEAKS = re.compile(r"nanobind: leaked .*?refleaks\.html", re.DOTALL)


def printable(text: object) -> str:
    r"""Render text so that a terminal or a log cannot interpret any of it as a command.

    Line breaks and tabs become spaces. Everything else that `str.isprintable` rejects becomes a
    Python escape: control characters including ESC, bidirectional overrides, invisible characters,
    lone surrogates. Text over 4,000 characters is cut, and its length is appended.

    >>> print(printable("title: \x1b]0;mine\x07, lines:\n[red]forged\u202e"))
    title: \x1b]0;mine\x07, lines: [red]forged\u202e
    """
    line = str(text)
    if len(line) > LONGEST_CHARACTERS:
        line = f"{line[:LONGEST_CHARACTERS]}… ({len(line):,} characters)"
    if line.isprintable():
        return line
    return "".join(
        each if each.isprintable() else " " if each.isspace() else repr(each)[1:-1] for each in line
    )


def drop_leaks(log: str) -> str:
    r"""Drop nanobind's leak report (triton 3.9 leaks), which follows the error at a process's end.

    >>> drop_leaks("the error\nnanobind: leaked 4 types!\n - type\nSee https://x/refleaks.html\n")
    'the error\n\n'
    """
    return _LEAKS.sub("", log)
