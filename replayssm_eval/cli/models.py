"""The command `models`: lists the models that have a name, and what one of them keeps per sequence."""

import json
from typing import Annotated

import typer

from .console import print_listing
from .options import Json

app = typer.Typer(
    invoke_without_command=True,
    help="List the models that have a name; hub ids and local folders work too.",
    epilog="Example: replayssm-eval models; replayssm-eval models show nemotron-3-super",
)


@app.callback()
def listing(context: typer.Context, as_json: Json = False) -> None:
    if context.invoked_subcommand is not None:
        return
    from ..models.registry import REGISTRY

    shape = {True: "; --random-weights builds its true shape", False: ""}
    rows = [
        (m.name, "in the package" if m.testbed else m.location, m.summary + shape[m.shape is not None])
        for m in REGISTRY.values()
    ]
    print_listing("Models", ("name", "location", "what it is"), rows, as_json)


@app.command(epilog="Example: replayssm-eval models show nemotron-3-super")
def show(
    name: Annotated[str, typer.Argument(help="Name (see `models`), hub id or local folder.")], as_json: Json = False
) -> None:
    """What a model keeps per sequence: states, records, copies, and the context from which its KV cache is larger."""
    from ..models.sizes import model_sizes

    sizes = model_sizes(name)
    if as_json:
        print(json.dumps(sizes, indent=1))
        return
    mib = 1 << 20
    facts = [
        ("type", sizes["type"]),
        ("parameters", f"{sizes['parameters']:,}"),
        ("layers", f"{sizes['layers']}, {sizes['state_layers']} of them with a state"),
        (
            "state of a layer",
            f"{sizes['heads']} heads x {sizes['d_v']} x {sizes['d_k']} (d_v x d_k), keys of {sizes['groups']} groups",
        ),
        ("state of a sequence", f"{sizes['state_bytes'] / mib:,.2f} MiB in fp32"),
        ("records of a token", f"{sizes['record_bytes_per_token']:,} bytes (inputs in 16 bits, gates in fp32)"),
        ("KV cache of a token", f"{sizes['kv_bytes_per_token']:,} bytes in bf16"),
        (
            "crossover",
            f"{sizes['crossover_tokens']:,} tokens: beyond, the KV cache is larger"
            if sizes["crossover_tokens"]
            else "no KV cache",
        ),
    ]
    if sizes["confirmed"]:
        facts.append(("shape known from", sizes["confirmed"]))
    print_listing(name, ("what", "value"), facts, False)
    rows = []
    for scheme, stored in sizes["schemes"].items():
        total = stored["copies"] + stored["records"]
        cells = (f"{stored['copies'] / mib:,.2f}", f"{stored['records'] / mib:,.2f}", f"{total / mib:,.2f}")
        rows.append((scheme, *cells, f"{total / sizes['state_bytes']:.2f}"))
    print_listing("Stored per sequence, MiB", ("scheme", "copies", "records", "together", "of fp32"), rows, False)
