"""Commands of `python -m cuflash`, and the options that they share."""
