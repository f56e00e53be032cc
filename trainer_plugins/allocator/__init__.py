"""Settings of torch's caching allocator: read, judge and choose them, and verify those in force.

To add an option of a new torch, name it in `trainer_plugins/allocator/settings.py`; settings are
judged in `trainer_plugins/allocator/lint.py`, which `docs/allocator.md` explains. A trace in
`tests/allocator/traces/` demonstrates each rule of `trainer_plugins/allocator/model.py`.
"""
