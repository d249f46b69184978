"""Structure guidance: a small picture leads patches of a large one."""
