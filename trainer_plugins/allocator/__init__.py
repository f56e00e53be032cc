"""Settings of torch's caching allocator: read, judge and choose them, and verify those in force."""
