"""Render runs, plans and snapshots as pages: each is one file that loads nothing.

To add a picture, build a value of `trainer_plugins/report/html/chart.py`, which
`trainer_plugins/report/html/page.js` draws. `tests/report/test_browser.py` measures it in Chromium,
and `docs/pages.md` shows it.
"""
