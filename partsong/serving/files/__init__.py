"""Holds the pictures and videos that clients send and fetch."""
