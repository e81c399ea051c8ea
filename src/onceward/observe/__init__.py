"""Listeners that show an inbox to other tools. Each is fed by onceward.events alone, and each in its own module."""
