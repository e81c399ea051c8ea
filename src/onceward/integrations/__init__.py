"""onceward inside frameworks that have their own loop around a broker."""
