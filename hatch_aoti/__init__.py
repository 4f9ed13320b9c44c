"""Compile PyTorch models ahead of time while a wheel is built, and ship them in it."""

__version__ = "0.1.0"
