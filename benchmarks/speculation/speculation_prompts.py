"""Prompts by how much of an answer can be guessed from the text so far."""

from __future__ import annotations

HARBOUR = (
    "The harbour wakes before the town does. Gulls circle over the boats that came in at night, and men in yellow "
    "coats carry boxes of ice along the pier. By seven the first bakery has opened its shutters, and the smell of "
    "bread mixes with that of diesel and salt."
)
GARDEN = (
    "In March the gardener turns the soil and lays out strings for the rows. Beans go in by the wall, where the sun "
    "stays longest, and lettuce between them for shade. Nobody waters before evening, since drops on leaves burn them "
    "at noon."
)
MEAN = """def mean(values):
    total = 0.0
    count = 0
    for value in values:
        total = total + value
        count = count + 1
    if count == 0:
        return None
    return total / count
"""
STACK = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def peek(self):
        if not self.items:
            raise IndexError("peek at an empty stack")
        return self.items[-1]
"""

PROMPTS: dict[str, tuple[str, ...]] = {
    "copy and edit": (
        f"Repeat this text word for word:\n\n{HARBOUR}",
        f"Copy this text exactly, and write THE END after it:\n\n{GARDEN}",
        f"Repeat this code exactly:\n\n{STACK}",
        f"Repeat this code, but call the class Pile:\n\n{STACK}",
        f"Repeat this function, and call it average:\n\n{MEAN}",
    ),
    "code": (
        "Write a Python class Stack with methods push, pop, peek, is_empty and size.",
        "Write a Python function that reads a CSV file and returns a list of dictionaries, with an example.",
        f"Write a class Queue in the style of this class:\n\n{STACK}",
        f"Write tests with unittest for this function:\n\n{MEAN}",
        "Write an HTML page with a table of three rows and three columns.",
    ),
    "prose": (
        "Tell a short story about a lighthouse keeper who finds a letter in a bottle.",
        "Explain in a few sentences why the sky is blue.",
        "Describe a day in the life of a medieval baker.",
        "What should one think about before buying a used bicycle?",
        "Write a letter to a friend who has moved to another country.",
    ),
}
