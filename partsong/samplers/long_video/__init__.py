"""Holds what the methods for long videos share: blocks of frames, their neighbours' keys, decoding and journals."""
