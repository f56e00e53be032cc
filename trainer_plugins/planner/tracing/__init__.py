"""A rehearsal is counted here: every tensor that it makes, and what an allocator does with them."""
