"""Recorded studies: what takes too long for a chapter, run seed by seed into one results file."""
