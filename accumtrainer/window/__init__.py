"""The window algorithm, told once for all backends; begin with `program`."""
