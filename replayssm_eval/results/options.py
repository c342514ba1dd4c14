"""Options of a command: a frozen dataclass whose fields carry what the command line needs to know about them.

The command line makes flags and the keys of --config from the fields. Results record the same fields.
"""

from collections.abc import Callable
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from typing import Any, ClassVar

_FLAG = "flag"


@dataclass(frozen=True)
class Flag:
    """How one field appears on the command line.

    help: one sentence for --help. names: the flags; empty for the field's own name.
    item: type of one value of a repeatable flag; None for a flag that is given once. parse: turns the texts of a
    repeatable flag into the field's value. positional: an argument instead of a flag.
    default_depends: the default depends on other options, so --help shows none.
    """

    help: str
    names: tuple[str, ...] = ()
    metavar: str | None = None
    item: type | None = None
    parse: Callable[[list[Any]], Any] | None = None
    positional: bool = False
    default_depends: bool = False


def option(default: Any, help: str, *names: str, factory: Any = MISSING, **more: Any) -> Any:
    """A dataclass field with a flag. names, more: see `Flag`. factory: makes a mutable default such as a dict."""
    metadata = {_FLAG: Flag(help, names, **more)}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def flag(one: Field[Any]) -> Flag | None:
    """The flag of a field; None for a field that only Python callers can set."""
    return one.metadata.get(_FLAG)


class Options:
    """Base of all options.

    A dataclass puts the fields of its bases first. Results and --help put those named in LAST at the end.
    """

    LAST: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def ordered_fields(cls) -> list[Field[Any]]:
        """The fields in the order of results and --help."""
        own: tuple[Field[Any], ...] = fields(cls)  # type: ignore[arg-type]  # every subclass is a dataclass
        return sorted(own, key=lambda one: cls.LAST.index(one.name) if one.name in cls.LAST else -1)

    def to_json(self) -> dict[str, Any]:
        """The values by field name, in the order of results. Schemes and paths are not yet text."""
        values = asdict(self)  # type: ignore[call-overload]
        return {one.name: values[one.name] for one in self.ordered_fields()}
