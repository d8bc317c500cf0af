"""Runs recipes by mergekit, one after the other in one process, as `mergekit-yaml` would.

    python mergekit_driver.py RECIPE.yml OUT [RECIPE.yml OUT]...

Executed by an interpreter that has mergekit; imports nothing of mergegit.
"""

import sys

from mergekit.scripts.run_yaml import main

if __name__ == "__main__":
    arguments = sys.argv[1:]
    for recipe, out in zip(arguments[::2], arguments[1::2], strict=True):
        main([recipe, out, "--no-copy-tokenizer", "--random-seed", "42"], standalone_mode=False)
