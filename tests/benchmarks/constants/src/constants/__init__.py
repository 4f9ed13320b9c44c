"""The same kind of model with more and more weights."""
