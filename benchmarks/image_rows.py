"""Prints the rows of one timing as JSON; `image.py` starts it, inside a network namespace where one is asked for."""

import json
import sys

from partsong.evals.bench.image import run

if __name__ == "__main__":
    print(json.dumps(run(**json.loads(sys.argv[1]))))
