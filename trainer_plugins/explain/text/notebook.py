"""printed_by: what the cells of a notebook have printed, out of its file."""

import json
import re
from collections.abc import Iterator

_OUTPUTS = re.compile(r'"outputs"\s*:\s*(?=\[)')
_CELL = re.compile(rb'^\s*\{.*?"cell_type"\s*:\s*"', re.DOTALL)


def is_notebook(start: bytes) -> bool:
    """Return whether a file that starts so is a notebook of Jupyter, Colab or Kaggle."""
    return _CELL.match(start) is not None


def printed_by(notebook: str) -> str | None:
    """Return what a notebook's cells have printed, without their code; None if it has no outputs.

    Each list of outputs is read for itself, so a notebook whose end is missing is read as well.
    """
    decoder, has_outputs = json.JSONDecoder(), False
    printed: list[str] = []
    end = 0
    while match := _OUTPUTS.search(notebook, end):
        try:
            outputs, end = decoder.raw_decode(notebook, match.end())
        except (ValueError, RecursionError):  # the end is missing, or it is no notebook
            break
        has_outputs = True
        for output in outputs:
            printed += _printed(output) if isinstance(output, dict) else ()
    return "\n".join(printed) if has_outputs else None


def _printed(output: dict[str, object]) -> Iterator[str]:
    """Yield the text of one output: of a stream, of an error, or beside a picture or a table."""
    data = output.get("data")
    shown = data.get("text/plain") if isinstance(data, dict) else None
    for text in (output.get("text"), shown):
        if isinstance(text, list):
            yield "".join(map(str, text))
        elif isinstance(text, str):
            yield text
    traceback = output.get("traceback")
    if isinstance(traceback, list) and traceback:
        yield "\n".join(map(str, traceback))
    elif "ename" in output:
        yield f"{output['ename']}: {output.get('evalue', '')}"
