"""A byte-level language model of 25.7M parameters, trained from random weights, then by reward."""

__version__ = "0.1.0"
