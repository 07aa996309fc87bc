"""Measurements beside other libraries, and their charts."""
