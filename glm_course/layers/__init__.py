"""The mechanisms of the model, one a file: parallel form, one-token step, module."""
