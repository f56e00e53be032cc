"""Makes foreign text (of a file, a process, a driver) harmless: one line, shown but not obeyed."""

LONGEST_CHARACTERS = 4000


def printable(text: object) -> str:
    r"""Render foreign text so that a terminal or a log shows it and does nothing it asks for.

    Line breaks and tabs become spaces. Everything else that `str.isprintable` refuses becomes a
    Python escape: C0 and C1 controls including ESC, bidirectional overrides, invisible characters,
    lone surrogates. A text of more than 4,000 characters is cut, and the result says so.

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
