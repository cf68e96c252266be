"""`python -m sdpo_scale`: the same as the console script `sdpo-scale`."""

import sys

from sdpo_scale.cli import main

if __name__ == "__main__":
    sys.exit(main())
