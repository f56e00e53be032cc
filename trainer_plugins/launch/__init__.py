"""Before the run: launch configurations that do what their names say, and the environment they run in."""
