"""`python -m vidur_ppo_plugin …` is `python -m vidur.main …` where no .pth file is read.

`pip install --target` with PYTHONPATH, a bare checkout or `python -S` skip start-up files; this does not.
"""

import runpy
import sys

from vidur_ppo_plugin import _autoload


def main() -> None:
    """Install the import hook, then run `vidur.main` with the same arguments."""
    _autoload.install()
    # The usage line of --help and of errors should name the command that the user typed.
    sys.argv[0] = "python -m vidur_ppo_plugin"
    runpy.run_module("vidur.main", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
