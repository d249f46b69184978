"""The autoencoder shared out over ranks."""
