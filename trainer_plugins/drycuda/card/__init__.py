"""The card: handwritten C++ where behaviour matters, generated stubs for the rest."""
