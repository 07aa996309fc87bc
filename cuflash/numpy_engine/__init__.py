"""The NumPy engine."""
