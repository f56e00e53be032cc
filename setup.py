"""The description that a package index shows: the README, with links that work there.

Everything else about the package is in setup.cfg.
"""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

_ROOT = Path(__file__).parent
_LINK = re.compile(r"\[([^]]+)\]\((?!https?:)([^)]+)\)")
_PICTURE = re.compile(r"^!\[[^]]*\]\([^)]*\)\n\n", re.MULTILINE)


def description() -> str:
    """Return the README with links to `Files` of setup.cfg, or with paths where it has no such URL.

    A package index shows the README alone, so a link to a file beside it leads nowhere, and a
    picture beside it is left out.
    """
    config = ConfigParser()
    config.read(_ROOT / "setup.cfg")
    urls = config.get("metadata", "project_urls", fallback="")
    files = re.search(r"^Files\s*=\s*(\S+?)/?$", urls, re.MULTILINE)
    replaced = rf"[\1]({files[1]}/\2)" if files else r"\1 (`\2`)"
    readme = (_ROOT / "README.md").read_text(encoding="utf-8")
    return _LINK.sub(replaced, _PICTURE.sub("", readme))


setup(long_description=description(), long_description_content_type="text/markdown")
