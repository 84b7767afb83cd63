"""SIGTERM and Ctrl-C as a flag, which a loop reads where its state is whole."""

import signal

# 128 + the signal, as a shell reports it. Whoever is stopped so has not failed, and can go on.
EXIT_SIGINT, EXIT_SIGTERM = 130, 143
EXITS_STOPPED = (EXIT_SIGINT, EXIT_SIGTERM)


class StopRequested(Exception):
    """SIGTERM or SIGINT arrived; the state of the last finished step is whole and can be saved. `status`: what to exit
    with; SIGTERM's on a rank that only heard of another's signal."""

    def __init__(self, status: int = EXIT_SIGTERM):
        super().__init__(f"exit status {status}")
        self.status = status


class StopSignal:
    """Turns SIGTERM and the first SIGINT into a flag that the loop reads between micro-batches; `status` is that of the
    first signal."""

    def __init__(self):
        self.requested, self.status = False, EXIT_SIGTERM
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number, _frame):
        if not self.requested:
            self.requested, self.status = True, 128 + number
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C means it
