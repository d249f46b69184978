"""Says how the arguments of a denoiser depend on the batch, and takes some samples of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import Adapter
from partsong.parallel.cuts.same_arguments import equal_arguments

__all__ = ["BatchRules", "Rows"]

#: Samples of a batch: a slice, or a list of numbers.
Rows = slice | list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRules:
    """Says how the arguments of a denoiser depend on the batch.

    An argument that is not named here must not look like one with values per sample: its first dimension may not be a
    multiple of the batch size, nor may a list have that length.

    Attributes:
        model: name of the model, for messages.
        batched: arguments whose tensors have the batch first; lists and dictionaries are searched for tensors.
        per_sample: arguments that are lists with an item per sample.
        first: arguments that are lists of which the model reads the first item for all samples.
        numbered: dictionaries from a sample's number to a list -> the argument that lists as many things.
        folded: arguments whose tensors have batch x frames first.
        layered: arguments whose tensors have the batch second; dictionaries are searched for tensors.
        padded: arguments as long as the longest item of another one -> its name, and the multiple that items fill up.
        shared: arguments that all samples share, whatever their first dimension is.
        trusting: cut what looks like a batch and pass everything else on, because the result is compared with that of
            one rank.
    """

    model: str
    batched: tuple[str, ...]
    per_sample: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    numbered: Mapping[str, str] = field(default_factory=dict)
    folded: tuple[str, ...] = ()
    layered: tuple[str, ...] = ()
    padded: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    trusting: bool = False

    @staticmethod
    def of(adapter: Adapter) -> BatchRules:
        """Reads the rules of a row."""
        return BatchRules(
            model=adapter.model,
            batched=(*adapter.batched, *adapter.residuals),
            per_sample=adapter.per_sample,
            first=adapter.first,
            numbered=adapter.numbered,
            folded=adapter.frames.folded if adapter.frames is not None else (),
            layered=adapter.layered,
            padded=adapter.padded,
            shared=adapter.shared,
            trusting=adapter.inferred,
        )

    def cut(self, named: Mapping[str, Any], rows: Rows, total: int) -> dict[str, Any]:
        """Returns the arguments of some samples.

        Args:
            named: the arguments of the whole batch, by name.
            rows: the samples to take.
            total: samples of the whole batch.

        Raises:
            UnsupportedError: names an argument whose relation to the batch is unknown.
        """
        taken = {name: self._argument(name, value, rows, total) for name, value in named.items()}
        for name, (other, multiple) in self.padded.items():
            if named.get(name) is not None:
                longest, kept = (max(map(len, items[other])) for items in (named, taken))
                surplus = (-(-longest // multiple) - -(-kept // multiple)) * multiple
                taken[name] = _shortened(taken[name], surplus)
        for name, listed in self.numbered.items():
            if named.get(name):
                taken[name], taken[listed] = _renumbered(named[name], named[listed], _numbers(rows, total))
        return taken

    def _argument(self, name: str, value: Any, rows: Rows, total: int) -> Any:
        if value is None or name in self.shared or name in (*self.numbered, *self.numbered.values()):
            return value
        if name in self.first:
            return self._first(name, value)
        if name in self.per_sample:
            if isinstance(value, (list, tuple)):
                return self._items(name, value, rows, total)
            return self._samples(name, value, rows, total)
        if name in self.folded:
            return self._frames(name, value, rows, total)
        if name in self.layered:
            return self._layers(name, value, rows, total)
        if name in self.batched:
            return self._samples(name, value, rows, total)
        self._refuse_lookalikes(name, value, total)
        return value

    def _first(self, name: str, value: Any) -> Any:
        if not all(equal_arguments(item, value[0]) for item in value):
            raise UnsupportedError(
                f"{self.model}: {name} differs between samples, and the model reads the first one's for all of them; "
                "give samples of one call the same, or use a strategy that leaves the batch whole, such as Ulysses"
            )
        return value[:1]

    def _layers(self, name: str, value: Any, rows: Rows, total: int) -> Any:
        """Cuts tensors that have the batch second, as views, so that a model's writes reach the whole tensors."""
        if isinstance(value, Mapping):
            return {key: self._layers(f"{name}[{key!r}]", item, rows, total) for key, item in value.items()}
        return self._samples(name, value.transpose(0, 1), rows, total).transpose(0, 1)

    def _items(self, name: str, value: Any, rows: Rows, total: int) -> Any:
        if value and len(value) != total:
            raise UnsupportedError(f"{self.model}: {name} has {len(value)} items for {total} samples; {_ADVICE}")
        return _some(value, rows)

    def _samples(self, name: str, value: Any, rows: Rows, total: int) -> Any:
        """Cuts every tensor in an argument; one with a single row serves all samples."""
        if isinstance(value, Mapping):
            return {key: self._samples(f"{name}[{key!r}]", item, rows, total) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            if self._is_plain(value):
                return self._plain(name, value, rows, total)
            return type(value)(self._samples(name, item, rows, total) for item in value)
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) == 1:
            return value
        if len(value) == total:
            return value[rows]
        if self.trusting and len(value) % total:
            return value
        raise UnsupportedError(f"{self.model}: {name} has {len(value)} rows for {total} samples; {_ADVICE}")

    def _plain(self, name: str, value: Any, rows: Rows, total: int) -> Any:
        if self.trusting:
            return _some(value, rows) if len(value) == total else value
        if value and len(value) % total == 0:
            raise UnsupportedError(
                f"{self.model}: {name} has {len(value)} items in a batch of {total}, and it is not known whether they "
                f"belong to the samples; {_ADVICE}"
            )
        return value

    @staticmethod
    def _is_plain(value: Any) -> bool:
        """Says whether a list holds numbers or names, one per sample."""
        return not any(isinstance(leaf, Tensor) for leaf in _leaves(value))

    def _frames(self, name: str, value: Any, rows: Rows, total: int) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._frames(name, part, rows, total) for part in value)
        if not isinstance(value, Tensor):
            return value
        if value.ndim == 0 or len(value) % total:
            rows_given = len(value) if value.ndim else "no"
            raise UnsupportedError(f"{self.model}: {name} has {rows_given} rows for {total} samples; {_ADVICE}")
        frames = len(value) // total
        return value.unflatten(0, (total, frames))[rows].flatten(0, 1)

    def _refuse_lookalikes(self, name: str, value: Any, total: int) -> None:
        for leaf in _leaves(value):
            if isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) % total == 0:
                raise UnsupportedError(
                    f"{self.model}: {name} holds a tensor of {tuple(leaf.shape)} in a batch of {total}, and it is not "
                    f"known whether it belongs to the samples; {_ADVICE}"
                )
        if isinstance(value, (list, tuple)) and self._is_plain(value):
            self._plain(name, value, slice(0, 0), total)


_ADVICE = "leave it out, or use a strategy that leaves the batch whole, such as Ulysses"


def _some(items: Sequence[Any], rows: Rows) -> Any:
    """Takes some items of a list or tuple, or none where it is empty."""
    if isinstance(rows, slice):
        return items[rows]
    return type(items)(items[row] for row in rows) if items else items  # type: ignore[call-arg]


def _numbers(rows: Rows, total: int) -> Sequence[int]:
    return range(total)[rows] if isinstance(rows, slice) else rows


def _renumbered(by_sample: Mapping[int, Any], listed: Sequence[Any], rows: Sequence[int]) -> tuple[Any, Any]:
    """Takes some samples' entries, by their new numbers, and the things that these count, in their order."""
    left, things = iter(listed), {}
    for sample, entries in by_sample.items():
        things[sample] = [next(left) for _ in entries]
    kept = [(new, old) for new, old in enumerate(rows) if old in by_sample]
    return {new: by_sample[old] for new, old in kept}, [thing for _, old in kept for thing in things[old]]


def _shortened(value: Any, surplus: int) -> Any:
    """Drops the last entries `[B, L, ...]` of every tensor in an argument, which pad to the longest sample."""
    if isinstance(value, Mapping):
        return {key: _shortened(item, surplus) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_shortened(item, surplus) for item in value)
    return value[:, : value.shape[1] - surplus]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
