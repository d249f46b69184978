"""Says which ranks take part, and moves bytes between them."""
