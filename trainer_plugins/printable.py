"""Foreign text made harmless: what a file, a process or a driver says, as one line that is shown and not obeyed."""

LONGEST_CHARACTERS = 4000


def printable(text: object) -> str:
    r"""Render text that somebody else wrote, so that a terminal and a log show it and do nothing it asks for.

    Line breaks and tabs become spaces. Whatever else `str.isprintable` refuses is written as Python
    escapes it: the C0 and C1 controls with ESC, the bidirectional overrides, what is invisible,
    half surrogates. A text of more than 4,000 characters is cut, and says so.

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
