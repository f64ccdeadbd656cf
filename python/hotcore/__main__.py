"""``python -m hotcore`` prints the facts of :mod:`hotcore.info`."""

import sys

from .info import main

sys.exit(main())
