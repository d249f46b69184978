"""Studies models of the zoo: drift, memory, and quality of videos."""
