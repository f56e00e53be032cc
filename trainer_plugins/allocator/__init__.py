"""Settings of torch's caching allocator: read them, judge them, choose them, and see that they are in force."""
