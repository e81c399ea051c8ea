"""Queues that keep messages and work on them later: onceward's, a hand-written one, and two packages."""
