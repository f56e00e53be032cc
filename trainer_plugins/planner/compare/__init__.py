"""Plan a run many times: search what fits, and predict what a change would save."""
