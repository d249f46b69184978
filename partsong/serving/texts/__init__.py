"""Serves text models: each in a process of its own, or at another server that speaks the OpenAI API."""
