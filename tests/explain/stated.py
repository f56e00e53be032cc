"""What a text is explained by, and whether the figures of a cause are the numbers that its sentences state."""

import io
import re
from typing import Any

from trainer_plugins.explain.answer import Explanation
from trainer_plugins.explain.log import explain_log
from trainer_plugins.units import percent, size

_SIZES = re.compile(r"-?\d+\.\d+ [MG]iB")
# What another part of the package or the text itself has written.
_QUOTED = re.compile(
    r"MemoryWatchdog noted | held by |According to the text, |The log says: |engine says: "
)


def explained(text: str, subject: str = "a test") -> Explanation:
    return explain_log(io.BytesIO(text.encode(errors="replace")), subject)


def check_figures(cause: dict[str, Any]) -> None:
    """Every figure stands in its sentence, and every size of a sentence is a figure."""
    for each in cause["figures"]:
        name, value = each["name"], each["value"]
        sentence = cause["evidence"][each["sentence"]]
        shown = size(value) if "bytes" in name.split("_") else str(value)
        shown = percent(value) if name.endswith("_fraction") else shown
        assert shown in sentence or f"{value:,}" in sentence
        assert name in cause["data"]
    for at, sentence in enumerate(cause["evidence"]):
        if not _QUOTED.search(sentence):
            named = {size(each["value"]) for each in cause["figures"] if each["sentence"] == at}
            assert set(_SIZES.findall(sentence)) <= named, sentence
