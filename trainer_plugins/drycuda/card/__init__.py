"""The card: C++ for what is written by hand, and generated stubs for the rest."""
