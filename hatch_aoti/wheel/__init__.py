"""What goes into a wheel, and what can be read from one."""
