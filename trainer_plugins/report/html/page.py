"""Page: one HTML file, rendered from templates that escape foreign text."""

import base64
import hashlib
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path

import jinja2
from markupsafe import Markup

from trainer_plugins.printable import printable
from trainer_plugins.report.html.chart import colour_of
from trainer_plugins.report.plan_text import words_of
from trainer_plugins.units import percent, size

_FOLDER = Path(__file__).parent
_FRAME = (
    '<iframe srcdoc="{}" sandbox="allow-scripts" title="{}"'
    ' style="width:100%;height:46rem;border:0"></iframe>'
)
_PLACES_TO_BREAK = re.compile(r"(?<=[/_=])(?=\w)|(?<=[a-z]\.)(?=[A-Za-z_*])|(?<=\w)(?=:\d)")


class Page(str):
    """Holds the text of a page; a notebook shows it if it is the last value of a cell."""

    def _repr_html_(self) -> str:
        # In its own frame, so that neither its style nor its script reaches the notebook.
        return _FRAME.format(escape(self, quote=True), "Memory")


def page(template: str, data: Mapping[str, object], **values: object) -> Page:
    """Render a template of this folder with values; everything but `Markup` is escaped.

    Pictures are drawn from `data` by the only script that the page allows, by its hash.
    """
    files = ["page.js", "snapshot.js"] if data.get("snapshots") else ["page.js"]
    script = "".join((_FOLDER / file).read_text(encoding="utf-8") for file in files)
    digest = hashlib.sha256(script.encode()).digest()
    values |= {"script": Markup(script), "hash": base64.b64encode(digest).decode()}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_harmless,
    )
    # `tojson` writes data so that no text in it can end its element.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters |= {"colour": colour_of, "percent": percent, "size": size}
    environment.filters |= {"soft": soft, "words": words_of}
    return Page(environment.get_template(template).render(values, data=data))


def soft(text: object, longest: int = 36) -> Markup:
    """Allow longer words to break behind their separators only.

    >>> print(soft("per_device_train_batch_size & 1.5 GiB", 20))
    per_<wbr>device_<wbr>train_<wbr>batch_<wbr>size &amp; 1.5 GiB
    """
    words = [
        "<wbr>".join(map(escape, _PLACES_TO_BREAK.split(word) if len(word) > longest else [word]))
        for word in printable(text).split(" ")
    ]
    return Markup(" ".join(words))


def _harmless(value: object) -> object:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
