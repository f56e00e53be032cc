"""Decides which batches, losses and models add up over pieces.

To refuse a loss or a model, name it in `trainer_plugins/survival/exact/losses.py`, or its module in
`trainer_plugins/accumulation/modules.py`, and in `docs/survival.md`.
"""
