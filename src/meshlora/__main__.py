"""`python -m meshlora`."""

import sys

from meshlora.cli import main

sys.exit(main())
