"""`python -m meshlora`."""

import sys

try:
    from meshlora.cli import main
except KeyboardInterrupt:  # before `main` is there to say it
    print("interrupted", file=sys.stderr)
    sys.exit(130)

sys.exit(main())
