"""The checks of words and rooms that `make lint` runs."""
