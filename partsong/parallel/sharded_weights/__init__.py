"""Shares out the weights of whole blocks over ranks, which gather each block before they need it."""
