"""Eight small models that have little in common."""
