"""Three models that are often compiled: tiny, convolutional, attention."""
