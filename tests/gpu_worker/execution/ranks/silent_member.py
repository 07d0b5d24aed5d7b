"""A rank that is started and never says anything."""

import time

if __name__ == "__main__":
    time.sleep(600)
