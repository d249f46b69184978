"""Ways to exchange keys, values, border rows and statistics between ranks, one file for each strategy."""
