"""Plans on a GPU: memory, arguments, launches."""
