"""Serves pictures, videos, text and thinking over HTTP, from replicas whose ranks stay alive."""
