"""Rules of the membership: who may be lost, who may leave, and when the others wait."""

from paceline.protocol.membership import Membership
from paceline.protocol.messages import WorkerReady
from paceline.protocol.run_spec import RunSpec
from paceline.protocol.view import MembershipView


class MemberRules:
    """Decides about the members of a view; `ViewSequence` changes them."""

    plan: RunSpec
    view: MembershipView
    members: Membership
    _lost: dict[int, str]
    """Workers of this view that are gone, and why."""
    _joining: dict[int, WorkerReady]
    """Workers that wait to be admitted."""
    _returning: set[int]
    """Lost workers that are started again."""
    _leaving: set[int]
    """Workers of this view that leave it at the next quiesce."""
    _is_interrupted: bool
    """True after workers were stopped in the middle of their work, until the next view."""

    @property
    def live_workers(self) -> int:
        """Number of workers of this view that are not lost."""
        return self.view.size - len(self._lost)

    def can_lose(self, worker: int, *, returns: bool = False) -> bool:
        """Returns whether the run can continue without a worker; `returns` if it is started again.

        With fewer than `min_workers` the others wait, if enough workers are started again.
        """
        is_member = self.view.rank_of(worker) is not None and worker not in self._lost
        remain = {w for w in self.view.workers if w not in self._lost} - {worker}
        joining = set(self._joining) - {worker}
        if not is_member and len(remain | joining) >= self.plan.min_workers:
            return True
        coming = joining | (self._returning - {worker})
        enough = len(remain | coming) + returns >= self.plan.min_workers
        return self.plan.can_lose_workers and bool(remain) and enough

    def _is_short(self) -> bool:
        return self.live_workers + len(self._joining) < self.plan.min_workers

    def why_not_leave(self, worker: int) -> str | None:
        """Returns why a worker cannot leave; None if it can."""
        if worker not in self.members:
            return f"worker {worker} is not part of the run"
        if not self.plan.can_lose_workers:
            return f"worker {worker} cannot leave: the run needs all of its workers"
        if self.view.rank_of(worker) is None or worker in self._lost:
            can_leave = self.can_lose(worker)
        else:
            remain = self.live_workers - len(self._leaving | {worker})
            can_leave = remain >= max(1, self.plan.min_workers)
        least = self.plan.min_workers
        if not can_leave:
            return f"worker {worker} cannot leave: fewer than --min-workers {least} would remain"
        return None

    def _departing(self) -> set[int]:
        """Returns the workers that leave with this view, which others can continue without."""
        stay = len(self.view.workers) - len(self._leaving)
        enough = stay > 0 and stay + len(self._joining) >= self.plan.min_workers
        # The newest state may be that of a worker that leaves, after a loss or if its work was
        # interrupted: it stays for one view.
        is_whole = not self._lost and not self._is_interrupted
        return set(self._leaving) if enough and is_whole else set()
