"""What others do, each behind the same three lines: two packages, two documented flows, and onceward."""
