"""Turn a raw log or a trace pasted from anywhere into an `Explanation`, without torch."""
