"""Data made on the spot from seeds: nothing is downloaded."""
