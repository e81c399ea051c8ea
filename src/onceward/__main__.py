"""`python -m onceward`."""

import sys

from onceward.cli import main

sys.exit(main())
