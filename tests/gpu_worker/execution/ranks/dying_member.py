"""A rank that ends as soon as it has started."""

import sys

if __name__ == "__main__":
    sys.exit(3)
