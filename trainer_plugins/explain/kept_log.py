"""Read a log as it is kept: in any encoding, of any size, packed, a notebook, in JSON or HTML."""

import codecs
import html
import json
import re
import zlib
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import BinaryIO

from trainer_plugins.units import size

_BLOCK_BYTES = 1 << 20
_HEAD_BLOCKS, _END_BLOCKS = 4, 12  # of a large log, whose middle is not searched
_NOTEBOOK_BLOCKS = 64  # of a notebook, which is read at once: images make it large
_MOST_UNKNOWN = 0.3  # the largest part of a text's characters that may be invalid, in any encoding
_MOST_BYTES = 1 << 29  # gzip data may unpack to any size
SKIPPED = "\n\0\n"  # stands for what was not read
_NOTEBOOK = re.compile(rb'^\s*\{.*?"cell_type"\s*:\s*"', re.DOTALL)  # of Jupyter, Colab, Kaggle
_OUTPUTS = re.compile(r'"outputs"\s*:\s*(?=\[)')
_HTML = re.compile(
    r"&(?:quot|lt|gt|amp|#\d{1,4}|#x[\da-fA-F]{1,4});|</(?:pre|span|code|p|div)>|<br ?/?>"
)
_BREAK = re.compile(r"<br ?/?>|</(?:p|div|tr|li)>")
_TAG = re.compile(
    r"</?(?:pre|span|code|p|div|a|b|i|td|tr|table|body|html|li|ul|font|strong)"
    r"(?: [^<>\n]{0,300})?/?>"
)
# A traceback as one string of JSON.
_ESCAPED, _END = '\\n  File \\"', re.compile(r"(?<!\\)\\n")


def read_log(stream: BinaryIO) -> tuple[str, str]:
    """Return the head and the end of a log as text, and a note on the part left out.

    Raise ValueError if it is empty or not text.
    """
    blocks = _read_blocks(stream)
    first = next(blocks, b"")
    if not first.strip():
        raise ValueError("it is empty")
    wide = first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if not wide and b"\0" in first[: 1 << 16]:
        raise ValueError("it is not text")
    if _NOTEBOOK.match(first):
        whole = first + b"".join(islice(blocks, _NOTEBOOK_BLOCKS))
        printed = _read_notebook(whole.decode("utf-8", "replace"))
        if printed is not None:
            return printed, ""
        first, blocks = whole, iter(())
    head = first + b"".join(islice(blocks, _HEAD_BLOCKS))
    end, num_bytes = deque[bytes](maxlen=_END_BLOCKS), len(head)
    for block in blocks:
        end.append(block)
        num_bytes += len(block)
        if num_bytes > _MOST_BYTES:
            break
    tail = b"".join(end)
    encoding = "utf-16" if wide else "utf-8"
    skipped = num_bytes - len(head) - len(tail)
    if skipped and wide:
        tail = head[:2] + tail[(len(head) + skipped) % 2 :]
    parts = (head, tail) if skipped else (head + tail,)
    text = SKIPPED.join(part.decode(encoding, "replace") for part in parts)
    if text.count("\ufffd") > _MOST_UNKNOWN * len(text):
        raise ValueError("it is not text")
    if _ESCAPED in text:
        text = _END.sub("\n", text).replace('\\"', '"')
    if _HTML.search(text):
        text = html.unescape(_TAG.sub("", _BREAK.sub("\n", text)))
    if not skipped:
        return text, ""
    left_out = f"{size(skipped)} between its first {size(len(head))} and its last {size(len(tail))}"
    is_bomb = num_bytes > _MOST_BYTES
    return text, left_out + f" (it is more than {size(_MOST_BYTES)})" * is_bomb


def _read_blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Read block by block; unpack gzip data, even if their end is missing."""
    block = stream.read(_BLOCK_BYTES)
    packed = zlib.decompressobj(wbits=31) if block.startswith(b"\x1f\x8b") else None
    while block:
        try:
            yield packed.decompress(block, _BLOCK_BYTES) if packed else block
        except zlib.error as error:
            raise ValueError(f"its gzip data is damaged: {error}") from error
        block = (packed and packed.unconsumed_tail) or stream.read(_BLOCK_BYTES)


def _read_notebook(notebook: str) -> str | None:
    """Return the output of a notebook's cells, without their code; None if it has none.

    Each list of outputs is read separately, so a truncated notebook can be read as well.
    """
    decoder, has_outputs = json.JSONDecoder(), False
    printed: list[str] = []
    end = 0
    while match := _OUTPUTS.search(notebook, end):
        try:
            outputs, end = decoder.raw_decode(notebook, match.end())
        except (ValueError, RecursionError):  # truncated, or not a notebook
            break
        has_outputs = True
        for output in outputs:
            printed += _read_output(output) if isinstance(output, dict) else ()
    return "\n".join(printed) if has_outputs else None


def _read_output(output: dict[str, object]) -> Iterator[str]:
    """Yield the text of one output: of a stream, of an error, or beside an image or a table."""
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
