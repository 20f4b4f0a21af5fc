"""The fast exact twin of Vidur: the same events, compiled, on arrays."""
