"""text: a raw log or a trace pasted from anywhere becomes an `Explanation`, without torch."""
