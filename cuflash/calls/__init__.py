"""From a caller's arguments to a call that has been checked and planned."""
