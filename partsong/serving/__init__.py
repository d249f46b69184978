"""Serves pictures, videos, text and thinking over HTTP, from groups of ranks that stay alive."""
