"""When a run counts as failed: the one rule, for the training loop and for every script that compares runs."""

import math
from collections import deque
from collections.abc import Sequence

WINDOW, RISE = 50, 0.5  # logged losses in the running mean, nats


class FailureRule:
    """When a run counts as failed; the one rule used everywhere, loss by loss as they are logged:

    at the first logged loss that is not finite, or with which the mean of the last 50 logged losses exceeds the
    smallest such mean so far by more than 0.5 nats. Windows are full: before the 50th logged loss only the first half
    of the rule can apply.
    """

    def __init__(self):
        self.window, self.smallest = deque(maxlen=WINDOW), math.inf

    def failed(self, loss: float) -> bool:
        """Whether this logged loss, the next one in order, makes the run a failed one."""
        self.window.append(loss)
        if not math.isfinite(loss):
            return True
        if len(self.window) < WINDOW:
            return False
        mean = math.fsum(self.window) / WINDOW
        self.smallest = min(self.smallest, mean)
        return mean > self.smallest + RISE


def failure_of(records: Sequence[dict]) -> int | None:
    """The step at which a run failed: by `FailureRule` over its logged losses, or where it met a non-finite number."""
    rule = FailureRule()
    return next((r["step"] for r in records if "loss" in r and (rule.failed(r["loss"]) or r.get("stopped"))), None)


def step_of_turn(steps: Sequence[int], losses: Sequence[float]) -> int:
    """The logged step with the smallest of `FailureRule`'s means, from which on the loss rose; the last without one."""
    rule, turn = FailureRule(), steps[-1]
    for step, loss in zip(steps, losses, strict=True):
        before = rule.smallest
        rule.failed(loss)
        turn = step if rule.smallest < before else turn
    return turn
