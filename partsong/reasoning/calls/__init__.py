"""Makes the calls of a run: holds requests, engines, the graph of calls, budgets and journals."""
