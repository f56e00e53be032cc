"""Settings of torch's caching allocator: read, judge and choose them, and verify those in force.

To add an option of a new torch, name it in `trainer_plugins/allocator/settings.py`; what is wrong
with settings is judged in `trainer_plugins/allocator/lint.py`, which `docs/allocator.md` explains.
A rule of CUDA's allocator in `trainer_plugins/allocator/model.py` is shown by a trace in
`tests/allocator/traces/`.
"""
