"""One model, from the request for it to artifacts that were verified."""
