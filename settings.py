"""Which keys of a config its run reads: what is set and changes nothing, and in what two runs differ."""

from config import Config, as_dict

# Keys that one setting alone reads, by their beginning: that setting, and whether a config has it.
READ_WITH = (
    ("compile_mode", "compile=True", lambda c: c["compile"]),
    ("muon_", "optimizer=muon", lambda c: c["optimizer"] == "muon"),
    ("monitor_remedy", "monitor=switch", lambda c: c["monitor"] == "switch"),
    ("monitor_", "a monitor", lambda c: c["monitor"] != "off"),
    ("probe_sequences", "a probe_interval or a monitor", lambda c: c["probe_interval"] or c["monitor"] != "off"),
    ("wandb_", "wandb_log=True", lambda c: c["wandb_log"] or c["wandb_mode"] != "disabled"),
    ("lr_decay_iters", "decay_lr=True", lambda c: c["decay_lr"]),
    ("min_lr", "decay_lr=True", lambda c: c["decay_lr"]),
)


def unread(config: dict) -> list[str]:
    """What was set and changes nothing, and with what it would: "compile_mode=reduce-overhead (read with ...)"."""
    return [f"{name}={config[name]} (read with {what})" for name, default in as_dict(Config()).items()
            if config[name] != default and (what := _lacks(config, name))]


def read_keys(config: dict) -> dict:
    """The keys of a config that its run reads: in what else two configs differ, their runs do not. A key that the
    config's commit did not have yet is at its default, or a run without it could go on with it."""
    config = as_dict(Config()) | config
    config["smooth_k"] = config["smooth_k"] or 0.0  # None is that of every backend
    return {name: value for name, value in config.items() if not _lacks(config, name)}


def _lacks(config: dict, name: str) -> str | None:
    """The setting without which this key is not read, where a config does not have it."""
    return next((what for begins, what, on in READ_WITH if name.startswith(begins) and not on(config)), None)
