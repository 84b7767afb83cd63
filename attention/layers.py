"""One resolved spec a layer, from what the user set: a backend, switches on top of it, and per-layer overrides."""

import dataclasses

from attention.spec import CHOICES, FULL, NO_SWITCHES, SWITCHES, AttentionSpec, has_switch

# What only some settings read, by name: the switch that says so, and its values.
_SHIFTED = ("stabilizer", ("paper", "capped", "unconditional"))
READ_WITH = {"beta": _SHIFTED, "shift_cap": _SHIFTED, "fixed_shift": ("stabilizer", ("fixed",)),
             "lazy_threshold": ("stabilizer", ("lazy_max",)), "dots": ("operands", ("fp32",))}


def layer_specs(n_layer: int, n_head: int, backend: str, switches: dict | None = None, override: str = "",
                output_heads: str = "") -> list[AttentionSpec]:
    """One resolved spec a layer.

    switches: what the user set, by name; each applies to every layer whose backend has it.
    override: "1=standard", "1=flash_bf16,default=standard", "1=flash_bf16+output=fp32+tile_k=64"; layers from 0.
    output_heads: "1:0,6,7;3:2" keeps an FP32 O in heads 0, 6, 7 of layer 1 and head 2 of layer 3.
    Errors: ValueError for an unknown layer, head, backend or switch, and for a switch that no layer can use.
    """
    switches = {k: v for k, v in (switches or {}).items() if v is not None}
    chosen, default = {}, (backend, {})
    for item in filter(None, override.split(",")):
        where, equals, what = item.partition("=")
        name, *extra = what.strip().split("+")
        own = _parse_switches(extra, f"attention_override item {item!r}")
        if where.strip() == "default":
            if override.count("default=") > 1:
                raise ValueError(f"attention_override={override!r} names the default twice")
            default = (name, own)
        elif equals and where.strip().isdigit() and int(where) < n_layer:
            if int(where) in chosen:
                raise ValueError(f"attention_override={override!r} names layer {int(where)} twice")
            chosen[int(where)] = (name, own)
        else:
            raise ValueError(f"attention_override item {item!r} is not LAYER=BACKEND or default=BACKEND with a "
                             f"layer of 0..{n_layer - 1}")
    heads = _parse_heads(output_heads, n_layer, n_head)
    layers, used = [], set()
    for layer in range(n_layer):
        name, own = chosen.get(layer, default)
        common = {k: v for k, v in switches.items() if has_switch(name, k)}
        used.update(common)
        layers.append(AttentionSpec(backend=name, output_heads=heads.get(layer, ()), **common | own))
    for name, value in switches.items():
        if name in used and not any(reads(spec, name) for spec in layers):
            switch, values = READ_WITH[name]
            raise ValueError(f"{name}={value!r} changes nothing: it is read with {switch}={'|'.join(values)}, and no "
                             f"layer has that ({switch}={', '.join(sorted({getattr(s, switch) for s in layers}))})")
        if name not in used:
            raise ValueError(f"{name}={value!r} changes nothing: no layer's backend "
                             f"({', '.join(sorted({s.backend for s in layers}))}) has that switch; a flash one has")
    return layers


def specs_of(config) -> list[AttentionSpec]:
    """`layer_specs` of a config.Config."""
    return layer_specs(config.n_layer, config.n_head, config.attention, config.switches, config.attention_override,
                       config.output_heads)


def changed(spec: AttentionSpec, change: str, switches: dict | None = None) -> AttentionSpec:
    """What becomes of a layer's spec by "BACKEND[+SWITCH=VALUE...]", as attention_override writes it, or by
    "SWITCH=VALUE[+...]" on top of what the spec is.

    switches: what the user set for all layers, by name; a named backend takes those that it has.
    Errors: ValueError for an unknown backend or switch, and for a combination that makes no sense.
    """
    name, *rest = change.split("+")
    heads = spec.output_heads
    if "=" not in name:
        spec = AttentionSpec(backend=name, **{k: v for k, v in (switches or {}).items() if has_switch(name, k)})
    else:
        rest = [name, *rest]
    own = _parse_switches(rest, repr(change))
    keeps = has_switch(spec.backend, "output_heads") and own.get("output", spec.output) != "fp32"
    return dataclasses.replace(spec, output_heads=heads if keeps else (), **own)


def same_numerics(a: AttentionSpec, b: AttentionSpec) -> bool:
    """Whether two specs round alike, whatever preset they come from."""
    if a.backend != b.backend and {a.backend, b.backend} & set(NO_SWITCHES):
        return False
    return all(getattr(a, name) == getattr(b, name) or not (reads(a, name) or reads(b, name)) for name in SWITCHES)


def reads(spec: AttentionSpec, name: str) -> bool:
    """Whether this spec's arithmetic depends on a switch that only some settings read."""
    if name not in READ_WITH:
        return True
    switch, values = READ_WITH[name]
    return getattr(spec, switch) in values


def _parse_switches(texts: list[str], origin: str) -> dict[str, object]:
    found = [_parse_switch(text, origin) for text in texts]
    if len(dict(found)) < len(found):
        raise ValueError(f"{origin} names a switch twice")
    return dict(found)


def _parse_switch(text: str, origin: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals or name not in SWITCHES or name == "output_heads":
        raise ValueError(f"{origin}: {text!r} is not SWITCH=VALUE with a switch of "
                         f"{', '.join(s for s in SWITCHES if s != 'output_heads')}")
    if name in CHOICES:
        return name, value
    try:
        return name, parse_tile(value) if name.startswith("tile") else float(value)
    except ValueError:
        raise ValueError(f"{origin}: {name}={value!r} is not a number") from None


def parse_tile(value: str | int) -> int:
    """A tile length: a number, or "full" for the whole sequence."""
    return FULL if value == "full" else int(value)


def _parse_heads(text: str, n_layer: int, n_head: int) -> dict[int, tuple[int, ...]]:
    found = {}
    for item in filter(None, text.split(";")):
        layer, colon, heads = item.partition(":")
        numbers = [layer, *heads.split(",")]
        if not colon or not all(n.strip().isdigit() for n in numbers):
            raise ValueError(f"output_heads item {item!r} is not LAYER:HEAD,HEAD,... (layers separated by ';')")
        layer, *heads = map(int, numbers)
        if layer >= n_layer or max(heads) >= n_head:
            raise ValueError(f"output_heads item {item!r} is outside layers 0..{n_layer - 1}, heads 0..{n_head - 1}")
        if layer in found:
            raise ValueError(f"output_heads={text!r} names layer {layer} twice")
        found[layer] = tuple(sorted(set(heads)))
    return found
