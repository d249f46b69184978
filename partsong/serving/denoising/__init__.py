"""Lets clients call a denoiser themselves, on ranks that live."""
