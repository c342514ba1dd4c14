"""lm-eval's own command line with the model `replayssm`: python -m replayssm_eval.lm_eval run --model replayssm ..."""

from .cli.main import guarded


def main() -> None:
    from lm_eval.__main__ import cli_evaluate

    from .accuracy import backend as lm_backend  # noqa: F401 (registers the model)

    guarded(cli_evaluate)


if __name__ == "__main__":
    main()
