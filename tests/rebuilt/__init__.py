"""Layers written by a reader from a chapter's text alone: they must match the library."""
