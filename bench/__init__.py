"""The benchmark: what onceward costs, each figure beside the hand-written code that it is compared with.

`make bench`, or `python -m bench --help`. One file per question; `rounds.py` says how it is measured.
"""
