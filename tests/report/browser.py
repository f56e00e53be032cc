"""Chromium without a screen and without a network: opens pages and measures what it draws."""

import json
import re
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

from tests.report.chromium import CHROMIUM, chromium

MEASURE = r"""
(() => {
  const root = document.documentElement;
  for (const each of document.querySelectorAll("details")) each.open = true;
  const seen = rect => rect.width > 0 && rect.height > 0;
  const broken = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode;
    if (node.parentElement.closest("pre, script, .said, .block, .mark")) continue;
    for (const word of node.data.matchAll(/[^\s-]+/g)) {
      const range = document.createRange();
      range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);
      const tops = new Set([...range.getClientRects()].filter(seen).map(each => Math.round(each.top)));
      if (tops.size > 1) broken.push(word[0]);
    }
  }
  const colours = canvas => {
    const some = new OffscreenCanvas(200, 100).getContext("2d", {willReadFrequently: true});
    some.imageSmoothingEnabled = false;
    some.drawImage(canvas, 0, 0, 200, 100);
    const points = new Uint32Array(some.getImageData(0, 0, 200, 100).data.buffer);
    return new Set(points).size;
  };
  const style = getComputedStyle(document.body), canvases = [...document.querySelectorAll("canvas:not(.over)")];
  return {
    width: innerWidth,
    is_dark: matchMedia("(prefers-color-scheme: dark)").matches,
    ink: style.color, paper: style.backgroundColor,
    wider_by: root.scrollWidth - innerWidth,
    plots: canvases.filter(each => each.width && each.height).map(colours),
    unnamed: canvases.filter(each => !each.getAttribute("aria-label")).length,
    unreachable: [...document.querySelectorAll("summary, a[href], pre, button, input, .table, canvas:not(.over)")].filter(each => { each.focus(); return document.activeElement !== each; }).length,
    broken,
  };
})()
"""


def look(
    folder: Path, pages: dict[str, str], *, is_dark: bool, widths: tuple[int, ...] = (1280, 390)
) -> tuple[dict[tuple[str, int], dict[str, Any]], list[str]]:
    """Draw pages at each width; return the measurements, and what the console says."""
    found = {}
    with chromium(folder) as tab:
        for name, text in pages.items():
            for width in widths:
                tab.show(folder, text, width=width, is_dark=is_dark)
                found[name, width] = tab.run(MEASURE)
        return found, tab.console


def measured_in(
    folder: Path, script: str, frames: str, *flags: str, is_dark: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    """Load pages in frames, with a script that writes what it measures into `pre#measured`.

    Returns that, and what the console says.
    """
    assert CHROMIUM is not None
    file = folder / "all.html"
    file.write_text(
        '<!DOCTYPE html><meta charset="utf-8"><style>:root { color-scheme: light dark; }'
        f"iframe {{ border: 0; }}</style><script>{script}</script>{frames}",
        encoding="utf-8",
    )
    done = subprocess.run(
        [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=127.0.0.1:9",
            "--disable-background-networking", "--enable-logging=stderr",
            f"--blink-settings=preferredColorScheme={0 if is_dark else 1}",
            f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000", "--dump-dom",
            *flags, file.as_uri(),
        ],
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    match = re.search(r'<pre id="measured">(.*)</pre>', done.stdout, re.DOTALL)
    assert match is not None, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(unescape(match[1]))
    return found, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def luminance(colour: str) -> float:
    """As WCAG defines it, of `rgb(1, 2, 3)`."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
