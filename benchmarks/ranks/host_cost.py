"""Files what one attention over ranks costs the host, as `partsong.evals.gpu.host_cost` measures it.

python -m benchmarks.ranks.host_cost
"""

from __future__ import annotations

import argparse

from benchmarks.filing import file_result, markdown_table, result_path
from partsong.evals.gpu.host_cost import CALLS, REPEATS, measured


def main() -> None:
    """Prints or files the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", action="store_true", help="file the result of today")
    chosen = parser.parse_args()
    rows = measured()
    columns = ["name", "ranks", "microseconds", "launches"]
    table = markdown_table(columns, [[row[column] for column in columns] for row in rows])
    if not chosen.file:
        print(table)
        return
    note = (
        f"The least of {REPEATS} runs of {CALLS} attentions on a CPU, without kernels that compute and messages. "
        "Before the exchanges were rewritten, on another machine: 316 to 373 at 2 ranks and 871 to 1,537 at 8, with 64 "
        "to 123 launches at 8."
    )
    file_result(result_path(__file__), __file__, rows, "What an attention costs the host", note, table)


if __name__ == "__main__":
    main()
