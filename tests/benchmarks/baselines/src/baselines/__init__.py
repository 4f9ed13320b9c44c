"""One model, for several CPU baselines."""
