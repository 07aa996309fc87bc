"""What the ranks of a communicator can do for each other, and how they agree and fail."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol, TypeAlias

from ..operands.checks import checked_integer
from .machine import Machine

TIMEOUT = 60.0  # seconds
SIZE_WANTED = "give how many ranks there are, 1 or more"

# A rank and an array, contiguous in C order, that goes to it or comes from it.
Parcel: TypeAlias = "tuple[int, Any]"


class RankError(RuntimeError):
    """A rank failed, left or did not arrive: so all ranks fail, each with this message.

    Attributes
    ----------
    rank : int
        The rank that it began with.
    """

    def __init__(self, rank: int, message: str):
        super().__init__(f"rank {rank} {message}")
        self.rank = rank
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.message)


class Transfer(Protocol):
    """Arrays under way."""

    def wait(self) -> None:
        """Wait until they have arrived and been sent: on a GPU the current stream does so."""

    def lead(self) -> None:
        """On a GPU, let what the current stream is given from now on begin behind this transfer."""


class OnHost:
    """A transfer that takes no room on a device."""

    def lead(self) -> None:
        """Return at once."""


class Nothing(OnHost):
    """A transfer of nothing."""

    def wait(self) -> None:
        """Return at once."""


class Statement(NamedTuple):
    """What a rank says ahead of a call: facts by their names, or the error that it has found."""

    facts: dict[str, str]
    kind: str = ""  # of the error
    text: str = ""


class Communicator:
    """One rank's view of `size` ranks that work together.

    A subclass moves arrays with :meth:`start` and words with :meth:`tell`, and spreads errors with
    :meth:`fail`. All ranks make the same calls in the same order.

    Parameters
    ----------
    rank, size : int
    timeout : float
        Seconds after which a rank that has not arrived is given up.
    """

    machine = Machine()  # what methods are chosen for

    # Errors that all ranks can raise again: they are found before anything has begun.
    _KINDS: ClassVar[dict[str, type[Exception]]] = {
        x.__name__: x for x in (ValueError, TypeError, NotImplementedError)
    }

    def __init__(self, rank: int, size: int, timeout: float = TIMEOUT):
        size = checked_integer("size", size, SIZE_WANTED)
        rank = checked_integer("rank", rank, "give a rank from 0 to size - 1")
        if not 0 <= rank < size:
            raise ValueError(f"rank={rank}: give a rank from 0 to size - 1, size is {size}")
        if not timeout > 0:
            raise ValueError(f"timeout={timeout}: give seconds, more than 0")
        self.rank, self.size, self.timeout = rank, size, timeout
        self._common: Exception | None = None  # the last error that all ranks have raised

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size})"

    def start(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Transfer:
        """Begin to send arrays and to receive others, whose memory is given.

        Between two ranks, arrays arrive in the order in which they were sent. Neither may be
        changed before the transfer has ended.
        """
        raise NotImplementedError

    def tell(self, words: Any) -> list[Any]:
        """What each rank has told, by rank: numbers, strings, lists and dictionaries."""
        raise NotImplementedError

    def begin_to_tell(self, words: Any) -> Callable[[], list[Any]]:
        """What :meth:`tell` does in two steps: a function that waits for what each has told."""
        told = self.tell(words)
        return lambda: told

    def fail(self, error: RankError) -> None:
        """Make all ranks fail with this error, unless they already fail with another."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise the error with which a rank has failed, if one has.

        Raises
        ------
        RankError
        """
        raise NotImplementedError

    def agree(self, facts: dict[str, str], error: Exception | None = None) -> None:
        """Raise one and the same error on all ranks if one has an error, or facts differ.

        Raises
        ------
        ValueError, TypeError, NotImplementedError, RankError
            As what :meth:`begin_to_agree` returns.
        """
        self.begin_to_agree(facts, error)()

    def begin_to_agree(
        self, facts: dict[str, str], error: Exception | None = None
    ) -> Callable[[], None]:
        """Say what :meth:`agree` compares; a function that waits for the others and compares.

        What a rank does in between may concern nobody but itself. The function raises:

        Raises
        ------
        ValueError, TypeError, NotImplementedError
            Of a rank that has found one, or for facts that differ. The ranks can go on.
        RankError
            For any other error.
        """
        short = "" if error else _digest(*facts.items())
        told = self.begin_to_tell(short)

        def compare() -> None:
            if told().count(short) < self.size or error is not None:
                self._common = self._difference(facts, error)
                raise self._common from error

        return compare

    def _difference(self, facts: dict[str, str], error: Exception | None) -> Exception:
        """The error that all ranks raise, where one has an error or facts differ."""
        own = Statement(facts) if error is None else Statement({}, type(error).__name__, str(error))
        statements = [Statement(*x) for x in self.tell(list(own))]
        for rank, said in enumerate(statements):
            if said.kind in self._KINDS:
                return self._KINDS[said.kind](f"rank {rank}: {said.text}")
            if said.kind:
                return RankError(rank, f"raised {said.kind}: {said.text}")
        for name in statements[0].facts:
            found = [said.facts.get(name, "absent") for said in statements]
            if len(set(found)) > 1:
                return ValueError(f"{name} differs between ranks: {_listing(found)}")
        raise AssertionError("what has no difference has the same digest")

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """A part of a call in which an error of one rank makes all fail, unless all have it."""
        self.check()
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            if error is self._common:
                raise
            self._fail_with(error)

    def _fail_with(self, error: Exception) -> NoReturn:
        self.fail(RankError(self.rank, f"raised {type(error).__name__}: {error}"))
        try:
            self.check()
        except RankError as spread:
            raise spread from error
        raise error


def check_communicator(comm: object) -> None:
    """Raise a TypeError unless this is a communicator."""
    if not isinstance(comm, Communicator):
        raise TypeError(
            f"comm is a {type(comm).__name__}: give a Communicator, such as an NcclComm, a "
            "SocketComm or those of LocalComm.make"
        )


@functools.lru_cache(maxsize=256)
def _digest(*facts: tuple[str, str]) -> str:
    """A short text that differs where facts do."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _listing(found: list[str]) -> str:
    """Which ranks say what."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(found):
        ranks.setdefault(value, []).append(str(rank))
    return "; ".join(
        f"{value} on rank{'s' if len(own) > 1 else ''} {', '.join(own)}"
        for value, own in ranks.items()
    )
