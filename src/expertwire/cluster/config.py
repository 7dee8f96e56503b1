"""The YAML file of `expertwire up`: what it may say, and errors that name the place in it."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Hashable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
import yaml.constructor

from ..control.channel import parse_address
from ..errors import ConfigError

PLACEMENTS = ("spread", "strict_spread", "pack", "strict_pack")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
DTYPES = ("float32", "bfloat16", "float16")
REQUIRED = object()


@dataclass(frozen=True)
class RegistryConfig:
    """A registry that is started with the servers, or (address) one that runs already."""

    listen: str | None = None  # None: 127.0.0.1:7700, on Ray port 7700 of the node's own address
    address: str | None = None
    lease: float = 10.0  # seconds of silence until a server is removed


@dataclass(frozen=True)
class ServersConfig:
    """The expert servers: options of `expertwire serve`, and how many."""

    count: int = 1
    experts: str | tuple[str, ...] = "auto"  # all, auto, ids; or ids of each server in turn
    replicas: int = 1  # with auto: how many servers hold each expert
    device: str | tuple[str, ...] = "cpu"  # several: of each server in turn (not on Ray)
    dtype: str | None = None
    threads: int | None = None
    room: int | None = None
    hca: str = "soft"
    batch_invariant: bool = True
    max_restarts: int = -1  # of one server; -1: without end


@dataclass(frozen=True)
class RayConfig:
    """Where Ray is, and what one server takes from it."""

    address: str = "auto"  # as of ray.init: auto, HOST:PORT, or ray://...
    placement: str = "spread"
    places: int | None = None  # with strict_*: servers there is a place for; None: servers.count
    cpus: float = 1.0
    gpus: float | None = None  # None: 1 for a server with a GPU, else 0
    memory_gb: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ClusterConfig:
    """One cluster: what its YAML file says."""

    name: str
    model: str  # checkpoint folder, at this path on every node
    registry: RegistryConfig
    servers: ServersConfig
    ray: RayConfig
    env: dict[str, str]  # more environment variables of all its processes
    token_file: str | None = None  # of each node; None: the token of whoever calls `up`

    def as_dict(self) -> dict[str, Any]:
        """What `parse_config` reads back."""
        return asdict(self)


def load_config(path: str | Path) -> ClusterConfig:
    """Reads a YAML file. A relative `model` and `token_file` are relative to its folder; the
    default `name` is the file's. Raises ConfigError that names the file and the setting."""
    file = Path(path)
    try:
        content = yaml.load(file.read_text(), _Loader)
    except OSError as err:
        raise ConfigError(f"cannot read {file}: {err.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not text in UTF-8") from None
    except (yaml.YAMLError, ValueError) as err:  # ValueError: a date that does not exist, ...
        raise ConfigError(f"{file} is not YAML: {err}") from None
    except RecursionError:
        raise ConfigError(f"{file} is nested too deeply") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must be a mapping with at least `model: FOLDER`")
    folder = file.resolve().parent
    for key in ("model", "token_file"):
        if isinstance(content.get(key), str) and content[key]:
            content[key] = str(folder / Path(content[key]).expanduser())
    return parse_config({"name": file.stem, **content}, str(file))


def parse_config(content: dict[str, Any], source: str = "cluster") -> ClusterConfig:
    """The checked configuration. Raises ConfigError for keys that do not exist, values of another
    type or out of range, and settings that contradict each other."""
    top = _Section(content, source, "")
    name = top.text("name", REQUIRED)
    if not NAME.fullmatch(name):
        raise ConfigError(f"{source}: name must be at most 63 letters, digits, - and _, not "
                          f"{name!r}; it becomes part of the names of processes and files")
    config = ClusterConfig(
        name=name, model=top.text("model", REQUIRED), registry=_registry(top.section("registry")),
        servers=_servers(top.section("servers")), ray=_ray(top.section("ray")),
        env=top.texts("env"), token_file=top.text("token_file"),
    )
    top.end()
    if "EXPERTWIRE_TOKEN" in config.env:
        raise ConfigError(f"{source}: env must not hold EXPERTWIRE_TOKEN: a file with a secret is "
                          "no place for settings; use token_file")
    return config


def _registry(section: _Section) -> RegistryConfig:
    config = RegistryConfig(section.address("listen"), section.address("address"),
                            section.number("lease", 10.0, above=0))
    if config.listen and config.address:
        raise section.error("address", "goes without listen: a registry either runs already, or "
                                       "is started here")
    section.end()
    return config


def _servers(section: _Section) -> ServersConfig:
    config = ServersConfig(
        count=section.count("count", 1), experts=section.text_or_list("experts", "auto"),
        replicas=section.count("replicas", 1), device=section.text_or_list("device", "cpu"),
        dtype=section.choice("dtype", None, DTYPES), threads=section.count("threads", None),
        room=section.count("room", None), hca=section.text("hca", "soft"),
        batch_invariant=section.flag("batch_invariant", True),
        max_restarts=section.count("max_restarts", -1, least=-1),
    )
    if isinstance(config.experts, tuple) and len(config.experts) != config.count:
        raise section.error("experts", f"lists {len(config.experts)} servers, and count is "
                                       f"{config.count}")
    if config.replicas > config.count:
        raise section.error("replicas", f"is {config.replicas}, with {config.count} servers")
    if config.replicas > 1 and config.experts != "auto":
        raise section.error("replicas", "goes with experts: auto only")
    section.end()
    return config


def _ray(section: _Section) -> RayConfig:
    config = RayConfig(
        address=section.text("address", "auto"),
        placement=section.choice("placement", "spread", PLACEMENTS),
        places=section.count("places", None), cpus=section.number("cpus", 1.0),
        gpus=section.number("gpus", None), memory_gb=section.number("memory_gb", 0.0),
        resources=section.numbers("resources"),
    )
    if config.places is not None and not config.placement.startswith("strict"):
        raise section.error("places", "goes with placement: strict_spread or strict_pack; "
                                      f"{config.placement} has no places to keep")
    section.end()
    return config


class _Section:
    """Takes settings out of one mapping; what is left at the end should not be there."""

    def __init__(self, content: dict[str, Any], source: str, path: str):
        self._content, self._source, self._path = dict(content), source, path
        self._known: list[str] = []

    def error(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self._source}: {self._path}{key} {problem}")

    def _take(self, key: str, default: Any, kinds: Any, what: str) -> Any:
        self._known.append(key)
        value = self._content.pop(key, None)
        if value is None:
            if default is REQUIRED:
                raise ConfigError(f"{self._source}: there is no {self._path}{key}; it must be "
                                  f"{what}")
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise self.error(key, f"must be {what}, not {value!r}")
        return value

    def section(self, key: str) -> _Section:
        return _Section(self._take(key, {}, dict, "a mapping"), self._source,
                        f"{self._path}{key}.")

    def text(self, key: str, default: Any = None) -> Any:
        value = self._take(key, default, str, "text")
        if value == "":
            raise self.error(key, "is empty")
        if value is not default and "\0" in value:  # would end a path or an argument
            raise self.error(key, "has a zero byte in it")
        return value

    def choice(self, key: str, default: Any, choices: tuple[str, ...]) -> Any:
        value = self._take(key, default, str, f"one of {', '.join(choices)}")
        if value is not default and value not in choices:
            raise self.error(key, f"must be one of {', '.join(choices)}, not {value!r}")
        return value

    def address(self, key: str) -> Any:
        value = self.text(key)
        if value is not None:
            try:
                parse_address(value)
            except ConfigError as err:
                raise self.error(key, f"is wrong: {err}") from None
        return value

    def flag(self, key: str, default: bool) -> Any:
        return self._take(key, default, bool, "true or false")

    def count(self, key: str, default: Any, *, least: int = 1) -> Any:
        value = self._take(key, default, int, f"a whole number from {least} up")
        if value is not default and value < least:
            raise self.error(key, f"must be a whole number from {least} up, not {value}")
        return value

    def number(self, key: str, default: Any, *, above: float | None = None) -> Any:
        value = self._take(key, default, int | float, "a number")
        if value is default:
            return value
        if not math.isfinite(value) or value < 0 or (above is not None and value <= above):
            limit = "0 or more" if above is None else f"more than {above:g}"
            raise self.error(key, f"must be {limit}, not {value}")
        return float(value)

    def text_or_list(self, key: str, default: str) -> Any:
        """Text, or a tuple of it. A number is the one expert of that id."""
        value = self._take(key, default, str | int | list | tuple, "text, or a list of texts")
        parts = value if isinstance(value, list | tuple) else [value]
        for part in parts:
            if isinstance(part, bool) or not isinstance(part, str | int) or part == "":
                raise self.error(key, f"must be text, or a list of texts, not {value!r}")
        texts = tuple(str(part) for part in parts)
        if not texts:
            raise self.error(key, "is an empty list")
        return texts if isinstance(value, list | tuple) else texts[0]

    def texts(self, key: str) -> dict[str, str]:
        value = self._take(key, {}, dict, "a mapping of names to texts")
        for name, text in value.items():
            if not isinstance(name, str) or not isinstance(text, str | int | float):
                raise self.error(f"{key}.{name}", f"must be text, not {text!r}")
            if isinstance(text, bool):
                raise self.error(f"{key}.{name}", f"must be text, not {text!r}: write it in quotes")
            if not name or "=" in name or "\0" in f"{name}{text}":
                raise self.error(f"{key}.{name}", "is no environment variable: its name is empty "
                                                  "or has = in it, or there is a zero byte")
        return {name: str(text) for name, text in value.items()}

    def numbers(self, key: str) -> dict[str, float]:
        value = self._take(key, {}, dict, "a mapping of names to amounts")
        inner = _Section(value, self._source, f"{self._path}{key}.")
        return {str(name): inner.number(name, REQUIRED, above=0) for name in value}

    def end(self) -> None:
        """Raises ConfigError if there are keys that nobody took."""
        for key in self._content:
            near = difflib.get_close_matches(str(key), self._known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(self._known)}"
            raise self.error(str(key), f"is no setting; {hint}")


class _Loader(yaml.SafeLoader):
    """YAML in which a key that comes twice is an error, not the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue  # a list or a mapping: refused below
            key = key_node.value
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is there twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)
