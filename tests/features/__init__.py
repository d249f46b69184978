"""What users put on a pipeline, under every group of strategies."""
