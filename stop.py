"""SIGTERM and Ctrl-C as a flag, which a loop reads where its state is whole."""

import signal

EXIT_SIGTERM = 143  # 128 + SIGTERM, as a shell reports it


class StopRequested(Exception):
    """SIGTERM or SIGINT arrived; the state of the last finished step is whole and can be saved."""


class StopSignal:
    """Turns SIGTERM and the first SIGINT into a flag that the loop reads between micro-batches."""

    def __init__(self):
        self.requested = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number, _frame):
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C means it
