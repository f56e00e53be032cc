"""text: a raw log or a trace pasted from anywhere becomes an `Explanation`, without torch."""

from trainer_plugins.explain.text.explain import explain_stream, explain_text

__all__ = ["explain_stream", "explain_text"]
