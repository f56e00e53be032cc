"""Launch files and the launch environment: find, show, check, and compare with what runs.

To add a launch file, write it in `configs/accelerate/` and describe it in `docs/configs.md`;
`tests/launch/test_combinations.py` reads it.
"""
