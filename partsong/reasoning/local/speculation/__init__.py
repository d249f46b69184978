"""Drafts several tokens and verifies them in one forward, so that the text stays that of plain decoding."""
