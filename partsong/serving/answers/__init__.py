"""Reads requests for answers of text models, and writes the replies in the form of each endpoint."""
