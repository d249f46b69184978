"""Every pipeline of diffusers, tiny and with random weights, under every strategy: right, or refused at once."""
