"""An example of a package that ships compiled PyTorch models: see `python -m example_project`."""
