"""Prints the rows of one timing, and its disturbances, as JSON.

`image.py` starts it, inside a network namespace if it has a link.
"""

import json
import sys

from partsong.evals.bench.image import run
from partsong.jobs.load import LoadWatch

if __name__ == "__main__":
    watch = LoadWatch()
    rows = run(**json.loads(sys.argv[1]))
    print(json.dumps({"rows": rows, "load": watch.report()}))
