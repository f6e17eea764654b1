"""`python -m meshlora`."""

import sys

try:
    from meshlora.cli.main import main

    code = main()
except KeyboardInterrupt:  # before `main` is there to say it
    print("interrupted", file=sys.stderr)
    code = 130

sys.exit(code)
