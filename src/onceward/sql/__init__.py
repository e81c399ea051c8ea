"""Stores in SQL: plans (what to say), dialects (how it is said), drivers (who says it)."""
