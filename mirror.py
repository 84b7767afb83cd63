"""wandb as a mirror of the local log: it can be absent, offline or broken without a run noticing."""

from collections.abc import Callable


class Wandb:
    """Stands in for a wandb run: the same two methods whether it is disabled, offline, online or broken.

    mode: "disabled" (wandb is not even imported), "offline" or "online"; say: prints one line; options: of wandb.init,
    with `id`, so that a resumed run continues its curve. Nothing here raises: a failure is one message, then silence.
    """

    def __init__(self, mode: str, say: Callable[[str], None], **options):
        self._run, self._say = None, say
        if mode == "disabled":
            return
        try:
            import wandb  # only here: it starts a service and takes a second

            # Without a key, wandb would ask for one on a terminal and a run would wait for an answer.
            if mode == "online" and not wandb.login(verify=False, prompt=False):
                say("wandb has no API key, so this run is logged to metrics.jsonl alone; set WANDB_API_KEY, run "
                    "`wandb login`, or use wandb_mode=offline and `wandb sync` later")
                return
            # Time limits: without a network both ends of a run would wait for it.
            settings = wandb.Settings(init_timeout=30, finish_timeout=60, console="off")
            self._run = wandb.init(mode=mode, resume="allow", settings=settings, **options)
            # Our own step is the axis. wandb's must never fall, and a resumed run logs some steps again.
            self._run.define_metric("*", step_metric="step")
        except Exception as error:
            self._give_up(error)

    def log(self, record: dict) -> None:
        if self._run is not None:
            try:
                self._run.log(record)
            except Exception as error:
                self._give_up(error)

    def finish(self, exit_code: int) -> None:
        if self._run is not None:
            try:
                self._run.finish(exit_code=exit_code)
            except Exception as error:
                self._give_up(error)
            self._run = None

    def _give_up(self, error: Exception) -> None:
        self._run = None
        reason = " ".join(str(error).split())  # wandb's run over several lines
        self._say(f"wandb failed ({type(error).__name__}: {reason}); training goes on, metrics.jsonl has everything")
