"""The only place that touches `torch._inductor`: from an exported program to a compiled object."""
