"""Studies of the zoo's models: drift, memory, and quality of videos."""
