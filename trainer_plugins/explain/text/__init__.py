"""text: a raw log or a trace pasted from anywhere becomes an `Explanation`.

`excerpt.py` finds the first OOM, `text_facts.py` reads numbers, frames and words around it,
`causes/` judges them, `remedies/` says what to do. It imports neither torch nor transformers.
"""

from trainer_plugins.explain.text.explain import explain_stream, explain_text

__all__ = ["explain_stream", "explain_text"]
