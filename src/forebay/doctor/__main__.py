"""`python -m forebay.doctor`."""

import sys

from forebay.doctor.command import main

if __name__ == "__main__":
    sys.exit(main())
