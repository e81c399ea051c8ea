"""Drivers: one file each."""
