"""A run and its calls: requests, engines, the graph of calls, budgets and journals."""
