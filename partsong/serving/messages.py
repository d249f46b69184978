"""Defines the messages between a server's parent process and the first rank of a replica, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from partsong.errors import PartsongError

__all__ = [
    "JOB_ENDS",
    "MOST_PICTURES",
    "Cancel",
    "JobCancelled",
    "Check",
    "Checked",
    "DenoiseCall",
    "DenoiseAnswer",
    "FilePart",
    "JobFailed",
    "JobFinished",
    "JobMemory",
    "JobReturned",
    "FromRanks",
    "Pulse",
    "Ready",
    "Recall",
    "Spent",
    "JobStarted",
    "JobStepped",
    "Stop",
    "Submit",
    "ToDesk",
    "ToRanks",
    "JobWork",
    "by_rank",
]


#: Most pictures that a request may begin with, besides a mask.
MOST_PICTURES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class JobMemory:
    """Says how many bytes the fullest rank needs for a job; zeros where unknown.

    Attributes:
        weights: bytes of weights, the same for every job.
        working: further bytes at the peak of the job.
    """

    weights: int = 0
    working: int = 0

    @property
    def total(self) -> int:
        """Returns all of them."""
        return self.weights + self.working


@dataclass(frozen=True, kw_only=True, slots=True)
class JobWork:
    """Says what a replica should sample.

    Attributes:
        id: name of the job.
        prompt: what to sample.
        arguments: further arguments of the pipeline's call.
        num: how many pictures of the prompt; 1 for a video.
        seed: of the noise; picture i draws from the seed and i, as ``partsong image`` does.
        strategies: as on the command line; empty for the serial twin, which the first rank makes alone.
        lora: an adapter by the name it is known by; None for none.
        out: files to write, one per picture, or one for the video.
        pictures: those to begin with, for pipelines that take some; empty for text alone. Each is a file of the server,
            and the bytes of that file once the job is sent to the ranks, which may be on other machines.
        mask: its mask in the same form; None for none.
        num_frames: frames of a video to deliver; None takes the pipeline's own number, and for pictures.
        fps: frames per second of a video.
        deadline: when it should be done, in seconds of `time.time`; None for no hurry.
        previews: how many unfinished pictures to show on the way.
        user: whose job it is; users have equal shares of the ranks.
        pause: seconds without a call after which a session ends; None for what samples by itself. In a session a
            client makes the calls of the denoiser one by one.
        memory: what it needs, which the first rank predicts.
    """

    id: str
    prompt: str
    arguments: Mapping[str, Any]
    num: int = 1
    seed: int = 0
    strategies: tuple[str, ...] = ()
    lora: str | None = None
    out: tuple[Path, ...]
    pictures: tuple[Path | bytes, ...] = ()
    mask: Path | bytes | None = None
    num_frames: int | None = None
    fps: float = 16.0
    deadline: float | None = None
    previews: int = 0
    user: str = ""
    pause: float | None = None
    memory: JobMemory = JobMemory()

    @property
    def is_session(self) -> bool:
        """Says whether a client makes the calls of the denoiser."""
        return self.pause is not None

    @property
    def setting(self) -> tuple[tuple[str, ...], str | None]:
        """Returns the setting of the model that the job needs: jobs of one setting can take turns."""
        return self.strategies, self.lora

    def with_pictures(self) -> JobWork:
        """Returns it with the bytes of its pictures.

        Raises:
            OSError: one of them cannot be read.
        """
        if not self.pictures:
            return self
        read = [each.read_bytes() if isinstance(each, Path) else each for each in (self.mask, *self.pictures)]
        return replace(self, mask=read[0], pictures=tuple(read[1:]))


@dataclass(frozen=True, slots=True)
class Submit:
    """Asks for a job."""

    work: JobWork


@dataclass(frozen=True, slots=True)
class Check:
    """Asks whether a job could be carried out; the answer is a `Checked`."""

    work: JobWork


@dataclass(frozen=True, slots=True)
class Cancel:
    """Asks to drop a job, whether it waits or runs."""

    id: str


@dataclass(frozen=True, slots=True)
class Recall:
    """Takes a job back if it has not begun, for other ranks that are less busy; the answer is a `JobReturned`."""

    id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DenoiseCall:
    """Asks for one call of the denoiser in a session that has begun; the answer is a `DenoiseAnswer`.

    Attributes:
        id: of the session.
        number: of the call.
        body: its arguments, as a safetensors file.
    """

    id: str
    number: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Stop:
    """Asks the replica to end once no call of the model is running."""


#: What the desk of the first rank decides about.
ToDesk = Submit | Cancel | Recall | DenoiseCall | Stop
ToRanks = ToDesk | Check


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """Says that all ranks hold the model.

    Attributes:
        strategies: what the ranks can run the model with, as written on a command line.
        defaults: arguments of a call that a client need not give.
        kind: what the model makes, ``image`` or ``video``.
        takes_picture: whether a call can begin with a picture.
        takes_pictures: whether it can begin with several.
        takes_mask: whether it can have a mask as well.
        denoiser: its denoiser, as clients that call it themselves have to know it: ``class``, ``arguments``, ``dtype``
            and ``config``.
        session_strategies: names of those that can be used there.
    """

    strategies: tuple[str, ...]
    defaults: Mapping[str, Any]
    kind: str
    takes_picture: bool = False
    takes_pictures: bool = False
    takes_mask: bool = False
    denoiser: Mapping[str, Any] = field(default_factory=dict)
    session_strategies: tuple[str, ...] = ()

    @property
    def most_pictures(self) -> int:
        """Returns the most pictures that a call can begin with."""
        return 0 if not self.takes_picture else MOST_PICTURES if self.takes_pictures else 1


@dataclass(frozen=True, slots=True)
class Pulse:
    """Says that all ranks have just answered.

    Attributes:
        memory: bytes that the first rank holds.
    """

    memory: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Answers a `Check`.

    Attributes:
        id: of the job.
        kind: ``exact``, ``bounded`` or ``approximate``.
        error: why it cannot be carried out; None where it can.
    """

    id: str
    kind: str = "exact"
    error: PartsongError | None = None


@dataclass(frozen=True, slots=True)
class JobStarted:
    """Says that a job is running."""

    id: str


@dataclass(frozen=True, slots=True)
class Spent:
    """Counts what one rank spent on a job so far.

    Attributes:
        bytes_sent: to other ranks.
        seconds_waiting: for messages of others.
    """

    bytes_sent: int = 0
    seconds_waiting: float = 0.0


def by_rank(spent: Sequence[Spent]) -> list[dict[str, Any]]:
    """Returns what each rank spent, as clients see it."""
    return [{"rank": rank, **asdict(each)} for rank, each in enumerate(spent)]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStepped:
    """Says that a job has made a step.

    Attributes:
        id: of the job.
        step: steps made.
        steps: steps in all; 0 where unknown.
        spent: by rank.
        previews: PNG files of the current state of the pictures; empty where none was made.
    """

    id: str
    step: int
    steps: int
    spent: tuple[Spent, ...] = ()
    previews: tuple[bytes, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFinished:
    """Says that a job is done and its files are written.

    Attributes:
        id: of the job.
        spent: by rank.
        seconds: wall time from its first step to its files.
    """

    id: str
    spent: tuple[Spent, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DenoiseAnswer:
    """Answers a `DenoiseCall`.

    Attributes:
        id: of the session.
        number: of the call.
        body: the prediction, as a safetensors file with one tensor, ``sample``.
        spent: by rank.
        seconds: wall time on the ranks.
        error: why the call was refused, which leaves the session as it was; None where it was made.
    """

    id: str
    number: int
    body: bytes = b""
    spent: tuple[Spent, ...] = ()
    seconds: float = 0.0
    error: PartsongError | None = None


@dataclass(frozen=True, slots=True)
class JobCancelled:
    """Says that a job was dropped."""

    id: str


@dataclass(frozen=True, slots=True)
class JobReturned:
    """Says that these ranks have given back a job that had not begun."""

    id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePart:
    """Carries part of a job's file, where the ranks cannot write it themselves.

    Attributes:
        id: of the job.
        path: of the file, where the server wants it.
        data: its next bytes.
        is_first: whether the file begins with them.
    """

    id: str
    path: Path
    data: bytes
    is_first: bool


@dataclass(frozen=True, slots=True)
class JobFailed:
    """Says that a job ended in an error of its own, which leaves the ranks as they are."""

    id: str
    error: PartsongError


#: The ways a job that has begun ends on its ranks.
JOB_ENDS = (JobFinished, JobFailed, JobCancelled)

FromRanks = (
    Ready
    | Pulse
    | Checked
    | DenoiseAnswer
    | JobStarted
    | JobStepped
    | JobFinished
    | JobCancelled
    | JobReturned
    | JobFailed
    | FilePart
)
