"""Judge an accelerate YAML or a DeepSpeed JSON before the launch, without importing either library.

To add a key, name it in `trainer_plugins/launch/lint/keys.py`. A harmful combination of keys is
judged in the file of its library, and `docs/launching.md` explains it.
"""
