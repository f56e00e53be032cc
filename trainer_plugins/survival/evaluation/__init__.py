"""A batch of evaluation, or of generation, is divided here."""
