"""lm-eval's own command line with the model `replayssm`: python -m replayssm_eval.lm_eval run --model replayssm ..."""

from replayssm_emulation.errors import require

from .cli.main import guarded


def main() -> None:
    guarded(_main)


def _main() -> None:
    require("lm_eval", "accuracy", "replayssm_eval.lm_eval")
    from lm_eval.__main__ import cli_evaluate

    from .accuracy import backend as lm_backend  # noqa: F401 (registers the model)

    cli_evaluate()


if __name__ == "__main__":
    main()
