"""Benchmarks of cuflash; see ../README.md."""
