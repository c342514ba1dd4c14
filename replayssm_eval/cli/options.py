"""Flags: those that several commands share, those that follow from the options of a command, and --config."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from replayssm_emulation.errors import UsageError

from ..results.options import Flag, Options, flag


def load_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Values of a YAML file become the defaults of the flags. Flags on the command line win."""
    if path is None:
        return None
    parameters = {name.lstrip("-").replace("-", "_"): p for p in ctx.command.params for name in (*p.opts, p.name or "")}
    defaults: dict[str, Any] = {}
    for key, value in _read_yaml(path).items():
        parameter = parameters.get(str(key).replace("-", "_"))
        if parameter is None:
            flags = {max(p.opts, key=len).lstrip("-") for p in ctx.command.params} - {"config"}
            known = ", ".join(sorted(flags))
            raise UsageError(f"--config {path}: unknown option {key!r}; known: {known}")
        if value is None:  # left empty: the flag's own default
            continue
        several, switch = getattr(parameter, "multiple", False), getattr(parameter, "is_flag", False)
        if switch != isinstance(value, bool) or (isinstance(value, list | dict) and not several):
            raise UsageError(f"--config {path}: {key}: {value!r} is not a value of this option")
        # As text, a value goes through the same checks as on the command line.
        if several:
            defaults[str(parameter.name)] = [str(v) for v in (value if isinstance(value, list) else [value])]
        else:
            defaults[str(parameter.name)] = value if switch else str(value)
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    return path


def _read_yaml(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UsageError(f"--config {path}: not a mapping of options to values")
    return values


Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run in the output folder.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print no progress on stderr.")]
Config = Annotated[
    Path | None, typer.Option(help="YAML file with any of these options.", is_eager=True, callback=load_config)
]


def takes_options(kind: type[Options], build: Callable[..., Options] | None = None) -> Callable[[Callable], Callable]:
    """Decorate a command whose first parameter is an object of `kind`: every field of `kind` becomes a flag.

    The other parameters of the command stay its own flags, behind those of `kind`.
    build: makes the object from the values that the user has given. Default: `kind` itself.
    """

    def decorate(command: Callable) -> Callable:
        own = list(inspect.signature(command).parameters.values())[1:]
        with_flag = {one.name: spec for one in kind.ordered_fields() if (spec := flag(one)) is not None}
        hints = get_type_hints(kind)
        shared = [
            _parameter(one, with_flag[one.name], hints[one.name])
            for one in kind.ordered_fields()
            if one.name in with_flag
        ]

        def run(**values: Any) -> Any:
            given = {}
            for name, spec in with_flag.items():
                value = values.pop(name)
                if value is None or value == []:  # not given: the field's own default
                    continue
                given[name] = value if spec.parse is None else spec.parse(value)
            return command((build or kind)(**given), **values)

        functools.update_wrapper(run, command)
        del run.__wrapped__  # type: ignore[attr-defined]  # typer would look through to the undecorated command
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*shared, *own)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _parameter(one: Field[Any], spec: Flag, hint: Any) -> inspect.Parameter:
    """What typer needs to know about one field."""
    default = None if spec.item is not None or spec.default_depends else one.default
    if default is MISSING:
        default = inspect.Parameter.empty
    if spec.item is not None:
        hint = list[spec.item] | None  # type: ignore[name-defined]  # a type that is known at run time only
    metavar = spec.metavar or ({str: "TEXT", int: "INTEGER"}.get(spec.item) if spec.item else None)
    info: Any
    if spec.positional:
        info = typer.Argument(metavar=metavar, help=spec.help)
    else:
        # Named here, a switch has no --no- form.
        names = spec.names or (f"--{one.name.replace('_', '-')}",)
        info = typer.Option(*names, metavar=metavar, help=spec.help)
    return inspect.Parameter(
        one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, info]
    )
