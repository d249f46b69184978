"""Does what operators of a server ask for: its state, restarts, and a folder of what was made."""
