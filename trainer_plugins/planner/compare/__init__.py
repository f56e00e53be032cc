"""Plan a run many times: search for settings that fit, and predict the savings of a change."""
