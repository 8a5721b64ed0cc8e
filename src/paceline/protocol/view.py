"""Views: which workers and servers take part in a run.

Workers keep their number for the whole run. Inside a view they have dense ranks, 0 to size - 1, and
messages of workers carry the rank and the number of the view. The coordinator ignores messages of
any other view, so a worker that was cut off and returns changes nothing.
"""

from paceline.protocol.messages import record


@record
class MembershipView:
    number: int
    workers: tuple[int, ...]
    """Workers by rank."""
    servers: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.workers)

    def rank_of(self, worker: int) -> int | None:
        """Returns the rank of a worker; None if it is not in this view."""
        return self.workers.index(worker) if worker in self.workers else None


class MemberLost(Exception):
    """Thrown into the sequence of a run at the point where it waits for workers."""
