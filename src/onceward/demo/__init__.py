"""`make demo`: a small shop that charges every order exactly once, whatever its broker does and whoever is killed.

Two worlds get the same orders, the same faults and the same kills. In one the workers charge through an inbox, in the
other they charge in a plain transaction and then acknowledge. At the end an audit compares both databases with the
ledger of what was sent. Read shop.py and worker.py first: they are what a user of onceward writes.
"""
