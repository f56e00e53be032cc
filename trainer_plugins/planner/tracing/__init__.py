"""Count every tensor that a rehearsal makes, and replay them through the allocator's rules."""
