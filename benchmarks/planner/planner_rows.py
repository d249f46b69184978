"""Prints the rows of one setting as JSON; `planner.py` starts it, inside a network namespace if it has a link."""

import json
import sys

from benchmarks.planner.local import run

if __name__ == "__main__":
    print(json.dumps(run(**json.loads(sys.argv[1]))))
