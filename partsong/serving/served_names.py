"""Lets clients ask for models by other names, since many have the names of models built in."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from partsong.errors import ArgumentError

__all__ = ["ServedNames"]


@dataclass(frozen=True, slots=True)
class ServedNames:
    """Maps further names to what is served: a model, or a text model with a strategy.

    >>> names = ServedNames({"gpt-4o": "sums"})
    >>> names.target("gpt-4o"), names.target("gpt-4o:self-consistency:num=8"), names.target("shapes")
    ('sums', 'sums:self-consistency:num=8', 'shapes')
    """

    names: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, given: Sequence[str]) -> ServedNames:
        """Reads ``NAME=MODEL`` of a command line.

        Raises:
            ArgumentError: one has another form, or names something twice.
        """
        names: dict[str, str] = {}
        for text in given:
            name, _, target = text.partition("=")
            if not name or not target:
                raise ArgumentError(f"--served-name {text}: write NAME=MODEL, such as gpt-image-1=shapes")
            if name in names:
                raise ArgumentError(f"--served-name {name} is given twice, for {names[name]} and for {target}")
            names[name] = target
        return cls(names)

    def target(self, asked: Any) -> Any:
        """Returns what a name stands for; anything else comes back as it is."""
        fits = [name for name in self.names if isinstance(asked, str) and _begins(asked, name)]
        if not fits:
            return asked
        name = max(fits, key=len)
        return self.names[name] + asked[len(name) :]

    def check(self, pictures: Collection[str], texts: Collection[str]) -> None:
        """Refuses names that stand for nothing, or that hide a model.

        Args:
            pictures: models of pictures and videos.
            texts: models of text.

        Raises:
            ArgumentError: names the one that is wrong, and what is served.
        """
        served = [*pictures, *texts]
        for name, target in self.names.items():
            if any(_begins(model, name) for model in served):
                raise ArgumentError(f"--served-name {name}={target}: {name} is the name of a model; choose another")
            if target not in pictures and not any(_begins(target, model) for model in texts):
                known = ", ".join(served) or "none"
                raise ArgumentError(f"--served-name {name}={target}: {target} is not served; these are: {known}")

    def rows(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns the rows of the list of models for these names, with the model behind each as ``root``."""
        listed = []
        for name, target in self.names.items():
            fits = [row for row in rows if _begins(target, row["id"])]
            listed += [{**max(fits, key=lambda row: len(row["id"])), "id": name, "root": target}] if fits else []
        return listed


def _begins(asked: str, name: str) -> bool:
    return asked == name or asked.startswith(f"{name}:")
