"""A program of the tests, which waits until the file named in its arguments is there."""

import os
import sys
import time

while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
