"""Chromium without a screen and without a network: opens pages and measures what it draws."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")

MEASURE = r"""
function measured(frame) {
  const view = frame.contentWindow, page = frame.contentDocument, root = page.documentElement;
  for (const each of page.querySelectorAll("details")) each.open = true;
  const seen = rect => rect.width > 0 && rect.height > 0;
  const texts = [...page.querySelectorAll("svg text")].filter(each => seen(each.getBoundingClientRect()));
  const broken = [], outside = [], over = [];
  const walk = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode;
    if (node.parentElement.closest("svg, pre, title, desc")) continue;
    for (const word of node.data.matchAll(/[^\s-]+/g)) {
      const range = page.createRange();
      range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);
      const tops = new Set([...range.getClientRects()].filter(seen).map(each => Math.round(each.top)));
      if (tops.size > 1) broken.push(word[0]);
    }
  }
  for (const one of texts) {
    const a = one.getBoundingClientRect();
    if (a.left < 0 || a.right > view.innerWidth) outside.push(one.textContent);
    for (const other of texts) {
      const b = other.getBoundingClientRect();
      if (one !== other && a.left < b.right - 1 && b.left < a.right - 1 && a.top + 3 < b.bottom - 3 && b.top + 3 < a.bottom - 3)
        over.push(one.textContent + " / " + other.textContent);
    }
  }
  const style = view.getComputedStyle(page.body);
  return {
    width: view.innerWidth,
    is_dark: view.matchMedia("(prefers-color-scheme: dark)").matches,
    ink: style.color, paper: style.backgroundColor,
    wider_by: root.scrollWidth - view.innerWidth,
    smallest_text: Math.min(...texts.map(each => parseFloat(view.getComputedStyle(each).fontSize) * Math.abs(each.getScreenCTM().a))),
    num_texts: texts.length,
    plots: [...page.querySelectorAll("svg[role=img]")].map(each => [...each.querySelectorAll("path.band, path.rule")].filter(path => seen(path.getBoundingClientRect())).length),
    unnamed: [...page.querySelectorAll("svg[role=img]")].filter(each => !(each.getAttribute("aria-label") || each.querySelector("title"))).length,
    unreachable: [...page.querySelectorAll("summary, a[href], pre, .table")].filter(each => { each.focus(); return page.activeElement !== each; }).length,
    broken, outside, over: [...new Set(over)],
  };
}
addEventListener("load", () => {
  const all = [...document.querySelectorAll("iframe")].map(measured);
  document.body.innerHTML = "<pre id=measured></pre>";
  document.querySelector("pre").textContent = JSON.stringify(all);
});
"""


def look(
    folder: Path, pages: dict[str, str], *, is_dark: bool, widths: tuple[int, ...] = (1280, 400)
) -> tuple[dict[tuple[str, int], dict[str, Any]], list[str]]:
    """Draw pages at each width at once; return the measurements, and what the console says."""
    asked = [(name, width) for name in pages for width in widths]
    frames = "".join(
        f'<iframe width="{width}" height="900" srcdoc="{escape(pages[name])}"></iframe>'
        for name, width in asked
    )
    found, console = measured_in(folder, MEASURE, frames, is_dark=is_dark)
    return dict(zip(asked, found, strict=True)), console


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
