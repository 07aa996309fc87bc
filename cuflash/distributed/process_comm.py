"""What ranks have in common that are processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .communicator import Communicator, RankError
from .host_group import HostGroup


class ProcessComm(Communicator):
    """A rank that is a process: words and errors go by way of its `group`."""

    group: HostGroup

    def tell(self, words: Any) -> list[Any]:
        """What each rank has told, by rank."""
        return self.group.tell(words)

    def begin_to_tell(self, words: Any) -> Callable[[], list[Any]]:
        """Tell; a function that waits for what each rank has told."""
        self.group.say(words)
        return self.group.hear

    def fail(self, error: RankError) -> None:
        """Make all ranks fail with this error, unless they already fail with another."""
        self.group.fail(error)

    def check(self) -> None:
        """Raise the error with which a rank has failed, if one has."""
        self.group.check()

    def close(self) -> None:
        """Leave the other ranks, which can make no calls with this one any more."""
        self.group.leave()
