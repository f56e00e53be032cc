"""Judges an accelerate YAML or a DeepSpeed JSON before the launch, and imports neither library.

To add a key, name it in `trainer_plugins/launch/lint/keys.py`. A combination of keys that hurts is
judged in the file of its library, and `docs/configs.md` explains it.
"""
