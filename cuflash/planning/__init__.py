"""Which kernel serves a problem, with which sizes, and its text. Needs no GPU."""
