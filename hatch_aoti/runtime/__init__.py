"""The code that is copied into wheels. Nothing here imports the rest."""
