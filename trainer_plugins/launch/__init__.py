"""Find, show and check launch files and the launch environment; compare them with the run.

To add a launch file, write it in `configs/accelerate/` and describe it in `docs/launching.md`;
`tests/launch/test_combinations.py` reads it.
"""
