"""Lets whole replies of another server vote: calls of tools by name and arguments, and JSON that fits its schema.

A thinking method reads and writes text, and a call of a tool is none. What self-consistency does with answers can be
done with calls, too: the same request is sent several times, and the call that most replies make is the answer.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from partsong.errors import ArgumentError
from partsong.jobs.engines import extractor
from partsong.reasoning.answers.votes import Ballot
from partsong.reasoning.calls.answer import Extract
from partsong.reasoning.strategies.registry import parse_thinking
from partsong.seeds import derive
from partsong.serving.errors import ApiError, as_written
from partsong.serving.texts.limits import TextLimits

__all__ = ["ReplyVotes", "needs_reply_votes"]

#: The method that votes, and those of its knobs that mean something here, with their defaults.
_METHOD = "self-consistency"
_KNOBS: dict[str, Any] = {"num": 8, "early_stop": True}
#: Fields that are answered here, and those of other ways to answer, which are refused.
_OWN = ("extract", "budget_calls", "stream", "stream_options", "seed", "n")
_ELSEWHERE = ("budget_tokens", "budget_seconds", "cache", "block_size")


def needs_reply_votes(fields: Mapping[str, Any]) -> bool:
    """Says whether a request holds what no text can: tools, their results, or a form of the answer."""
    if fields.get("tools") and fields.get("tool_choice") != "none":
        return True
    if (fields.get("response_format") or {"type": "text"}) != {"type": "text"}:
        return True
    messages = fields.get("messages")
    return isinstance(messages, list) and any(
        isinstance(message, dict) and (message.get("role") == "tool" or message.get("tool_calls"))
        for message in messages
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyVotes:
    """Holds a request that is sent several times.

    Attributes:
        fields: those of the request that the other server is sent.
        strategy: the method as the request wrote it.
        num: how often it is sent at most.
        early_stop: whether to stop when the missing replies cannot change the winner.
        seed: those of the calls are derived from it.
        extract: finds the answer in a text, for replies that are no calls.
        checks: what arguments of each tool must fit; empty where a tool says nothing of them.
        form: what the answer itself must fit; None where it is any text.
    """

    fields: Mapping[str, Any]
    strategy: str
    num: int
    early_stop: bool
    seed: int
    extract: Extract
    checks: Mapping[str, Any] = field(default_factory=dict)
    form: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, strategy: str, fields: Mapping[str, Any], model: str, limits: TextLimits) -> ReplyVotes:
        """Reads a request.

        Args:
            strategy: what stands after the model's name.
            fields: of the request.
            model: name of the model at the other server.
            limits: what may be asked for.

        Raises:
            ApiError: another method or knob is named, the request asks for too much, or a schema is none.
            ArgumentError: the method or the extractor is unknown.
        """
        thinking = parse_thinking(strategy)
        if thinking.name != _METHOD or (others := set(thinking.knobs) - set(_KNOBS)):
            named = thinking.name if thinking.name != _METHOD else f"{_METHOD} with {', '.join(sorted(others))}"
            raise ApiError(
                400,
                f"tools and response_format go with {_METHOD}:num=N, whose votes are whole replies; {named} reads and "
                "writes text alone",
                param="tools" if fields.get("tools") else "response_format",
            )
        limits.check_strategy(thinking.knobs)
        knobs = {**_KNOBS, **thinking.knobs}
        for name in _ELSEWHERE:
            if fields.get(name) is not None:
                raise ApiError(400, f"{name} does not go with votes of whole replies; leave it out", param=name)
        if fields.get("n") not in (None, 1):
            raise ApiError(400, "n: one request gives one answer here; leave it out", param="n")
        seed = _whole(fields, "seed", 0)
        calls = _whole(fields, "budget_calls", 1) or limits.max_calls
        sent = {name: value for name, value in fields.items() if name not in _OWN and value is not None}
        return cls(
            fields={**sent, "model": model},
            strategy=strategy,
            num=min(knobs["num"], calls, limits.max_calls),
            early_stop=knobs["early_stop"],
            seed=secrets.randbits(32) if seed is None else seed,
            extract=extractor(fields.get("extract"))[1],
            checks=_checks(fields.get("tools")),
            form=_form(fields.get("response_format")),
        )

    def call(self, number: int) -> bytes:
        """Returns the body of a call."""
        return json.dumps({**self.fields, "seed": derive(self.seed, "vote", number) % 2**31}).encode()

    def vote_of(self, choice: Mapping[str, Any]) -> str | None:
        """Returns what a reply votes for, written in one way only; None where it is cut off or does not fit.

        Args:
            choice: the first of the reply.
        """
        message = choice.get("message") or {}
        if choice.get("finish_reason") == "length":
            return None
        if calls := message.get("tool_calls"):
            return self._vote_of_calls(calls)
        text = message.get("content") or ""
        if self.form is not None:
            return _written(text, self.form)
        return self.extract(text) or text.strip() or None

    def _vote_of_calls(self, calls: Sequence[Mapping[str, Any]]) -> str | None:
        votes = []
        for call in calls:
            asked = call.get("function") or {}
            name = str(asked.get("name"))
            arguments = _written(asked.get("arguments") or "{}", self.checks.get(name, {}))
            if arguments is None:
                return None
            votes.append(f"{name}({arguments})")
        return "; ".join(votes)

    async def run(self, send: Any) -> dict[str, Any]:
        """Sends the request until the vote is decided; returns the first reply of the winner, with what all cost.

        Args:
            send: an async function that sends a body, and returns the reply.

        Raises:
            ApiError: no reply came, or none of them has a vote.
        """
        ballot, replies = Ballot(self.num), dict[str, tuple[int, dict[str, Any]]]()
        spent = {"prompt_tokens": 0, "completion_tokens": 0}
        numbers = {asyncio.ensure_future(send(self.call(number))): number for number in range(self.num)}
        missing, failure = set(range(self.num)), None
        try:
            waiting = set(numbers)
            while waiting and not (self.early_stop and ballot.leader is not None and ballot.decided(missing)):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=numbers.__getitem__):
                    number = numbers[task]
                    missing.discard(number)
                    if (error := task.exception()) is not None:
                        failure = failure or error
                        continue
                    reply = task.result()
                    for name in spent:
                        spent[name] += (reply.get("usage") or {}).get(name) or 0
                    vote = self.vote_of((reply.get("choices") or [{}])[0])
                    ballot.add(number, vote)
                    if vote is not None and number <= replies.get(vote, (number, {}))[0]:
                        replies[vote] = number, reply
        finally:
            for task in numbers:
                task.cancel()
            await asyncio.gather(*numbers, return_exceptions=True)
        if ballot.leader is None:
            if failure is not None and not ballot.counted:
                raise failure
            text = f"none of {ballot.counted} replies fits the schema, or is whole"
            raise ApiError(502, f"{text}; ask with more tokens or another prompt", code="no_valid_reply")
        return self._answer(ballot, replies[ballot.leader][1], spent, self.num - len(missing))

    def _answer(self, ballot: Ballot, reply: Mapping[str, Any], spent: dict[str, int], calls: int) -> dict[str, Any]:
        total = sum(ballot.weights.values())
        report = {
            "strategy": self.strategy,
            "answer": ballot.leader,
            "shares": {vote: weight / total for vote, weight in ballot.weights.items()},
            "spoilt": ballot.spoilt,
            "stopped": "done" if calls == self.num else "decided",
            "calls": calls,
            "seed": self.seed,
        }
        usage = {**(reply.get("usage") or {}), **spent, "total_tokens": sum(spent.values())}
        return {**reply, "usage": usage, "partsong": report}


def _whole(fields: Mapping[str, Any], name: str, least: int) -> int | None:
    value = fields.get(name)
    if value is not None and (type(value) is not int or value < least):
        raise ApiError(400, f"{name}={as_written(value)}: write a whole number from {least}", param=name)
    return value


def _written(text: str, schema: Mapping[str, Any]) -> str | None:
    """Returns JSON in its one canonical form; None where it is none, or does not fit a schema."""
    from jsonschema import Draft202012Validator

    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not Draft202012Validator(schema).is_valid(value):
        return None
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _checks(tools: Any) -> dict[str, Any]:
    """Returns the schemas of the tools' arguments, by name."""
    checks = {}
    for number, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, f"tools.{number} is no function with a name", param="tools")
        checks[function["name"]] = _schema(function.get("parameters") or {}, f"tools.{number}.function.parameters")
    return checks


def _form(asked: Any) -> dict[str, Any] | None:
    """Returns the schema of the answer; one that takes any object where only JSON is asked for."""
    if not asked or asked == {"type": "text"}:
        return None
    kind = asked.get("type") if isinstance(asked, dict) else None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise ApiError(400, "response_format is of the type text, json_object or json_schema", param="response_format")
    given = asked.get("json_schema")
    schema = given.get("schema") if isinstance(given, dict) else None
    return _schema(schema if schema is not None else {}, "response_format.json_schema.schema")


def _schema(given: Any, place: str) -> dict[str, Any]:
    try:
        from jsonschema import Draft202012Validator, SchemaError
    except ImportError as error:
        raise ArgumentError(f"{error}; install partsong[serve] to check answers by a schema") from error
    try:
        Draft202012Validator.check_schema(given)
    except SchemaError as error:
        raise ApiError(400, f"{place} is no JSON schema: {error.message}", param=place.partition(".")[0]) from None
    return given
