"""lm-eval's own command line with the model `replayssm`: python -m replayssm_eval.lm_eval run --model replayssm ..."""

import sys

from replayssm_emulation.errors import RunError, UsageError


def main() -> None:
    from lm_eval.__main__ import cli_evaluate

    from . import lm_backend  # noqa: F401 (registers the model)

    try:
        cli_evaluate()
    except UsageError as error:
        print(f"replayssm-eval: {error}", file=sys.stderr)
        sys.exit(2)
    except RunError as error:
        print(f"replayssm-eval: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
